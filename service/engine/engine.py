"""The thread that runs the pipeline, cycle by cycle, and hands every token to its request."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from service.engine.balance import Balance
from service.engine.recorder import Recorder
from service.engine.scheduler import QueueFullError, Scheduler
from service.engine.sequence import Sequence, Sink
from service.messages import (
    CyclePlan,
    CycleResult,
    Delta,
    Failure,
    GenerateRequest,
    PromptScored,
    RequestTimes,
)
from service.pipeline.graph import GraphError, ServingGraph

log = logging.getLogger(__name__)

Command = Callable[[], None]

CLOSE_SECONDS = 10.0
AUDIT_AFTER_S = 1.0
NOT_INTACT = "the idle pipeline is not as it should be"
SHUTTING_DOWN = "the server is shutting down"


class Engine:
    """Owns scheduler and graph. Other threads reach them only by commands, which the engine's
    thread carries out between two cycles."""

    def __init__(
        self,
        make_graph: Callable[[], ServingGraph],
        scheduler: Scheduler,
        recorder: Recorder,
        *,
        queue_timeout_s: float | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`make_graph` is called in the engine's thread, where a compiled graph must be made, run
        and closed. Waits until it is there; raises what it raises. A request that has waited for a
        slot for `queue_timeout_s` is told so. `on_failure` is called in the engine's thread
        once the pipeline is of no use any more: all requests know, and the actors have ended."""
        self._make_graph, self._scheduler, self._recorder = make_graph, scheduler, recorder
        self._queue_timeout_s, self._on_failure = queue_timeout_s, on_failure
        self._graph: ServingGraph | None = None
        self._cycle_began: float | None = None
        self._unsent = Unsent()
        self._is_audited = False
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._clocks: dict[str, RequestClock] = {}
        self._running = True
        self.failure: str | None = None
        self.draft_error: str | None = None
        self.balance = Balance()
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spd-engine", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    # --- called from other threads ----------------------------------------------------------------

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queues a request. `sink` gets its events in the engine's thread and must not block."""
        if not self._running:
            sink(Failure(SHUTTING_DOWN))
            return
        arrived = time.perf_counter()
        self._commands.put(lambda: self._add(request, sink, arrived))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next cycle; no event follows. Unknown ids are fine."""
        self._commands.put(lambda: self._abort(request_id))

    def close(self) -> None:
        """Ends the thread after the running cycle, and the graph with it. Gives up on a cycle that
        hangs: the process ends anyway."""
        self._commands.put(self._stop)
        self._thread.join(CLOSE_SECONDS)

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    @property
    def cycle_seconds(self) -> float:
        """For how long the present cycle has been running; 0 between two."""
        began = self._cycle_began
        return 0.0 if began is None else time.perf_counter() - began

    def check(self, seconds: float) -> None:
        """Asks all actors for a sign of life. Raises GraphError where one gives none in time."""
        if self._graph is not None:
            self._graph.check(seconds)

    def kill(self) -> None:
        """Ends the actors, whatever they or the engine's thread are doing."""
        if self._graph is not None:
            self._graph.kill()

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            graph = self._graph = self._make_graph()
        except BaseException as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            while self._hear_commands():
                self._cycle(graph)
        except Exception as error:
            self._fail(error)
        try:
            if self.failure is not None:
                graph.kill()  # requests come here until this replica has ended
            graph.close()
        except Exception:
            log.exception("the graph could not be closed")
        if self.failure is not None:
            self._on_failure(self.failure)
        while self._running:  # requests that come before a failed replica is replaced
            self._commands.get()()

    def _cycle(self, graph: ServingGraph) -> None:
        """One cycle of the machine: plan, run, take the result. The tokens of the cycle before go
        out while this one runs: no cycle waits for them."""
        self._expire()
        plan = self._scheduler.plan()
        if plan is None:
            self._hand_out()
            self._rest(graph)
            return
        self._admit(plan)
        decoding = self._scheduler.decoding
        self._is_audited, self._cycle_began = False, time.perf_counter()
        result = graph.run(plan, meanwhile=self._hand_out)
        self._cycle_began = None
        self._unsent = Unsent(self._scheduler.apply(result), (plan, result, decoding))

    def _hand_out(self) -> None:
        """Tokens to their requests, figures to the recorder."""
        unsent, self._unsent = self._unsent, Unsent()
        for sequence, event in unsent.events:
            self._deliver(sequence, event)
        if unsent.cycle is not None:
            self._record(*unsent.cycle)
        self._recorder.load(self._scheduler.running, self._scheduler.waiting)

    def _rest(self, graph: ServingGraph) -> None:
        """Nothing to do until somebody says something; then there is time to look at the books."""
        try:
            command = self._commands.get(timeout=None if self._is_audited else AUDIT_AFTER_S)
        except Empty:
            self._audit(graph)
        else:
            command()

    def _audit(self, graph: ServingGraph) -> None:
        """Whether an idle pipeline is as it should be: all slots free, and in each of them what the
        scheduler believes. What is wrong can't be told from its consequences: the pipeline is made
        anew."""
        self._is_audited = True
        faults = self._scheduler.faults()
        if self._clocks:
            faults.append(f"requests without an end: {sorted(self._clocks)}")
        faults += graph.audit(self._scheduler.held, drafter=self.draft_error is None)
        if faults:
            raise GraphError(f"{NOT_INTACT}: " + "; ".join(faults))

    def _expire(self) -> None:
        """Ends what has waited for a slot for too long."""
        if self._queue_timeout_s is None or not self._scheduler.waiting:
            return
        oldest = time.perf_counter() - self._queue_timeout_s
        for request_id in self._scheduler.new_in_queue:
            if self._clocks[request_id].arrived < oldest:
                sink = self._scheduler.unqueue(request_id)
                assert sink is not None
                sink(Failure("it waited too long for a slot", "expired"))
                del self._clocks[request_id]

    def _hear_commands(self) -> bool:
        """Carries out what other threads have asked for; False once it was to stop."""
        while self._running:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return True
            command()
        return False

    def _add(self, request: GenerateRequest, sink: Sink, arrived: float) -> None:
        if self.failure is not None:
            sink(Failure(self.failure))
            return
        try:
            self._scheduler.add(request, sink)
        except ValueError as error:
            sink(Failure(str(error), "refused"))
            return
        except QueueFullError as error:
            sink(Failure(str(error), "overloaded"))
            return
        self._clocks[request.request_id] = RequestClock(arrived)

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        self._unsent.forget(request_id)
        self._clocks.pop(request_id, None)

    def _admit(self, plan: CyclePlan) -> None:
        """Notes who has a slot from now on."""
        if plan.admitted:
            now = time.perf_counter()
            for sequence in self._scheduler.admitted(plan):
                self._clocks[sequence.request.request_id].admitted = now
                self._recorder.admitted(sequence.request, sequence.reused)

    def _stop(self) -> None:
        self._running = False
        self._hand_out()
        self._drop_all(SHUTTING_DOWN)

    def _deliver(self, sequence: Sequence, event: PromptScored | Delta) -> None:
        if isinstance(event, PromptScored):
            sequence.sink(event)
            return
        request_id = sequence.request.request_id
        clock = self._clocks[request_id]
        gap = clock.tick(time.perf_counter())
        if event.stats is not None:  # the last one
            del self._clocks[request_id]
            event = replace(event, stats=replace(event.stats, times=clock.times()))
        sequence.sink(event)
        self._recorder.token(gap)

    def _record(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None:
        self._recorder.cycle(plan, result, decoding)
        self.balance.see(result)
        error = result.drafter.error if result.drafter else None
        if error != self.draft_error and (error or plan.drafts):  # success is a draft that came
            log.warning("speculation: %s", error or "works again")
            self._recorder.speculation(works=error is None)
            self.draft_error = error

    def _fail(self, error: Exception) -> None:
        """The pipeline is of no use any more: every stream is told, and none can start."""
        if not isinstance(error, GraphError):
            log.exception("the engine failed")
        self._hand_out()
        self.failure = str(error)
        log.error("the pipeline has failed: %s", self.failure)
        self._drop_all(f"the pipeline has failed: {self.failure}")

    def _drop_all(self, message: str) -> None:
        for sink in self._scheduler.drop_all():
            sink(Failure(message))
        self._clocks.clear()


@dataclass(slots=True)
class Unsent:
    """What a cycle has brought and nobody has been told."""

    events: list[tuple[Sequence, PromptScored | Delta]] = field(default_factory=list)
    cycle: tuple[CyclePlan, CycleResult, int] | None = None  # how many sequences were decoding

    def forget(self, request_id: str) -> None:
        """Nobody waits for its events any more."""
        self.events = [e for e in self.events if e[0].request.request_id != request_id]


class RequestClock:
    """When a request came, got its slot and its tokens, in seconds of `time.perf_counter`."""

    __slots__ = ("admitted", "arrived", "first_token", "last_token")

    def __init__(self, arrived: float) -> None:
        self.arrived = self.admitted = arrived
        self.first_token: float | None = None
        self.last_token = arrived

    def tick(self, now: float) -> float | None:
        """A token. Returns how long after the one before; None for the first one."""
        before, self.last_token = self.last_token, now
        if self.first_token is None:
            self.first_token = now
            return None
        return now - before

    def times(self) -> RequestTimes:
        """Of a request that has tokens."""
        assert self.first_token is not None
        return RequestTimes(
            queue=self.admitted - self.arrived,
            prefill=self.first_token - self.admitted,
            decode=self.last_token - self.first_token,
        )
