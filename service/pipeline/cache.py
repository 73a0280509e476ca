"""Keys and values in slots, and the attention over them.

A cache holds, for each layer, keys and values [slots, kv_heads, max_len, head_dim]. A row is
written at its (slot, position) and attends to the positions up to its own. So taking a rejected row
back costs nothing: its position is written again before a later row reads it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from service.messages import Copy, Rows, spans
from service.pipeline.padded import PaddedBatch, finite
from service.target_config import TargetConfig

_NO_BIAS = torch.zeros(1)


class Batch:
    """The rows of one forward, laid end to end, and their place in the slots."""

    def __init__(self, rows: Sequence[Rows], device: torch.device) -> None:
        self.rows = tuple(rows)
        positions = [position for r in rows for position in range(r.start, r.end)]
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)  # [R]
        self._masks: dict[tuple[Rows, int | None], Tensor] = {}

    def mask(self, rows: Rows, window: int | None) -> Tensor:
        """Which positions [0, end) each of the rows sees: [count, end] bool."""
        key = (rows, window)
        if key not in self._masks:
            device = self.positions.device
            query = torch.arange(rows.start, rows.end, device=device)[:, None]
            seen = torch.arange(rows.end, device=device)[None]
            allowed = seen <= query
            if window is not None:
                allowed &= seen > query - window
            self._masks[key] = allowed
        return self._masks[key]


class SlotCache:
    """Keys and values of a run of layers."""

    def __init__(
        self,
        config: TargetConfig,
        layers: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch: bool = False,
    ) -> None:
        """`scratch`: each slot has one position more, for the padding of `PaddedBatch`."""
        self.scratch, self.max_len = scratch, max_len
        shape = (layers, slots, config.num_key_value_heads, max_len + scratch, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def layers(self) -> int:
        return len(self._keys)

    @property
    def dtype(self) -> torch.dtype:
        return self._keys.dtype

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def copy(self, order: Copy) -> None:
        """What a slot holds of its first positions, to another slot."""
        for held in (self._keys, self._values):
            held[:, order.target, :, : order.length] = held[:, order.source, :, : order.length]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Batch | PaddedBatch,
        *,
        scaling: float,
        window: int | None = None,
    ) -> Tensor:
        """Writes the rows' keys and values [R, kv_heads, head_dim] at their places; then their
        queries [R, heads, head_dim] attend to their slots -> [R, heads * head_dim]."""
        if self.scratch:
            key, value = finite(key), finite(value)
        if isinstance(batch, PaddedBatch):
            held = self._keys[layer], self._values[layer]
            return batch.attend(*held, query, key, value, scaling=scaling, window=window)
        outputs = []
        for r, at in spans(batch.rows):
            keys, values = self._keys[layer, r.slot], self._values[layer, r.slot]
            keys[:, r.start : r.end] = key[at].transpose(0, 1)
            values[:, r.start : r.end] = value[at].transpose(0, 1)
            if r.count == 1:
                first = 0 if window is None else max(0, r.end - window)
                seen = slice(first, r.end)
                outputs.append(_one_row(query[at], keys[:, seen], values[:, seen], scaling))
            else:
                mask = batch.mask(r, window)
                outputs.append(
                    _chunk(query[at], keys[:, : r.end], values[:, : r.end], mask, scaling)
                )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _one_row(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """The heads [1, heads, head_dim] that share keys [kv_heads, S, head_dim] go as rows of one
    product: all see all that is there, so no mask is needed, and nothing is read twice."""
    grouped = query.view(len(keys), -1, query.shape[-1])
    if query.dtype == torch.float32 and not query.is_cuda:  # plain steps are faster there
        scores = torch.baddbmm(_NO_BIAS, grouped, keys.mT, beta=0, alpha=scaling)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(1, -1)
    out = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scaling)
    return out.reshape(1, -1)


def _chunk(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Rows [count, heads, head_dim] of one slot -> [count, heads * head_dim]."""
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(len(query), -1)
