"""`python -m loadtest SCENARIO...`: loads a server, and reports. `make load` runs a short one."""

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import about
from clients import Client, ClientError
from loadtest.memory import watched_memory
from loadtest.report import Measured, write_report
from loadtest.running import ROOT, run_scenario
from loadtest.sample import write_samples
from loadtest.scenario import ScenarioError, read_scenario
from service.config import ConfigError

HERE = Path(__file__).parent
SHORT = HERE / "scenarios" / "short.yaml"
DEPLOYMENT = HERE / "deployment.yaml"
BUILD = ROOT / "build" / "loadtest"


def main() -> None:
    options = _parsed()
    out: Path = options.out or BUILD / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        measured = _measured(options, out)
    except (ScenarioError, ConfigError, ClientError) as error:
        sys.exit(f"loadtest: {error}")
    _say(f"{sum(len(each.samples) for each in measured)} requests; {out / 'README.md'}")


def _measured(options: argparse.Namespace, out: Path) -> list[Measured]:
    scenarios = [(file, *read_scenario(file)) for file in options.scenarios]
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with ExitStack() as stack:
        server = _server(options, stack)
        url = server.url
        facts = {**about(), "commit": _commit(), "server": server.about, **_of_server(url)}
        measured = []
        for file, scenario, prompts in scenarios:
            with watched_memory(server.process) as memory:
                samples = run_scenario(scenario, prompts, url, _say)
            (lines := out / f"{scenario.name}.jsonl").unlink(missing_ok=True)
            write_samples(samples, lines)
            measured.append(Measured(scenario, file.read_text(), samples, memory))
    facts["took"] = f"{time.monotonic() - begun:.0f} s, to {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    write_report(measured, facts, out)
    return measured


class Server(NamedTuple):
    """The server to load. `process`: its first one, if it was started here."""

    url: str
    about: str
    process: int | None = None


def _server(options: argparse.Namespace, stack: ExitStack) -> Server:
    """Raises ScenarioError if it does not start."""
    if options.url:
        return Server(options.url, options.url)
    # Starts it on a free port, and ends all that it has started.
    from tests.serving import serve

    _say(f"starting {options.deployment}")
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        text = options.deployment.read_text()
        served = stack.enter_context(serve(BUILD / "server.log", text=text))
    except (AssertionError, OSError) as error:
        raise ScenarioError(f"{options.deployment} can't be served: {error}") from None
    what = f"{options.deployment.name} of this commit, on this machine"
    return Server(served.url, what, served.process.pid)


def _of_server(url: str) -> dict[str, str]:
    with Client(url) as client:
        (model, *_) = client.models()
        return {"model": f"{model.id}, {model.max_model_len} positions, server {client.version()}"}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenarios", type=Path, nargs="*", default=[SHORT], help="YAML files")
    parser.add_argument("--url", help="a running server; without it, one is started")
    parser.add_argument("--deployment", type=Path, default=DEPLOYMENT, help="what is started")
    parser.add_argument("--out", type=Path, help="folder of the report")
    return parser.parse_args()


def _say(message: str) -> None:
    sys.stderr.write(f"loadtest: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
