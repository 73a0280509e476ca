"""The engine's thread: requests and aborts from outside, failures, and the way out."""

import threading
import time
from queue import SimpleQueue

import pytest

from service.engine.engine import Engine
from service.engine.recorder import NullRecorder
from service.engine.scheduler import Scheduler
from service.engine.slots import Place
from service.messages import CyclePlan, CycleResult, Delta, DraftReport, Failure, GenerateRequest
from service.pipeline.graph import GraphError, Meanwhile, nothing
from tests.test_scheduler import PlainText
from tests.token_pipeline import TokenPipeline, continuation

MAX_LEN = 64


class SteppedGraph:
    """A pipeline of tokens that runs one cycle for each step it is given."""

    def __init__(self, stages: int = 2) -> None:
        self.pipeline = TokenPipeline(stages, 2, MAX_LEN, lambda _slot, _position: None)
        self.steps = threading.Semaphore(0)
        self.plans: SimpleQueue[CyclePlan] = SimpleQueue()
        self.error: Exception | None = None
        self.dies = False  # no plan can be sent any more
        self.draft_error: str | None = None
        self.closed, self.killed = threading.Event(), threading.Event()
        self.audits: SimpleQueue = SimpleQueue()
        self.faults: list[str] = []
        self.dead: str | None = None
        self.thread = threading.current_thread()

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        assert threading.current_thread() is self.thread, "made in another thread"
        if self.dies:
            raise GraphError("stage 0 has died")
        self.plans.put(plan)
        meanwhile()
        self.steps.acquire()
        if self.error is not None:
            raise self.error
        result = self.pipeline.run(plan)
        if self.draft_error is not None:
            return CycleResult(result.stages, DraftReport(0.0, (), self.draft_error), 0.0)
        return result

    def audit(self, texts, *, drafter: bool) -> list[str]:
        self.audits.put((texts, drafter))
        return self.faults

    def check(self, seconds: float) -> None:
        self.checked = seconds
        if self.dead is not None:
            raise GraphError(self.dead)

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> None:
        self.closed.set()


class LoadRecorder(NullRecorder):
    """Remembers each change of the load."""

    def __init__(self) -> None:
        self.loads: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._last: tuple[int, int] | None = None

    def load(self, running: int, waiting: int) -> None:
        if (running, waiting) != self._last:
            self._last = (running, waiting)
            self.loads.put(self._last)


class Bench:
    """An engine over a stepped graph."""

    def __init__(self, queue: int | None = None, queue_timeout_s: float | None = None) -> None:
        self.graph: SteppedGraph | None = None
        self.failures: SimpleQueue[str] = SimpleQueue()

        def make() -> SteppedGraph:
            self.graph = SteppedGraph()
            return self.graph

        self.scheduler = Scheduler(
            stages=2,
            slots=2,
            max_len=MAX_LEN,
            chunk=8,
            eos_ids=frozenset(),
            new_text=lambda _: PlainText(),
            uses_pdm=True,
            queue=queue,
        )
        self.recorder = LoadRecorder()
        self.engine = Engine(
            make,
            self.scheduler,
            self.recorder,
            queue_timeout_s=queue_timeout_s,
            on_failure=self.failures.put,
        )
        assert self.graph is not None
        self.events: dict[str, SimpleQueue] = {}

    def submit(self, name: str, max_tokens: int = 4, prompt=(1, 2), generated=()) -> None:
        self.events[name] = SimpleQueue()
        request = GenerateRequest(name, tuple(prompt), max_tokens, generated_ids=tuple(generated))
        self.engine.submit(request, self.events[name].put)

    def next(self, name: str):
        return self.events[name].get(timeout=30)

    def plan(self) -> CyclePlan:
        return self.graph.plans.get(timeout=30)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.graph.steps.release(10_000)
    bench.engine.close()
    assert bench.graph.closed.is_set()
    assert not bench.engine.alive


def test_tokens_arrive_one_by_one(bench: Bench) -> None:
    bench.submit("a")
    bench.graph.steps.release(1000)
    deltas = [bench.next("a") for _ in range(4)]
    assert [d.token_id for d in deltas] == continuation([1, 2], 4)
    assert [d.finish_reason for d in deltas] == [None, None, None, "length"]


def test_where_the_time_went_is_told_at_the_end(bench: Bench) -> None:
    """Two slots are taken; the third request waits for one of them, and has one token."""
    began = time.perf_counter()
    for name, tokens in (("a", 4), ("b", 30), ("c", 1)):
        bench.submit(name, max_tokens=tokens, prompt=(1, ord(name)))
    bench.graph.steps.release(1000)
    last = {}
    for name, tokens in (("a", 4), ("b", 30), ("c", 1)):
        deltas = [bench.next(name) for _ in range(tokens)]
        assert all(delta.stats is None for delta in deltas[:-1])
        last[name] = deltas[-1].stats.times
    took = time.perf_counter() - began
    for times in last.values():
        assert 0 < times.queue + times.prefill + times.decode < took
        assert times.prefill > 0
    assert last["c"].decode == 0
    assert last["c"].queue > last["a"].prefill + last["a"].decode, "c has the slot of a"
    assert last["b"].decode > last["a"].decode > 0


