"""A decoder layer for inference: the weights of transformers' own, in fewer and larger steps.

What a dense target's layer computes is that of `LlamaDecoderLayer`, with what the supported
architectures have beside it: biases, norms of queries and keys, windows, layers without positions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.pipeline.cache import Batch, SlotCache
from service.pipeline.linear import fused
from service.pipeline.padded import PaddedBatch

Rotation = tuple[Tensor, Tensor]


class DecoderLayer(nn.Module):
    """Queries, keys and values are one product, the two inner ones of the MLP another."""

    def __init__(self, layer: Any, weights: str | None = None) -> None:
        """`layer`: transformers' own, with its weights, which are given up."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._pairs = attention.k_proj.out_features // self._head_dim
        self._scaling: float = attention.scaling
        self._window = _window(attention)
        self._rotates = bool(getattr(attention, "use_rope", True))
        self.before_attention, self.before_mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.q_norm = getattr(attention, "q_norm", None)
        self.k_norm = getattr(attention, "k_norm", None)
        self.qkv = fused([attention.q_proj, attention.k_proj, attention.v_proj], weights)
        self.out = fused([attention.o_proj], weights)
        self.gate_up = fused([mlp.gate_proj, mlp.up_proj], weights)
        self.down = fused([mlp.down_proj], weights)
        self._activation = mlp.act_fn

    def forward(
        self,
        hidden: Tensor,
        number: int,
        cache: SlotCache,
        batch: Batch | PaddedBatch,
        rotation: Rotation,
    ) -> Tensor:
        """Rows [R, H] -> [R, H], with keys and values in the cache's layer `number`."""
        qkv = self.qkv(_normed(hidden, self.before_attention))
        query, key, value = self._split(qkv, rotation)
        attended = cache.attend(
            number, query, key, value, batch, scaling=self._scaling, window=self._window
        )
        hidden = hidden + self.out(attended)
        gate, up = self.gate_up(_normed(hidden, self.before_mlp)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down(self._activation(gate) * up)
        return out

    def _split(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [R, heads, head_dim], keys and values [R, kv_heads, head_dim]; those two know
        their positions."""
        by_head = qkv.view(len(qkv), -1, self._head_dim)
        turned, value = by_head[:, : self._heads + self._pairs], by_head[:, -self._pairs :]
        if self.q_norm is not None:
            query, key = turned[:, : self._heads], turned[:, self._heads :]
            turned = torch.cat([_normed(query, self.q_norm), _normed(key, self.k_norm)], dim=1)
        if self._rotates:
            turned = _rotated(turned, rotation)
        return turned[:, : self._heads], turned[:, self._heads :], value


def _normed(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm. On GPUs it is one kernel; on CPUs fewer steps than torch's own takes, in float32 as
    transformers'."""
    if x.is_cuda:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    wide = x.float()
    scale = torch.rsqrt_(wide.square().mean(-1, keepdim=True).add_(norm.variance_epsilon))
    normed: Tensor = (wide * scale).to(x.dtype) * norm.weight
    return normed


def rotation_tables(rotary: nn.Module, max_len: int, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [max_len, 1, head_dim] of all positions, as `_rotated` wants them."""
    buffer = next(rotary.buffers())
    positions = torch.arange(max_len, device=buffer.device)[None]
    cos, sin = rotary(buffer.to(dtype), positions)
    sin = sin[0].clone()
    sin[:, : sin.shape[-1] // 2].neg_()  # so that halves are exchanged without a sign
    return cos[0][:, None], sin[:, None]


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Puts positions into queries or keys [R, heads, head_dim]."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)


def _window(attention: Any) -> int | None:
    """How many positions a row sees at most; Mistral's own layer reads it from the config."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window
