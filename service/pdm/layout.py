"""The PDM over whole texts at once, as training needs it: the outputs of the newest row at every
position, each as if the pipeline stood there.

The paper masks all rows of all depths against each other. But a query of depth d at position t
sees the row of depth d + j at distance j while that is in flight, and beyond only rows that have
left the pipeline. So its scores are one product with the rows of depth n, kept causal at a
distance, and one number for each row in flight: no square of all depths is ever made. With one
layer only the newest rows ask, with more layers every depth does, except in the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.pdm.module import PDM
from service.pipeline.skeleton import Attention, Layer, RMSNorm, Turn, rotated

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """Texts side by side in rows of one length: for each token its hidden states [B, S, A + 1, H]
    at anchors 0.., its position in its text [B, S], the number of its text [B, S] (-1: no token),
    and whether the newest row is wanted there [B, S]."""

    states: Tensor
    positions: Tensor
    texts: Tensor
    wanted: Tensor

    @property
    def there(self) -> Tensor:
        """Where there is a token [B, S]."""
        return self.texts >= 0

    def parts(self, rows: int) -> Iterator["Packed"]:
        """A few rows at a time: the states of many fill gigabytes in float32."""
        tensors = (self.states, self.positions, self.texts, self.wanted)
        for part in zip(*(torch.split(t, rows) for t in tensors), strict=True):
            yield Packed(*part)

    def to(self, device: torch.device) -> "Packed":
        return Packed(
            self.states.to(device),
            self.positions.to(device),
            self.texts.to(device),
            self.wanted.to(device),
        )


def newest_hidden(pdm: PDM, packed: Packed, types: Sequence[int], fill: int) -> Tensor:
    """The last layer's output [wanted, H] of newest rows, in a pipeline whose tokens have the types
    `types[d]` after d = 0..n stages, with `fill` (1..n) tokens in flight, the newest included."""
    rows = _features(pdm, packed, types, fill)
    turn = pdm.rotation(packed.positions, rows[0].dtype)
    last = len(pdm.decoder) - 1
    for i, layer in enumerate(pdm.decoder):
        asking = rows if i < last else {0: rows[0]}
        attended = _attention(layer, rows, list(asking), turn, packed, len(types) - 1)
        if i == last:
            newest, attended = asking[0][packed.wanted], {0: attended[0][packed.wanted]}
            return _rest_of_layer(layer, newest, attended[0])
        rows = {d: _rest_of_layer(layer, hidden, attended[d]) for d, hidden in rows.items()}
    raise AssertionError("a PDM has a layer")


def _features(pdm: PDM, packed: Packed, types: Sequence[int], fill: int) -> dict[int, Tensor]:
    """The rows [B, S, H] of each depth that occurs: 0..fill-1, in flight, and n, which have left.
    Depths of one type share a tensor."""
    n = len(types) - 1
    depths = [*range(fill), n]
    by_type = {
        k: pdm.aggregation(packed.states[:, :, : k + 1].flatten(2), k)
        for k in sorted({types[d] for d in depths})
    }
    rows = {d: by_type[types[d]] for d in depths}
    before = (
        earlier(rows[j if j < fill else n], j, packed) for j in range(1, min(pdm.distances, n) + 1)
    )
    rows[0] = pdm.previous(rows[0], before)
    return rows


def earlier(x: Tensor, distance: int, packed: Packed) -> Tensor:
    """x [B, S, ..] of the token `distance` before, zero where its text has none."""
    there = packed.positions >= distance
    return x.roll(distance, dims=1) * there.view(*there.shape, *(1,) * (x.dim() - 2))


def _attention(
    layer: Layer,
    rows: dict[int, Tensor],
    asking: Sequence[int],
    turn: Turn,
    packed: Packed,
    n: int,
) -> dict[int, Tensor]:
    """Attention outputs [B, S, heads * head_dim] of the asking depths, before the projection."""
    attention = layer.self_attn
    fill = max((d for d in rows if d < n), default=0) + 1
    normed: dict[int, Tensor] = {}
    by_tensor: dict[int, tuple[Tensor, Pair]] = {}
    for d, hidden in rows.items():  # depths that share a tensor share keys and values
        if id(hidden) not in by_tensor:
            states = layer.input_layernorm(hidden)
            by_tensor[id(hidden)] = states, _keys_values(attention, states, turn)
        normed[d] = by_tensor[id(hidden)][0]
    pairs = {d: by_tensor[id(hidden)][1] for d, hidden in rows.items()}
    outputs = {}
    for d in asking:
        query = _heads(attention.q_proj(normed[d]), attention.head_dim, attention.q_norm)
        query = _rotate(attention, query, turn) * attention.scaling
        in_flight = [
            (earlier(pairs[d + j][0], j, packed), earlier(pairs[d + j][1], j, packed))
            for j in range(fill - d if d < n else 0)
        ]
        outputs[d] = _attend(query, pairs[n], in_flight, packed)
    return outputs


def _attend(query: Tensor, left: Pair, in_flight: list[Pair], packed: Packed) -> Tensor:
    """Queries [B, S, heads, head_dim] over the rows that have left, from the distance
    len(in_flight) on, and over the rows in flight at the distances below; keys and values are
    [B, S, kv_heads, head_dim]. -> [B, S, heads * head_dim]"""
    batch, size, heads, head_dim = query.shape
    kv_heads, near = left[0].shape[2], len(in_flight)
    grouped = query.view(batch, size, kv_heads, heads // kv_heads, head_dim)
    asked = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, kv, group * S, head_dim]
    scores = asked @ left[0].permute(0, 2, 3, 1)  # [B, kv, group * S, S]
    scores = scores.view(batch, kv_heads, -1, size, size)
    at = torch.arange(size, device=query.device)
    far = (packed.texts[:, :, None] == packed.texts[:, None]) & (at[:, None] - at[None] >= near)
    scores = scores.masked_fill(~far[:, None, None], -torch.inf)
    if near:
        keys = torch.stack([k for k, _ in in_flight], dim=-1)  # [B, S, kv, head_dim, near]
        close = torch.einsum("bskgd,bskdj->bkgsj", grouped, keys)
        there = packed.positions[:, :, None] >= at[:near]  # [B, S, near]
        close = close.masked_fill(~there[:, None, None], -torch.inf)
        scores = torch.cat([scores, close], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    out = weights[..., :size].flatten(2, 3) @ left[1].transpose(
        1, 2
    )  # [B, kv, group * S, head_dim]
    out = out.view(batch, kv_heads, -1, size, head_dim).permute(0, 3, 1, 2, 4)
    if near:
        values = torch.stack([v for _, v in in_flight], dim=-2)  # [B, S, kv, near, head_dim]
        out = out + torch.einsum("bkgsj,bskjd->bskgd", weights[..., size:], values)
    return out.reshape(batch, size, heads * head_dim)


def _keys_values(attention: Attention, states: Tensor, turn: Turn) -> Pair:
    """Keys, rotated, and values [B, S, kv_heads, head_dim]."""
    key = _heads(attention.k_proj(states), attention.head_dim, attention.k_norm)
    return _rotate(attention, key, turn), _heads(attention.v_proj(states), attention.head_dim)


def _heads(projected: Tensor, head_dim: int, norm: RMSNorm | None = None) -> Tensor:
    """[B, S, heads * head_dim] -> [B, S, heads, head_dim], normalised where the target does so."""
    split = projected.view(*projected.shape[:-1], -1, head_dim)
    return split if norm is None else norm(split)


def _rotate(attention: Attention, x: Tensor, turn: Turn) -> Tensor:
    """Puts the position into queries or keys [B, S, heads, head_dim], except in a NoPE layer."""
    return rotated(x, turn) if attention.rotates else x


def _rest_of_layer(layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
    """What a decoder layer does behind its attention."""
    hidden = hidden + layer.self_attn.o_proj(attended)
    out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return out