def test_the_load_is_told_even_if_nothing_runs_any_more(bench: Bench) -> None:
    """An abort is followed by no cycle."""
    for name in "abc":
        bench.submit(name, max_tokens=50)
    bench.graph.steps.release()
    while bench.recorder.loads.get(timeout=30) != (2, 1):
        pass
    for name in "abc":
        bench.engine.abort(name)
    bench.graph.steps.release(1000)
    while bench.recorder.loads.get(timeout=30) != (0, 0):
        pass


def test_an_abort_frees_the_slot_before_the_next_cycle(bench: Bench) -> None:
    bench.submit("a", max_tokens=50)
    bench.plan()  # a's first cycle is running
    bench.engine.abort("a")
    bench.submit("b")
    bench.graph.steps.release()
    plan = bench.plan()
    slots = {rows.slot for stage in plan.stages for rows in stage}
    assert len(slots) == 1, "a is in no stage"
    assert plan.tokens == ((1, 2),)
    bench.graph.steps.release(1000)
    assert [bench.next("b").token_id for _ in range(4)] == continuation([1, 2], 4)
    assert bench.events["a"].empty()


def test_no_event_follows_an_abort(bench: Bench) -> None:
    """Not even what the cycle before it has brought."""
    bench.submit("a", max_tokens=50)
    bench.plan()
    bench.graph.steps.release()
    bench.plan()  # the cycle that brings a's first token
    bench.engine.abort("a")
    bench.submit("b", max_tokens=1)
    bench.graph.steps.release(1000)
    assert bench.next("b").finish_reason == "length"
    assert bench.events["a"].empty()


def test_what_a_cycle_has_brought_outlives_the_pipeline(bench: Bench) -> None:
    bench.submit("a", max_tokens=1)
    bench.submit("b", max_tokens=50)
    bench.plan()
    bench.graph.steps.release()
    bench.plan()  # the cycle that brings the first tokens, and is the last
    bench.graph.dies = True
    bench.graph.steps.release()
    assert bench.next("a").finish_reason == "length"
    assert isinstance(bench.next("b"), Delta)
    assert bench.next("b") == Failure("the pipeline has failed: stage 0 has died")


def test_an_abort_of_somebody_unknown_is_fine(bench: Bench) -> None:
    bench.engine.abort("nobody")
    bench.submit("a", max_tokens=1)
    bench.graph.steps.release(1000)
    assert bench.next("a").finish_reason == "length"
    bench.engine.abort("a")


def test_a_request_that_does_not_fit_fails_alone(bench: Bench) -> None:
    bench.submit("big", prompt=range(MAX_LEN))
    bench.submit("a", max_tokens=1)
    bench.graph.steps.release(1000)
    assert isinstance(bench.next("big"), Failure)
    assert isinstance(bench.next("a"), Delta)


def test_a_failed_graph_ends_every_request(bench: Bench) -> None:
    bench.graph.error = GraphError("stage 1 died")
    for name in "abc":  # two have slots, one waits
        bench.submit(name)
    bench.plan()
    bench.graph.steps.release()
    for name in "abc":
        assert bench.next(name) == Failure("the pipeline has failed: stage 1 died")
    assert bench.graph.closed.wait(30)
    assert bench.graph.killed.is_set()  # and not asked to end
    assert not bench.engine.alive
    assert bench.engine.failure == "stage 1 died"
    bench.submit("late")
    assert bench.next("late") == Failure("stage 1 died")


def test_a_failing_drafter_is_told_and_serving_goes_on(bench: Bench) -> None:
    bench.graph.draft_error = "RuntimeError: no"
    bench.submit("a")
    bench.graph.steps.release(1000)
    assert [bench.next("a").token_id for _ in range(4)] == continuation([1, 2], 4)
    bench.submit("b", max_tokens=1)  # after b's token the record of a's last cycle is there
    bench.next("b")
    assert bench.engine.draft_error == "RuntimeError: no"


def test_a_graph_that_can_not_be_made_is_told() -> None:
    def make():
        raise GraphError("no GPU")

    with pytest.raises(GraphError, match="no GPU"):
        Engine(make, None, NullRecorder())


def test_closing_ends_running_requests() -> None:
    bench = Bench()
    bench.submit("a", max_tokens=50)
    bench.plan()
    closing = threading.Thread(target=bench.engine.close)
    closing.start()
    bench.graph.steps.release(1000)
    closing.join(30)
    assert not closing.is_alive()
    events = []
    while not bench.events["a"].empty():
        events.append(bench.next("a"))
    assert events[-1] == Failure("the server is shutting down")


# --- overload -----------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once() -> None:
    bench = Bench(queue=1)
    for name in "abcd":  # two slots, and one may wait
        bench.submit(name, max_tokens=50)
        if name == "a":
            bench.plan()  # its first cycle is running: the others come between two
    bench.graph.steps.release()
    refused = bench.next("d")  # b and c take the other slot and the queue
    assert refused == Failure("2 requests wait for a slot", "overloaded")
    bench.graph.steps.release(1000)
    assert isinstance(bench.next("a"), Delta)
    bench.engine.close()


