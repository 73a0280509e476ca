"""One chat at a time: this server with speculation on and off, over both graphs and over HTTP,
beside transformers and llama.cpp. `make bench`, or `python -m benchmarks.chat --help`.

Some ways at a time stand ready, each in a process of its own, and take turns prompt by prompt with
the baseline among them; speed-ups are medians of what they are at each prompt. So what the machine
gives to others, now more and now less, is taken from both sides of a ratio. Greedy, so all ways in
one precision should write the same text.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks.comparison import (
    Result,
    Worker,
    WorkerError,
    cycles_table,
    groups,
    table,
    take_turns,
)
from benchmarks.machine import about
from benchmarks.ways import Way, all_ways
from benchmarks.worker import Task
from service.config import DEFAULT_MODEL

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def chosen(options: argparse.Namespace) -> list[Way]:
    """The ways that are asked for and can be had, the baseline always."""
    baseline, *ways = all_ways(options.model, os.cpu_count() or 1)
    if options.only:
        ways = [way for way in ways if way.name.startswith(tuple(options.only))]
    if options.gguf is None or importlib.util.find_spec("llama_cpp") is None:
        left_out = [way for way in ways if way.kind == "llama.cpp"]
        ways = [way for way in ways if way.kind != "llama.cpp"]
        if left_out:
            say("llama.cpp is left out: it needs llama-cpp-python and --gguf")
    return [baseline, *ways]


def measure(ways: Sequence[Way], options: argparse.Namespace, logs: Path) -> list[Result]:
    """All prompts, `--rounds` times, in each of the ways. Raises WorkerError."""
    with ExitStack() as stack:
        workers = []
        for number, way in enumerate(ways):
            task = Task(
                way=way,
                model=options.model,
                prompts=tuple(map(str, options.prompts)),
                limit=options.limit,
                max_tokens=options.max_tokens,
                gguf=None if options.gguf is None else str(options.gguf),
            )
            workers.append(worker := Worker(task, logs / f"{number}.log"))
            stack.callback(worker.kill)
        take_turns(workers, options.rounds)
        results = [worker.end() for worker in workers]
    for result in results:
        say(f"{result.way.name}: {result.tokens_per_s:.1f} tokens/s")
    return results


def say(message: str) -> None:
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[PROMPTS], help="JSONL files")
    parser.add_argument("--limit", type=int, help="only so many prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt is taken")
    parser.add_argument("--together", type=int, default=6, help="ways that stand ready at a time")
    parser.add_argument("--only", nargs="+", help="ways whose names begin so")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    measured: list[list[Result]] = []
    os.environ.update(RAY_worker_niceness="0")  # at nice 15, its default, Ray starves
    try:
        for ways in groups(chosen(options), options.together):
            with tempfile.TemporaryDirectory() as logs:
                measured.append(measure(ways, options, Path(logs)))
    except WorkerError as error:
        say(str(error))
        return 1
    settings = ", ".join(f"{k} {v}" for k, v in vars(options).items() if k not in ("json", "only"))
    head = {**about(), "settings": settings}
    lines = [*(f"{k}: {v}" for k, v in head.items()), "", *table(measured), ""]
    sys.stdout.write("\n".join([*lines, *cycles_table(measured)]) + "\n")
    if options.json:
        found = [[asdict(result) for result in group] for group in measured]
        options.json.write_text(json.dumps({"about": head, "found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
