"""Every metric, once. Ray exports `spd_x` of every process on its node's metrics port, as
`ray_spd_x` (a counter as `ray_spd_x_total`), with the deployment and the replica as labels.

An observation costs about 4 us: some 4 (n + 6) us between two cycles of n stages.
"""

import threading
import time

from ray.serve.metrics import Counter, Gauge, Histogram

from service.engine.recorder import Outcome
from service.messages import CycleResult

# Cycles take 5 to 10 ms on GPUs: the buckets of other servers start where these are half through.
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

GAUGE_PERIOD_S = 2.0  # Ray drops a gauge that has not been set for some 20 s


class Metrics:
    """The metrics of one pipeline. A `service.engine.recorder.Recorder`; needs a Ray process."""

    def __init__(self, model_name: str, stages: int, *, speculates: bool = True) -> None:
        self._model = {"model_name": model_name}
        self._stage_tags = [{"stage": str(stage)} for stage in range(stages)]
        self._load = (0, 0)
        self._speculates = speculates
        self._make_request_metrics()
        self._make_pipeline_metrics()
        threading.Thread(target=self._keep_gauges, name="spd-gauges", daemon=True).start()

    def load(self, running: int, waiting: int) -> None:
        self._load = (running, waiting)

    def cycle(self, result: CycleResult) -> None:
        self._cycles.inc()
        self._cycle_seconds.observe(result.seconds)
        for report, tags in zip(result.stages, self._stage_tags, strict=True):
            self._stage_seconds.observe(report.seconds, tags)
        if result.drafter is not None:
            self._draft_seconds.observe(result.drafter.seconds)
        judged = [v.accepted for v in result.stages[-1].verdicts if v.accepted is not None]
        if judged:
            accepted = sum(judged)
            self._drafts.inc(len(judged))
            _add(self._accepted, accepted)
            _add(self._flushes, len(judged) - accepted)

    def request_started(self, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        self._generation_tokens.inc()
        self._first_token_seconds.observe(seconds)

    def token(self, gap_seconds: float) -> None:
        self._generation_tokens.inc()
        self._token_seconds.observe(gap_seconds)

    def request_finished(self, reason: Outcome, e2e_seconds: float) -> None:
        self._finished.inc(1, {"finished_reason": reason})
        self._request_seconds.observe(e2e_seconds)

    def speculation(self, *, works: bool) -> None:
        self._speculates = works

    def restarted(self, *, was_intact: bool) -> None:
        """This pipeline is in the place of one that failed, and could not tell any more."""
        self._restarts.inc()
        _add(self._violations, int(not was_intact))

    def _keep_gauges(self) -> None:
        while True:
            running, waiting = self._load
            self._running.set(running)
            self._waiting.set(waiting)
            self._stages.set(len(self._stage_tags))
            self._speculation_works.set(self._speculates)
            time.sleep(GAUGE_PERIOD_S)

    def _make_request_metrics(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests that have a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a slot.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of all requests.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._finished = self._counter(
            "request_success",
            "Finished requests; finished_reason is stop, length, abort or error.",
            "finished_reason",
        )
        self._first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_SECONDS,
        )
        self._token_seconds = self._histogram(
            "inter_token_latency_seconds", "From one token of a request to the next.", TOKEN_SECONDS
        )
        self._request_seconds = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", REQUEST_SECONDS
        )

    def _make_pipeline_metrics(self) -> None:
        self._stages = self._gauge(
            "pipeline_stages",
            "Stages, n. The theoretical speed-up is n x generated tokens / cycles, where one "
            "request runs at a time.",
        )
        self._cycles = self._counter("pipeline_cycles", "Cycles run.")
        self._flushes = self._counter(
            "pipeline_flushes", "Rejected drafts; each voids what follows it in the pipeline."
        )
        self._speculation_works = self._gauge(
            "speculation_works", "0 where the PDM is broken or drafting fails, else 1."
        )
        self._restarts = self._counter(
            "pipeline_restarts", "Times that a pipeline was started in place of a lost one."
        )
        self._violations = self._counter(
            "integrity_violations", "Times that an idle pipeline was not as it should be."
        )
        self._drafts = self._counter("spec_decode_num_drafts", "Verified drafts, of one token.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._cycle_seconds = self._histogram(
            "cycle_seconds", "From a plan's departure to the last report.", TOKEN_SECONDS
        )
        self._stage_seconds = self._histogram(
            "stage_forward_seconds", "Work of one stage in one cycle.", TOKEN_SECONDS, "stage"
        )
        self._draft_seconds = self._histogram(
            "draft_forward_seconds", "Work of the drafter in one cycle.", TOKEN_SECONDS
        )

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        counter = Counter(f"spd_{name}", help_text, ("model_name", *labels))
        counter.set_default_tags(dict(self._model))
        return counter

    def _gauge(self, name: str, help_text: str) -> Gauge:
        gauge = Gauge(f"spd_{name}", help_text, ("model_name",))
        gauge.set_default_tags(dict(self._model))
        return gauge

    def _histogram(
        self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        histogram = Histogram(f"spd_{name}", help_text, list(buckets), ("model_name", *labels))
        histogram.set_default_tags(dict(self._model))
        return histogram


def _add(counter: Counter, count: int) -> None:
    if count:  # Ray's counters refuse 0
        counter.inc(count)
