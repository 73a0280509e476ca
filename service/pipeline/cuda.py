"""Streams and CUDA graphs: all that speaks to CUDA itself, and so all that no CPU can run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Work = Callable[[], None]

_WARM_UPS = 2  # the first run makes handles and workspaces and loads kernels, which no graph may


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A queue of work on a GPU, beside its others."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is begun within goes to this stream. None: on a CPU, which does it at once."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def wait_for(device: torch.device) -> None:
    """Until all that this thread has begun on the device is done. Other streams of it work on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Capture:
    """Makes one launch of many: what a function does on a device is recorded, to be replayed.

    Such a function reads and writes tensors that never move, and it never waits for the device.
    Captures share a pool of memory, as none of them leaves anything there for another one. There
    may be but one at a time in a process: they are made while actors are, one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            # Torch's own default for captures is on whatever device came first.
            self._stream = new_stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Does the work, and gives it back as a replay. On CPUs it is the work itself."""
        if self._device.type != "cuda":
            work()
            return work
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    work()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",  # other threads may use their own devices
            ):
                work()
        return graph.replay
