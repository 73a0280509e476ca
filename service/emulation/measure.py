"""Runs requests through engine, scheduler and graph, over devices that wait, and takes the time."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.config import EmulatedSettings, PipelineSettings
from service.emulation.results import Record, Run, Setup
from service.engine.engine import Engine
from service.engine.recorder import NullRecorder
from service.engine.scheduler import Scheduler
from service.messages import (
    CyclePlan,
    CycleResult,
    Delta,
    Event,
    Failure,
    GenerateRequest,
    Sampling,
)
from service.pdm.checkpoint import untrained_draft_ids
from service.pdm.features import default_anchors
from service.pipeline.blueprint import Blueprint, make_emulation
from service.pipeline.choice import make_graph
from service.pipeline.graph import GraphError
from service.pipeline.partition import balanced_layers, stage_bounds
from service.pipeline.spec import ActorSpec
from service.target_config import TargetConfig

PROMPT = (1,) * 8
VOCABULARY = 32_000
SLOTS = 1


class Clock(NullRecorder):
    """Notes when each cycle is over."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.slowest: list[float] = []  # the slowest stage of each cycle

    def cycle(self, _plan: CyclePlan, result: CycleResult, _decoding: int) -> None:
        self.ends.append(time.perf_counter())
        self.slowest.append(max(stage.seconds for stage in result.stages))

    def take(self) -> tuple[list[float], list[float]]:
        """The cycles' times in ms, and the slowest stage's in each; forgets them."""
        cycles = [1000 * (b - a) for a, b in zip(self.ends, self.ends[1:], strict=False)]
        slowest = [1000 * seconds for seconds in self.slowest[1:]]
        self.ends, self.slowest = [], []
        return cycles, slowest


class NoText:
    """No text at all: there is no tokenizer."""

    def push(self, _token_id: int) -> tuple[str, bool]:
        return "", False

    def finish(self) -> str:
        return ""


def make_emulated(setup: Setup, max_len: int) -> Blueprint:
    """A blueprint without a model."""
    config = _no_target(setup, max_len)
    draft_ids = untrained_draft_ids(config) if setup.width > 1 else None
    waits = EmulatedSettings(
        stage_ms=setup.stage_ms,
        draft_ms=setup.draft_ms,
        link_ms=setup.link_ms,
        acceptance=setup.acceptance,
    )
    spec = ActorSpec(
        folder="",
        target=config,
        bounds=stage_bounds(balanced_layers(setup.layers, setup.width)),
        anchors=default_anchors(setup.layers, setup.width) if setup.width > 1 else (),
        slots=SLOTS,
        max_len=max_len,
        dtype=setup.dtype,
        device="emulated",
        threads=1,
        emulation=make_emulation(waits, config, draft_ids),
    )
    return Blueprint(spec, None, draft_ids)


def _no_target(setup: Setup, max_len: int) -> TargetConfig:
    """What waiting devices, which have no layers, are told of a target."""
    return TargetConfig(
        architecture="none",
        hidden_size=setup.hidden_size,
        intermediate_size=0,
        num_hidden_layers=setup.layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=0,
        vocab_size=VOCABULARY,
        max_position_embeddings=max_len,
        windows=(),
        rotates=(),
        inv_freq=(),
    )


def measure(setup: Setup, tokens: int, runs: int, say: Callable[[str], None]) -> Record:
    """Decodes `tokens` tokens of one request after another. A first run, which finds everything
    cold, does not count. Raises GraphError."""
    clock = Clock()
    with running(setup, len(PROMPT) + tokens + 1, clock) as engine:
        measured = []
        for key in range(runs + 1):
            run = measure_run(engine, clock, key, tokens)
            if key:
                measured.append(run)
                say(f"{setup.graph}, n={setup.width}: share {run.share(setup.stage_ms):.1%}")
    return Record(setup=setup, runs=tuple(measured))


@contextmanager
def running(setup: Setup, max_len: int, clock: Clock) -> Iterator[Engine]:
    """The engine of a pipeline of emulated devices."""
    blueprint = make_emulated(setup, max_len)
    scheduler = Scheduler(
        stages=setup.width,
        slots=SLOTS,
        max_len=max_len,
        chunk=len(PROMPT),
        eos_ids=frozenset(),
        new_text=lambda _: NoText(),
        uses_pdm=True,
    )
    pipeline = PipelineSettings(graph=setup.graph, chunk=len(PROMPT))
    engine = Engine(lambda: make_graph(blueprint, pipeline), scheduler, clock)
    try:
        yield engine
    finally:
        engine.close()


def measure_run(engine: Engine, clock: Clock, key: int, tokens: int) -> Run:
    last: list[Event] = []
    ended = threading.Event()

    def sink(event: Event) -> None:
        if isinstance(event, Failure) or (isinstance(event, Delta) and event.stats):
            last.append(event)
            ended.set()

    # The first generated token is not counted as decoded.
    engine.submit(GenerateRequest(str(key), PROMPT, tokens + 1, Sampling(key=key)), sink)
    ended.wait()
    if not isinstance(last[0], Delta):
        raise GraphError(str(last[0]))
    time.sleep(0.05)  # the engine's thread notes the last cycle after its tokens
    cycles, slowest = clock.take()
    stats = last[0].stats
    assert stats is not None
    return Run(
        decoded=stats.decoded,
        cycles=stats.cycles,
        accepted=stats.accepted,
        cycle_ms=statistics.mean(cycles),
        median_cycle_ms=statistics.median(cycles),
        slowest_stage_ms=statistics.median(slowest),
    )
