"""What is measured, over stand-ins for Ray's instruments: the figures of the engine's own requests,
and what an ingress sees become of its requests.

With Ray and Prometheus: tests/test_metrics_scrape.py.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service import metrics, recording
from service.api.client import PipelineUnavailableError
from service.api.door import Door
from service.api.errors import ApiError
from service.api.observed import Life, Observed
from service.engine.engine import NOT_INTACT, Engine
from service.engine.scheduler import Scheduler
from service.messages import (
    CyclePlan,
    CycleResult,
    Delta,
    DraftReport,
    Failure,
    GenerateRequest,
    RequestStats,
    RequestTimes,
    StageReport,
)
from service.metrics import Metric
from service.pipeline.graph import Meanwhile, nothing
from service.recording import IngressMetrics, PipelineMetrics
from tests.fake_pipeline import FakePipeline, Hang
from tests.test_restarts import Shelf, restarts
from tests.test_scheduler import PlainText
from tests.token_pipeline import TokenPipeline, target_token

STAGES = 3
WAIT_S = 30


class Recorded:
    """All that Ray's instruments were told, by metric and value of its label."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.counts: dict[tuple[str, str], float] = defaultdict(float)
        self.levels: dict[str, float] = {}
        self.observations: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.made: dict[str, Any] = {}

    def count(self, metric: Metric, value: str = "") -> float:
        return self.counts[metric.name, value]

    def seen(self, metric: Metric, value: str = "") -> list[float]:
        return self.observations[metric.name, value]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), (self.counts, self.levels)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    told = Recorded()

    class Instrument:
        def __init__(self, name: str, _help: str, *rest: Any) -> None:
            assert name.startswith("spd_")
            self.name, self.labels = name.removeprefix("spd_"), set(rest[-1])
            assert self.name not in told.made
            told.made[self.name] = rest

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.default = tags

        def place(self, tags: dict[str, str] | None) -> tuple[str, str]:
            assert {*self.default, *(tags or {})} == self.labels
            (value,) = (tags or {"": ""}).values()
            return self.name, value

        def inc(self, count: float, tags: dict[str, str] | None) -> None:
            assert count > 0
            with told.changed:
                told.counts[self.place(tags)] += count
                told.changed.notify_all()

        def _record(self, value: float, tags: dict[str, str] | None) -> None:
            assert value == 0
            told.counts[self.place(tags)] += 0

        def set(self, level: float) -> None:
            with told.changed:
                told.levels[self.name] = level
                told.changed.notify_all()

        def observe(self, value: float, tags: dict[str, str] | None) -> None:
            told.observations[self.place(tags)].append(value)

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(recording, kind, Instrument)
    monkeypatch.setattr(recording, "PERIOD_S", 0.05)
    return told


# --- pipelines ------------------------------------------------------------------------------------


class TimedGraph:
    """A pipeline of tokens in which a stage takes its number of seconds, and more the PDM."""

    def __init__(self) -> None:
        def drafting(slot: int, position: int) -> int | None:
            """Right, wrong and silent in turns."""
            text = self.pipeline.memory[0][slot][:position]
            return (target_token(text), 1, None)[position % 3]

        self.pipeline = TokenPipeline(STAGES, 2, 64, drafting)
        self.plans: list[CyclePlan] = []

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        self.plans.append(plan)
        meanwhile()
        result = self.pipeline.run(plan)
        stages = tuple(
            StageReport(k + 1.0, report.verdicts, report.scored, 0.25)
            for k, report in enumerate(result.stages)
        )
        assert result.drafter is not None
        return CycleResult(stages, DraftReport(4.0, result.drafter.drafts), 4.5)

    def audit(self, _texts: Any, *, drafter: bool) -> list[str]:  # noqa: ARG002
        return []

    def check(self, seconds: float) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def running(recorded: Recorded) -> Iterator[tuple[Engine, TimedGraph]]:
    assert not recorded.made
    graph = TimedGraph()
    scheduler = Scheduler(
        stages=STAGES,
        slots=2,
        max_len=64,
        chunk=8,
        eos_ids=frozenset(),
        new_text=lambda _: PlainText(),
        uses_pdm=True,
    )
    recorder = PipelineMetrics("m", STAGES, 2)
    engine = Engine(lambda: graph, scheduler, recorder)
    yield engine, graph
    engine.close()


