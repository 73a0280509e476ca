"""make chaos: all faults, with one pipeline and with two, and what became of the streams.

`python -m tests.chaos [--seed N] [--rounds N] [--replicas 1,2] [--only WORD]`
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from service.default_model import prepare_default_model
from tests.chaos.deployment import deployment, make_toy
from tests.chaos.faults import FAULTS
from tests.chaos.rounds import TOKENS, Round, play
from tests.chaos.streams import undisturbed


def table(rounds: Sequence[Round]) -> str:
    lines = [
        "| pipelines | fault | streams running | identical | median pause | longest | stall |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.replicas} | {r.fault} | {r.running} | {r.identical} | "
        f"{r.median:.1f} s | {r.longest:.1f} s | {r.stall:.1f} s |"
        for r in rounds
    ]
    streams, same = sum(r.running for r in rounds), sum(r.identical for r in rounds)
    lines.append(
        f"\n{len(rounds)} faults, {streams} streams running, {same} texts identical of "
        f"{8 * len(rounds)}."
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--replicas", default="2,1")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        toy = make_toy(Path(folder) / "toy", prepare_default_model())
        for replicas in map(int, options.replicas.split(",")):
            with deployment(Path(folder) / f"log-{replicas}", toy, replicas=replicas) as running:
                running.wait_until_whole(replicas)
                wanted = undisturbed(running.url, TOKENS)
                for seed in range(options.seed, options.seed + options.rounds):
                    for fault in FAULTS:
                        if options.only not in fault.name:
                            continue
                        rounds.append(play(running, fault, wanted, replicas, seed))
                        lines = [table(rounds[-1:]).splitlines()[2], *rounds[-1].differences]
                        sys.stdout.write("\n".join(lines) + "\n")
                        sys.stdout.flush()
                        running.wait_until_whole(replicas)
    sys.stdout.write(f"\n{table(rounds)}\n")
    return 0 if not any(r.differences for r in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
