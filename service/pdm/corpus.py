"""Texts to train a PDM on, and what the target has shown of them, in shards on disk.

A shard is one safetensors file: `tokens` [N] of all its documents end to end, `lengths`,
`answer_starts` and `temperatures` [documents], and, where the target has already been run,
`states` [N, A, H] bfloat16, its hidden states at the anchors (without 0, the embedding).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.config import ConfigError


@dataclass(frozen=True, slots=True)
class Document:
    """One chat: a prompt and, from `answer_start` on, an answer drawn at a temperature."""

    tokens: tuple[int, ...]
    answer_start: int
    temperature: float


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """What a corpus was made with. Two of a kind can be used together."""

    target_fingerprint: str
    anchors: tuple[int, ...]


def write_shard(
    file: Path, info: CorpusInfo, documents: Sequence[Document], states: Sequence[Tensor] | None
) -> None:
    """Writes a shard in one go: under its name it is always whole."""
    tensors = {
        "tokens": torch.tensor([t for d in documents for t in d.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(d.tokens) for d in documents], dtype=torch.int32),
        "answer_starts": torch.tensor([d.answer_start for d in documents], dtype=torch.int32),
        "temperatures": torch.tensor([d.temperature for d in documents]),
    }
    if int(tensors["tokens"].max()) < 2**16:
        tensors["tokens"] = tensors["tokens"].to(torch.uint16)
    if states is not None:
        tensors["states"] = torch.cat(list(states)).to(torch.bfloat16)
    metadata = {
        "target_fingerprint": info.target_fingerprint,
        "anchors": json.dumps(info.anchors),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, metadata)
    partial.replace(file)


def shard_tokens(file: Path) -> int:
    """How many tokens a shard holds."""
    with safe_open(file, framework="pt") as shard:
        tokens: int = shard.get_slice("tokens").get_shape()[0]
    return tokens