def run(engine: Engine, *requests: GenerateRequest) -> list[RequestStats]:
    """The statistics of requests that run at once."""
    ended: list[RequestStats] = []
    all_ended = threading.Semaphore(0)

    def sink(event: Any) -> None:
        if isinstance(event, Delta) and event.stats is not None:
            ended.append(event.stats)
            all_ended.release()

    for request in requests:
        engine.submit(request, sink)
    for _ in requests:
        assert all_ended.acquire(timeout=WAIT_S)
    return ended


def test_a_pipelines_figures_are_those_of_its_requests(
    recorded: Recorded, running: tuple[Engine, TimedGraph]
) -> None:
    engine, graph = running
    requests = [
        GenerateRequest("a", (1, 2, 3), 20),
        GenerateRequest("b", (4,) * 12, 9),
        GenerateRequest("c", (1, 2, 3, 4), 5),
        GenerateRequest("resumed", (7, 8), 12, generated_ids=(9, 10, 11)),
        GenerateRequest("one token", (5, 5), 1),
    ]
    stats = run(engine, *requests)
    recorded.wait_for(lambda: recorded.count(metrics.CYCLES) == len(graph.plans))

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in stats)

    fresh = sum(len(r.prompt_ids) for r in requests if not r.generated_ids)
    made = total("generated_tokens") - 3
    assert recorded.count(metrics.PROMPT_TOKENS) == fresh
    assert recorded.count(metrics.PREFIX_QUERIES) == fresh + 5
    assert recorded.count(metrics.PREFIX_HITS) == total("cached") > 0
    assert recorded.count(metrics.GENERATION_TOKENS) == made
    assert recorded.count(metrics.DECODED) == total("decoded") == made - len(requests)
    assert len(recorded.seen(metrics.TOKEN)) == total("decoded")
    assert recorded.count(metrics.DECODE_CYCLES) == total("cycles")
    for metric in (metrics.DRAFTS, metrics.DRAFT_TOKENS):
        assert recorded.count(metric) == total("drafted")
    assert recorded.count(metrics.ACCEPTED) == total("accepted") > 0
    assert recorded.count(metrics.ACCEPTED_AT, "0") == total("accepted")
    assert recorded.count(metrics.FLUSHES) == total("drafted") - total("accepted") > 0
    bubbles = sum(not rows for plan in graph.plans for rows in plan.stages)
    assert recorded.count(metrics.BUBBLES) == bubbles > 0


def test_seconds_are_those_of_actors_that_had_work(
    recorded: Recorded, running: tuple[Engine, TimedGraph]
) -> None:
    engine, graph = running
    run(engine, GenerateRequest("a", (1, 2, 3), 20))
    cycles = len(graph.plans)
    recorded.wait_for(lambda: recorded.count(metrics.CYCLES) == cycles)
    for stage in range(STAGES):
        busy = sum(bool(plan.stages[stage]) for plan in graph.plans)
        assert recorded.seen(metrics.STAGE, str(stage)) == [stage + 1.0] * busy
        assert recorded.count(metrics.STAGE_SPENT, str(stage)) == (stage + 1.0) * busy
    assert 0 < busy < cycles
    drafting = sum(bool(plan.drafts) for plan in graph.plans)
    assert recorded.seen(metrics.DRAFT) == [4.0] * drafting
    assert recorded.count(metrics.DRAFT_SPENT) == 4.0 * drafting
    verifying = sum(bool(plan.verify) for plan in graph.plans)
    assert recorded.seen(metrics.VERIFY) == [0.25] * verifying
    assert recorded.count(metrics.VERIFY_SPENT) == 0.25 * verifying
    assert recorded.seen(metrics.CYCLE) == [4.5] * cycles
    assert recorded.count(metrics.CYCLE_SPENT) == 4.5 * cycles
    assert recorded.seen(metrics.OVERHEAD) == [0.5] * cycles, "the PDM is slower than the stages"
    assert recorded.count(metrics.OVERHEAD_SPENT) == 0.5 * cycles


