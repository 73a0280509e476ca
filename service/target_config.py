"""What a target computes: the numbers of its config.json that its layers are built from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from service.config import ConfigError

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Plain numbers, so that actors can be told: transformers, which knows how a config.json is
    to be read, takes seconds to import, and they start without it.

    The names are transformers' own where it has the same. `windows` and `rotates` are by layer:
    how many positions a row sees at most, and whether queries and keys know theirs."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    inv_freq: tuple[float, ...]  # of the rotation, [head_dim / 2]
    attention_scaling: float = 1.0  # of its cosines and sines
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False  # of queries and keys


def target_config(config: Any) -> TargetConfig:
    """From a configuration as transformers has read it, of a supported architecture. Raises
    ConfigError for what the layers of this server can't do."""
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(
            f"model: the activation {config.hidden_act!r} (hidden_act in config.json) is not "
            f"supported. Supported are: {', '.join(ACTIVATIONS)}"
        )
    # Each architecture has its own options; what else a config.json may hold means nothing.
    kind: str = config.model_type
    layers = config.num_hidden_layers
    inv_freq, attention_scaling = _rotation(config)
    attention_bias = kind in ("llama", "qwen3", "smollm3") and config.attention_bias
    return TargetConfig(
        architecture=config.architectures[0],
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        windows=_windows(config),
        rotates=tuple(map(bool, config.no_rope_layers if kind == "smollm3" else [1] * layers)),
        inv_freq=tuple(inv_freq.tolist()),
        attention_scaling=attention_scaling,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=kind in ("llama", "smollm3") and config.mlp_bias,
        head_norms=kind == "qwen3",
    )


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return head_dim


def _windows(config: Any) -> tuple[int | None, ...]:
    layers: int = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * layers
    window: int | None = config.sliding_window
    if config.model_type == "mistral":
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rotation(config: Any) -> tuple[Tensor, float]:
    """The frequencies [head_dim / 2] of positions, and the scaling of cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "longrope":
        raise ConfigError(
            "model: its rope_type longrope turns what is cached otherwise when a text grows long, "
            "which this server can't. Give a model with another rope_type."
        )
    head_dim = _head_dim(config)
    if kind == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** steps, 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise ConfigError(f"model: its rope_type {kind!r} is not known. Known are: {known}")
    inv_freq, attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if 2 * len(inv_freq) != head_dim:
        raise ConfigError(
            f"model: its positions turn {2 * len(inv_freq)} of the {head_dim} numbers of a head "
            "(partial_rotary_factor); only models that turn all of them can be run."
        )
    return inv_freq, float(attention_scaling)
