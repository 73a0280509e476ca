"""The network of the PDM: aggregation of hidden states, decoder layers, norm and a small head."""

from collections.abc import Iterable, Sequence
from typing import cast

from torch import Tensor, nn

from service.pipeline.cache import Batch, SlotCache
from service.pipeline.decoder import DecoderLayer
from service.pipeline.layers import DecoderLayers
from service.pipeline.linear import replace_linears
from service.pipeline.padded import PaddedBatch
from service.pipeline.skeleton import Layer, Rotation


class Aggregation(nn.Module):
    """FC_k for each type k: the concatenated hidden states at anchors 0..k -> one feature."""

    def __init__(self, hidden_size: int, types: Sequence[int]) -> None:
        super().__init__()
        self.by_type = nn.ModuleDict(
            {
                str(k): nn.Linear((k + 1) * hidden_size, hidden_size, bias=False)
                for k in sorted(set(types))
            }
        )

    def forward(self, states: Tensor, kind: int) -> Tensor:
        """States [R, (kind + 1) * H] of rows of one type -> features [R, H]."""
        feature: Tensor = self.by_type[str(kind)](states)
        return feature


class PreviousRows(nn.Module):
    """An extra input of the newest row, beyond the paper: for each distance j = 1..n a linear map
    of the feature of the row j positions before it. So even in a PDM of one layer the newest row
    knows the end of the text before its attention."""

    def __init__(self, hidden_size: int, distances: int) -> None:
        super().__init__()
        self.by_distance = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(distances)
        )

    def forward(self, newest: Tensor, before: Iterable[Tensor]) -> Tensor:
        """Features of newest rows [.., H] and of those before them, nearest first, each [.., H] ->
        features [.., H]."""
        for linear, feature in zip(self.by_distance, before, strict=False):
            newest = newest + linear(feature)
        return newest


class PDM(nn.Module):
    """Aggregation + decoder layers of the target's kind + its final norm + a head over the draft
    vocabulary (arXiv 2605.30852). `draft_ids` [D] int64 are that vocabulary's token ids. Its
    parameters are named as in a checkpoint."""

    def __init__(
        self,
        aggregation: Aggregation,
        previous: PreviousRows,
        layers: nn.ModuleList,
        norm: nn.Module,
        head: nn.Linear,
        rotation: Rotation,
        draft_ids: Tensor,
    ) -> None:
        super().__init__()
        self.aggregation = aggregation
        self.previous = previous
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rotation = rotation
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.draft_ids: Tensor

    @property
    def decoder(self) -> Sequence[Layer]:
        """Its decoder layers, of the target's kind."""
        return cast(Sequence[Layer], self.layers)

    @property
    def distances(self) -> int:
        """How many previous rows the newest one sees directly; 0 in the paper's form."""
        return len(self.previous.by_distance)

    def logits(self, hidden: Tensor) -> Tensor:
        """The last layer's output [N, H] -> logits [N, D]."""
        logits: Tensor = self.head(self.norm(hidden)).float()
        return logits


class CachedPDM:
    """A PDM with keys and values in slots, as the drafter runs it."""

    def __init__(self, pdm: PDM, cache: SlotCache, weights: str | None = None) -> None:
        """Takes the PDM over: what it multiplies with is laid out for inference. The products that
        read the target's hidden states are not rounded: a few of these are far larger than the
        others, and the error there costs eight points of acceptance."""
        self.pdm = pdm
        layers = [DecoderLayer(layer, weights) for layer in pdm.decoder]
        self._layers = DecoderLayers(layers, pdm.rotation, cache)
        pdm.layers = nn.ModuleList()
        replace_linears(pdm.aggregation, None)
        replace_linears(pdm.previous, None)
        replace_linears(pdm, weights)  # the head

    def __call__(self, features: Tensor, batch: Batch, newest: list[int]) -> Tensor:
        """Features [R, H] -> logits [len(newest), D] of the rows with these indices. All rows write
        their keys and values."""
        hidden, _ = self._layers(features, batch)
        if not newest:  # rows of a prompt: their keys and values alone are wanted
            return features.new_empty(0, 0)
        return self.pdm.logits(hidden[newest])

    def decoded(self, batch: PaddedBatch, features: Tensor) -> tuple[Tensor]:
        """The same as a step of fixed shapes: the logits [R, D] of all rows."""
        hidden, _ = self._layers(features, batch)
        return (self.pdm.logits(hidden),)
