"""Texts to train a PDM on, and what the target has shown of them, in shards on disk.

A shard is one safetensors file: `tokens` [N] of all its documents end to end, `lengths`,
`answer_starts` and `temperatures` [documents] (NaN where it is not known), and, where the target
has already been run, `states` [N, A, H] bfloat16, its hidden states at the anchors (without 0, the
embedding). Without states it is a file of texts, small enough to be kept.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.config import ConfigError
from service.files import whole_file

_SAME_BEGINNING = 16


@dataclass(frozen=True, slots=True)
class Document:
    """One chat: a prompt and, from `answer_start` on, an answer drawn at a temperature (NaN: by
    somebody else)."""

    tokens: tuple[int, ...]
    answer_start: int
    temperature: float


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """What a corpus was made with. Two of a kind can be used together."""

    target_fingerprint: str
    anchors: tuple[int, ...]


def write_shard(
    file: Path,
    info: CorpusInfo,
    documents: Sequence[Document],
    states: Sequence[Tensor] | None = None,
) -> None:
    """Writes a shard."""
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
    with whole_file(file) as partial:
        save_file(tensors, partial, metadata)


def shard_tokens(file: Path) -> int:
    """How many tokens a shard holds."""
    with safe_open(file, framework="pt") as shard:
        tokens: int = shard.get_slice("tokens").get_shape()[0]
    return tokens


def shard_info(file: Path) -> CorpusInfo:
    """What a shard was made with."""
    with safe_open(file, framework="pt") as shard:
        made_with = shard.metadata() or {}
    return CorpusInfo(
        made_with.get("target_fingerprint", "?"),
        tuple(json.loads(made_with.get("anchors", "[]"))),
    )


def read_documents(file: Path) -> list[Document]:
    """The documents of a shard, without their states. Raises ConfigError for a broken file."""
    try:
        with safe_open(file, framework="pt") as shard:
            tokens = shard.get_tensor("tokens").tolist()
            columns = [
                shard.get_tensor(name).tolist()
                for name in ("lengths", "answer_starts", "temperatures")
            ]
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is no shard of a corpus: {error}") from None
    documents, at = [], 0
    for length, answer_start, temperature in zip(*columns, strict=True):
        documents.append(Document(tuple(tokens[at : at + length]), answer_start, temperature))
        at += length
    return documents


class Corpus:
    """All shards of a folder: documents, each once, and their states. One in 64 is held out: which
    one depends on its text alone, so it stays so as the corpus grows."""

    def __init__(self, folder: Path, info: CorpusInfo) -> None:
        """Raises ConfigError if there is nothing, or a shard was made with something else."""
        self.info = info
        self.train: list[int] = []
        self.held_out: list[int] = []
        self.documents: list[Document] = []
        self.duplicates = 0
        self._places: list[tuple[int, int]] = []  # (shard, first row of its states)
        self._shards: list[Any] = []
        seen: set[tuple[int, ...]] = set()
        for file in sorted(folder.glob("*.safetensors")):
            self._add(file, seen)
        if not self.train:
            raise ConfigError(f"the corpus {folder} holds no documents to train on")

    def _add(self, file: Path, seen: set[tuple[int, ...]]) -> None:
        documents = read_documents(file)
        found = shard_info(file)
        if found != self.info:
            raise ConfigError(
                f"{file} was made with {found}, and this training needs {self.info}; use another "
                "corpus folder"
            )
        shard: Any = safe_open(file, framework="pt")
        self._shards.append(shard.get_slice("states"))
        at = 0
        for document in documents:
            # Of greedy answers, and of loops, the same beginning is the same text.
            key = document.tokens[: document.answer_start + _SAME_BEGINNING]
            if key in seen:
                self.duplicates += 1
            else:
                seen.add(key)
                digest = zlib.crc32(str(document.tokens).encode())
                (self.held_out if digest % 64 == 0 else self.train).append(len(self.documents))
                self.documents.append(document)
                self._places.append((len(self._shards) - 1, at))
            at += len(document.tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(d.tokens) for d in self.documents]

    def states(self, index: int) -> Tensor:
        """Hidden states [S, A, H] of a document, bfloat16."""
        shard, start = self._places[index]
        states: Tensor = self._shards[shard][start : start + len(self.documents[index].tokens)]
        return states

    def common_prefix(self) -> int:
        """With how many tokens all documents begin (the template's own)."""
        first, last = (pick(d.tokens for d in self.documents) for pick in (min, max))
        differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
        return next(differ, min(len(first), len(last)))

    def token_counts(self, vocabulary: int) -> Tensor:
        """How often each token occurs in answers: [vocabulary] int64."""
        answers = [t for d in self.documents for t in d.tokens[d.answer_start :]]
        return torch.bincount(torch.tensor(answers), minlength=vocabulary)

    def summary(self) -> str:
        """What a person wants to know of it before training."""
        tokens = sum(self.lengths)
        lines = [
            f"{len(self.documents)} documents ({len(self.held_out)} held out, "
            f"{self.duplicates} duplicates left out), {tokens} tokens"
        ]
        by_temperature: dict[str, list[tuple[int, ...]]] = {}
        for d in self.documents:
            by_temperature.setdefault(f"{d.temperature:.1f}", []).append(d.tokens[d.answer_start :])
        for temperature, answers in sorted(by_temperature.items()):
            count = sum(map(len, answers))
            repeated = sum(map(repeated_four_grams, answers))
            lines.append(
                f"  answers at temperature {temperature}: {len(answers)}, {count} tokens, "
                f"{repeated / max(count, 1):.0%} in repeated 4-grams"
            )
        return "\n".join(lines)


def repeated_four_grams(tokens: Sequence[int]) -> int:
    """How many 4-grams of a text have occurred in it before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return len(grams) - len(set(grams))
