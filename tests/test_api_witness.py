"""Whatever else comes in, a stream beside it stays what it is, and the pipeline sees none of it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from service.messages import Delta
from tests.api_server import (
    CHAT,
    JSON_TYPE,
    TEXT,
    WAIT_S,
    Connection,
    make_api,
    post,
    serving,
)
from tests.fake_pipeline import FakePipeline, Gate, text
from tests.test_api import BAD_CHATS, BAD_TEXTS

DEEP = 100_000


@contextmanager
def witnessed() -> Iterator[tuple[str, FakePipeline]]:
    """A server on which a stream runs, from before until after; then it must be right."""
    pipeline, gate, got = FakePipeline(), Gate(), []
    pipeline.play([Delta(0, "a"), gate, *text("b", "c")])
    with serving(make_api(pipeline)) as url:

        def read() -> None:
            body = json.dumps(TEXT | {"stream": True})
            with httpx.stream(
                "POST", f"{url}/v1/completions", content=body, headers=JSON_TYPE, timeout=60
            ) as response:
                got.extend(line for line in response.iter_lines() if line)

        reader = threading.Thread(target=read)
        reader.start()
        assert pipeline.started.wait(WAIT_S)
        try:
            yield url, pipeline
        finally:
            gate.open()
            reader.join(60)
    assert len(pipeline.requests) == 1, "something reached the pipeline"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in got[:-1]]
    assert texts == ["a", "b", "c", ""]
    assert got[-1] == "data: [DONE]"


def test_every_bad_body() -> None:
    with witnessed() as (url, _), httpx.Client(base_url=url, timeout=WAIT_S) as http:
        for base, corpus in ((CHAT, BAD_CHATS), (TEXT, BAD_TEXTS)):
            for change, param in corpus:
                response = post(http, base | change)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "[" * DEEP + "]" * DEEP),
        ("messages", '[{"role":' * DEEP + "0" + "}]" * DEEP),
        ("response_format", '{"a":' * DEEP + "1" + "}" * DEEP),
        ("seed", "9" * 5000),
        ("temperature", "1e400"),
        ("logit_bias", json.dumps({str(i): 1 for i in range(100_000)})),
        ("stop", json.dumps(["x" * 10] * 100_000)),
        ("messages", json.dumps([{"role": "user", "content": "x"}] * 20_000)),
        ("messages", '"\\ud800\\udc00\\ud800"'),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_bodies_that_are_too_much(field: str, value: str) -> None:
    """Deep, long and huge: a 4xx, and quickly."""
    content = json.dumps({"model": CHAT["model"]})[:-1] + f', "{field}": {value}}}'
    if field != "messages":
        content = content[:-1] + ', "messages": [{"role": "user", "content": "hi"}]}'
    with witnessed() as (url, _):
        response = httpx.post(
            f"{url}/v1/chat/completions", content=content, headers=JSON_TYPE, timeout=WAIT_S
        )
        assert response.status_code in (400, 413), response.text[:200]
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] is None or error["param"].startswith(field)


MALFORMED = [
    b"",
    b"\r\n\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
    b"GET\r\n\r\n",
    b"POST /v1/chat/completions\r\n\r\n",
    b"POST /v1/chat/completions HTTP/9.9\r\nHost: x\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: ten\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"POST /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /%00%ff%fe HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"X" * 200_000,
]


def test_malformed_http() -> None:
    with witnessed() as (url, _):
        for data in MALFORMED:
            with Connection(url) as connection:
                try:
                    connection.send(data)
                    connection.end()
                    answer = connection.rest()
                except OSError:  # the server has hung up
                    continue
                assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]


@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_truncated_uploads(kept: float) -> None:
    """The client says how long its body is, and hangs up before the end."""
    body = json.dumps(CHAT).encode()
    count = int(len(body) * kept) if 0 < kept < 1 else int(kept) % len(body)
    with witnessed() as (url, _), Connection(url) as connection:
        connection.post("/v1/chat/completions", f"Content-Length: {len(body)}")
        connection.send(body[:count])


def test_odd_but_right() -> None:
    """What is at an edge and lawful is no error."""
    pipeline = FakePipeline()
    odd: list[dict[str, Any]] = [
        CHAT | {"temperature": 0, "seed": -(2**63)},
        CHAT | {"stop": ["x" * 10] * 16},
        CHAT | {"max_tokens": 10**400},
        CHAT | {"messages": [{"role": "user", "content": "\U0010ffff\u0000"}]},
    ]
    with serving(make_api(pipeline)) as url, httpx.Client(base_url=url, timeout=WAIT_S) as http:
        for body in odd:
            assert post(http, body).status_code == 200
