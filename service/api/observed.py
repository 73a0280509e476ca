"""What becomes of each request, told to those who measure it: metrics and traces.

The ingress holds a request from its arrival to its end, whatever becomes of pipelines meanwhile. So
what a client experiences is measured here; what a pipeline does, by its engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from service.api.client import PipelineClient, PipelineStatus, PipelineUnavailableError
from service.messages import Delta, Event, Failure, GenerateRequest, RequestStats
from service.metrics import Outcome, Rejection

_REJECTIONS: dict[str, Rejection] = {"overloaded": "queue_full", "expired": "queue_timeout"}


@dataclass(slots=True)
class Life:
    """The life of one request; times are in seconds since its arrival. One that was turned away
    has a `rejection`, any other one that is over an `outcome`."""

    request: GenerateRequest
    arrived_ns: int  # since the epoch
    tokens: int = 0
    first_token_s: float | None = None
    ended_s: float = 0.0
    outcome: Outcome | None = None
    rejection: Rejection | None = None
    stats: RequestStats | None = None  # of a request that ended by itself

    def end(self, outcome: Outcome, seconds: float) -> None:
        """The first end counts: what follows is its consequence."""
        if self.outcome is None and self.rejection is None:
            self.outcome, self.ended_s = outcome, seconds

    def fail(self, rejection: Rejection | None, seconds: float) -> None:
        """It can't be served. After its first token that is an error, for whatever reason."""
        if rejection is None or self.tokens:
            self.end("error", seconds)
        elif self.outcome is None and self.rejection is None:
            self.rejection, self.ended_s = rejection, seconds


class Observer(Protocol):
    """Called in the loop of the ingress; must be quick and never fail."""

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after its arrival."""

    def over(self, life: Life) -> None:
        """A request is over."""


class Observed:
    """A PipelineClient whose requests are observed."""

    def __init__(self, pipeline: PipelineClient, observers: Sequence[Observer]) -> None:
        self._pipeline, self._observers = pipeline, observers

    async def status(self) -> PipelineStatus:
        return await self._pipeline.status()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of a request, unchanged."""
        began = time.perf_counter()
        life = Life(request, time.time_ns())

        def seconds() -> float:
            return time.perf_counter() - began

        try:
            async with aclosing(self._pipeline.generate(request)) as events:
                async for event in events:
                    self._note(life, event, seconds())
                    yield event
        except (GeneratorExit, asyncio.CancelledError):
            life.end("abort", seconds())
            raise
        except PipelineUnavailableError:
            life.fail("unavailable", seconds())
            raise
        finally:
            life.end("error", seconds())
            for observer in self._observers:
                observer.over(life)

    def _note(self, life: Life, event: Event, seconds: float) -> None:
        if isinstance(event, Failure):
            life.fail(_REJECTIONS.get(event.kind), seconds)
        elif isinstance(event, Delta):
            life.tokens += 1
            if life.first_token_s is None:
                life.first_token_s = seconds
                for observer in self._observers:
                    observer.first_token(seconds)
            if event.finish_reason is not None:
                life.stats = event.stats
                life.end(event.finish_reason, seconds)
