"""The network of the PDM: aggregation of hidden states, decoder layers, norm and a small head."""

from collections.abc import Sequence

from torch import Tensor, nn

from service.pipeline.cache import Batch
from service.pipeline.layers import DecoderLayers


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


class PDM(nn.Module):
    """Aggregation + decoder layers of the target's kind + its final norm + a head over the draft
    vocabulary (arXiv 2605.30852). `draft_ids` [D] int64 are that vocabulary's token ids."""

    def __init__(
        self,
        aggregation: Aggregation,
        layers: DecoderLayers,
        norm: nn.Module,
        head: nn.Linear,
        draft_ids: Tensor,
    ) -> None:
        super().__init__()
        self.aggregation = aggregation
        self.layers = layers
        self.norm = norm
        self.head = head
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.draft_ids: Tensor

    def forward(self, features: Tensor, batch: Batch, newest: list[int]) -> Tensor:
        """Features [R, H] -> logits [len(newest), D] of the rows with these indices. All rows write
        their keys and values."""
        hidden, _ = self.layers(features, batch)
        logits: Tensor = self.head(self.norm(hidden[newest])).float()
        return logits
