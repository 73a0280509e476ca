"""The forward of single tokens as steps of fixed shapes: on GPUs each is one CUDA graph.

At one row a layer takes a GPU less time than it takes Python to launch its kernels. So the forward
is recorded once for every bucket of rows and of context, and replayed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from service.messages import Rows
from service.pipeline.cuda import Capture, Work
from service.pipeline.padded import PaddedBatch

log = logging.getLogger(__name__)

SHORTEST_CONTEXT = 256
MOST_ROWS = 256  # beyond these a step is no longer bound by its launches

# Rows [R, H] and where they are -> tensors [R, ...]; waits for nothing, keeps nothing
Forward = Callable[[PaddedBatch, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is made for. The position behind the last one is scratch, see `PaddedBatch`."""

    slots: int
    max_len: int
    hidden_size: int
    dtype: torch.dtype
    width: int = 1  # rows of a slot, at most


def buckets(first: int, most: int) -> tuple[int, ...]:
    """`first`, twice that, ..., and at last `most`."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return (*sizes, most)


class DecodeStep:
    """Runs a forward on few rows from buffers that never move.

    A cycle's rows are written to one pinned buffer, which goes to the device in one copy: for each
    row its slot, its position, and where its hidden state is to be found.
    """

    @torch.inference_mode()
    def __init__(self, forward: Forward, shape: StepShape, device: torch.device) -> None:
        began = time.perf_counter()
        self._forward, self._shape = forward, shape
        most = max(1, min(shape.slots, MOST_ROWS // shape.width))
        self._groups = buckets(1, most)
        self._contexts = buckets(SHORTEST_CONTEXT, shape.max_len)
        rows = most * shape.width
        pinned = device.type == "cuda"
        self._told = torch.zeros(3 * rows, dtype=torch.int64, pin_memory=pinned)
        self._where = torch.zeros(3 * rows, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(rows, shape.hidden_size, dtype=shape.dtype, device=device)
        self._write([], most)
        outputs = forward(self._batch(most, shape.max_len), self._inputs)
        self._outputs = tuple(torch.zeros_like(output) for output in outputs)
        capture = Capture(device)
        self._replays: dict[tuple[int, int], Work] = {}
        for groups in reversed(self._groups):  # the largest first: the others fit in its memory
            self._write([], groups)
            for context in reversed(self._contexts):
                work = partial(self._work, groups, context)
                self._replays[groups, context] = capture(work)
        if pinned:
            seconds = time.perf_counter() - began
            log.info("Captured %d CUDA graphs in %.1f s", len(self._replays), seconds)

    def covers(self, rows: Sequence[Rows]) -> bool:
        """Whether these are few enough, in all and of each slot."""
        return len(rows) <= self._groups[-1] and all(r.count <= self._shape.width for r in rows)

    def places(self, rows: Sequence[Rows]) -> list[int]:
        """Where the outputs of these rows are, one after another."""
        width = self._shape.width
        return [i * width + j for i, r in enumerate(rows) for j in range(r.count)]

    def run(self, rows: Sequence[Rows], table: Tensor, picks: Sequence[int]) -> tuple[Tensor, ...]:
        """The forward of rows, of distinct slots, whose hidden states are in `table` [N, H] at
        `picks`. Returns its outputs, to be looked up at `places`: the next run overwrites them."""
        groups = next(size for size in self._groups if size >= len(rows))
        end = max(r.end for r in rows)
        context = next(size for size in self._contexts if size >= end)
        picked = self._write(rows, groups, picks)
        torch.index_select(table, 0, picked, out=self._inputs[: len(picked)])
        self._replays[groups, context]()
        return self._outputs

    def _write(self, rows: Sequence[Rows], groups: int, picks: Sequence[int] = ()) -> Tensor:
        """Tells the device where the rows are; all others are padding. Returns the picks there."""
        width = self._shape.width
        count = groups * width
        slots, positions, picked = [0] * count, [self._shape.max_len] * count, [0] * count
        for i, r in enumerate(rows):
            slots[i * width : (i + 1) * width] = [r.slot] * width
            positions[i * width : i * width + r.count] = range(r.start, r.end)
        for place, pick in zip(self.places(rows), picks, strict=True):
            picked[place] = pick
        told, where = self._told[: 3 * count], self._where[: 3 * count]
        told.copy_(torch.tensor([*slots, *positions, *picked]))
        where.copy_(told, non_blocking=True)  # nobody writes there until this cycle is over
        return where[2 * count :]

    def _batch(self, groups: int, context: int) -> PaddedBatch:
        count = groups * self._shape.width
        slots, positions, _ = self._where[: 3 * count].view(3, count)
        return PaddedBatch(slots, positions, self._shape.width, context)

    def _work(self, groups: int, context: int) -> None:
        """What is captured: from the buffers to the buffers."""
        batch = self._batch(groups, context)
        count = len(batch.positions)
        for kept, output in zip(
            self._outputs, self._forward(batch, self._inputs[:count]), strict=True
        ):
            kept[:count].copy_(output)
