"""The settings of a deployment: what `args` of a serve YAML may hold. Validated once, frozen."""

import importlib.util
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

DEFAULT_MODEL = "smollm2-135m-instruct"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/*A-Z]+")


_HTTP_URL = re.compile(r"https?://[^\s/?#]+(?P<path>/[^\s?#]*)?")


class ConfigError(ValueError):
    """A setting that can't work. The message names the field, the value and what would be right."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PipelineSettings(_Section):
    """The stages and the graph that joins them."""

    graph: Literal["ray", "local"] = Field(
        "ray",
        description="`ray`: an actor for each stage and one for the PDM, joined by a compiled "
        "graph. `local`: on one machine, without Ray in a cycle: processes that share memory on "
        "CPUs, threads of one process elsewhere.",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="Pipelines, each with stages and a PDM of its own. With a second one, the "
        "streams of a pipeline that fails go on at once.",
    )
    gpus: int = Field(
        1,
        ge=1,
        description="With `graph: local` and `device: cuda`: GPUs of one machine, over which "
        "stages and PDM are spread in turns. With `graph: ray` each has one of its own.",
    )
    cuda_graphs: bool = Field(
        True,
        description="With `device: cuda`: the forward of single tokens is recorded when the "
        "pipeline starts and replayed in one launch. Off: every kernel is launched by itself, "
        "which is slower, starts sooner and takes less memory.",
    )
    stages: int = Field(2, ge=1, le=64, description="Number of pipeline stages, n.")
    layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="Decoder layers of each stage, e.g. [18, 12]. Unset: balanced by cost, the "
        "last stage carrying the head.",
    )
    slots: int = Field(4, ge=1, le=256, description="Sequences that run at once.")
    max_len: int = Field(2048, ge=2, description="Positions of a slot: prompt and answer.")
    chunk: int = Field(128, ge=1, description="Prompt tokens that enter stage 0 in one cycle.")
    threads: int = Field(1, ge=1, description="Torch threads of each actor.")
    cpus_per_actor: float = Field(
        0.2,
        gt=0,
        description="CPUs that Ray reserves for an actor. A reservation, not a limit: small, so "
        "that a pipeline fits a laptop.",
    )
    cycle_timeout_s: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="The watchdog's bound: a cycle that takes longer, or an idle actor that does "
        "not answer for so long, means a hung actor. The replica ends, and Serve starts a new one.",
    )

    @model_validator(mode="after")
    def _layers_match_stages(self) -> Self:
        if self.layers is not None and len(self.layers) != self.stages:
            raise ValueError(
                f"layers has {len(self.layers)} entries for {self.stages} stages; give one "
                "number of layers for each stage"
            )
        return self


def _bare_off(kind: Any) -> Any:
    """What YAML makes of `off` without quotes."""
    return "off" if kind is False else kind


class DrafterSettings(_Section):
    """Who proposes the next token."""

    kind: Annotated[Literal["lookup+pdm", "pdm", "lookup", "off"], BeforeValidator(_bare_off)] = (
        Field(
            "lookup+pdm",
            description="`lookup`: the continuation of the text's last match with its own ending. "
            "`pdm`: the Pipeline Draft Module. `lookup+pdm`: lookup where it has a match "
            "(unseeded above temperature 0.5: where the PDM has no draft). "
            "`off`: plain pipeline decoding, the baseline.",
        )
    )
    checkpoint: str | None = Field(
        None,
        description="Folder of a PDM checkpoint. Unset: the one that comes with the project "
        "for this model and this number of stages, else an untrained PDM made from the target.",
    )
    lookup_min_match: int = Field(
        2, ge=1, le=8, description="Tokens that a lookup match has at least."
    )

    @property
    def uses_pdm(self) -> bool:
        return self.kind in ("pdm", "lookup+pdm")

    @property
    def uses_lookup(self) -> bool:
        return self.kind in ("lookup", "lookup+pdm")


def _origin(text: str) -> str:
    """Refuses what no browser sends as its origin, and so would never match."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(
            "an origin is written as https://chat.example.com or http://localhost:3000, in lower "
            "case and without a path; '*' stands for any"
        )
    return text


class ApiSettings(_Section):
    """The door of the HTTP API."""

    keys_file: str | None = Field(
        None,
        min_length=1,
        description="File of API keys, one a line, read once when the deployment is built. Keys "
        "may also come from the environment variable SPD_API_KEYS. Neither: no key is asked for.",
    )
    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = Field(
        (),
        description="Web pages that may use the API from a browser, e.g. "
        "[https://chat.example.com]. Empty: none but those of this server.",
    )
    max_body_bytes: int = Field(
        8 * 2**20, ge=1024, description="Size of a request's body. A larger one is refused."
    )
    speculation_switch: bool = Field(
        True,
        description="Whether a request may turn drafting off for itself (`speculation: false`): to "
        "compare, since its text is the same.",
    )
    keep_alive_s: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="A stream that has been silent for so long sends an SSE comment, so that "
        "nothing on the way takes it for dead.",
    )


class LimitSettings(_Section):
    """How much is taken on, for how long, and how often a failed pipeline is started anew."""

    queue: int = Field(
        64,
        ge=0,
        description="Requests that may wait for a slot, for each pipeline. Beyond it: 429.",
    )
    queue_timeout_s: float | None = Field(
        300.0,
        gt=0,
        allow_inf_nan=False,
        description="A request that has waited for a slot for so long gets a 503. null: never.",
    )
    request_timeout_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="A request that has no end after so long gets a 504, or an error in its "
        "stream. null: never.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of pipelines within `restart_window_s`. After these the streams "
        "end with an error, and the next start waits until the window allows it. A request that "
        "has lost its pipeline more often than this ends too: it may be what breaks it.",
    )
    restart_window_s: float = Field(600.0, gt=0, allow_inf_nan=False, description="See above.")
    grace_s: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="How long running requests may go on when the server is told to end.",
    )


def _collector(url: str) -> str:
    """The address of a collector's traces; without a path it is the usual one."""
    found = _HTTP_URL.fullmatch(url)
    if not found:
        raise ValueError("a collector's address is written as http://collector:4318/v1/traces")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ValueError(
            "spans need OpenTelemetry: pip install 'spd-serve[tracing]', or leave this out"
        )
    return url if (found["path"] or "").strip("/") else url.rstrip("/") + "/v1/traces"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


class TracingSettings(_Section):
    """Spans of requests, for OpenTelemetry. See docs/metrics.md."""

    endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        None,
        description="Where spans go over OTLP/HTTP, e.g. http://collector:4318/v1/traces. Unset: "
        "no spans are made.",
    )


class EmulatedSettings(_Section):
    """Devices that wait instead of computing, for load tests and planning: no weights are read,
    and the text is nonsense of the right length."""

    stage_ms: float = Field(
        gt=0, allow_inf_nan=False, description="What a cycle takes of a stage that has rows."
    )
    draft_ms: float = Field(ge=0, allow_inf_nan=False, description="The same of the PDM.")
    link_ms: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="How long what a stage or the PDM sends is on its way.",
    )
    acceptance: float = Field(ge=0, le=1, description="Share of the PDM's drafts that are right.")
    hidden_size: int | None = Field(
        None, ge=1, description="Numbers in a hidden state, as they travel. Unset: the model's."
    )


class Settings(_Section):
    """One deployment: a model, its pipeline, its drafter and its API."""

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description=f"`{DEFAULT_MODEL}`, a Hugging Face folder, or a hub id.",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="The name that clients ask for. Unset: as `model`."
    )
    device: Literal["cpu", "cuda", "emulated"] = Field(
        "cpu", description="Where stages and PDM run. `emulated`: nowhere, they wait."
    )
    emulated: EmulatedSettings | None = Field(
        None, description="With `device: emulated`, and only then: what to wait for."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the weights and of the arithmetic."
    )
    weights: Literal["int8"] | None = Field(
        None,
        description="`int8`: the weights of decoder layers, head and PDM are rounded to 8 bits "
        "when they are read, one scale for each output; on CPUs. Less to read, so faster; the text "
        "is another. Unset: as `dtype`.",
    )
    pipeline: PipelineSettings = PipelineSettings()
    drafter: DrafterSettings = DrafterSettings()
    api: ApiSettings = ApiSettings()
    limits: LimitSettings = LimitSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _emulated_is_meant(self) -> Self:
        if (self.emulated is not None) != (self.device == "emulated"):
            raise ValueError(
                f"device is {self.device!r}, and the section `emulated` is "
                f"{'missing' if self.emulated is None else 'there'}; give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _int8_on_cpus(self) -> Self:
        if self.weights == "int8" and self.device != "cpu":
            raise ValueError(
                f"weights: int8 is for `device: cpu`, not {self.device}; leave `weights` out there"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_used(self) -> Self:
        pipeline, gpus = self.pipeline, self.pipeline.gpus
        if gpus > 1 and (self.device != "cuda" or pipeline.graph != "local"):
            raise ValueError(
                f"pipeline.gpus is {gpus}: that is for `device: cuda` with `graph: local`; leave "
                "it out"
            )
        if gpus > (actors := pipeline.stages + self.runs_pdm):
            raise ValueError(
                f"pipeline.gpus is {gpus}, but stages and PDM can use {actors} at most"
            )
        return self

    @property
    def name(self) -> str:
        return self.served_model_name or self.model

    @property
    def runs_pdm(self) -> bool:
        """At one stage no draft is ever in flight: speculation is off."""
        return self.drafter.uses_pdm and self.pipeline.stages > 1


def parse_settings(args: dict[str, Any]) -> Settings:
    """Validates the `args` of a serve YAML. Raises ConfigError naming each field that is wrong."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        lines = [_line(e) for e in error.errors()]
        raise ConfigError("The settings can't be used:\n" + "\n".join(lines)) from None


def _line(error: ErrorDetails) -> str:
    line = f"  {'.'.join(map(str, error['loc'])) or 'args'}: {error['msg']}"
    return line if _may_hold_a_key(error["loc"]) else f"{line} (got {error['input']!r})"


def _may_hold_a_key(place: tuple[int | str, ...]) -> bool:
    """Keys end up in fields that are not for them, and messages in logs."""
    shown = ApiSettings.model_fields.keys() - {"keys_file"}
    return place[:1] == ("api",) and not shown.intersection(place[1:])
