"""Requests that outlive their pipeline: the ingress knows them and the tokens that it has sent, so
another pipeline, or the next one, can go on where the stream ended."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.api.sse import following
from service.messages import Accepted, Delta, Event, Failure, GenerateRequest, PromptScored

logger = logging.getLogger("ray.serve")

PAUSE_S = 0.25  # between two tries to find a pipeline
LOOK_S = 1.0  # after so long without a pipeline: whether there will be one


class PipelineLostError(Exception):
    """The pipeline of a request ended, or there was none. `counts`: whatever became of it may be
    the request's fault, as it may always be once the request was accepted."""

    def __init__(self, message: str, *, counts: bool = False) -> None:
        super().__init__(message)
        self.counts = counts


class Pipelines(Protocol):
    """A way to any of the pipelines. `generate` first yields Accepted, once the request is in a
    pipeline's queue; it raises PipelineLostError when the pipeline is lost."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Event, None]: ...

    async def status(self) -> PipelineStatus: ...

    async def given_up(self) -> str | None:
        """Why no pipeline is started any more, if that is so."""


class Resuming:
    """A PipelineClient whose requests go on in another pipeline when theirs is lost. Their text is
    what it would have been: greedy and seeded texts depend on the request alone."""

    def __init__(
        self,
        pipelines: Pipelines,
        *,
        max_losses: int,
        patience_s: float | None = None,
        on_loss: Callable[[], None] = lambda: None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """A request that has lost `max_losses` pipelines and one more ends: perhaps it breaks
        them. One that finds none for `patience_s` ends too."""
        self._pipelines = pipelines
        self._max_losses, self._patience_s = max_losses, patience_s
        self._on_loss, self._pause = on_loss, pause

    async def status(self) -> PipelineStatus:
        return await self._pipelines.status()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of a request, from as many pipelines as it takes. Raises
        PipelineUnavailableError."""
        progress = Progress(request)
        since = time.monotonic()  # when there was a pipeline
        while True:
            try:
                async with aclosing(self._run(progress, since)) as events:
                    async for event in events:
                        progress.note(event)
                        if not isinstance(event, Accepted):
                            yield event
                return
            except PipelineLostError as error:
                if progress.accepted or error.counts:
                    progress.losses += 1
                    since = time.monotonic()
                    self._lost(progress, error)
            await self._pause(PAUSE_S)

    async def _run(
        self, progress: "Progress", since: float
    ) -> AsyncGenerator[Accepted | Event, None]:
        """The events of one pipeline. Raises PipelineLostError, and PipelineUnavailableError where
        none is found."""
        async with aclosing(self._pipelines.generate(progress.next_run())) as events:
            first = await self._first(events, since)
            if first is not None:
                yield first
            async for event in events:
                if isinstance(event, Failure) and event.kind == "lost":
                    raise PipelineLostError(event.message)
                yield event

    async def _first(
        self, events: AsyncGenerator[Accepted | Event, None], since: float
    ) -> Accepted | Event | None:
        """The first event. Where no pipeline takes the request, it looks whether one ever will."""
        step = asyncio.create_task(following(events))
        try:
            while not (await asyncio.wait((step,), timeout=LOOK_S))[0]:
                await self._check_hope(since)
            event = step.result()
        except PipelineLostError:
            await self._check_hope(since)
            raise
        finally:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
        if isinstance(event, Failure) and event.kind == "lost":
            await self._check_hope(since)
            raise PipelineLostError(event.message)
        return event

    async def _check_hope(self, since: float) -> None:
        if (reason := await self._pipelines.given_up()) is not None:
            raise PipelineUnavailableError(f"The pipeline has failed. {reason}")
        if self._patience_s is not None and time.monotonic() - since > self._patience_s:
            raise PipelineUnavailableError("The pipeline is not there; try again.")

    def _lost(self, progress: "Progress", error: PipelineLostError) -> None:
        name, losses = progress.request.request_id, progress.losses
        logger.warning(
            "request %s lost its pipeline after %d tokens: %s", name, len(progress.tokens), error
        )
        self._on_loss()
        if losses > self._max_losses:
            raise PipelineUnavailableError("The pipeline failed too often; try again.") from error


class Progress:
    """How far a request has come."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.accepted = False  # in the present run
        self.losses = 0
        self._runs = 0
        self._is_scored = False

    def note(self, event: Accepted | Event) -> None:
        if isinstance(event, Accepted):
            self.accepted = True
        elif isinstance(event, PromptScored):
            self._is_scored = True
        elif isinstance(event, Delta):
            self.tokens.append(event.token_id)

    def next_run(self) -> GenerateRequest:
        """What is left to do. Its id is new: the lost pipeline may still know the old one."""
        self.accepted = False
        self._runs += 1
        run = "" if self._runs == 1 else f"~{self._runs}"
        return replace(
            self.request,
            request_id=self.request.request_id + run,
            generated_ids=self.request.generated_ids + tuple(self.tokens),
            prompt_logprobs=self.request.prompt_logprobs and not self._is_scored,
        )
