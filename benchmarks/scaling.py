"""What a token costs in a long text and beside other chats: `python -m benchmarks.scaling --help`.

Texts of random tokens, so that nothing can be looked up and nothing is reused; each answer goes on
to its limit.
"""

import argparse
import json
import math
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import about
from benchmarks.ways import Way, deployment
from benchmarks.worker import Cycles, Ids, Task, engine
from service.config import DEFAULT_MODEL
from service.messages import CyclePlan, CycleResult
from service.presentation import aligned, blank_figure

CONTEXTS = (128, 512, 1024, 2048, 4096, 8064)
CHATS = (1, 2, 4, 8, 16)
CHUNK = 128
SHORT = 128  # tokens of a prompt where many chats run
WARM_UP = 8
VOCABULARY = 10_000  # of the random prompts: ordinary tokens of any model


class BusyCycles(Cycles):
    """Knows how many chats ran in each cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[int] = []
        self._running = 0

    def load(self, running: int, waiting: int) -> None:  # noqa: ARG002
        self._running = running

    def cycle(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None:
        super().cycle(plan, result, decoding)
        self.chats += [self._running] * (len(self.parts) - len(self.chats))

    def forget(self) -> None:
        self.parts.clear()
        self.chats.clear()

    def full(self, chats: int) -> list[tuple[float, float, float, float]]:
        """The parts of the cycles in which so many ran."""
        both = zip(self.parts, self.chats, strict=True)
        return [part for part, running in both if running == chats]


def random_ids(length: int, seed: int) -> Ids:
    source = random.Random(seed)
    return tuple(source.randrange(1000, VOCABULARY) for _ in range(length))


def measure(
    options: argparse.Namespace, chats: tuple[int, ...], contexts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """For each number of chats and each context the median cycle and its parts, in ms. One of the
    two has a single entry."""
    settings = deployment(options.model, options.stages, options.drafter, options.graph)
    longest = max(contexts) + options.tokens
    settings["pipeline"] |= {"slots": max(chats), "max_len": longest, "chunk": CHUNK}
    task = Task(Way("scaling", "engine", settings), options.model, (), None, options.tokens)
    cycles, found = BusyCycles(), []
    with ExitStack() as stack:
        talk = engine(task, stack, cycles)

        def tokens(ids: Ids) -> int:
            return len(list(talk(ids, options.tokens, ignore_eos=True)))

        tokens(random_ids(WARM_UP, 0))
        for number, (chat, context) in enumerate((c, x) for c in chats for x in contexts):
            prompts = [random_ids(context, 1 + 100 * number + k) for k in range(chat)]
            cycles.forget()
            with ThreadPoolExecutor(chat) as pool:
                made = sum(pool.map(tokens, prompts))
            # Prompts come first, a chunk in a cycle; what is left is all decoding.
            prompts_end = chat * math.ceil(context / CHUNK) + options.stages
            parts = cycles.full(chat)[prompts_end:]
            ms = [1000 * statistics.median(column) for column in zip(*parts, strict=True)]
            found.append(
                {"chats": chat, "context": context, "tokens": made, "cycle": ms[0],
                 "scheduler": ms[0] - ms[1], "slowest stage": ms[2], "drafter": ms[3]}
            )  # fmt: skip
            say(f"{chat} chats of {context} tokens: {ms[0]:.1f} ms a cycle")
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    names = ("cycle", "slowest stage", "drafter", "scheduler")
    rows = [
        [str(f["chats"]), str(f["context"]), *(f"{f[name]:.2f}" for name in names)] for f in found
    ]
    return aligned(["chats", "context", *(f"{name} ms" for name in names)], rows)


def draw(by_context: list[dict[str, Any]], by_chats: list[dict[str, Any]], file: Path) -> None:
    figure = blank_figure(file, (10, 4))
    for place, (found, key, label) in enumerate(
        ((by_context, "context", "tokens in the text"), (by_chats, "chats", "chats at once")), 1
    ):
        axes = figure.add_subplot(1, 2, place)
        for name in ("cycle", "slowest stage", "drafter", "scheduler"):
            axes.plot([f[key] for f in found], [f[name] for f in found], marker="o", label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("ms a cycle, median")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(file, dpi=120)


def say(message: str) -> None:
    sys.stderr.write(f"scaling: {message}\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--drafter", default="pdm")
    parser.add_argument("--graph", default="local")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--plot", type=Path, help="draws a picture to this file")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    options = parser.parse_args()
    by_context = measure(options, (1,), CONTEXTS)
    by_chats = measure(options, CHATS, (SHORT,))
    head = {**about(), "settings": f"{options.stages} stages, {options.drafter}, {options.graph}"}
    lines = [*(f"{k}: {v}" for k, v in head.items()), "", *table(by_context), ""]
    sys.stdout.write("\n".join([*lines, *table(by_chats)]) + "\n")
    if options.plot:
        draw(by_context, by_chats, options.plot)
    if options.json:
        options.json.write_text(
            json.dumps({"about": head, "context": by_context, "chats": by_chats}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
