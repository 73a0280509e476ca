"""Serves a YAML as `serve run` does, and ends as a server should: `spd-serve deployments/spd.yaml`.

SIGTERM and Ctrl-C let running requests finish: new ones get a 503, and the rest have
`limits.grace_s`. A second signal ends it at once. What can't be served is one message and exit
code 1, before Ray starts or, where only the replicas could know, after it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from service.config import parse_settings
from service.preflight import IMPORT_PATH, passes

LOOK_S = 0.2
ANSWER_S = 5.0
FAREWELL_S = 0.5  # until the last bytes are out


class Signals:
    """SIGTERM and SIGINT, counted."""

    def __init__(self) -> None:
        self._count = 0
        self._came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._came.set()

    @property
    def count(self) -> int:
        return self._count

    def wait(self, seconds: float) -> bool:
        return self._came.wait(seconds)


def graces(config: Mapping[str, Any]) -> dict[str, float]:
    """The names of our applications in a YAML, and how long each may take to end."""
    return {
        application.get("name", "default"): parse_settings(
            application.get("args") or {}
        ).limits.grace_s
        for application in config["applications"]
        if application.get("import_path") == IMPORT_PATH
    }


def run(file: Path) -> int:
    """Serves until a signal comes; the exit code."""
    import ray
    from ray import serve
    from ray.serve._private import api
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load(file.read_text())
    schema = ServeDeploySchema.model_validate(config)
    ray.init(address=os.environ.get("RAY_ADDRESS"), namespace=SERVE_NAMESPACE)
    signals = Signals()  # behind Ray's own
    try:
        # As `serve run`, whose own function can't be told to drain.
        client = api.serve_start(
            http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
        )
        client.deploy_apps(schema, _blocking=False)
        names = [application.name for application in schema.applications]
        failure = _serve(names, signals)
        if failure is not None:
            sys.stderr.write(f"{file} can't be served.\n{failure}\n")
            return 1
        for name, grace_s in graces(config).items():
            drain(name, grace_s, signals)
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()


def _serve(names: Iterable[str], signals: Signals) -> str | None:
    """Waits for a signal. Returns why an application could not be started, if that is so."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    starting = set(names)
    while not signals.wait(LOOK_S if starting else 3600.0):
        applications = serve.status().applications if starting else {}
        for name in sorted(starting & applications.keys()):
            found = applications[name]
            if found.status == ApplicationStatus.DEPLOY_FAILED:
                return str(found.message)
            if found.status == ApplicationStatus.RUNNING:
                starting.discard(name)
    return None


def drain(name: str, grace_s: float, signals: Signals) -> None:
    """Lets an application's requests finish, for so long at most."""
    from ray import serve

    deadline = time.monotonic() + grace_s
    handle = serve.get_deployment_handle("Ingress", name)
    while time.monotonic() < deadline and signals.count < 2:
        try:
            left = sum(handle.broadcast("drain").results(timeout_s=ANSWER_S))
        except Exception as error:  # it was not there yet, or is not any more
            sys.stderr.write(f"spd-serve: {name} can't be asked to end: {error}\n")
            return
        if left == 0:
            time.sleep(FAREWELL_S)
            return
        time.sleep(LOOK_S)


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: spd-serve deployments/spd.yaml\n")
        return 2
    file = Path(sys.argv[1])
    return run(file) if passes(file) else 1


if __name__ == "__main__":
    sys.exit(main())
