"""A PDM before training: the target's last layers, and aggregation FCs by linear regression.

Each FC_k is fitted so that its feature comes as near as a linear map can to the input of the first
copied layer. So the PDM begins where the target's own last layers would stand, had they to work on
what is known before the cycle.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from service.pdm.checkpoint import tensors_of_target
from service.pdm.layout import Packed, earlier
from service.target_config import TargetConfig

_RIDGE = 1e-3  # of each input's own square: its scale does not matter
_SMALLEST = 1e-9
_ROWS_AT_ONCE = 8
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")  # what a layer adds comes out of these


class Moments:
    """Sums over rows from which linear maps are fitted: of inputs [N, in] with themselves, and with
    what is wanted [N, out]."""

    def __init__(self, inputs: int, wanted: int) -> None:
        self.gram = torch.zeros(inputs, inputs)
        self.cross = torch.zeros(inputs, wanted)

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(inputs.T, wanted)

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
    config: TargetConfig,
    sample: Packed,
    anchors: Sequence[int],
    widths: Sequence[Sequence[int]],
    draft_ids: Tensor,
    layers: int,
    previous: int,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, float32. `sample` has texts with their states;
    `widths` are, for each pipeline width n, the types of the depths 0..n."""
    first = config.num_hidden_layers - layers
    fitted = _fitted(sample, anchors, widths, first, previous)
    return tensors_of_target(folder, config, layers, draft_ids) | fitted


def deeper(
    folder: Path, config: TargetConfig, tensors: dict[str, Tensor], layers: int, more: int
) -> dict[str, Tensor]:
    """The tensors of a PDM of `layers` layers with `more` of the target's last ones behind them. As
    yet these add nothing to what passes through them, so the drafts are the same."""
    added = tensors_of_target(folder, config, more, tensors["draft_ids"])
    grown = dict(tensors)
    for i in range(more):
        old, new = f"layers.{i}.", f"layers.{layers + i}."
        for name in [name for name in added if name.startswith(old)]:
            silent = name.startswith(tuple(old + output for output in _OUTPUTS))
            grown[new + name.removeprefix(old)] = added[name] * (0.0 if silent else 1.0)
    return grown


def _fitted(
    sample: Packed,
    anchors: Sequence[int],
    widths: Sequence[Sequence[int]],
    first: int,
    previous: int,
) -> dict[str, Tensor]:
    """FC_k of each type, and the maps of the previous rows, which the newest rows of all widths
    share."""
    width, newest = sample.states.shape[-1], widths[0][0]
    goal = max(i for i, a in enumerate(anchors) if a <= max(first, anchors[1]))
    kinds = sorted({k for types in widths for k in types})
    of_types = Moments((kinds[-1] + 1) * width, width)  # their inputs begin alike
    for part in sample.parts(_ROWS_AT_ONCE):
        of_types.add(_known(part, kinds[-1])[part.there], part.states[part.there][:, goal].float())
    weights = {k: of_types.ridge((k + 1) * width) for k in kinds}
    of_newest = Moments((newest + 1 + previous) * width, width)
    for part in sample.parts(_ROWS_AT_ONCE):
        wanted = part.states[part.there][:, goal].float()
        features = {k: _known(part, k) @ weights[k].T for k in kinds}
        for types in widths:
            reach = min(previous, len(types) - 1)
            before = [earlier(features[types[j]], j, part) for j in range(1, reach + 1)]
            none = [torch.zeros_like(features[newest])] * (previous - reach)
            inputs = torch.cat([_known(part, newest), *before, *none], dim=-1)
            of_newest.add(inputs[part.there], wanted)
    fitted = torch.split(of_newest.ridge(), [(newest + 1) * width, *[width] * previous], dim=1)
    weights[newest] = fitted[0]
    return {f"aggregation.by_type.{k}.weight": w.contiguous() for k, w in weights.items()} | {
        f"previous.by_distance.{j}.weight": w.contiguous() for j, w in enumerate(fitted[1:])
    }


def _known(packed: Packed, kind: int) -> Tensor:
    """The hidden states [B, S, (kind + 1) * H] that a type has."""
    return packed.states[:, :, : kind + 1].flatten(2).float()
