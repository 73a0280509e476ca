"""make chaos: all faults, over both graphs, with one pipeline and with two, and what became of the
streams.

`python -m tests.chaos [--seed N] [--rounds N] [--graphs ray,local] [--replicas 1,2] [--only WORD]`
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from service.default_model import prepare_default_model
from tests.chaos.deployment import deployment, make_toy
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import TOKENS, Round, play
from tests.chaos.streams import undisturbed


def table(rounds: Sequence[Round]) -> str:
    lines = [
        "| graph | pipelines | fault | running | identical | pause, median | longest | stall |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.graph} | {r.replicas} | {r.fault} | {r.running} | {r.identical} | "
        f"{r.median:.1f} s | {r.longest:.1f} s | {r.stall:.1f} s |"
        for r in rounds
    ]
    streams, same = sum(r.running for r in rounds), sum(r.identical for r in rounds)
    lines.append(
        f"\n{len(rounds)} faults, {streams} streams running, {same} texts identical of "
        f"{8 * len(rounds)}."
    )
    return "\n".join(lines)


def tell(found: Round) -> None:
    lines = [table([found]).splitlines()[2], *found.differences]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--graphs", default="ray,local")
    parser.add_argument("--replicas", default="2,1")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(Path(folder) / "toy", prepare_default_model())
        for graph, replicas in product(
            options.graphs.split(","), map(int, options.replicas.split(","))
        ):
            log = Path(folder) / f"log-{graph}-{replicas}"
            with deployment(log, toy, replicas=replicas, graph=graph) as running:
                running.wait_until_whole()
                wanted = undisturbed(running.url, TOKENS)
                for seed in range(options.seed, options.seed + options.rounds):
                    for fault in FAULTS[graph]:
                        if options.only in fault.name:
                            rounds.append(play(running, fault, wanted, seed))
                            tell(rounds[-1])
                            running.wait_until_whole()
    sys.stdout.write(f"\n{table(rounds)}\n")
    return 0 if not any(r.differences for r in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
