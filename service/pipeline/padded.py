"""Rows in a shape that does not depend on the plan, so that a CUDA graph can hold their forward."""

import torch
import torch.nn.functional as F
from torch import Tensor


class PaddedBatch:
    """The rows of one forward in groups of one size, each of one slot: the rows of a slot, then
    padding. Where they are is known to the device alone; their keys are read up to a bound.

    Padding stands at the scratch position, behind all others: nobody reads what is written there,
    and nobody looks at what is computed for it.
    """

    def __init__(self, slots: Tensor, positions: Tensor, width: int, context: int) -> None:
        """`slots`, `positions` [groups * width] int64: where each row is written. `context`: more
        than any of the positions, but that of padding."""
        self.positions = positions
        self._slots, self._width, self._context = slots, width, context
        self._groups = slots.view(-1, width)[:, 0]
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def attend(
        self,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """As `SlotCache.attend`, over a layer's keys and values [slots, kv_heads, max_len,
        head_dim]."""
        keys[self._slots, :, self.positions] = key
        values[self._slots, :, self.positions] = value
        groups, width, pairs = len(self._groups), self._width, keys.shape[1]
        size = query.shape[-1]
        # The heads that share keys, of all rows of a slot, are rows of one product.
        by_pair = query.view(groups, width, pairs, -1, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            by_pair.reshape(groups, pairs, -1, size),
            self._read(keys),
            self._read(values),
            attn_mask=self._mask(window, query.shape[1] // pairs),
            scale=scaling,
        )
        by_row = out.view(groups, pairs, width, -1, size).transpose(1, 2)
        return by_row.reshape(groups * width, -1)

    def _read(self, cache: Tensor) -> Tensor:
        """Of each group's slot [groups, kv_heads, context, head_dim]."""
        return cache[:, :, : self._context].index_select(0, self._groups)

    def _mask(self, window: int | None, heads: int) -> Tensor:
        """Which positions each row sees, for each of its heads [groups, 1, width * heads, context]
        bool."""
        if (window, heads) not in self._masks:
            row = self.positions.view(-1, 1, self._width, 1, 1)
            seen = torch.arange(self._context, device=row.device)
            allowed = seen <= row
            if window is not None:
                allowed &= seen > row - window
            by_head = allowed.expand(-1, -1, -1, heads, -1)
            self._masks[window, heads] = by_head.reshape(len(row), 1, -1, self._context)
        return self._masks[window, heads]


def finite(x: Tensor) -> Tensor:
    """With zeros for what has overflowed. A padded row masks what it must not see; that does not
    help against it, since nothing times NaN is NaN."""
    return x.nan_to_num(0.0, 0.0, 0.0)
