"""What the server's processes hold while a scenario runs, where this program has started it."""

import re
import statistics
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from benchmarks.machine import family, held_bytes

PERIOD_S = 5.0
PARTS = 6  # of a scenario's time, for the table

Memory = Mapping[str, float]  # MiB by process


@contextmanager
def watched_memory(server: int | None, period_s: float = PERIOD_S) -> Iterator[list[Memory]]:
    """What a process and all that it has started hold, read now and again until the end; nothing
    without a process."""
    readings: list[Memory] = []
    if server is None:
        yield readings
        return
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            readings.append(_reading(server))
            over.wait(period_s)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        thread.join()


def _reading(server: int) -> Memory:
    held: dict[str, float] = defaultdict(float)
    for process in family(server):
        with suppress(psutil.Error):
            held[_kind(process)] += held_bytes([process]) / 2**20
    return held


def _kind(process: psutil.Process) -> str:
    """Actors by their class, stages of the local graph together, other programs by their names."""
    command = " ".join(process.cmdline())
    if found := re.match(r"ray::([\w:]+)", command):
        return found[1]
    return "stage processes" if "process_actor" in command else process.name()


def by_time(readings: Sequence[Memory]) -> list[tuple[str, list[float]]]:
    """For each kind of process, and for all, the medians [PARTS] over equal parts of the time, MiB.
    Nothing where there are not as many readings as parts."""
    if len(readings) < PARTS:
        return []
    parts = [
        readings[len(readings) * k // PARTS : len(readings) * (k + 1) // PARTS]
        for k in range(PARTS)
    ]
    rows = [
        (kind, [statistics.median(r.get(kind, 0.0) for r in part) for part in parts])
        for kind in sorted({kind for reading in readings for kind in reading})
    ]
    return [*rows, ("all", [statistics.median(sum(r.values()) for r in p) for p in parts])]
