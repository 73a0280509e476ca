"""Tensors in memory that processes share."""

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """Where a process has put a tensor in its own memory."""

    half: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedTensors:
    """A process's memory for what it sends, in two halves that take turns: what one cycle has
    written is read in the next, while the next is written."""

    def __init__(self, fd: int, size: int) -> None:
        """`size`: bytes of a half. The descriptor is not needed afterwards."""
        self._size = size
        self._bytes = torch.frombuffer(mmap.mmap(fd, 2 * size), dtype=torch.uint8)
        self._half = 0

    def put(self, tensor: Tensor | None) -> Output | None:
        """Raises ValueError for a tensor that is too large."""
        if tensor is None:
            return None
        self._half = 1 - self._half
        output = Output(self._half, tuple(tensor.shape), tensor.dtype)
        if tensor.nbytes > self._size:
            raise ValueError(f"a tensor of {tensor.nbytes} bytes is sent, {self._size} are there")
        self._view(output).copy_(tensor)
        return output

    def get(self, output: Output | None) -> Tensor | None:
        """A copy, as the memory is written again."""
        return None if output is None else self._view(output).clone()

    def _view(self, output: Output) -> Tensor:
        count = output.dtype.itemsize
        for extent in output.shape:
            count *= extent
        start = output.half * self._size
        return self._bytes[start : start + count].view(output.dtype).view(output.shape)
