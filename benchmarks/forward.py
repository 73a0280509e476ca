"""How long a decoder layer and the head take at a few rows: transformers' eager ones, a stage's,
and a stage's with weights of 8 bits. `python -m benchmarks.forward --help`.

Rows are one token each of as many sequences. The ways take turns within each repetition. On one
thread, time is the thread's own: what other programs take from the CPU does not count (that they
use caches and memory does).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.machine import about
from service.config import DEFAULT_MODEL, ConfigError
from service.messages import Rows
from service.pipeline.cache import Batch
from service.pipeline.linear import check_int8
from service.pipeline.spec import ActorSpec
from service.pipeline.stage import Stage
from service.target import load_target_config, resolve_target

ROWS = (1, 2, 4, 8)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """One way to run layers and head; each takes hidden states [R, H]."""

    layers: Callable[[Tensor], object]
    head: Callable[[Tensor], object]
    weight_bytes: int


def eager(folder: Path, options: argparse.Namespace) -> Way:
    """transformers' model, cut to its last layers, one sequence for each row."""
    dtype = getattr(torch, options.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    first = len(model.model.layers) - options.layers
    model.model.layers = model.model.layers[first:]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    caches = {rows: _filled_cache(model, rows, options.context - 1) for rows in ROWS}

    def layers(hidden: Tensor) -> None:
        cache = caches[len(hidden)]
        model.model(inputs_embeds=hidden[:, None], cache=cache, use_cache=True)
        cache.crop(-1)  # the token that has just been added

    held = [*model.model.layers.parameters(), *model.model.norm.parameters(), model.lm_head.weight]
    return Way(layers, lambda x: model.lm_head(model.model.norm(x)), sum(p.nbytes for p in held))


def _filled_cache(model: Any, rows: int, length: int) -> DynamicCache:
    attention = model.model.layers[0].self_attn
    pairs = attention.k_proj.out_features // attention.head_dim
    cache = DynamicCache()
    for number in range(len(model.model.layers)):
        states = torch.randn(rows, pairs, length, attention.head_dim, dtype=model.dtype)
        cache.update(states, states.clone(), number)
    return cache


def stage(folder: Path, options: argparse.Namespace, weights: str | None) -> Way:
    """The last stage of a pipeline."""
    target = load_target_config(folder)
    count = target.num_hidden_layers
    bounds = (0, count - options.layers, count) if options.layers < count else (0, count)
    spec = ActorSpec(
        folder=str(folder),
        target=target,
        bounds=bounds,
        anchors=(),
        slots=max(ROWS),
        max_len=options.context,
        dtype=options.dtype,
        device="cpu",
        threads=options.threads,
        weights=weights,
    )
    made = Stage(spec, len(bounds) - 2)

    def layers(hidden: Tensor) -> None:
        rows = [Rows(slot, options.context - 1) for slot in range(len(hidden))]
        made.layers(hidden, Batch(rows, _CPU))

    return Way(layers, lambda x: made.head(made.norm(x)), made.weight_bytes())


def measure(ways: dict[str, Way], options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each way, part and number of rows the milliseconds of all repetitions; in turns."""
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    width = load_target_config(resolve_target(options.model)).hidden_size
    taken: dict[tuple[str, str, int], list[float]] = {}
    for repetition in range(options.repeats + 1):
        for rows in ROWS:
            hidden = torch.randn(rows, width, dtype=getattr(torch, options.dtype))
            for name, way in ways.items():
                for part, run, divisor in (
                    ("layer", way.layers, options.layers),
                    ("head", way.head, 1),
                ):
                    run(hidden)  # caches hold what another way has left in them
                    began = clock()
                    run(hidden)
                    seconds = (clock() - began) / divisor
                    if repetition:  # the first one warms up
                        taken.setdefault((name, part, rows), []).append(1000 * seconds)
    eager = next(iter(ways))
    return [
        {"way": name, "part": part, "rows": rows, "least": min(ms), "median": statistics.median(ms),
         "most": max(ms), "times as fast": _speedup(taken[eager, part, rows], ms)}
        for (name, part, rows), ms in taken.items()
    ]  # fmt: skip


def _speedup(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Of two ways that took turns: the median of the ratios within each turn."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def report(head: dict[str, str], ways: dict[str, Way], found: list[dict[str, Any]]) -> str:
    lines = [f"{key}: {value}" for key, value in head.items()]
    lines += [
        f"{name}: {way.weight_bytes / 2**20:.0f} MiB of weights" for name, way in ways.items()
    ]
    for part in ("layer", "head"):
        lines += ["", f"ms for the {part}, least / median / most (times as fast)", ""]
        lines += ["| way | " + " | ".join(f"{r} rows" for r in ROWS) + " |", "|---" * 5 + "|"]
        for name in ways:
            cells = [
                f"{f['least']:.2f} / {f['median']:.2f} / {f['most']:.2f} ({f['times as fast']:.2f})"
                for f in found
                if (f["way"], f["part"]) == (name, part)
            ]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or hub id")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--layers", type=int, default=15, help="how many, more than caches hold")
    parser.add_argument("--context", type=int, default=256, help="positions that a row sees")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = resolve_target(options.model)
    ways = {"transformers": eager(folder, options), "stage": stage(folder, options, None)}
    try:
        check_int8()
        ways["stage, int8"] = stage(folder, options, "int8")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
    with torch.inference_mode():
        found = measure(ways, options)
    settings = ", ".join(f"{k} {v}" for k, v in vars(options).items() if k != "json")
    head = {**about(), "settings": settings}
    sys.stdout.write(report(head, ways, found))
    if options.json:
        sizes = {name: way.weight_bytes for name, way in ways.items()}
        options.json.write_text(
            json.dumps({"about": head, "weight_bytes": sizes, "ms": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
