"""What every actor of a pipeline is told when it is made."""

from dataclasses import dataclass

import torch

from service.target_config import TargetConfig
from service.text.grammar import GrammarTokens


@dataclass(frozen=True, slots=True)
class Emulation:
    """What actors do instead of computing, see `service.pipeline.emulated`."""

    stage_s: float
    draft_s: float
    link_s: float
    acceptance: float
    hidden_size: int
    vocabulary: int
    draft_vocabulary: int


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What stages and drafter have in common. `bounds` are a(0)..a(n), see `stage_bounds`."""

    folder: str
    target: TargetConfig
    bounds: tuple[int, ...]
    anchors: tuple[int, ...]  # empty: nothing is tapped
    slots: int
    max_len: int
    dtype: str
    device: str
    threads: int
    emulation: Emulation | None = None
    weights: str | None = None  # "int8", else as `dtype`
    grammar_tokens: GrammarTokens | None = None  # None: no answer can be constrained
    static_steps: bool = False  # single tokens run in fixed shapes, `service.pipeline.decode_step`

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def device_of(self, actor: int) -> torch.device:
        """Where the weights of a stage (or, at index n, of the PDM) are. Those that see several
        GPUs share them in turns; a Ray actor sees its own alone."""
        if self.device != "cuda":
            return torch.device(self.device)
        return torch.device("cuda", actor % max(1, torch.cuda.device_count()))

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1
