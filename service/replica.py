"""The Pipeline deployment: one replica is one pipeline. It owns the engine, and its placement group
holds the stages and the drafter."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray
from ray import serve

from service.api.client import PipelineStatus
from service.api.protocol import MAX_CHOICES
from service.config import Settings
from service.engine.engine import Engine
from service.engine.lookup import Lookup
from service.engine.scheduler import Scheduler
from service.engine.watchdog import Watchdog
from service.messages import Accepted, Delta, Event, Failure, GenerateRequest
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.choice import make_graph
from service.pipeline.graph import ServingGraph
from service.recording import PipelineMetrics
from service.restarts import ClusterStore, Restarts
from service.target import eos_token_ids
from service.text.stream import TextStream
from service.text.tokenizer import Tokenizer

log = logging.getLogger("ray.serve")


FAREWELL_S = 0.2  # until what was said last is on its way


class Pipeline:
    """Runs requests through the engine. Methods are called through a Serve handle."""

    def __init__(self, settings: Settings) -> None:
        """Returns when the pipeline can serve. Raises ConfigError and GraphError."""
        self._settings = settings
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._restarts = Restarts(context.app_name, settings, ClusterStore())
        self._start = self._restarts.started(self._name)
        self._wait_for_window()
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
        self._broken_pdm = blueprint.broken_pdm
        if self._broken_pdm is not None:
            log.error("The PDM can't be used, and it is served without: %s", self._broken_pdm)
        placement_group = ray.util.get_current_placement_group()

        def graph() -> ServingGraph:
            return make_graph(blueprint, settings.pipeline, placement_group)

        scheduler = make_scheduler(settings, blueprint)
        metrics = PipelineMetrics(
            settings.name,
            spec.stages,
            settings.pipeline.slots,
            speculates=self._broken_pdm is None,
        )
        self._engine = Engine(
            graph,
            scheduler,
            metrics,
            queue_timeout_s=settings.limits.queue_timeout_s,
            on_failure=self._die,
        )
        if self._start.is_restart:
            failure = self._restarts.last_failure()
            log.warning("In place of a pipeline that was lost: %s", failure or "nobody could tell")
        self._watchdog = Watchdog(self._engine, settings.pipeline.cycle_timeout_s, self._give_up)

    def _wait_for_window(self) -> None:
        """A pipeline that fails again and again is not started at once: no request comes to a
        replica that is still being made."""
        while (wait := self._restarts.wait_s()) > 0:
            log.error("The pipeline fails too often; the next try is in %.0f s", wait)
            time.sleep(min(wait, 10) + 0.1)

    def _give_up(self, fault: str) -> None:
        """The watchdog's word: the engine can't be asked any more."""
        log.error("the pipeline has failed: %s", fault)
        self._engine.kill()
        self._die(fault)

    def _die(self, reason: str) -> None:
        """Ends this process: to compile a graph anew in an old one leaks, and what hangs would be
        waited for. Serve starts a new replica, and the ingress resumes the requests."""
        log.error("this replica ends: %s", reason)
        with suppress(Exception):  # it is but a note
            self._restarts.failed(self._name, self._start, reason)
        time.sleep(FAREWELL_S)
        os._exit(1)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Event, None]:
        """The events of one request, and first that it was accepted. Cancelling, as Serve does when
        the caller goes away, aborts it."""
        if self._engine.failure is not None:
            yield Failure(self._engine.failure)
            return
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        self._engine.submit(request, sink)
        try:
            yield Accepted()
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
        if self._broken_pdm is not None:
            rest = "lookup" if drafter.uses_lookup else "off"
            return f"{rest} (the PDM can't be used: {self._broken_pdm})"
        if self._engine.draft_error is not None:
            return f"{drafter.kind} (the PDM fails: {self._engine.draft_error})"
        notes = ["untrained PDM"] if self._untrained else []
        if self._engine.balance.fault is not None:
            notes.append(self._engine.balance.fault)
        return f"{drafter.kind} ({'; '.join(notes)})" if notes else drafter.kind

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._engine.alive:
            raise RuntimeError(self._engine.failure or "the engine has stopped")

    def __del__(self) -> None:
        if hasattr(self, "_watchdog"):
            self._watchdog.close()
            self._engine.close()
            self._restarts.ended(self._name)


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
        uses_pdm=blueprint.with_drafter,
        queue=settings.limits.queue + MAX_CHOICES,  # the door lets requests in as a whole
    )
