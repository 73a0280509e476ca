"""Keys and values in slots, and the attention over them. Registered with transformers, so that its
own decoder layers run on them unchanged.

A cache holds, for each layer, keys and values [slots, kv_heads, max_len, head_dim]. A row is
written at its (slot, position) and attends to the positions up to its own. So taking a rejected row
back costs nothing: its position is written again before a later row reads it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from service.messages import Copy, Rows, spans

ATTENTION = "spd_slots"


class Batch:
    """The rows of one forward, flattened into one sequence [1, R], and their place in the slots."""

    def __init__(self, rows: Sequence[Rows], device: torch.device) -> None:
        self.rows = tuple(rows)
        self.positions = torch.cat(  # [1, R]
            [torch.arange(r.start, r.end) for r in rows]
        )[None].to(device)
        self._masks: dict[tuple[Rows, int | None], Tensor] = {}

    def mask(self, rows: Rows, window: int | None) -> Tensor | None:
        """Which positions [0, start + count) each of the rows sees: [count, start + count] bool."""
        end = rows.end
        if rows.count == 1 and (window is None or end <= window):
            return None  # one row sees all that is there
        key = (rows, window)
        if key not in self._masks:
            device = self.positions.device
            query = torch.arange(rows.start, end, device=device)[:, None]
            seen = torch.arange(end, device=device)[None]
            allowed = seen <= query
            if window is not None:
                allowed &= seen > query - window
            self._masks[key] = allowed
        return self._masks[key]


class SlotCache:
    """Keys and values of a run of layers. `update` is the method that transformers' layers call."""

    def __init__(
        self,
        config: PretrainedConfig,
        layers: int,
        first_layer: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (layers, slots, config.num_key_value_heads, max_len, head_dim)
        self._first_layer = first_layer
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def layers(self) -> int:
        return len(self._keys)

    def copy(self, order: Copy) -> None:
        """What a slot holds of its first positions, to another slot."""
        for held in (self._keys, self._values):
            held[:, order.target, :, : order.length] = held[:, order.source, :, : order.length]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Writes rows [1, kv_heads, R, head_dim] at their places and returns the layer's whole
        keys and values [slots, kv_heads, max_len, head_dim], for `slot_attention`."""
        layer = layer_idx - self._first_layer
        keys, values = self._keys[layer], self._values[layer]
        for r, at in spans(kwargs["batch"].rows):
            keys[r.slot, :, r.start : r.end] = key[0, :, at]
            values[r.slot, :, r.start : r.end] = value[0, :, at]
        return keys, values


def slot_attention(
    _module: nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    _attention_mask: Tensor | None,
    *,
    batch: Batch,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of rows [1, heads, R, head_dim] over their slots -> [1, R, heads, head_dim]."""
    outputs = [
        F.scaled_dot_product_attention(
            query[:, :, at],
            keys[r.slot : r.slot + 1, :, : r.end],
            values[r.slot : r.slot + 1, :, : r.end],
            attn_mask=batch.mask(r, sliding_window),
            scale=scaling,
            enable_gqa=True,
        )
        for r, at in spans(batch.rows)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, slot_attention)
