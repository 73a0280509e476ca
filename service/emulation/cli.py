"""The command `spd-emulate`."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path

from service.config import ConfigError
from service.emulation.results import Record, Setup, table
from service.pipeline.graph import GraphError

DESCRIPTION = """\
Runs the server's own engine and graph over stages and a PDM that wait instead of computing, and
tells how much of the theoretical speed-up is left on the wall. The table goes to stdout; with --out
there are emulation.json and emulation.png too."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        setups = make_setups(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        records = run(setups, options.tokens, options.runs)
        sys.stdout.write(f"{table(records)}\n{circumstances()}\n")
        if options.out is not None:
            write(records, options.out)
    except (ConfigError, GraphError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spd-emulate", description=DESCRIPTION)
    add = parser.add_argument
    add("--widths", type=_list(int), default="4,8,16", help="numbers of stages, n (%(default)s)")
    add(
        "--stage-ms",
        type=_list(float),
        default="7.9,4.2,2.1",
        help="of the slowest stage, one for each width (%(default)s: the paper's)",
    )
    add("--draft-ms", type=_list(float), help="of the PDM; unset: 0.9 of a stage's")
    add("--link-ms", type=_list(float), default="0", help="latencies to try (%(default)s)")
    add("--acceptance", type=_list(float), default="0.8", help="rates to try (%(default)s)")
    add(
        "--recorded",
        type=Path,
        metavar="results.json",
        help="of spd-eval: the rates that it found for these widths (lookup+pdm, temperature 0), "
        "instead of --acceptance",
    )
    add("--graphs", type=_list(str), default="local", help="local, ray or both (%(default)s)")
    add("--layers", type=int, default=32, help="of the target: they say what is tapped")
    add("--hidden-size", type=int, default=2560, help="of the target (%(default)s)")
    dtypes = ("float32", "bfloat16", "float16")
    add(
        "--dtype",
        choices=dtypes,
        default="bfloat16",
        help="of the hidden states that travel (%(default)s)",
    )
    add("--tokens", type=int, default=128, help="decoded in a run (%(default)s)")
    add("--runs", type=int, default=5, help="of each pipeline (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="folder of emulation.json and emulation.png")
    return parser


def make_setups(options: argparse.Namespace) -> list[Setup]:
    """Raises ValueError, which names the option that is wrong."""
    widths, stage_ms = options.widths, options.stage_ms
    draft_ms = options.draft_ms or [0.9 * ms for ms in stage_ms]
    for name, value in (("--stage-ms", stage_ms), ("--draft-ms", draft_ms)):
        if len(value) != len(widths):
            raise ValueError(f"{name} has {len(value)} numbers for {len(widths)} --widths")
    if not all(1 <= width <= options.layers for width in widths):
        raise ValueError(f"--widths: a stage needs one of the {options.layers} layers at least")
    for graph in options.graphs:
        if graph not in ("local", "ray"):
            raise ValueError(f"--graphs: {graph!r} is neither local nor ray")
    if not all(0 <= rate <= 1 for rate in options.acceptance):
        raise ValueError("--acceptance: a rate is between 0 and 1")
    if min(*stage_ms, *draft_ms, *options.link_ms) < 0 or min(stage_ms) == 0:
        raise ValueError("--stage-ms, --draft-ms, --link-ms: no time is negative, nor a stage's 0")
    if min(options.tokens, options.runs, options.hidden_size) < 1:
        raise ValueError("--tokens, --runs, --hidden-size: at least 1")
    stages = list(zip(widths, stage_ms, draft_ms, strict=True))
    rates = options.acceptance
    if options.recorded is not None:
        known = recorded_rates(options.recorded, widths)
        rates = list(dict.fromkeys(known.values()))
    cases = [
        (graph, rate, link, stage)
        for graph, rate, link, stage in product(options.graphs, rates, options.link_ms, stages)
        if options.recorded is None or known[stage[0]] == rate
    ]
    return [
        Setup(
            graph=graph,
            width=width,
            stage_ms=stage,
            draft_ms=round(draft, 4),
            link_ms=link,
            acceptance=rate,
            layers=options.layers,
            hidden_size=options.hidden_size,
            dtype=options.dtype,
        )
        for graph, rate, link, (width, stage, draft) in cases
    ]


def recorded_rates(file: Path, widths: Sequence[int]) -> dict[int, float]:
    """The acceptance of the default drafter at each width. Raises ConfigError."""
    from service.evaluation.store import read_results

    found = {
        record.width: record.overall.acceptance
        for record in read_results(file, "--recorded").configurations
        if record.drafter == "lookup+pdm" and record.temperature == 0
    }
    rates = {width: found.get(width) for width in widths}
    if missing := [width for width, rate in rates.items() if rate is None]:
        raise ConfigError(
            f"--recorded: {file} has no lookup+pdm at temperature 0 for n = {missing[0]}"
        )
    return {width: rate for width, rate in rates.items() if rate is not None}


def run(setups: Sequence[Setup], tokens: int, runs: int) -> list[Record]:
    from service.emulation.measure import measure  # imports torch: --help need not wait for it

    most = max((setup.width for setup in setups if setup.graph == "ray"), default=0)
    with _cluster(most):
        return [measure(setup, tokens, runs, _say) for setup in setups]


@contextmanager
def _cluster(width: int) -> Iterator[None]:
    """Ray on this machine, for stages and PDM; none where no graph needs it."""
    if not width:
        yield
        return
    # Read when Ray starts. Its workers run at nice 15 otherwise, below every other program.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=width + 1, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def circumstances() -> str:
    """What the times depend on beside the options."""
    versions = [f"{name} {version(name)}" for name in ("spd-serve", "ray", "torch")]
    return ", ".join(
        [
            f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            f"Python {platform.python_version()}",
            *versions,
        ]
    )


def write(records: Sequence[Record], folder: Path) -> None:
    """Raises ConfigError where matplotlib is missing; the numbers are written by then."""
    from service.emulation.plot import draw

    folder.mkdir(parents=True, exist_ok=True)
    results = {"measured_on": circumstances(), "records": [r.figures() for r in records]}
    (folder / "emulation.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(records, folder / "emulation.png")


def _list(kind: Callable[[str], object]) -> Callable[[str], list[object]]:
    def numbers(text: str) -> list[object]:
        try:
            return [kind(word.strip()) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} should be like 4,8,16") from None

    return numbers


def _say(message: str) -> None:
    sys.stderr.write(f"spd-emulate: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
