"""Documents side by side in rows of one length, and the rows in batches."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from service.pdm.corpus import Corpus
from service.pdm.layout import Packed

_WINDOW = 8  # batches whose documents are packed together

Row = tuple[int, ...]  # documents
Batch = tuple[Row, ...]


def pack(lengths: Sequence[int], order: Sequence[int], rows: int, size: int) -> list[Batch]:
    """Puts documents of these lengths into rows of at most `size` tokens, and the rows into batches
    of `rows`. Each document is used once; documents stay near their place in `order`. A document
    longer than a row gets one of its own (and is cut there)."""
    filled: list[Row] = []
    window = rows * _WINDOW
    waiting = list(order)
    while waiting:
        open_rows: list[list[int]] = [[] for _ in range(window)]
        room = [size] * window
        left = []
        taken, waiting = waiting[: 4 * window], waiting[4 * window :]
        for document in sorted(taken, key=lambda d: -lengths[d]):  # longest first fill best
            needed = min(lengths[document], size)
            place = next((i for i, free in enumerate(room) if free >= needed), None)
            if place is None:
                left.append(document)
                continue
            open_rows[place].append(document)
            room[place] -= needed
        waiting = left + waiting
        filled += sorted(tuple(row) for row in open_rows if row)  # in no order of length
    return [tuple(filled[i : i + rows]) for i in range(0, len(filled), rows)]


def shuffled(documents: Sequence[int], seed: int, epoch: int) -> list[int]:
    """The order of an epoch, from the seed alone."""
    order = list(documents)
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def packed_states(
    corpus: Corpus, batch: Batch, embedding: Tensor, size: int, first_wanted: Sequence[int]
) -> Packed:
    """The documents of a batch with their hidden states; `first_wanted` says for each document of
    the corpus from which position on the newest row is wanted. Rows are only as long as needed."""
    cut = [[min(len(corpus.documents[d].tokens), size) for d in row] for row in batch]
    longest = max(map(sum, cut))
    anchors = len(corpus.info.anchors) + 1
    shape = (len(batch), longest)
    states = torch.zeros(*shape, anchors, embedding.shape[1], dtype=embedding.dtype)
    positions = torch.zeros(shape, dtype=torch.int64)
    texts = torch.full(shape, -1)
    wanted = torch.zeros(shape, dtype=torch.bool)
    for b, (row, lengths) in enumerate(zip(batch, cut, strict=True)):
        at = 0
        for d, length in zip(row, lengths, strict=True):
            place = slice(at, at + length)
            tokens = torch.tensor(corpus.documents[d].tokens[:length])
            states[b, place, 0] = nn.functional.embedding(tokens, embedding)
            states[b, place, 1:] = corpus.states(d)[:length].to(embedding.dtype)
            positions[b, place] = torch.arange(length)
            texts[b, place] = d
            wanted[b, at + first_wanted[d] : at + length] = True
            at += length
    return Packed(states, positions, texts, wanted)
