"""How the metrics are measured: by the engine's recorder in a pipeline, by an observer of requests
at the ingress. Both hand them to Ray, and need a Ray process."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ray.serve.metrics import Counter, Gauge, Histogram

from service import metrics
from service.api.observed import Life
from service.engine.engine import NOT_INTACT
from service.messages import CyclePlan, CycleResult, GenerateRequest
from service.metrics import METRICS, Metric, Origin, Rejection
from service.restarts import Restarts

PERIOD_S = 1.0  # Ray drops a gauge that has not been set for some 20 s
STEP_S = 0.05  # how often what was heard is looked at
PAUSE_S = 0.0003  # between two pieces of it
BACKLOG = 1000  # with more waiting there are no pauses


class Instruments:
    """Ray's instruments for the metrics of one origin."""

    def __init__(self, origin: Origin, model_name: str, stages: int) -> None:
        self._model = {"model_name": model_name}
        self._stages = tuple(map(str, range(stages)))
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in METRICS:
            if metric.origin == origin:
                self._make(metric)

    def _make(self, metric: Metric) -> None:
        name = f"spd_{metric.name}"
        labels = ("model_name", *([metric.label] if metric.label else []))
        if metric.kind == "histogram":
            made = Histogram(name, metric.help, list(metric.buckets), labels)
            self._histograms[metric] = made
        elif metric.kind == "gauge":
            made = Gauge(name, metric.help, labels)
            self._gauges[metric] = made
        else:
            made = Counter(name, metric.help, labels)
            self._counters[metric] = made
        made.set_default_tags(dict(self._model))
        if metric.kind == "counter":
            # One that is first seen at 1 has not grown, for Prometheus; and `inc` takes no 0.
            values = (metric.values or self._stages) if metric.label else ("",)
            for value in values:
                made._record(0.0, _tags(metric, value))

    def add(self, metric: Metric, count: float = 1.0, value: str = "") -> None:
        """`value`: that of the metric's label, if it has one."""
        if count:
            self._counters[metric].inc(count, _tags(metric, value))

    def set(self, metric: Metric, level: float) -> None:
        self._gauges[metric].set(level)

    def observe(self, metric: Metric, observation: float, value: str = "") -> None:
        self._histograms[metric].observe(observation, _tags(metric, value))


def _tags(metric: Metric, value: str) -> dict[str, str] | None:
    return {metric.label: value} if metric.label else None


