"""The target's modules, with the names that their weights have in files: in transformers' models.

They are containers, on the meta device until they are filled. What runs in a pipeline is made of
them (`service.pipeline.decoder`); the PDM is trained with them as they are.
"""

import torch
from torch import Tensor, nn

from service.target_config import ACTIVATIONS, TargetConfig

Turn = tuple[Tensor, Tensor]  # cosines and sines of positions


class RMSNorm(nn.Module):
    """Over the last dimension (arXiv 1910.07467), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.floor = torch.tensor(eps, device="cpu")  # as `normed` wants it

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self)


def normed(x: Tensor, norm: RMSNorm) -> Tensor:
    """RMSNorm. On GPUs it is one kernel; on CPUs fewer and cheaper steps than torch's own takes: a
    Python number as operand, or a mean, costs as much as two others."""
    if x.is_cuda:
        return nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    wide = x.float()
    squares = wide.square().sum(-1, keepdim=True)
    scale = torch.rsqrt_(torch.add(norm.floor, squares, alpha=1 / x.shape[-1]))
    return (wide * scale).to(x.dtype) * norm.weight


class Attention(nn.Module):
    """The products around attention in one layer."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * self.head_dim
        pairs = config.num_key_value_heads * self.head_dim
        self.scaling = self.head_dim**-0.5
        self.window, self.rotates = config.windows[layer], config.rotates[layer]
        self.q_proj = nn.Linear(hidden, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, pairs, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, pairs, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=config.out_bias)
        self.q_norm = self._head_norm(config)
        self.k_norm = self._head_norm(config)

    def _head_norm(self, config: TargetConfig) -> RMSNorm | None:
        return RMSNorm(self.head_dim, config.rms_norm_eps) if config.head_norms else None


class MLP(nn.Module):
    """With a gate (arXiv 2002.05202)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: TargetConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Rotation:
    """Puts positions into queries and keys (RoFormer, arXiv 2104.09864)."""

    def __init__(self, config: TargetConfig, device: torch.device) -> None:
        self._inv_freq = torch.tensor(config.inv_freq, device=device)
        self._scaling = config.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Positions [..] -> cosines and sines [.., 1, head_dim], as `rotated` wants them."""
        angles = positions[..., None, None].float() * self._inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        # The sign is in the sines, so that halves are exchanged without one
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotated(x: Tensor, turn: Turn) -> Tensor:
    """Queries or keys [.., heads, head_dim], turned."""
    cos, sin = turn
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def target_layer(config: TargetConfig, layer: int) -> Layer:
    """One decoder layer of the target, without memory."""
    with torch.device("meta"):
        return Layer(config, layer)


def target_norm(config: TargetConfig) -> RMSNorm:
    """Its final norm, without memory."""
    with torch.device("meta"):
        return RMSNorm(config.hidden_size, config.rms_norm_eps)
