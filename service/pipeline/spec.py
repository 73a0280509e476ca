"""What every actor of a pipeline is told when it is made."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What stages and drafter have in common. `bounds` are a(0)..a(n), see `stage_bounds`."""

    folder: str
    bounds: tuple[int, ...]
    anchors: tuple[int, ...]  # empty: nothing is tapped
    slots: int
    max_len: int
    dtype: str
    device: str
    threads: int
    weights: str | None = None  # "int8", else as `dtype`

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1
