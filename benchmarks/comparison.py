"""Workers that take turns, and what comes of it: ratios at each prompt, and what they could be."""

import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ways import Way
from benchmarks.worker import Chat, Figures, Task, work
from service.emulation.results import theoretical_speed_up
from service.presentation import aligned

START_S = 300
CHAT_S = 600
END_S = 60


class WorkerError(Exception):
    """With the way's name, and the end of what its process said."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one way did: its chats in the order of the turns."""

    way: Way
    chats: list[Chat]
    figures: Figures

    @property
    def tokens_per_s(self) -> float:
        return sum(c.decoded for c in self.chats) / sum(c.decode_s for c in self.chats)

    @property
    def cycle(self) -> dict[str, float]:
        """Of an engine; see Cycles.medians_ms."""
        assert self.figures.cycle is not None
        return self.figures.cycle


class Worker:
    """A process that decodes in one way."""

    def __init__(self, task: Task, log: Path) -> None:
        self.way, self._log = task.way, log
        self._chats: list[Chat] = []
        context = multiprocessing.get_context("spawn")
        self._asks, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(task, theirs, str(log)))
        self._process.start()
        theirs.close()

    def ready(self) -> int:
        """Waits until it can decode; the number of prompts. Raises WorkerError, as all here do."""
        count: int = self._answer(START_S)
        return count

    def chat(self, number: int) -> None:
        self._ask(number)
        self._chats.append(self._answer(CHAT_S))

    def end(self) -> Result:
        self._ask(None)
        figures = self._answer(END_S)
        self._process.join(END_S)
        return Result(self.way, self._chats, figures)

    def _ask(self, number: int | None) -> None:
        with suppress(OSError):  # it has died, which its answer tells
            self._asks.send(number)

    def _answer(self, most_s: float) -> Any:
        with suppress(EOFError, OSError):
            if self._asks.poll(most_s):
                return self._asks.recv()
        self._process.kill()
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        raise WorkerError(f"{self.way.name} failed:\n{said[-2000:]}")

    def kill(self) -> None:
        """Whatever it does; after its end, nothing."""
        self._process.kill()


def groups(ways: Sequence[Way], together: int) -> Iterator[list[Way]]:
    """The ways that stand ready at a time: the baseline, which is the first, and some others, at
    most one of them with Ray: there can be only one of it on a machine."""
    baseline, *left = ways
    while left:
        group = [baseline]
        for way in list(left):
            if len(group) < together and not (way.uses_ray and any(w.uses_ray for w in group)):
                group.append(way)
                left.remove(way)
        yield group


def take_turns(workers: Sequence[Worker], rounds: int) -> None:
    """Each prompt in every way before the next one; who begins changes."""
    prompts = min([worker.ready() for worker in workers])
    turn = 0
    for _ in range(rounds):
        for number in range(prompts):
            for k in range(len(workers)):
                workers[(turn + k) % len(workers)].chat(number)
            turn += 1


def ratios(result: Result, baseline: Result) -> list[float]:
    """How many times as fast it was at each prompt; one whose answer is a single token says
    nothing."""
    pairs = zip(result.chats, baseline.chats, strict=True)
    return [
        (b.decode_s / b.decoded) / (a.decode_s / a.decoded)
        for a, b in pairs
        if a.decoded and b.decoded
    ]


def allowed(found: Result, baseline: Result) -> float | None:
    """The most that a speculative way could be ahead of its plain form with as many drafts accepted
    as were: all cores work all the time, and at nothing but stages and drafts."""
    if not (found.way.speculates and baseline.way.is_baseline_of(found.way)):
        return None
    whole, draft = baseline.cycle["cycle"], found.cycle["drafter mean"]
    cores = len(os.sched_getaffinity(0))
    cycle = max(whole / found.way.stages, draft, (whole + draft) / cores)
    in_theory = theoretical_speed_up(found.way.stages, found.cycle["accepted"])
    return in_theory / found.way.stages * whole / cycle


def _with_groups(
    measured: Sequence[Sequence[Result]],
) -> Iterator[tuple[Result, Sequence[Result]]]:
    """Each way and those it took turns with; the baseline, which is in all groups, once."""
    for group in measured:
        for found in group if group is measured[0] else group[1:]:
            yield found, group


def table(measured: Sequence[Sequence[Result]]) -> list[str]:
    """A line for each way."""
    rows = [_row(found, group[0]) for found, group in _with_groups(measured)]
    names = ["way", "tokens/s", f"of {measured[0][0].way.name}", "middle half", "first token ms",
             "CPU ms/token", "MiB", "same text"]  # fmt: skip
    return aligned(names, rows, texts=("way",))


def _row(found: Result, baseline: Result) -> list[str]:
    low, middle, high = np.percentile(ratios(found, baseline), [25, 50, 75])
    tokens = sum(len(chat.tokens) for chat in found.chats)
    equal = sum(a.tokens == b.tokens for a, b in zip(found.chats, baseline.chats, strict=True))
    return [
        found.way.name,
        f"{found.tokens_per_s:.1f}",
        f"{middle:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{1000 * statistics.median(chat.first_s for chat in found.chats):.0f}",
        f"{1000 * found.figures.cpu_s / tokens:.0f}",
        f"{found.figures.memory_mib:.0f}",
        f"{equal} of {len(found.chats)}",
    ]


def cycles_table(measured: Sequence[Sequence[Result]]) -> list[str]:
    """What a cycle is made of, in ms; the share of neither slowest stage nor drafter; and how much
    of what the accepted drafts allow is reached."""
    rows = [
        _cycle_row(found, group) for found, group in _with_groups(measured) if found.figures.cycle
    ]
    names = ["way", "cycle ms", "graph ms", "slowest stage ms", "drafter ms", "overhead",
             "accepted", "of its plain form", "allowed", "reached"]  # fmt: skip
    return aligned(names, rows, texts=("way",)) if rows else []


def _cycle_row(found: Result, group: Sequence[Result]) -> list[str]:
    cycle = found.cycle
    ms = [f"{cycle[k]:.2f}" for k in ("cycle", "graph", "slowest stage", "drafter")]
    row = [found.way.name, *ms, *(f"{cycle[k]:.0%}" for k in ("overhead share", "accepted"))]
    for other in group:
        most = allowed(found, other)
        if most is not None:
            ratio = statistics.median(ratios(found, other))
            return [*row, f"{ratio:.2f}", f"{most:.2f}", f"{ratio / most:.0%}"]
    return [*row, "", "", ""]
