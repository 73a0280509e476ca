"""A PDM before training: the target's last layers, and aggregation FCs by linear regression.

Each FC_k is fitted so that its feature comes as near as a linear map can to the input of the first
copied layer. So the PDM begins where the target's own last layers would stand, had they to work on
what is known before the cycle.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from service.pdm.layout import Packed, earlier
from service.pipeline.layers import NORM, WeightReader, model_skeleton

_RIDGE = 1e-3  # of each input's own square: its scale does not matter
_SMALLEST = 1e-9


class Moments:
    """Sums over rows from which linear maps are fitted: of inputs [N, in] with themselves, and with
    what is wanted [N, out]."""

    def __init__(self, inputs: Tensor, wanted: Tensor) -> None:
        self.gram = inputs.T @ inputs
        self.cross = inputs.T @ wanted

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ wanted

    def ridge(self, inputs: int | None = None) -> Tensor:
        """The weight [out, in] of the linear map of the first inputs with the least squared error
        and a small penalty, which is relative to each input's own square: scales don't matter."""
        gram = self.gram[:inputs, :inputs].double()
        gram.diagonal().mul_(1 + _RIDGE).add_(_SMALLEST)
        factor = torch.linalg.cholesky(gram)
        weight: Tensor = torch.cholesky_solve(self.cross[:inputs].double(), factor)
        return weight.T.contiguous().float()


def initial_tensors(
    folder: Path,
    config: PretrainedConfig,
    sample: Packed,
    anchors: Sequence[int],
    widths: Sequence[Sequence[int]],
    draft_ids: Tensor,
    layers: int,
    previous: int,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, float32. `sample` has texts with their states;
    `widths` are, for each pipeline width n, the types of the depths 0..n."""
    read, cpu = WeightReader(folder), torch.device("cpu")
    first = config.num_hidden_layers - layers
    tensors: dict[str, Tensor] = {}
    for i in range(layers):
        for name, _ in model_skeleton(config).model.layers[first + i].named_parameters():
            tensors[f"layers.{i}.{name}"] = read(
                f"model.layers.{first + i}.{name}", torch.float32, cpu
            )
    tensors["norm.weight"] = read(NORM, torch.float32, cpu)
    tensors["head.weight"] = read(read.head_name(config), torch.float32, cpu)[draft_ids]
    tensors["draft_ids"] = draft_ids.int()
    tensors |= _fitted(sample, anchors, widths, first, previous)
    return tensors


def _fitted(
    sample: Packed,
    anchors: Sequence[int],
    widths: Sequence[Sequence[int]],
    first: int,
    previous: int,
) -> dict[str, Tensor]:
    """FC_k of each type, and the maps of the previous rows, which the newest rows of all widths
    share."""
    used = sample.texts >= 0
    states = sample.states.float()
    nearest = max(i for i, a in enumerate(anchors) if a <= max(first, anchors[1]))
    goal = states[:, :, nearest][used]

    def known(kind: int) -> Tensor:
        return states[:, :, : kind + 1].flatten(2)

    width, newest = goal.shape[1], widths[0][0]
    moments = Moments(known(len(anchors) - 1)[used], goal)  # the types' inputs begin alike
    weights = {k: moments.ridge((k + 1) * width) for k in sorted({k for w in widths for k in w})}
    moments = Moments(goal.new_zeros(0, (newest + 1 + previous) * width), goal[:0])
    for types in widths:
        n = len(types) - 1
        parts = [known(newest)]
        for j in range(1, previous + 1):
            k = types[min(j, n)]
            feature = known(k) @ weights[k].T if j <= n else torch.zeros_like(states[:, :, 0])
            parts.append(earlier(feature, j, sample))
        moments.add(torch.cat(parts, dim=-1)[used], goal)
    fitted = torch.split(moments.ridge(), [(newest + 1) * width, *[width] * previous], dim=1)
    weights[newest] = fitted[0]
    return {f"aggregation.by_type.{k}.weight": w.contiguous() for k, w in weights.items()} | {
        f"previous.by_distance.{j}.weight": w.contiguous() for j, w in enumerate(fitted[1:])
    }
