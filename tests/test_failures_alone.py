"""Deployments that end or change as a whole; each has the machine to itself."""

import signal
import time
from pathlib import Path

import pytest

from tests.chaos.deployment import deployment, make_toy
from tests.chaos.faults import STAGE
from tests.chaos.rounds import TOKENS
from tests.chaos.streams import HTTP, MODEL, Stream, bodies, start
from tests.test_failures import WAIT_S, streams_of


@pytest.fixture(scope="module")
def toy(tmp_path_factory, default_model: Path) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy") / "toy", default_model)


@pytest.mark.full
def test_a_configuration_that_is_deployed_anew_under_load(tmp_path: Path, toy: Path) -> None:
    """Streams run to their ends in the old replicas, and requests that come meanwhile in the new
    ones; nothing is lost."""
    with deployment(tmp_path / "log", toy, grace_s=60.0) as running:
        running.wait_until_whole()
        before = running.pids(STAGE)
        wanted = streams_of(running)
        for thread in start(wanted):
            thread.join(WAIT_S)
        streams = streams_of(running)
        threads = start(streams)
        for stream in streams:
            stream.begun.wait(WAIT_S)
        running.deploy(limits={"grace_s": 60.0, "queue": 7})
        late = streams_of(running)
        threads += start(late)
        for thread in threads:
            thread.join(WAIT_S)
        for stream, reference in zip(streams + late, wanted + wanted, strict=True):
            assert stream.difference(reference) is None
        running.wait_until_whole()
        assert not set(running.pids(STAGE)) & set(before), "the new settings are served"


@pytest.mark.full
def test_after_too_many_restarts(tmp_path: Path, toy: Path) -> None:
    """The stream ends with OpenAI's error, new requests fail at once, and readiness says why."""
    limits = {"max_restarts": 1, "restart_window_s": 600}
    with deployment(tmp_path / "log", toy, **limits) as running:
        running.wait_until_whole()
        for _ in range(2):
            stream = Stream(running.url, bodies(TOKENS)[0], after=20)
            (thread,) = start([stream])
            stream.begun.wait(WAIT_S)
            running.signal(STAGE, 0, signal.SIGKILL)
            thread.join(WAIT_S)
            if stream.error is None:
                running.wait_until_whole()
        assert stream.error is not None
        assert stream.error["type"] == "server_error"
        assert "restarted more than 1 times in 600 s" in stream.error["message"]
        ready = HTTP.get(f"{running.url}/ready")
        assert ready.status_code == 503
        assert "the next try is in" in ready.json()["detail"]
        began = time.monotonic()
        answer = HTTP.post(f"{running.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert answer.status_code == 503
        assert time.monotonic() - began < 10
