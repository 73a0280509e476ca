"""One chat at a time: this server with speculation on and off, over both graphs and over HTTP,
beside transformers and llama.cpp. `make bench`, or `python -m benchmarks.chat --help`.

Each measurement is a process of its own, and the ways take turns in each round: what a busy machine
takes, it takes from all of them. Greedy, so all ways in one precision should write the same text.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import about
from benchmarks.ways import Way, all_ways
from benchmarks.worker import Task, task_json
from service.config import DEFAULT_MODEL
from service.presentation import aligned

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MOST_SECONDS = 1800
Result = dict[str, Any]


def chosen(options: argparse.Namespace) -> list[Way]:
    """The ways that are asked for and can be had."""
    ways = all_ways(options.model, os.cpu_count() or 1)
    if options.only:
        ways = [way for way in ways if way.name in options.only]
    if options.gguf is None or importlib.util.find_spec("llama_cpp") is None:
        left_out = [way.name for way in ways if way.kind == "llama.cpp"]
        ways = [way for way in ways if way.kind != "llama.cpp"]
        if left_out:
            say("llama.cpp is left out: it needs llama-cpp-python and --gguf")
    return ways


def measure(way: Way, options: argparse.Namespace) -> Result:
    """One measurement. Raises RuntimeError with the end of what the worker said."""
    task = Task(
        way=way,
        model=options.model,
        prompts=tuple(str(p) for p in options.prompts),
        limit=options.limit,
        max_tokens=options.max_tokens,
        gguf=None if options.gguf is None else str(options.gguf),
    )
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "task.json"), Path(folder, "result.json")
        asked.write_text(task_json(task))
        worker = [sys.executable, "-m", "benchmarks.worker", str(asked), str(answered)]
        environment = {**os.environ, "RAY_worker_niceness": "0"}
        done = subprocess.run(
            worker, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{way.name} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        result: Result = json.loads(answered.read_text())
        return result


def table(found: dict[str, list[Result]], baseline: str) -> list[str]:
    """A line for each way: medians over the rounds, least and most of the speed."""
    base = _median(found[baseline], "tokens_per_s")
    text = found[baseline][0]["tokens"]
    rows = []
    for name, rounds in found.items():
        speeds = [r["tokens_per_s"] for r in rounds]
        speed = statistics.median(speeds)
        equal = sum(a == b for a, b in zip(rounds[0]["tokens"], text, strict=True))
        rows.append(
            [
                name,
                f"{speed:.1f}",
                f"{min(speeds):.1f} to {max(speeds):.1f}",
                f"{speed / base:.2f}",
                f"{_median(rounds, 'first_token_ms'):.0f}",
                f"{_median(rounds, 'cpu_s_per_token') * 1000:.0f}",
                f"{_median(rounds, 'memory_mib'):.0f}",
                f"{equal} of {len(text)}",
            ]
        )
    headings = ["way", "tokens/s", "least to most", f"of {baseline}", "first token ms",
                "CPU ms/token", "MiB", "same text"]  # fmt: skip
    return aligned(headings, rows, texts=("way", "least to most"))


def cycles_table(found: dict[str, list[Result]]) -> list[str]:
    """What a cycle is made of, in ms, and the share of neither slowest stage nor drafter."""
    rows = []
    for name, rounds in found.items():
        parts = [r["cycle"] for r in rounds if r["cycle"]]
        if parts:
            median = {key: statistics.median(p[key] for p in parts) for key in parts[0]}
            ms = [f"{median[k]:.2f}" for k in ("cycle", "graph", "slowest stage", "drafter")]
            shares = [f"{median[k]:.0%}" for k in ("overhead share", "accepted")]
            rows.append([name, *ms, *shares])
    headings = [
        "way",
        "cycle ms",
        "graph ms",
        "slowest stage ms",
        "drafter ms",
        "overhead",
        "accepted",
    ]
    return aligned(headings, rows, texts=("way",)) if rows else []


def _median(rounds: Sequence[Result], key: str) -> float:
    return float(statistics.median(r[key] for r in rounds))


def say(message: str) -> None:
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[PROMPTS], help="JSONL files")
    parser.add_argument("--limit", type=int, help="only so many prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="ways whose names contain one of these")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    ways = chosen(options)
    found: dict[str, list[Result]] = {way.name: [] for way in ways}
    for number in range(1, options.rounds + 1):
        for way in ways:
            found[way.name].append(result := measure(way, options))
            say(f"round {number}, {way.name}: {result['tokens_per_s']:.1f} tokens/s")
    settings = ", ".join(f"{k} {v}" for k, v in vars(options).items() if k not in ("json", "only"))
    head = {**about(), "settings": settings}
    lines = [*(f"{k}: {v}" for k, v in head.items()), "", *table(found, ways[0].name), ""]
    sys.stdout.write("\n".join([*lines, *cycles_table(found)]) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"about": head, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