def test_who_waits_too_long_is_told() -> None:
    bench = Bench(queue_timeout_s=0.05)
    for name in "abc":
        bench.submit(name, max_tokens=20)
    bench.plan()
    time.sleep(0.1)
    bench.submit("late", max_tokens=1)
    bench.graph.steps.release(1000)
    assert bench.next("c") == Failure("it waited too long for a slot", "expired")
    assert isinstance(bench.next("a"), Delta), "who runs may go on"
    assert isinstance(bench.next("late"), Delta)
    bench.engine.close()
    assert bench.scheduler.faults() == []


def test_a_request_that_goes_on_is_never_turned_away() -> None:
    bench = Bench(queue=0)
    for name in "ab":
        bench.submit(name, max_tokens=30)
    bench.plan()
    generated = tuple(continuation([1, 2], 3))
    bench.submit("resumed", max_tokens=6, generated=generated)
    bench.graph.steps.release(1000)
    assert [bench.next("resumed").token_id for _ in range(3)] == continuation([1, 2], 6)[3:]
    bench.engine.close()


# --- the idle pipeline --------------------------------------------------------------------------


@pytest.fixture
def quick_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.engine.AUDIT_AFTER_S", 0.01)


@pytest.mark.usefixtures("quick_audit")
def test_an_idle_pipeline_is_audited_once(bench: Bench) -> None:
    bench.graph.audits.get(timeout=30)  # after the start
    bench.graph.steps.release(1000)
    bench.submit("a", max_tokens=3)
    texts, drafter = bench.graph.audits.get(timeout=30)
    assert drafter
    held = [1, 2, *continuation([1, 2], 3)]
    assert list(texts.values()) in ([held[:4], []], [[], held[:4]])
    time.sleep(0.05)
    assert bench.graph.audits.empty()


@pytest.mark.usefixtures("quick_audit")
def test_a_failing_drafter_is_not_asked(bench: Bench) -> None:
    bench.graph.audits.get(timeout=30)
    bench.graph.draft_error = "x"
    bench.graph.steps.release(1000)
    bench.submit("a", max_tokens=5)
    assert not bench.graph.audits.get(timeout=30)[1]


@pytest.mark.usefixtures("quick_audit")
def test_what_is_not_as_it_should_be_ends_the_pipeline() -> None:
    bench = Bench()
    bench.graph.audits.get(timeout=30)
    bench.graph.faults = ["the last stage has another text in the slots [1]"]
    bench.graph.steps.release(1000)
    bench.submit("a", max_tokens=1)
    assert bench.failures.get(timeout=30) == (
        "the idle pipeline is not as it should be: the last stage has another text in the slots [1]"
    )
    assert bench.graph.closed.is_set()
    assert not bench.engine.alive


def test_a_slot_that_is_lost_is_found() -> None:
    bench = Bench()
    bench.scheduler._slots.take(Place(1, 1, 0))
    assert bench.scheduler.faults() == ["the slots [1] are neither free nor in use"]
    bench.engine.close()


def test_failures_are_told_to_whoever_has_to_act() -> None:
    """When all requests know, and the actors have ended."""
    bench = Bench()
    bench.graph.error = GraphError("stage 1 died")
    bench.submit("a")
    bench.graph.steps.release()
    assert bench.failures.get(timeout=30) == "stage 1 died"
    assert isinstance(bench.events["a"].get_nowait(), Failure)
    assert bench.graph.closed.is_set()


def test_a_cycle_that_hangs_is_seen_from_outside(bench: Bench) -> None:
    assert bench.engine.cycle_seconds == 0
    bench.submit("a")
    bench.plan()
    time.sleep(0.02)
    assert bench.engine.cycle_seconds >= 0.02
    bench.engine.kill()
    assert bench.graph.killed.is_set()


# --- clients that go ----------------------------------------------------------------------------


@pytest.mark.parametrize("cycles", range(1, 7))
def test_an_abort_at_any_point_gives_the_slot_back_at_once(cycles: int) -> None:
    """In the prompt, before the first token, in the answer: the next plan may use the slot."""
    bench = Bench()
    bench.submit("a", prompt=range(20), max_tokens=10)  # a prompt of three chunks
    bench.submit("b", prompt=(30,), max_tokens=30)
    bench.submit("c", prompt=(50, 51), max_tokens=3)  # waits
    for _ in range(cycles):
        bench.plan()
        if _ < cycles - 1:
            bench.graph.steps.release()
    bench.engine.abort("a")
    bench.graph.steps.release()
    plan = bench.plan()
    assert (50, 51) in plan.tokens
    assert all(rows.start + rows.count <= 4 or rows.slot == 1 for rows in plan.stages[0])
    bench.graph.steps.release(1000)
    assert [bench.next("c").token_id for _ in range(3)] == continuation([50, 51], 3)
    bench.engine.close()
    assert bench.scheduler.faults() == []