def test_levels(recorded: Recorded) -> None:
    """None before there is an engine, whose first word is its load."""
    recorder = PipelineMetrics("m", STAGES, 7, speculates=False)
    recorder.token(None)
    recorded.wait_for(lambda: recorded.count(metrics.GENERATION_TOKENS) == 1)
    assert recorded.levels == {}
    recorder.load(2, 5)
    wanted = {
        "num_requests_running": 2,
        "num_requests_waiting": 5,
        "pipeline_slots": 7,
        "pipeline_stages": STAGES,
        "speculation_works": 0,
    }
    recorded.wait_for(lambda: recorded.levels == wanted)
    recorder.speculation(works=True)
    recorded.wait_for(lambda: recorded.levels["speculation_works"] == 1)


def test_every_metric_is_made_once_and_counters_begin_at_zero(recorded: Recorded) -> None:
    PipelineMetrics("m", STAGES, 1)
    IngressMetrics("m", STAGES)
    kept = {m.name: m for m in metrics.METRICS if m.origin != "page"}
    assert recorded.made.keys() == kept.keys()
    zeros = {
        (m.name, value)
        for m in kept.values()
        if m.kind == "counter"
        for value in (m.values or ("0", "1", "2") if m.label else ("",))
    }
    assert recorded.counts == dict.fromkeys(zeros, 0)


# --- requests -------------------------------------------------------------------------------------

TIMES = RequestTimes(queue=1.0, prefill=2.0, decode=3.0)
STATS = RequestStats(
    prompt_tokens=5,
    generated_tokens=3,
    decoded=2,
    cycles=4,
    drafted=2,
    accepted=1,
    times=TIMES,
)
SERVED = [Delta(1, "a"), Delta(2, "b"), Delta(3, "c", "length", STATS)]
HISTOGRAMS = (
    metrics.REQUEST,
    metrics.TIME_PER_TOKEN,
    metrics.QUEUED,
    metrics.PREFILL,
    metrics.DECODE,
    metrics.REQUEST_PROMPT,
    metrics.REQUEST_GENERATION,
    metrics.REQUEST_ACCEPT_LENGTH,
)


async def serve(ingress: IngressMetrics, script: list, take: int | None = None) -> None:
    """One request, of which the client takes so many events."""
    pipeline = FakePipeline()
    pipeline.play(script)
    events = Observed(pipeline, [ingress]).generate(GenerateRequest("r", (1,), 9))
    taken = 0
    async for _ in events:
        taken += 1
        if taken == take:
            break
    await events.aclose()


async def test_a_request_that_is_served(recorded: Recorded) -> None:
    await serve(IngressMetrics("m", STAGES), SERVED)
    assert recorded.count(metrics.FINISHED, "length") == 1
    assert sum(recorded.counts.values()) == 1
    assert len(recorded.seen(metrics.FIRST_TOKEN)) == 1
    (whole,) = recorded.seen(metrics.REQUEST)
    (first,) = recorded.seen(metrics.FIRST_TOKEN)
    assert recorded.seen(metrics.TIME_PER_TOKEN) == [pytest.approx((whole - first) / 2)]
    exact = {
        metrics.QUEUED: 1.0,
        metrics.PREFILL: 2.0,
        metrics.DECODE: 3.0,
        metrics.REQUEST_PROMPT: 5,
        metrics.REQUEST_GENERATION: 3,
        metrics.REQUEST_ACCEPT_LENGTH: STAGES * 2 / 4,
    }
    assert {m: recorded.seen(m) for m in exact} == {m: [value] for m, value in exact.items()}


