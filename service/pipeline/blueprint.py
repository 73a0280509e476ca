"""From settings to what a graph is built from: the target, where it is cut, a PDM that fits."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from service.config import ConfigError, EmulatedSettings, Settings
from service.pdm.checkpoint import (
    BrokenPdmError,
    PdmConfig,
    check_fits,
    check_tensors,
    load_draft_ids,
    target_fingerprint,
    untrained_draft_ids,
)
from service.pdm.features import default_anchors, stage_anchors
from service.pipeline.layers import WeightReader
from service.pipeline.linear import check_int8
from service.pipeline.partition import balanced_layers, check_layers, stage_bounds
from service.pipeline.spec import ActorSpec, Emulation
from service.target import check_context, load_target_config, resolve_target
from service.target_config import TargetConfig
from service.text.grammar import GrammarTokens
from service.text.tokenizer import Tokenizer

_FLOAT_BYTES = 4
_HEAD_READS = 0.75  # the time of a byte of the head, in that of a layer's; measured on CPUs
SHIPPED = Path(__file__).parents[2] / "deployments"  # the PDMs that come with the project


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that a graph is built from."""

    spec: ActorSpec
    checkpoint: str | None
    draft_ids: Tensor | None  # [D] int64; None without a PDM
    broken_pdm: str | None = None  # why there is none, where there should be one

    @property
    def with_drafter(self) -> bool:
        return self.draft_ids is not None

    @property
    def hidden_size(self) -> int:
        """Of the hidden states that travel."""
        emulation = self.spec.emulation
        return self.spec.target.hidden_size if emulation is None else emulation.hidden_size

    @property
    def draft_vocabulary(self) -> int:
        return 0 if self.draft_ids is None else len(self.draft_ids)


def largest_tensor_bytes(blueprint: Blueprint, chunk: int) -> int:
    """Of what an actor sends in a cycle: a prompt chunk with its taps, or the drafts' q."""
    spec = blueprint.spec
    taps = max(len(stage_anchors(spec.anchors, spec.bounds, k)) for k in range(spec.stages))
    hidden = (1 + taps) * (chunk + spec.slots) * blueprint.hidden_size
    return max(hidden, spec.slots * blueprint.draft_vocabulary) * _FLOAT_BYTES


def head_cost(config: TargetConfig) -> float:
    """What norm, head and verification take, in decoder layers. At one row, reading weights is the
    work; the head's one large product is read faster than the small ones of a layer."""
    hidden = config.hidden_size
    queries, pairs = config.num_attention_heads, 2 * config.num_key_value_heads
    layer = hidden * (2 * queries + pairs) * config.head_dim + 3 * hidden * config.intermediate_size
    return _HEAD_READS * float(hidden * config.vocab_size / layer)


def balanced_bounds(config: TargetConfig, stages: int) -> tuple[int, ...]:
    """The stage bounds of a pipeline whose layers are not given."""
    layers = balanced_layers(config.num_hidden_layers, stages, head_cost(config))
    return stage_bounds(layers)


def make_blueprint(settings: Settings) -> Blueprint:
    """Checks everything that can be checked before weights are read. Raises ConfigError."""
    folder = resolve_target(settings.model)
    config = load_target_config(folder)
    pipeline, layers = settings.pipeline, config.num_hidden_layers
    check_context(config, pipeline.max_len)
    if settings.weights == "int8":
        check_int8()
    bounds = (
        stage_bounds(check_layers(pipeline.layers, layers))
        if pipeline.layers
        else balanced_bounds(config, pipeline.stages)
    )
    anchors: tuple[int, ...] = ()
    draft_ids = None
    checkpoint = None
    broken = None
    if settings.emulated is None:
        WeightReader(folder).check(config)
    if settings.runs_pdm and settings.emulated is None:
        try:
            checkpoint = find_checkpoint(settings, folder, config, bounds)
            if checkpoint is not None:
                made_for = PdmConfig.read(checkpoint)
                check_tensors(checkpoint, made_for, config)
                draft_ids = load_draft_ids(checkpoint, made_for, config)
                anchors = made_for.anchors
        except BrokenPdmError as error:  # a text never depends on drafts
            checkpoint, broken = None, str(error)
    if settings.runs_pdm and checkpoint is None and broken is None:
        anchors = default_anchors(layers, pipeline.stages)
        draft_ids = untrained_draft_ids(config)
    spec = ActorSpec(
        folder=str(folder),
        target=config,
        bounds=bounds,
        anchors=anchors,
        slots=pipeline.slots,
        max_len=pipeline.max_len,
        dtype=settings.dtype,
        device=settings.device,
        threads=pipeline.threads,
        emulation=make_emulation(settings.emulated, config, draft_ids),
        weights=settings.weights,
        grammar_tokens=_grammar_tokens(folder, config),
        static_steps=settings.device == "cuda" and pipeline.cuda_graphs,
    )
    named = None if checkpoint is None else str(checkpoint)
    return Blueprint(spec, named, draft_ids, broken)


def _grammar_tokens(folder: Path, config: TargetConfig) -> GrammarTokens | None:
    with suppress(ConfigError):  # the ingress says why
        return GrammarTokens.of(folder, Tokenizer.load(folder), config.vocab_size)
    return None


def make_emulation(
    settings: EmulatedSettings | None, config: TargetConfig, draft_ids: Tensor | None
) -> Emulation | None:
    if settings is None:
        return None
    return Emulation(
        stage_s=settings.stage_ms / 1000,
        draft_s=settings.draft_ms / 1000,
        link_s=settings.link_ms / 1000,
        acceptance=settings.acceptance,
        hidden_size=settings.hidden_size or config.hidden_size,
        vocabulary=config.vocab_size,
        draft_vocabulary=0 if draft_ids is None else len(draft_ids),
    )


def find_checkpoint(
    settings: Settings, folder: Path, config: TargetConfig, bounds: tuple[int, ...]
) -> Path | None:
    """The PDM that the settings name, else a shipped one that fits. Raises ConfigError if the named
    one does not."""
    fingerprint = target_fingerprint(folder, config)
    if settings.drafter.checkpoint is not None:
        named = Path(settings.drafter.checkpoint).expanduser().resolve()
        check_fits(PdmConfig.read(named), fingerprint, config, bounds)
        return named
    for shipped in sorted(SHIPPED.glob("pdm-*")):
        with suppress(ConfigError):
            check_fits(PdmConfig.read(shipped), fingerprint, config, bounds)
            return shipped
    return None
