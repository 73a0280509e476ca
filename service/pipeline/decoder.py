"""A decoder layer for inference: the target's weights in fewer and larger steps."""

import torch
from torch import Tensor, nn

from service.pipeline.cache import Batch, SlotCache
from service.pipeline.linear import fused
from service.pipeline.padded import PaddedBatch
from service.pipeline.skeleton import Layer, Turn, normed, rotated


class DecoderLayer(nn.Module):
    """Queries, keys and values are one product, the two inner ones of the MLP another."""

    def __init__(self, layer: Layer, weights: str | None = None) -> None:
        """`layer`: filled with its weights, which are given up."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._pairs = attention.k_proj.out_features // self._head_dim
        self._scaling = attention.scaling
        self._window = attention.window
        self._rotates = attention.rotates
        self.before_attention, self.before_mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.qkv = fused([attention.q_proj, attention.k_proj, attention.v_proj], weights)
        self.out = fused([attention.o_proj], weights)
        self.gate_up = fused([mlp.gate_proj, mlp.up_proj], weights)
        self.down = fused([mlp.down_proj], weights)
        self._activation = mlp.activation

    def forward(
        self,
        hidden: Tensor,
        number: int,
        cache: SlotCache,
        batch: Batch | PaddedBatch,
        turn: Turn,
    ) -> Tensor:
        """Rows [R, H] -> [R, H], with keys and values in the cache's layer `number`."""
        qkv = self.qkv(normed(hidden, self.before_attention))
        query, key, value = self._split(qkv, turn)
        attended = cache.attend(
            number, query, key, value, batch, scaling=self._scaling, window=self._window
        )
        hidden = hidden + self.out(attended)
        gate, up = self.gate_up(normed(hidden, self.before_mlp)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down(self._activation(gate) * up)
        return out

    def _split(self, qkv: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, heads, head_dim], keys and values [R, kv_heads, head_dim]; those two know
        their positions."""
        by_head = qkv.view(len(qkv), -1, self._head_dim)
        turned, value = by_head[:, : self._heads + self._pairs], by_head[:, -self._pairs :]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = turned[:, : self._heads], turned[:, self._heads :]
            turned = torch.cat([normed(query, self.q_norm), normed(key, self.k_norm)], dim=1)
        if self._rotates:
            turned = rotated(turned, turn)
        return turned[:, : self._heads], turned[:, self._heads :], value
