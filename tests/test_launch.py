"""`spd-serve`: serves a YAML, and ends as a server should."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from service.launch import graces
from tests.chaos.deployment import make_toy
from tests.chaos.streams import HTTP, MODEL, Stream, bodies, start
from tests.serving import DEPLOYMENTS, Served, free_port, wait_until_gone, wait_until_ready

WAIT_S = 120
TOKENS = 700


def launch(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "service.launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("applications: [", "can't be read"),
        ("{}", "has no `applications`"),
        (
            "applications: [{import_path: 'service.app:build', args: {model: /nowhere}}]",
            "there is no folder '/nowhere'",
        ),
    ],
)
def test_what_can_not_be_served(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "spd.yaml"
    file.write_text(content)
    process = launch(str(file))
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert said in output
    assert "Traceback" not in output


def test_graces() -> None:
    applications = [
        {"name": "a", "import_path": "service.app:build", "args": {"limits": {"grace_s": 7}}},
        {"name": "b", "import_path": "service.app:build"},
        {"name": "c", "import_path": "other:build"},
    ]
    assert graces({"applications": applications}) == {"a": 7, "b": 30}


def test_sigterm_lets_streams_finish(tmp_path: Path, default_model: Path) -> None:
    """New requests get a 503 meanwhile, nothing is left in the end, and the exit code is 0."""
    config = yaml.safe_load((DEPLOYMENTS / "spd.yaml").read_text())
    port = config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] = {
        "model": str(make_toy(tmp_path / "toy", default_model)),
        "served_model_name": MODEL,
        "pipeline": {"max_len": 1024},
        "limits": {"grace_s": 90},
    }
    file, log, url = tmp_path / "spd.yaml", tmp_path / "log", f"http://127.0.0.1:{port}"
    file.write_text(yaml.safe_dump(config))
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.launch", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SPD_TEST_DEPLOYMENT": str(port)},
            start_new_session=True,
        )
    try:
        wait_until_ready(Served(url, process, log), WAIT_S)
        streams = [Stream(url, body, after=5) for body in bodies(TOKENS)[:2]]
        threads = start(streams)
        for stream in streams:
            stream.begun.wait(WAIT_S)
        process.send_signal(signal.SIGTERM)
        refused = _first_refusal(url)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        for thread in threads:
            thread.join(WAIT_S)
        for stream in streams:
            assert (stream.error, stream.reason) == (None, "length")
            assert len(stream.token_ids) == TOKENS
        assert process.wait(WAIT_S) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert not wait_until_gone(port)


def _first_refusal(url: str) -> httpx.Response:
    """A request is answered until the server has heard the signal."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        if answer.status_code != 200:
            return answer
    raise AssertionError("nothing was refused")
