"""The door of the API: keys, the limit on bodies, CORS."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from service.api.guard import DRAIN_S, BodyLimit
from service.api.keys import ApiKeys
from service.config import ApiSettings
from tests.api_server import (
    AUTHORIZED,
    BEARER,
    LIMIT,
    ORIGIN,
    PREFLIGHT,
    TEXT,
    WAIT_S,
    AccessLog,
    Connection,
    guarded_api,
    make_api,
)
from tests.fake_pipeline import FakePipeline, text


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakePipeline, str]]:
    with guarded_api() as served:
        yield served


def _body(size: int) -> bytes:
    """A valid request of so many bytes."""
    content = json.dumps(TEXT).encode()
    return content + b" " * (size - len(content))


def _error(message: str, code: str) -> dict[str, Any]:
    kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


NO_KEY = _error("An API key is needed. Send it as Authorization: Bearer <key>.", "invalid_api_key")
WRONG_KEY = _error(
    "This API key is not known here. Send it as Authorization: Bearer <key>.", "invalid_api_key"
)
TOO_LARGE = _error(
    f"The body is larger than {LIMIT} bytes, the most that is taken here.", "request_too_large"
)


# --- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["Bearer sk-one", "bearer sk-two", "BEARER   sk-two"])
def test_a_key_opens(http: httpx.Client, value: str) -> None:
    assert http.get("/v1/models", headers={"Authorization": value}).status_code == 200


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (None, NO_KEY),
        ("", NO_KEY),
        ("sk-one", NO_KEY),
        ("Bearer", NO_KEY),
        ("Basic sk-one", WRONG_KEY),
        ("Bearer sk-three", WRONG_KEY),
        ("Bearer sk-on", WRONG_KEY),
        ("Bearer sk-one1", WRONG_KEY),
        ("Bearer SK-ONE", WRONG_KEY),
        ("Bearer sk-one sk-two", WRONG_KEY),
        ("Bearer sk-one, sk-two", WRONG_KEY),
        ("Bearer \xe9", WRONG_KEY),
    ],
)
def test_nothing_else_opens(http: httpx.Client, value: str | None, body: dict[str, Any]) -> None:
    headers = {} if value is None else {"Authorization": value.encode("latin-1")}
    response = http.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json() == body
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["connection"] == "close"
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_who_watches_needs_no_key(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/docs", "/openapi.json", "/version", "/v2", "/page", "/health/", "//health", "/Health"],
)
def test_all_else_needs_a_key(http: httpx.Client, url: str, path: str) -> None:
    assert http.get(f"{url}{path}").status_code == 401  # a client's own "//health" is another host


@pytest.mark.usefixtures("pipeline")
def test_openai_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-two", max_retries=0) as client:
        assert client.completions.create(**TEXT).choices[0].text == "ok"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(**TEXT)
        assert caught.value.code == "invalid_api_key"


def test_a_wrong_key_is_refused_before_the_body(url: str, pipeline: FakePipeline) -> None:
    with Connection(url) as connection:
        connection.post("/v1/completions", f"Content-Length: {10**12}", "Expect: 100-continue")
        status, headers, body = connection.answer()
        assert (status, body) == (401, NO_KEY)
        assert headers["connection"] == "close"
        assert connection.rest() == b""
    assert not pipeline.requests


# --- the limit --------------------------------------------------------------------------------


def test_limit(http: httpx.Client, pipeline: FakePipeline) -> None:
    headers = BEARER | {"Content-Type": "application/json"}
    response = http.post("/v1/completions", content=_body(LIMIT), headers=headers)
    assert response.status_code == 200
    pipeline.play(text("ok"))
    response = http.post("/v1/completions", content=_body(LIMIT + 1), headers=headers)
    assert response.status_code == 413
    assert response.json() == TOO_LARGE
    assert response.headers["connection"] == "close"
    assert len(response.headers["x-request-id"]) == 32
    assert not pipeline.requests


@pytest.mark.parametrize("length", [LIMIT + 1, 10**12])
def test_a_large_length_is_refused_at_once(url: str, length: int) -> None:
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, f"Content-Length: {length}")
        status, headers, body = connection.answer()
        assert (status, body) == (413, TOO_LARGE)
        assert headers["connection"] == "close"
        assert connection.rest() == b""


def test_a_large_body_is_never_asked_for(url: str) -> None:
    """No `100 Continue` comes before the answer."""
    with Connection(url) as connection:
        head = (AUTHORIZED, f"Content-Length: {LIMIT + 1}", "Expect: 100-continue")
        connection.post("/v1/completions", *head)
        assert connection.answer()[0] == 413


def test_a_client_that_writes_all_first_reads_the_answer(url: str) -> None:
    with Connection(url) as connection:
        size = 64 * 2**20  # more than all buffers on the way hold
        connection.post("/v1/completions", AUTHORIZED, f"Content-Length: {size}")
        for _ in range(64):
            connection.send(bytes(2**20))
        assert connection.answer()[2] == TOO_LARGE
        assert connection.rest() == b""


@pytest.mark.parametrize("size", [1, 500, 10_000])
def test_chunks_are_counted(url: str, pipeline: FakePipeline, size: int) -> None:
    """The last ones are not sent: the answer must not wait for them."""
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, "Transfer-Encoding: chunked")
        connection.send((b"%x\r\n" % size + b" " * size + b"\r\n") * (LIMIT // size + 1))
        assert connection.answer()[::2] == (413, TOO_LARGE)
        assert connection.rest() == b""
    assert not pipeline.requests


def test_chunks_within_the_limit(url: str) -> None:
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, "Transfer-Encoding: chunked")
        for byte in _body(LIMIT):
            connection.send(b"1\r\n%c\r\n" % byte)
        connection.send(b"0\r\n\r\n")
        assert connection.answer()[0] == 200


def test_an_endless_upload_ends(url: str) -> None:
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, "Transfer-Encoding: chunked")
        began = time.monotonic()
        with suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < began + WAIT_S:
                connection.send(b"400\r\n" + bytes(0x400) + b"\r\n")
        assert time.monotonic() - began < DRAIN_S + 2


def test_a_length_beside_chunks_is_refused(url: str, pipeline: FakePipeline) -> None:
    with Connection(url) as connection:
        head = (AUTHORIZED, "Content-Length: 4", "Transfer-Encoding: chunked")
        connection.post("/v1/completions", *head)
        connection.send(b"ffff\r\n" + bytes(0xFFFF))
        assert connection.rest().startswith(b"HTTP/1.1 400 ")
    assert not pipeline.requests


def test_a_body_that_never_ends(url: str, pipeline: FakePipeline, log: AccessLog) -> None:
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, f"Content-Length: {LIMIT}")
        connection.send(json.dumps(TEXT).encode())
    assert log.next()["status"] == 499
    assert not pipeline.requests


def test_a_slow_upload_holds_nobody_up(url: str, http: httpx.Client) -> None:
    content = json.dumps(TEXT).encode()
    with Connection(url) as connection:
        connection.post("/v1/completions", AUTHORIZED, f"Content-Length: {len(content)}")
        for byte in content:
            connection.send(bytes([byte]))
            time.sleep(0.005)
            assert http.get("/health").status_code == 200
        assert connection.answer()[0] == 200


async def _through_limit(scope: Scope, chunks: list[bytes]) -> tuple[list[Message], list[bytes]]:
    """What is sent, and the bodies that get through, on a server that checks no lengths."""
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1}
        for i, chunk in enumerate(chunks)
    ]
    sent: list[Message] = []
    bodies: list[bytes] = []

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        bodies.append((await receive())["body"])
        assert (await receive())["type"] == "http.disconnect"

    async def receive() -> Message:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await BodyLimit(app, max_bytes=LIMIT)({"type": "http"} | scope, receive, send)
    return sent, bodies


@pytest.mark.parametrize("declared", [b"0", b"5", b"-1", b"x", b"9" * 5000, b""])
async def test_no_length_is_believed(declared: bytes) -> None:
    scope = {"headers": [(b"content-length", declared)]}
    sent, bodies = await _through_limit(scope, [bytes(LIMIT - 1), b"", b"a", b"b", b"c"])
    assert sent[0]["status"] == 413
    assert bodies == []
    sent, bodies = await _through_limit(scope, [bytes(LIMIT - 1), b"", b"a"])
    assert sent == []
    assert bodies == [bytes(LIMIT - 1) + b"a"]


# --- CORS -------------------------------------------------------------------------------------


def test_preflight_needs_no_key(http: httpx.Client) -> None:
    response = http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-allow-methods"] == "GET, POST"
    allowed = response.headers["access-control-allow-headers"]
    assert allowed == PREFLIGHT["Access-Control-Request-Headers"]
    assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", ORIGIN + ":444"])
def test_other_origins(http: httpx.Client, origin: str) -> None:
    response = http.options("/v1/chat/completions", headers=PREFLIGHT | {"Origin": origin})
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    response = http.get("/v1/models", headers=BEARER | {"Origin": origin})
    assert "access-control-allow-origin" not in response.headers


def test_all_answers_have_the_headers(http: httpx.Client, pipeline: FakePipeline) -> None:
    """Errors too: a page can't read them otherwise."""
    pipeline.play([RuntimeError("secret")])
    page = BEARER | {"Origin": ORIGIN, "Content-Type": "application/json"}
    answers = [
        http.get("/v1/models", headers=page),
        http.get("/v1/models", headers={"Origin": ORIGIN}),
        http.get("/v2", headers=page),
        http.post("/v1/completions", headers=page, content=b"{"),
        http.post("/v1/completions", headers=page, content=bytes(LIMIT + 1)),
        http.post("/v1/completions", headers=page, json=TEXT),
    ]
    assert [answer.status_code for answer in answers] == [200, 401, 404, 400, 413, 500]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id"
        assert "Origin" in answer.headers["vary"]
        assert len(answer.headers["x-request-id"]) == 32


async def _asks(app: Any, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.request(method, path, headers={"Origin": ORIGIN} | headers)


async def test_cors_is_off_by_default() -> None:
    app = make_api(FakePipeline())
    response = await _asks(app, "/v1/models")
    assert response.status_code == 200
    assert not any("access-control" in name for name in response.headers)
    assert (await _asks(app, "/v1/models", "OPTIONS", **PREFLIGHT)).status_code == 405


async def test_any_origin() -> None:
    app = make_api(FakePipeline(), settings=ApiSettings(cors_origins=("*",)))
    assert (await _asks(app, "/v1/models")).headers["access-control-allow-origin"] == "*"


async def test_no_keys_mean_an_open_server() -> None:
    assert (await _asks(make_api(FakePipeline(), keys=ApiKeys()), "/docs")).status_code == 200
