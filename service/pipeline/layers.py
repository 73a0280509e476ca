"""The target's parts with only the needed tensors read: a run of decoder layers, the embedding, the
final norm and the head."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from service.config import ConfigError
from service.pipeline.cache import Batch, SlotCache
from service.pipeline.decoder import DecoderLayer
from service.pipeline.padded import PaddedBatch
from service.pipeline.skeleton import Rotation, target_layer, target_norm
from service.target_config import TargetConfig

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def target_shapes(config: TargetConfig) -> dict[str, list[int]]:
    """The shapes of all its tensors, by their names."""
    table = [config.vocab_size, config.hidden_size]
    shapes = {EMBEDDING: table, NORM: [config.hidden_size], HEAD: table}
    for number in range(config.num_hidden_layers):
        for name, empty in target_layer(config, number).named_parameters():
            shapes[f"model.layers.{number}.{name}"] = list(empty.shape)
    return shapes


class WeightReader:
    """Reads single tensors of a safetensors folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where an index, or the only file, can't be read."""
        index = folder / "model.safetensors.index.json"
        if index.exists():
            self._files = {k: folder / f for k, f in _weight_map(index).items()}
        else:
            file = folder / "model.safetensors"
            with _opened(file) as tensors:
                self._files = dict.fromkeys(tensors.keys(), file)

    def check(self, config: TargetConfig) -> None:
        """Raises ConfigError unless all files are whole and have the target's tensors, in the
        shapes that its configuration says. Only their headers are read."""
        there = {}
        for file in sorted(set(self._files.values())):
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    there[name] = tensors.get_slice(name).get_shape()
        for name, shape in target_shapes(config).items():
            name = self.head_name(config) if name == HEAD else name
            if name not in there:
                raise ConfigError(_no_tensor(name))
            if there[name] != shape:
                raise ConfigError(
                    f"model: the tensor {name!r} has the shape {there[name]}; by config.json it "
                    f"should be {shape}. Are these files of one model?"
                )

    def head_name(self, config: TargetConfig) -> str:
        """The head's tensor: its own if there is one, whatever the config says of tying."""
        return EMBEDDING if config.tie_word_embeddings and HEAD not in self._files else HEAD

    def __call__(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor by its name in the model."""
        if name not in self._files:
            raise ConfigError(_no_tensor(name))
        with _opened(self._files[name], device) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor.to(dtype)


def _no_tensor(name: str) -> str:
    return f"model: the target's safetensors files have no tensor {name!r}"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model: {index} can't be used: {error!r}") from None
    return files


@contextmanager
def _opened(file: Path, device: torch.device | None = None) -> Iterator[Any]:
    """A safetensors file. The library itself compares its header with its size."""
    try:
        with safe_open(file, framework="pt", device=str(device or "cpu")) as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model: {file} can't be read: {error}. Is it whole? Fetch the model again."
        ) from None


def fill(module: nn.Module, prefix: str, tensor: Callable[[str], Tensor]) -> None:
    """Gives each parameter of a meta module its tensor, asked for by prefix + name. Raises
    ConfigError for a tensor of another shape."""
    for name, empty in list(module.named_parameters()):
        parent, _, leaf = name.rpartition(".")
        filled = tensor(prefix + name)
        if filled.shape != empty.shape:
            raise ConfigError(
                f"the tensor {prefix + name!r} has the shape {list(filled.shape)}; by its "
                f"configuration it should be {list(empty.shape)}"
            )
        parameter = nn.Parameter(filled, requires_grad=False)
        setattr(module.get_submodule(parent), leaf, parameter)


def read_norm(
    config: TargetConfig, read: WeightReader, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """The target's final norm with its weights."""
    norm = target_norm(config)
    fill(norm, NORM.removesuffix("weight"), lambda name: read(name, dtype, device))
    return norm


class DecoderLayers(nn.Module):
    """A run of decoder layers with their positions and their slot cache."""

    def __init__(
        self, layers: Iterable[DecoderLayer], rotation: Rotation, cache: SlotCache
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._cache = cache
        positions = torch.arange(cache.max_len, device=cache.device)
        self._cos, self._sin = rotation(positions, cache.dtype)  # [max_len, 1, head_dim]
        if cache.scratch:  # padding stands there, and is turned anyhow
            self._cos, self._sin = (torch.cat([t, t[-1:]]) for t in (self._cos, self._sin))

    def forward(
        self, hidden: Tensor, batch: Batch | PaddedBatch, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Rows [R, H] through the layers -> (rows [R, H], the outputs of the layers whose number
        within this run, counted from 1, is in `taps`)."""
        turn = self._cos[batch.positions], self._sin[batch.positions]
        tapped = []
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, number, self._cache, batch, turn)
            if number + 1 in taps:
                tapped.append(hidden)
        return hidden, tapped


def read_layers(
    config: TargetConfig,
    read: WeightReader,
    start: int,
    cache: SlotCache,
    weights: str | None = None,
) -> DecoderLayers:
    """The target's layers from number `start` on, as many as the cache has, with their weights."""
    layers = []
    for number in range(start, start + cache.layers):
        layer = target_layer(config, number)
        fill(layer, f"model.layers.{number}.", lambda name: read(name, cache.dtype, cache.device))
        layers.append(DecoderLayer(layer, weights))
    return DecoderLayers(layers, Rotation(config, cache.device), cache)
