"""The closed loop, for Locust: each user is a chat that takes the next request when its last one
has ended. `python -m loadtest` runs it; SPD_LOAD_BLOCK and SPD_LOAD_SAMPLES name its files.

Our own client reads the streams: Locust's fast one hands over bytes in large pieces, so first
tokens would seem late. Refused requests are not sent again, failed ones neither.
"""

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
from locust import User, constant, events, task
from locust.env import Environment
from locust.exception import StopUser

from clients import Client, ClientError, Retries
from loadtest.block import Block
from loadtest.openloop import TIMEOUT_S
from loadtest.sample import Recording, Sample, write_samples
from loadtest.scenario import Planned

BLOCK = Block.read(Path(os.environ["SPD_LOAD_BLOCK"]))
SAMPLES = Path(os.environ["SPD_LOAD_SAMPLES"])


@dataclass
class Progress:
    """What all users share: the requests that are left, and what became of the others."""

    left: deque[Planned]
    start: float = 0.0
    samples: list[Sample] = field(default_factory=list)


PROGRESS = Progress(deque(BLOCK.requests))


@events.test_start.add_listener
def _begin(**_: Any) -> None:
    PROGRESS.start = time.monotonic()


@events.quitting.add_listener
def _end(**_: Any) -> None:
    write_samples(PROGRESS.samples, SAMPLES)


class Chat(User):
    wait_time = constant(0)

    def on_start(self) -> None:
        self.client = Client(
            BLOCK.url, model=BLOCK.model, retries=Retries(most=0), timeout_s=TIMEOUT_S
        )

    @task
    def say(self) -> None:
        if not PROGRESS.left:
            raise StopUser
        sample = self._send()
        PROGRESS.samples.append(sample)
        _show(self.environment, sample)
        if len(PROGRESS.samples) == len(BLOCK.requests) and self.environment.runner:
            gevent.spawn(self.environment.runner.quit)  # it waits for this user

    def _send(self) -> Sample:
        request = PROGRESS.left.popleft()
        now = time.monotonic() - PROGRESS.start
        recording = Recording(BLOCK.variant, BLOCK.round, request.index, PROGRESS.start, now)
        recording.sending()
        try:
            with self.client.stream_chat(request.messages, extra=request.fields) as stream:
                for chunk in stream:
                    recording.take(chunk)
                    if len(recording.pieces_s) == request.abort_after:
                        return recording.ended(aborted=True)
        except ClientError as error:
            return recording.ended(error)
        return recording.ended()


def _show(environment: Environment, sample: Sample) -> None:
    """In Locust's own tables, by what is measured."""
    failed = sample.error if sample.outcome in ("refused", "failed") else None
    measured = {"whole": sample.ended_s - sample.planned_s, "first token": sample.first_token_s}
    for name, seconds in measured.items():
        if seconds is not None:
            environment.events.request.fire(
                request_type="chat",
                name=name,
                response_time=seconds * 1000,
                response_length=0,
                exception=failed,
                context={},
            )
