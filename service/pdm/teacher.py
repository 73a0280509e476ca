"""The frozen target in one piece, for training: it writes texts, many at once, or reads given ones,
and shows its hidden states at the anchors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from service.config import ConfigError
from service.messages import Rows, spans
from service.pipeline.cache import Batch, SlotCache
from service.pipeline.layers import (
    EMBEDDING,
    WeightReader,
    read_layers,
    read_norm,
)
from service.target import load_target_config
from service.target_config import TargetConfig

_CPU = torch.device("cpu")


class OneRowEach:
    """A batch of one row in every slot, at positions [B] of its own."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self.end = int(positions.max()) + 1
        seen = torch.arange(self.end) <= positions[:, None]
        self.mask = torch.where(seen, 0.0, -torch.inf)[:, None, None]  # [B, 1, 1, end]


class OneRowCache(SlotCache):
    """Keys and values of batches of one row in every slot: written and read as one tensor."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Any,
        *,
        scaling: float,
        window: int | None = None,  # noqa: ARG002 (texts are no longer: `_check_window`)
    ) -> Tensor:
        """As in a SlotCache, with one row in each slot. Two products for all slots: on CPUs 100
        rows so cost a tenth of 100 calls."""
        slots = torch.arange(len(key))
        keys, values = self._keys[layer], self._values[layer]
        keys[slots, :, batch.positions] = key
        values[slots, :, batch.positions] = value
        keys, values = keys[:, :, : batch.end], values[:, :, : batch.end]
        grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
        scores = torch.matmul(grouped * scaling, keys.transpose(2, 3)) + batch.mask.to(query.dtype)
        output = torch.matmul(torch.softmax(scores, dim=-1), values)  # [B, kv, group, head_dim]
        return output.reshape(len(query), -1)


class Target:
    """The target's two ends: embedding, and final norm with head."""

    def __init__(
        self, folder: Path, config: TargetConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        read = WeightReader(folder)
        self.config = config
        self.embedding = read(EMBEDDING, dtype, device)  # [V, H]
        self._norm = read_norm(config, read, dtype, device)
        name = read.head_name(config)
        self.head = self.embedding if name == EMBEDDING else read(name, dtype, device)  # [V, H]

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [..] -> hidden states [.., H] at anchor 0."""
        return nn.functional.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """The last layer's raw output [N, H] -> logits [N, V], or [N, D] of the given ids."""
        head = self.head if ids is None else self.head[ids]
        return nn.functional.linear(self._norm(hidden), head).float()


class Teacher:
    """The target's layers with a slot cache. The anchors are those whose hidden states it shows,
    without 0 (which is the embedding)."""

    def __init__(
        self,
        folder: Path,
        anchors: Sequence[int],
        slots: int,
        max_len: int,
        *,
        one_row_each: bool,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        config = load_target_config(folder)
        _check_window(config, max_len)
        self.config = config
        self.anchors = tuple(anchors)
        self.slots, self.max_len = slots, max_len
        self.target = Target(folder, config, dtype, _CPU)
        cache_class = OneRowCache if one_row_each else SlotCache
        cache = cache_class(config, config.num_hidden_layers, slots, max_len, dtype, _CPU)
        self._layers = read_layers(config, WeightReader(folder), 0, cache)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One token in every slot, tokens and positions [B] -> logits [B, V] of what follows, and
        the hidden states at the anchors [B, A, H]."""
        hidden = self.target.embed(tokens)
        hidden, taps = self._layers(hidden, OneRowEach(positions), self.anchors)
        return self.target.logits(hidden), torch.stack(taps, dim=1)

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Whole texts, at most one for each slot -> for each its hidden states [S, A, H]."""
        batch = Batch([Rows(i, 0, len(text)) for i, text in enumerate(texts)], _CPU)
        tokens = torch.tensor([token for text in texts for token in text])
        _, taps = self._layers(self.target.embed(tokens), batch, self.anchors)
        states = torch.stack(taps, dim=1)  # [R, A, H]
        return [states[at] for _, at in spans(batch.rows)]


def _check_window(config: TargetConfig, max_len: int) -> None:
    window = min((w for w in config.windows if w is not None), default=max_len)
    if max_len > window:
        raise ConfigError(
            f"texts of {max_len} tokens are longer than the target's sliding window of {window}; "
            "train on shorter ones"
        )
