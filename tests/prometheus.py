"""A real Prometheus, Debian's package, and its promtool."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serving import free_port

WAIT_S = 30
ABSENT = [program for program in ("prometheus", "promtool") if shutil.which(program) is None]
needs_prometheus = pytest.mark.skipif(
    bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (apt install prometheus)"
)


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, timeout=WAIT_S
    )


@dataclass(frozen=True)
class Prometheus:
    http: httpx.Client

    def _get(self, path: str, **params: str) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series."""
        found = self._get("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def value(self, expression: str) -> float | None:
        """Of the only series, None where there is none."""
        found = self.query(expression)
        assert len(found) <= 1, (expression, found)
        return found[0][1] if found else None

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        active: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return active

    def wait_until(self, expression: str, most: float = WAIT_S) -> None:
        """Until the expression has a series."""
        deadline = time.monotonic() + most
        while not self.query(expression):
            targets = [(t["scrapeUrl"], t["health"], t["lastError"]) for t in self.targets()]
            assert time.monotonic() < deadline, (expression, targets)
            time.sleep(0.5)


@contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    file, log, port = folder / "prometheus.yml", folder / "prometheus.log", free_port()
    file.write_text(yaml.safe_dump(config))
    checked = promtool("check", "config", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
            _wait_until_ready(http, process, log)
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _wait_until_ready(http: httpx.Client, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if http.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def expressions(dashboard: Path) -> list[tuple[str, str]]:
    """The panel's title and the query, of each query of a Grafana dashboard."""
    panels = json.loads(dashboard.read_text())["panels"]
    return [(p["title"], target["expr"]) for p in panels for target in p.get("targets", [])]
