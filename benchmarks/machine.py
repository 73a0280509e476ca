"""What a measurement was made on, and what processes have used."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import psutil


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def about() -> dict[str, str]:
    """The machine and the versions, for the head of a report."""
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}",
    }


def family(pid: int | None = None) -> list[psutil.Process]:
    """A process, by default this one, and all that it has started, Ray's among them."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def cpu_seconds() -> float:
    """Used so far by the family's living members."""
    used = 0.0
    for process in family():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def memory_bytes() -> int:
    """Held by the family."""
    return held_bytes(family())


def held_bytes(processes: Iterable[psutil.Process]) -> int:
    """Held by some processes; pages that several share count once among them."""
    held = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            held += process.memory_full_info().pss
    return held
