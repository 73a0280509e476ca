"""The log: one line for each request, and what is not in it."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.access import Access, note_choices
from service.api.choices import Choice
from service.messages import Delta, GenerateRequest
from tests.api_server import (
    AUTHORIZED,
    BEARER,
    LIMIT,
    PREFLIGHT,
    TEXT,
    WAIT_S,
    AccessLog,
    Connection,
    guarded_api,
)
from tests.fake_pipeline import FakePipeline, Hang


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakePipeline, str]]:
    with guarded_api() as served:
        yield served


def test_log(http: httpx.Client, log: AccessLog) -> None:
    headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer sk-two"}
    http.get("/v1/models?secret=sk-two", headers=headers)
    line = log.lines.get(timeout=WAIT_S)
    pattern = (
        r'\{"request_id":"mine-1","method":"GET","path":"/v1/models","status":200,'
        r'"duration_ms":\d+\.\d\}'
    )
    assert re.fullmatch(pattern, line)


@pytest.mark.usefixtures("pipeline")
def test_log_of_refusals(http: httpx.Client, log: AccessLog) -> None:
    answer = http.get("/v1/models", headers={"Authorization": "Bearer sk-secret"})
    entry = log.next()
    assert entry["request_id"] == answer.headers["x-request-id"]
    assert entry["status"] == 401
    assert "secret" not in str(entry)
    http.post("/v1/completions", headers=BEARER, content=bytes(LIMIT + 1))
    assert log.next()["status"] == 413
    http.get("/v2%0A%7B%22a", headers=BEARER)
    assert log.next()["path"] == '/v2\n{"a'
    http.options("/v1/models", headers=PREFLIGHT)
    assert log.next()["method"] == "OPTIONS"


def test_log_of_failures(http: httpx.Client, pipeline: FakePipeline, log: AccessLog) -> None:
    pipeline.play([RuntimeError("secret")])
    http.post("/v1/completions", headers=BEARER, json=TEXT)
    entry = log.next()
    assert entry["status"] == 500
    assert "secret" not in str(entry)


def test_probes_are_not_logged(http: httpx.Client, log: AccessLog) -> None:
    for path in ("/health", "/ready", "/metrics", "/v2"):
        http.get(path, headers=BEARER)
    assert log.next()["path"] == "/v2"


@pytest.mark.parametrize("stream", [True, False])
def test_log_of_a_client_that_goes(
    url: str, pipeline: FakePipeline, log: AccessLog, stream: bool
) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    content = json.dumps(TEXT | {"stream": stream}).encode()
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, f"Content-Length: {len(content)}")
        connection.send(content)
        assert pipeline.started.wait(WAIT_S)
    assert log.next()["status"] == 499


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
SIZED: Message = START | {"headers": [(b"content-length", b"2")]}
PIECE: Message = {"type": "http.response.body", "body": b"a", "more_body": True}
END: Message = {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        ([START, PIECE, END], 200),
        ([START, PIECE], 499),
        ([], 499),
        ([asyncio.CancelledError()], 499),
        ([START, PIECE, asyncio.CancelledError()], 499),
        ([START, PIECE, END, asyncio.CancelledError()], 200),  # it had all
        ([SIZED, PIECE, PIECE, asyncio.CancelledError()], 200),
        ([SIZED, PIECE, asyncio.CancelledError()], 499),
        ([START, PIECE, RuntimeError()], 500),
        ([RuntimeError()], 500),
    ],
)
async def test_outcomes(log: AccessLog, steps: list[Message | BaseException], status: int) -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            await send(step | {"headers": list(step.get("headers", []))})

    with suppress(RuntimeError, asyncio.CancelledError):
        await _through_access(app)
    assert log.next()["status"] == status


async def _through_access(app: ASGIApp) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await Access(app, echo=True)(scope, receive, send)


async def test_choices_are_counted_as_far_as_they_got(log: AccessLog) -> None:
    """Two of one prompt, and one of another."""
    short, long = (GenerateRequest("id", tuple(range(size)), max_tokens=9) for size in (2, 5))
    choices = [Choice(0, short), Choice(1, short, leads=False), Choice(2, long)]

    async def app(scope: Scope, _: Receive, __: Send) -> None:
        note_choices(Request(scope), choices)
        for choice in choices[1:]:
            list(choice.take(Delta(0, "a")))
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await _through_access(app)
    entry = log.next()
    assert list(entry)[-2:] == ["prompt_tokens", "completion_tokens"]
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (7, 2)