@pytest.mark.parametrize(
    ("script", "take", "outcome"),
    [
        ([Delta(1, "a"), Hang()], 1, "abort"),
        ([Delta(1, "a"), Failure("stage 1 died")], None, "error"),
        ([Delta(1, "a"), Failure("it waits for long", "expired")], None, "error"),
        ([Failure("it does not fit", "refused")], None, "error"),
        ([Failure("stage 1 died")], 1, "error"),  # the API closes the stream behind it
        ([Delta(1, "a")], None, "error"),
        (SERVED, 3, "length"),  # the client goes once it has all
    ],
)
async def test_how_requests_end(recorded: Recorded, script: list, take, outcome: str) -> None:
    await serve(IngressMetrics("m", STAGES), script, take)
    assert recorded.count(metrics.FINISHED, outcome) == 1
    assert sum(recorded.counts.values()) == 1
    assert all(bool(recorded.seen(m)) == (outcome == "length") for m in HISTOGRAMS)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([Failure("3 wait", "overloaded")], "queue_full"),
        ([Failure("it waited", "expired")], "queue_timeout"),
        ([PipelineUnavailableError("none")], "unavailable"),
    ],
)
async def test_who_is_turned_away(recorded: Recorded, script: list, reason: str) -> None:
    try:
        await serve(IngressMetrics("m", STAGES), script)
    except PipelineUnavailableError:
        assert reason == "unavailable"
    assert recorded.count(metrics.REJECTIONS, reason) == 1
    assert sum(recorded.counts.values()) == 1
    assert not recorded.observations


async def test_a_pipeline_that_goes_for_good_in_mid_stream(recorded: Recorded) -> None:
    with pytest.raises(PipelineUnavailableError):
        await serve(IngressMetrics("m", STAGES), [Delta(1, "a"), PipelineUnavailableError("none")])
    assert recorded.count(metrics.FINISHED, "error") == 1
    assert recorded.count(metrics.REJECTIONS, "unavailable") == 0


async def test_a_cancelled_request_is_an_abort(recorded: Recorded) -> None:
    task = asyncio.create_task(serve(IngressMetrics("m", STAGES), [Delta(1, "a"), Hang()]))
    while not recorded.seen(metrics.FIRST_TOKEN):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorded.count(metrics.FINISHED, "abort") == 1


def test_a_door_tells_whom_it_refuses(recorded: Recorded) -> None:
    ingress = IngressMetrics("m", STAGES)
    door = Door(1, ingress.rejected)
    with door.entered(2), pytest.raises(ApiError):
        door.check()
    assert recorded.count(metrics.REJECTIONS, "queue_full") == 1
    door.is_closed = True
    with pytest.raises(ApiError):
        door.check()
    assert recorded.count(metrics.REJECTIONS, "shutting_down") == 1


def test_the_first_end_counts() -> None:
    life = Life(GenerateRequest("r", (1,), 9), 0)
    life.fail("queue_full", 1.0)
    life.end("abort", 2.0)
    assert (life.rejection, life.outcome, life.ended_s) == ("queue_full", None, 1.0)


def test_restarts_only_grow(recorded: Recorded) -> None:
    """Also when one that was started in a lost one's place ends as it should, and is forgotten."""
    shelf, ingress = Shelf(), IngressMetrics("m", STAGES)
    record = restarts(shelf)

    def noted() -> tuple[float, float]:
        ingress.note_restarts(restarts(shelf))  # each with a cache of its own
        return recorded.levels["pipeline_restarts"], recorded.levels["integrity_violations"]

    start = record.started("a")
    assert noted() == (0, 0)
    record.failed("a", start, f"{NOT_INTACT}: slot 1 is neither free nor in use")
    second = record.started("b")
    assert noted() == (1, 1)
    record.failed("b", second, "a stage died")
    record.started("c")
    assert noted() == (2, 1)
    record.ended("c")
    assert noted() == (2, 1)
