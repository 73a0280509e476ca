"""Starts a deployment as its user does, with `serve run`, and stops it with Ctrl-C."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
START_SECONDS = 180


@dataclass
class Served:
    """A running deployment."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, most: float = 60) -> int:
        """Ctrl-C, as a terminal sends it: once, to all processes of the group; the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(most)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def processes_of(port: int) -> list[str]:
    """Command lines of the live processes that carry this deployment's mark."""
    mark = f"SPD_TEST_DEPLOYMENT={port}\0".encode()
    alive = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environ.read_bytes():
                alive.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended
            continue
    return alive


@contextmanager
def serve(
    log: Path,
    args: dict[str, Any] | None = None,
    text: str | None = None,
    import_path: str | None = None,
    **environment: str,
) -> Iterator[Served]:
    """`serve run` of deployments/spd.yaml (or `text`) on a free port of this machine alone, with
    other `args` and another application where given."""
    config = yaml.safe_load(text or (DEPLOYMENTS / "spd.yaml").read_text())
    port = free_port()
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    if args is not None:
        config["applications"][0]["args"] = args
    if import_path is not None:
        config["applications"][0]["import_path"] = import_path
    file = log.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "serve"), "run", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SPD_TEST_DEPLOYMENT": str(port), **environment},
            start_new_session=True,
            # A test run in the background ignores Ctrl-C, and would hand that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(served)
        yield served
    finally:
        if process.poll() is None:
            served.stop()
        left = wait_until_gone(port)
        assert not left, f"still running after Ctrl-C: {left}"


def wait_until_ready(served: Served, most: float = START_SECONDS) -> None:
    deadline = time.monotonic() + most
    while time.monotonic() < deadline:
        assert served.process.poll() is None, served.log.read_text()[-4000:]
        try:
            if httpx.get(f"{served.url}/ready", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"not ready in {most} s:\n{served.log.read_text()[-4000:]}")


def wait_until_gone(port: int, most: float = 20) -> list[str]:
    """The processes that are left in the end."""
    deadline = time.monotonic() + most
    while (left := processes_of(port)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
