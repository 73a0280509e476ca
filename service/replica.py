"""The Pipeline deployment: one replica is one pipeline. It owns the engine, and its placement group
holds the stages and the drafter."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray

from service.api.client import PipelineStatus
from service.config import Settings
from service.engine.engine import Engine
from service.engine.lookup import Lookup
from service.engine.scheduler import Scheduler
from service.messages import Delta, Event, Failure, GenerateRequest
from service.metrics import Metrics
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.choice import make_graph
from service.pipeline.graph import Graph
from service.target import eos_token_ids
from service.text.stream import TextStream
from service.text.tokenizer import Tokenizer

log = logging.getLogger("ray.serve")


class Pipeline:
    """Runs requests through the engine. Methods are called through a Serve handle."""

    def __init__(self, settings: Settings) -> None:
        """Returns when the pipeline can serve. Raises ConfigError and GraphError."""
        self._settings = settings
        blueprint = make_blueprint(settings)
        spec = blueprint.spec
        log.info(
            "Building %s: %d stages, cut at layers %s", settings.name, spec.stages, spec.bounds
        )
        self._untrained = (
            blueprint.with_drafter and blueprint.checkpoint is None and spec.emulation is None
        )
        if self._untrained:
            log.warning(
                "No PDM comes with the project for this model and %d stages, and "
                "drafter.checkpoint is unset: the PDM is untrained and rarely right",
                spec.stages,
            )
        placement_group = ray.util.get_current_placement_group()

        def graph() -> Graph:
            return make_graph(blueprint, settings.pipeline, placement_group)

        scheduler = make_scheduler(settings, blueprint)
        self._engine = Engine(graph, scheduler, Metrics(settings.name, spec.stages))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of one request. Cancelling, as Serve does when the caller goes away, aborts
        it."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._engine.submit(request, sink)
        try:
            while True:
                event = await events.get()
                yield event
                if isinstance(event, Failure):
                    return
                if isinstance(event, Delta) and event.finish_reason is not None:
                    return
        finally:
            self._engine.abort(request.request_id)

    async def status(self) -> PipelineStatus:
        ready = self._engine.alive
        return PipelineStatus(
            ready=ready,
            detail="serving" if ready else self._engine.failure or "the engine has stopped",
            speculation=self._speculation(),
        )

    def _speculation(self) -> str:
        """What drafts, and what is wrong with it."""
        drafter, stages = self._settings.drafter, self._settings.pipeline.stages
        if stages == 1 and drafter.kind != "off":
            return "off (one stage: nothing to fill)"
        if self._settings.emulated is not None:
            return f"{drafter.kind} (emulated devices: the text is nonsense)"
        if self._engine.draft_error is not None:
            return f"{drafter.kind} (the PDM fails: {self._engine.draft_error})"
        if self._untrained:
            return f"{drafter.kind} (untrained PDM)"
        return drafter.kind

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._engine.alive:
            raise RuntimeError(self._engine.failure or "the engine has stopped")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()


def make_scheduler(settings: Settings, blueprint: Blueprint) -> Scheduler:
    """The scheduler of a deployment, with the target's texts and ends."""
    folder = Path(blueprint.spec.folder)
    tokenizer = Tokenizer.load(folder)
    drafter, pipeline = settings.drafter, settings.pipeline
    new_lookup = partial(Lookup, drafter.lookup_min_match, unsettled=pipeline.stages)
    return Scheduler(
        stages=blueprint.spec.stages,
        slots=pipeline.slots,
        max_len=pipeline.max_len,
        chunk=pipeline.chunk,
        eos_ids=eos_token_ids(folder, tokenizer),
        new_text=lambda request: TextStream(tokenizer.decode, request.stop),
        new_proposer=new_lookup if drafter.uses_lookup else None,
        uses_pdm=drafter.uses_pdm,
    )