class PipelineMetrics:
    """The metrics of one pipeline: a `service.engine.recorder.Recorder`.

    To count a cycle takes some 150 us: Ray's calls take 2 to 5 us each. So the engine's thread only
    notes what it has to tell, in 5 us, and another one counts it, a little at a time: it must not
    keep the engine from Python's lock.
    """

    def __init__(
        self, model_name: str, stages: int, slots: int, *, speculates: bool = True
    ) -> None:
        self._instruments = Instruments("pipeline", model_name, stages)
        self._stages, self._slots = stages, slots
        self._heard: deque[Callable[[], None]] = deque()
        self._load: tuple[int, int] | None = None
        self._speculates = speculates
        self._counts: defaultdict[tuple[Metric, str], float] = defaultdict(float)
        threading.Thread(target=self._work, name="spd-metrics", daemon=True).start()

    # --- the engine's thread ----------------------------------------------------------------------

    def load(self, running: int, waiting: int) -> None:
        self._load = (running, waiting)

    def admitted(self, request: GenerateRequest, reused: int) -> None:
        self._heard.append(partial(self._count_admission, request, reused))

    def cycle(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None:
        self._heard.append(partial(self._count_cycle, plan, result, decoding))

    def token(self, gap_seconds: float | None) -> None:
        self._heard.append(partial(self._count_token, gap_seconds))

    def speculation(self, *, works: bool) -> None:
        self._speculates = works

    # --- the other thread -------------------------------------------------------------------------

    def _work(self) -> None:
        flushed = 0.0
        while True:
            if (now := time.monotonic()) - flushed >= PERIOD_S:
                self._flush()
                flushed = now
            if not self._heard:
                time.sleep(STEP_S)
                continue
            self._heard.popleft()()
            if len(self._heard) < BACKLOG:
                time.sleep(PAUSE_S)

    def _flush(self) -> None:
        ours = self._instruments
        for (metric, value), count in self._counts.items():
            ours.add(metric, count, value)
        self._counts.clear()
        if self._load is None:  # the graph is still being made: there is no pipeline yet
            return
        running, waiting = self._load
        ours.set(metrics.RUNNING, running)
        ours.set(metrics.WAITING, waiting)
        ours.set(metrics.SLOTS, self._slots)
        ours.set(metrics.STAGES, self._stages)
        ours.set(metrics.SPECULATION, self._speculates)

    def _add(self, metric: Metric, count: float = 1.0, value: str = "") -> None:
        self._counts[metric, value] += count

    def _seconds(self, metric: Metric, spent: Metric, seconds: float, value: str = "") -> None:
        """An observation, and its exact value to their sum."""
        self._instruments.observe(metric, seconds, value)
        self._add(spent, seconds, value)

    def _count_admission(self, request: GenerateRequest, reused: int) -> None:
        if not request.generated_ids:  # else another pipeline has counted its prompt
            self._add(metrics.PROMPT_TOKENS, len(request.prompt_ids))
        self._add(metrics.PREFIX_QUERIES, len(request.known_ids))
        self._add(metrics.PREFIX_HITS, reused)

    def _count_token(self, gap_seconds: float | None) -> None:
        self._add(metrics.GENERATION_TOKENS)
        if gap_seconds is not None:
            self._add(metrics.DECODED)
            self._instruments.observe(metrics.TOKEN, gap_seconds)

    def _count_cycle(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None:
        self._add(metrics.CYCLES)
        self._add(metrics.DECODE_CYCLES, decoding)
        self._add(metrics.BUBBLES, sum(not rows for rows in plan.stages))
        self._count_verdicts(result)
        self._seconds(metrics.CYCLE, metrics.CYCLE_SPENT, result.seconds)
        slowest = 0.0
        for stage, (rows, report) in enumerate(zip(plan.stages, result.stages, strict=True)):
            slowest = max(slowest, report.seconds)
            if rows:
                self._seconds(metrics.STAGE, metrics.STAGE_SPENT, report.seconds, str(stage))
        if plan.verify or plan.scores:
            verified = result.stages[-1].verify_seconds
            self._seconds(metrics.VERIFY, metrics.VERIFY_SPENT, verified)
        if result.drafter is not None:
            slowest = max(slowest, result.drafter.seconds)
            if plan.drafts:
                self._seconds(metrics.DRAFT, metrics.DRAFT_SPENT, result.drafter.seconds)
        overhead = max(0.0, result.seconds - slowest)
        self._seconds(metrics.OVERHEAD, metrics.OVERHEAD_SPENT, overhead)

    def _count_verdicts(self, result: CycleResult) -> None:
        judged = [v.accepted for v in result.stages[-1].verdicts if v.accepted is not None]
        accepted = sum(judged)
        self._add(metrics.DRAFTS, len(judged))
        self._add(metrics.DRAFT_TOKENS, len(judged))
        self._add(metrics.ACCEPTED, accepted)
        self._add(metrics.ACCEPTED_AT, accepted, "0")
        self._add(metrics.FLUSHES, len(judged) - accepted)


class IngressMetrics:
    """The metrics of one ingress: a `service.api.observed.Observer`."""

    def __init__(self, model_name: str, stages: int) -> None:
        self._instruments = Instruments("ingress", model_name, stages)
        self._stages = stages
        self._restarted: set[str] = set()  # replicas, by name
        self._violated: set[str] = set()

    def first_token(self, seconds: float) -> None:
        self._instruments.observe(metrics.FIRST_TOKEN, seconds)

    def over(self, life: Life) -> None:
        ours, stats = self._instruments, life.stats
        if life.rejection is not None:
            self.rejected(life.rejection)
            return
        ours.add(metrics.FINISHED, value=life.outcome or "error")
        if stats is None:
            return
        ours.observe(metrics.REQUEST, life.ended_s)
        ours.observe(metrics.REQUEST_PROMPT, stats.prompt_tokens)
        ours.observe(metrics.REQUEST_GENERATION, stats.generated_tokens)
        if life.tokens > 1 and life.first_token_s is not None:
            spread = life.ended_s - life.first_token_s
            ours.observe(metrics.TIME_PER_TOKEN, spread / (life.tokens - 1))
        if stats.times is not None:
            ours.observe(metrics.QUEUED, stats.times.queue)
            ours.observe(metrics.PREFILL, stats.times.prefill)
            ours.observe(metrics.DECODE, stats.times.decode)
        if stats.cycles:
            length = self._stages * stats.decoded / stats.cycles
            ours.observe(metrics.REQUEST_ACCEPT_LENGTH, length)

    def rejected(self, reason: Rejection) -> None:
        self._instruments.add(metrics.REJECTIONS, value=reason)

    def resumed(self) -> None:
        self._instruments.add(metrics.RESUMED)

    def keep_restarts(self, restarts: Restarts) -> None:
        """Says from now on what the record of restarts says. A pipeline could not: it would be in
        the place of the lost one, and its counter would begin at 1."""

        def keep() -> None:
            while True:
                with suppress(Exception):  # of Ray's store, while a head is made anew
                    self.note_restarts(restarts)
                time.sleep(PERIOD_S)

        threading.Thread(target=keep, name="spd-metrics", daemon=True).start()

    def note_restarts(self, restarts: Restarts) -> None:
        """By name: who ends as it should is forgotten by the record, and not here."""
        for replica, start in restarts.noted().items():
            if start.is_restart:
                self._restarted.add(replica)
            if (start.failure or "").startswith(NOT_INTACT):
                self._violated.add(replica)
        self._instruments.set(metrics.RESTARTS, len(self._restarted))
        self._instruments.set(metrics.VIOLATIONS, len(self._violated))
