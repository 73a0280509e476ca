"""The command `spd-eval`."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from service.config import DEFAULT_MODEL, ConfigError
from service.evaluation.configuration import Options
from service.pipeline.graph import GraphError

DESCRIPTION = """\
Runs prompts through the engine, with the stages as threads of this process, and counts how many
drafts are accepted. The table goes to stdout; with --out there are results.json and acceptance.png
too, and what that folder has already is not run again: an interrupted evaluation goes on."""


def main(argv: Sequence[str] | None = None) -> int:
    options = Options(**vars(make_parser().parse_args(argv)))
    from service.evaluation.evaluate import evaluate  # imports torch: --help need not wait for it

    try:
        evaluate(options)
    except (ConfigError, GraphError) as error:
        sys.stderr.write(f"spd-eval: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("spd-eval: interrupted; with --out, finished configurations are kept\n")
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Its results are named as the fields of Options."""
    parser = argparse.ArgumentParser(prog="spd-eval", description=DESCRIPTION)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="target: a folder or hub id (%(default)s)")
    add("--checkpoint", metavar="FOLDER", help="PDM checkpoint; unset: as in a deployment")
    add("--widths", type=_widths, default="2,3,5", help="numbers of stages, n (%(default)s)")
    add(
        "--drafters",
        type=_words,
        default="pdm,lookup,lookup+pdm,off",
        help="as in the settings (%(default)s); `off` runs once, at n = 1",
    )
    add("--temperatures", type=_temperatures, default="0,1", help="(%(default)s)")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE.jsonl",
        help="a data set each; a line has `turns` (the first is used), `messages` or `prompt`",
    )
    add("--limit", type=_positive, metavar="N", help="prompts of each data set (all)")
    add("--max-tokens", type=_positive, default=128, help="of an answer (%(default)s)")
    add("--max-len", type=_positive, default=2048, help="of prompt and answer (%(default)s)")
    add("--slots", type=_positive, default=16, help="prompts at once (%(default)s)")
    add("--dtype", default="float32", help="(%(default)s)")
    add("--threads", type=_positive, default=1, help="torch threads of each stage (%(default)s)")
    add("--seed", type=int, default=0, help="for temperatures above 0 (%(default)s)")
    add(
        "--seeded",
        action="store_true",
        help="above temperature 0 as requests with a seed are: a draft is right if it equals the "
        "target's own token. Unset: rejection sampling",
    )
    add("--out", type=Path, metavar="DIR", help="folder of results.json and acceptance.png")
    add(
        "--replay",
        type=Path,
        metavar="FILE.json",
        help="run nothing but the scheduler, over the target's texts at temperature 0 from this "
        "file; those that are not in it are generated first, once. The counts are the same",
    )
    add("--corpus", type=Path, metavar="DIR", help="of spd-train, to train `early-exit` on")
    add(
        "--early-exit-visits",
        type=_positive,
        default=1_000_000,
        metavar="N",
        help="tokens that the drafter `early-exit` (a head on stage 0, with --replay) is trained "
        "on, repeated ones included (%(default)s)",
    )
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} should be like 2,3,5") from None


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} should be like 0,0.7,1") from None
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} should be 0 (greedy) or more")
    return values


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
