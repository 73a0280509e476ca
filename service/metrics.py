"""Every metric, once: its name, kind, meaning and labels. How they are measured is in
`service.recording`.

Ray exports each from every process on its node's metrics port, as `ray_spd_<name>` (a counter with
`_total` behind it), with labels of its own that tell the process; GET /metrics joins all nodes. The
meanings are vLLM's where its names are.

Ray keeps of a histogram's observations their buckets only: counts and quantiles are right, `_sum`
is made of the buckets' middles. Where means matter, a counter `.._spent` has the exact seconds.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]
Origin = Literal["ingress", "pipeline", "page"]
Outcome = Literal["stop", "length", "abort", "error"]
Rejection = Literal["queue_full", "queue_timeout", "unavailable", "shutting_down"]

PREFIX = "ray_spd_"

# Cycles take 5 to 10 ms on GPUs: the buckets of other servers start where these are half through.
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5),
)
OVERHEAD_SECONDS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005),
    *(0.0075, 0.01, 0.02, 0.05, 0.1, 0.5),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
ACCEPT_LENGTHS = (
    *(0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0),
    *(24.0, 32.0, 64.0),
)


@dataclass(frozen=True, slots=True, eq=False)  # each stands once, and is looked up often
class Metric:
    """One metric. All have the label `model_name`; some have a `label` beside it, with these
    `values` and no others (none: the numbers of the stages)."""

    kind: Kind
    name: str
    help: str
    origin: Origin
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Its name at the exporters and at /metrics."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def series(self) -> frozenset[str]:
        """The names of its samples."""
        if self.kind != "histogram":
            return frozenset({self.exported})
        return frozenset(f"{self.exported}_{part}" for part in ("bucket", "sum", "count"))

    @property
    def spent(self) -> "Metric":
        """Of a histogram of seconds, the counter that has their exact sum."""
        return Metric(
            "counter",
            f"{self.name}_spent",
            f"Exact sum of {self.name}.",
            self.origin,
            self.label,
        )


# --- requests, as their clients meet them: measured where they are held, at the ingress -----------


def _request_seconds(name: str, help_text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric("histogram", name, help_text, "ingress", buckets=buckets)


FINISHED = Metric(
    "counter",
    "request_success",
    "Finished requests: stop and length by themselves, abort because the client went or the time "
    "that a request may take was over, error because a pipeline failed for good.",
    "ingress",
    "finished_reason",
    get_args(Outcome),
)
REJECTIONS = Metric(
    "counter",
    "admission_rejections",
    "Requests that were turned away before their first token: the queue was full, or they waited "
    "too long in it, no pipeline was there, or the server is shutting down.",
    "ingress",
    "reason",
    get_args(Rejection),
)
RESUMED = Metric(
    "counter", "requests_resumed", "Times that a request lost its pipeline.", "ingress"
)
FIRST_TOKEN = _request_seconds(
    "time_to_first_token_seconds",
    "From a request's arrival, with its prompt as tokens, to its first token.",
    FIRST_TOKEN_SECONDS,
)
TIME_PER_TOKEN = _request_seconds(
    "request_time_per_output_token_seconds",
    "Mean time of a finished request's tokens behind its first one.",
    TOKEN_SECONDS,
)
REQUEST = _request_seconds(
    "e2e_request_latency_seconds",
    "From a request's arrival to its last token.",
    REQUEST_SECONDS,
)
QUEUED = _request_seconds(
    "request_queue_time_seconds",
    "For how long a finished request waited for a slot. Of a resumed one, this and the next two "
    "are of its last run.",
    REQUEST_SECONDS,
)
PREFILL = _request_seconds(
    "request_prefill_time_seconds",
    "From a finished request's slot to its first token.",
    FIRST_TOKEN_SECONDS,
)
DECODE = _request_seconds(
    "request_decode_time_seconds",
    "From a finished request's first token to its last.",
    REQUEST_SECONDS,
)
REQUEST_PROMPT = Metric(
    "histogram",
    "request_prompt_tokens",
    "Prompt tokens of finished requests.",
    "ingress",
    buckets=TOKENS,
)
REQUEST_GENERATION = Metric(
    "histogram",
    "request_generation_tokens",
    "Generated tokens of finished requests.",
    "ingress",
    buckets=TOKENS,
)
REQUEST_ACCEPT_LENGTH = Metric(
    "histogram",
    "request_equivalent_accept_length",
    "Theoretical speed-up of a finished request: stages x decoded tokens / its cycles.",
    "ingress",
    buckets=ACCEPT_LENGTHS,
)
RESTARTS = Metric(
    "gauge",
    "pipeline_restarts",
    "Pipelines started in place of lost ones since this configuration was deployed: every ingress "
    "tells the same number, which only grows.",
    "ingress",
)
VIOLATIONS = Metric(
    "gauge",
    "integrity_violations",
    "Pipelines lost because they were not as they should be when idle; told as pipeline_restarts.",
    "ingress",
)

# --- what a pipeline does: measured by its engine -------------------------------------------------


def _count(
    name: str, help_text: str, label: str | None = None, values: tuple[str, ...] = ()
) -> Metric:
    return Metric("counter", name, help_text, "pipeline", label, values)


def _gauge(name: str, help_text: str) -> Metric:
    return Metric("gauge", name, help_text, "pipeline")


def _cycle_seconds(
    name: str,
    help_text: str,
    buckets: tuple[float, ...] = TOKEN_SECONDS,
    label: str | None = None,
) -> Metric:
    return Metric("histogram", name, help_text, "pipeline", label, buckets=buckets)


RUNNING = _gauge("num_requests_running", "Requests that have a slot.")
WAITING = _gauge("num_requests_waiting", "Requests that wait for a slot.")
SLOTS = _gauge("pipeline_slots", "Slots: so many requests run at most.")
STAGES = _gauge("pipeline_stages", "Stages, n.")
SPECULATION = _gauge("speculation_works", "0 where the PDM is broken or drafting fails, else 1.")

PROMPT_TOKENS = _count("prompt_tokens", "Prompt tokens of the requests that were given a slot.")
GENERATION_TOKENS = _count("generation_tokens", "Generated tokens.")
PREFIX_QUERIES = _count(
    "prefix_cache_queries", "Tokens of which keys and values were looked for in the slots."
)
PREFIX_HITS = _count("prefix_cache_hits", "Tokens of which keys and values were there.")
DRAFTS = _count("spec_decode_num_drafts", "Verified drafts.")
DRAFT_TOKENS = _count(
    "spec_decode_num_draft_tokens", "Tokens of these: a draft is of one token, so as many."
)
ACCEPTED = _count("spec_decode_num_accepted_tokens", "Accepted drafts.")
ACCEPTED_AT = _count(
    "spec_decode_num_accepted_tokens_per_pos",
    "The same by place in the draft.",
    "position",
    ("0",),
)

CYCLES = _count("pipeline_cycles", "Cycles run.")
FLUSHES = _count("pipeline_flushes", "Rejected drafts; each voids what follows it in the pipeline.")
BUBBLES = _count("pipeline_bubbles", "Times that a stage had no row in a cycle.")
DECODE_CYCLES = _count(
    "pipeline_decode_cycles", "Cycles behind its first token, counted for each text apart."
)
DECODED = _count(
    "pipeline_decoded_tokens",
    "Generated tokens behind the first one of each text. Stages x this / pipeline_decode_cycles "
    "is the equivalent accept length, the theoretical speed-up.",
)

TOKEN = _cycle_seconds("inter_token_latency_seconds", "From one token of a request to the next.")
CYCLE = _cycle_seconds("cycle_seconds", "From a plan's departure to the last report.")
STAGE = _cycle_seconds(
    "stage_forward_seconds", "Work of a stage in a cycle with rows.", label="stage"
)
DRAFT = _cycle_seconds("draft_forward_seconds", "Work of the PDM in a cycle with drafts.")
VERIFY = _cycle_seconds(
    "verify_seconds",
    "Of the last stage's work in a cycle with verdicts: the head and these; on GPUs the wait for "
    "its layers too.",
    OVERHEAD_SECONDS,
)
OVERHEAD = _cycle_seconds(
    "graph_overhead_seconds",
    "What a cycle takes beyond the work of its slowest stage, or of the PDM if that is slower.",
    OVERHEAD_SECONDS,
)
CYCLE_SPENT = CYCLE.spent
STAGE_SPENT = STAGE.spent
DRAFT_SPENT = DRAFT.spent
VERIFY_SPENT = VERIFY.spent
OVERHEAD_SPENT = OVERHEAD.spent

# --- what only GET /metrics knows -----------------------------------------------------------------

UNREACHABLE = Metric(
    "gauge", "metrics_nodes_unreachable", "Nodes whose metrics are missing here.", "page"
)

METRICS: tuple[Metric, ...] = tuple(m for m in list(globals().values()) if isinstance(m, Metric))
