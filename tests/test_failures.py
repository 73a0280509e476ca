"""Failures of a running deployment, over real actors and HTTP: the shortest of `make chaos`."""

import json
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.chaos.deployment import Deployment, deployment, make_toy
from tests.chaos.faults import PDM, STAGE
from tests.chaos.rounds import TOKENS
from tests.chaos.streams import HTTP, MODEL, Stream, bodies, start

WAIT_S = 120
KINDS = (0, 3, 6)  # greedy; seeded with penalties; seeded with a schema


@pytest.fixture(scope="module")
def toy(tmp_path_factory, default_model: Path) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy") / "toy", default_model)


@pytest.fixture(scope="module")
def running(tmp_path_factory, toy: Path):
    with deployment(tmp_path_factory.mktemp("failures") / "log", toy) as running:
        yield running


def streams_of(running: Deployment, after: int = 20) -> list[Stream]:
    return [Stream(running.url, bodies(TOKENS)[kind], after=after) for kind in KINDS]


@pytest.fixture(scope="module")
def wanted(running: Deployment) -> list[Stream]:
    streams = streams_of(running)
    for thread in start(streams):
        thread.join(WAIT_S)
    assert [stream.reason for stream in streams] == ["length"] * len(KINDS)
    return streams


def go_through(running: Deployment, wanted: list[Stream], inject) -> None:
    """Streams that feel a fault, and come out as if there had been none."""
    streams = streams_of(running)
    threads = start(streams)
    for stream in streams:
        stream.begun.wait(WAIT_S)
    inject()
    for thread in threads:
        thread.join(WAIT_S)
    for stream, reference in zip(streams, wanted, strict=True):
        assert stream.difference(reference) is None


def test_a_killed_stage_is_a_pause(running: Deployment, wanted: list[Stream]) -> None:
    """Readiness tells the truth, liveness does not care, and who comes meanwhile waits."""
    late = Stream(running.url, bodies(TOKENS)[0])
    answers: list[httpx.Response] = []

    def inject() -> None:
        running.signal(STAGE, 0, signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            answers[:] = [HTTP.get(f"{running.url}/ready")]
            if answers[0].status_code == 503:
                break
        assert HTTP.get(f"{running.url}/health").status_code == 200
        threads.extend(start([late]))

    threads: list[threading.Thread] = []
    go_through(running, wanted, inject)
    assert answers[0].json()["ready"] is False
    for thread in threads:
        thread.join(WAIT_S)
    assert late.difference(wanted[0]) is None
    running.wait_until_whole()


@pytest.mark.full
def test_an_exception_in_the_middle_of_a_cycle(running: Deployment, wanted: list[Stream]) -> None:
    go_through(running, wanted, lambda: running.order("stage-1.accept"))
    running.wait_until_whole()


def test_a_drafting_that_raises_costs_nothing_but_drafts(
    running: Deployment, wanted: list[Stream]
) -> None:
    before = running.pids(PDM)
    go_through(running, wanted, lambda: running.order("drafter.draft"))
    assert running.pids(PDM) == before, "nothing was restarted"


# --- the long ones ------------------------------------------------------------------------------


@pytest.mark.full
def test_books_that_do_not_balance(running: Deployment, wanted: list[Stream]) -> None:
    """An idle pipeline whose last stage holds another text is started anew."""
    before = running.pids(STAGE)
    running.order("stage-1.differing")
    go_through(running, wanted, lambda: None)
    deadline = time.monotonic() + WAIT_S
    while set(running.pids(STAGE)) & set(before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not set(running.pids(STAGE)) & set(before)
    assert "the idle pipeline is not as it should be" in running.served.log.read_text()
    running.wait_until_whole()
    go_through(running, wanted, lambda: None)


@pytest.mark.full
def test_a_slow_reader_holds_nobody_up(running: Deployment) -> None:
    """It takes all slots for megabytes that it does not read. Whoever comes next gets the slots all
    the same, and the reader in the end the whole answer."""
    tokens, choices = 900, 8
    body = {"model": MODEL, "prompt": "x", "max_tokens": tokens, "n": choices, "stream": True,
            "temperature": 0, "ignore_eos": True, "logprobs": 5,
            "stream_options": {"include_usage": True}}  # fmt: skip
    content = json.dumps(body).encode()
    host, port = running.url.removeprefix("http://").split(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(WAIT_S)
        reader.connect((host, int(port)))
        reader.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        received = reader.recv(1024)  # it runs
        assert received.startswith(b"HTTP/1.1 200")
        next_one = Stream(running.url, bodies(8)[0])
        (thread,) = start([next_one])
        thread.join(WAIT_S)
        assert next_one.reason == "length"
        while more := reader.recv(1 << 20):
            received += more
    assert received.count(b'"finish_reason":"length"') == choices
    assert b'"completion_tokens":%d' % (tokens * choices) in received
    assert b"data: [DONE]" in received
