"""Streams that pause, and what they are made of."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from service.api.client import merged
from service.api.errors import ApiError
from service.api.sse import paced
from service.config import ApiSettings
from service.messages import Delta, Failure
from tests.api_server import CHAT, JSON_TYPE, TEXT, WAIT_S, make_api, serving
from tests.fake_pipeline import FakePipeline, Gate, Hang, text

COMMENT = ": keep-alive\n\n"


# --- comments ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick() -> Iterator[tuple[FakePipeline, str]]:
    """A server that loses patience at once."""
    pipeline = FakePipeline()
    with serving(make_api(pipeline, settings=ApiSettings(keep_alive_s=0.01))) as url:
        yield pipeline, url


@pytest.fixture
def pipeline(quick: tuple[FakePipeline, str]) -> FakePipeline:
    return quick[0]


@pytest.fixture
def url(quick: tuple[FakePipeline, str]) -> str:
    return quick[1]


def _read(http: httpx.Client, body: dict[str, Any], gate: Gate) -> str:
    """A stream, whose gate is opened at the first comment."""
    received, opened = "", False
    content = json.dumps(body | {"stream": True})
    with http.stream("POST", "/v1/completions", content=content, headers=JSON_TYPE) as response:
        assert response.status_code == 200
        for piece in response.iter_text():
            received += piece
            if COMMENT in received and not opened:
                gate.open()
                opened = True
    assert opened
    return received


def _texts(stream: str) -> list[str]:
    frames = stream.replace(COMMENT, "").split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    return [chunk["choices"][0]["text"] for chunk in chunks]


def test_before_the_first_token(http: httpx.Client, pipeline: FakePipeline) -> None:
    gate = Gate()
    pipeline.play([gate, *text("a", "b")])
    received = _read(http, TEXT, gate)
    assert received.startswith(COMMENT + COMMENT) or received.startswith(COMMENT + "data: ")
    assert _texts(received) == ["a", "b", ""]


def test_between_tokens(http: httpx.Client, pipeline: FakePipeline) -> None:
    gate = Gate()
    pipeline.play([Delta(0, "a"), gate, *text("b")])
    assert _texts(_read(http, TEXT, gate)) == ["a", "b", ""]


def test_while_text_is_held_back(http: httpx.Client, pipeline: FakePipeline) -> None:
    """Tokens come, but nothing is sent."""
    gate = Gate()
    pipeline.play([Delta(0, ""), Delta(1, ""), gate, *text("b")])
    assert _texts(_read(http, TEXT, gate)) == ["b", ""]


def test_a_late_failure_is_an_event(http: httpx.Client, pipeline: FakePipeline) -> None:
    gate = Gate()
    pipeline.play([gate, Failure("x")])
    received = _read(http, TEXT, gate).replace(COMMENT, "")
    assert received == (
        'data: {"error":{"message":"The pipeline failed; try again.","type":"server_error",'
        '"param":null,"code":null}}\n\ndata: [DONE]\n\n'
    )


def test_clients_skip_comments(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play([Hang()])
    with client.chat.completions.create(**CHAT, stream=True) as stream:
        assert stream.response.status_code == 200
        assert next(stream.response.iter_text()).startswith(COMMENT)
    assert pipeline.ended.wait(WAIT_S)
    gate = Gate()
    pipeline.play([Delta(0, "a"), gate, *text("b")])
    pieces = []
    for chunk in client.chat.completions.create(**CHAT, stream=True):
        pieces.append(chunk.choices[0].delta.content)
        if pieces == ["", "a"]:
            gate.open()
    assert pieces == ["", "a", "b", None]


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_in_a_pause(http: httpx.Client, pipeline: FakePipeline, n: int) -> None:
    pipeline.play(*[[Hang()]] * n)
    body = json.dumps(CHAT | {"stream": True, "n": n})
    with http.stream("POST", "/v1/chat/completions", content=body, headers=JSON_TYPE) as response:
        pieces = response.iter_text()  # held: without it the connection would be closed
        assert next(pieces).startswith(COMMENT)
        assert not pipeline.ended.is_set()
    assert pipeline.ended.wait(WAIT_S)


# --- merged -----------------------------------------------------------------------------------


class Source:
    """A generator that tells whether it was closed."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.hangs = asyncio.Event()
        self.closed = False

    async def stream(self) -> AsyncGenerator[Any, None]:
        try:
            for step in self.steps:
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if step is Hang:
                    self.hangs.set()
                    await asyncio.Event().wait()
                yield step
        finally:
            await asyncio.sleep(0)  # takes its time
            self.closed = True


async def test_merged_takes_turns() -> None:
    sources = [Source("a", "b"), Source(), Source("c")]
    found = [item async for item in merged([source.stream() for source in sources])]
    assert found == [(0, "a"), (2, "c"), (0, "b")]
    assert all(source.closed for source in sources)


async def test_merged_ends_with_the_first_failure() -> None:
    sources = [Source("a", Hang), Source("b", ApiError(503, "x"), "c")]
    items = merged([source.stream() for source in sources])
    assert [await anext(items), await anext(items)] == [(0, "a"), (1, "b")]
    with pytest.raises(ApiError):
        await anext(items)
    assert all(source.closed for source in sources)


async def test_merged_closes_all() -> None:
    sources = [Source("a", Hang), Source(Hang)]
    async with aclosing(merged([source.stream() for source in sources])) as items:
        assert await anext(items) == (0, "a")
    assert all(source.closed for source in sources)


async def test_merged_is_cancelled() -> None:
    sources = [Source(Hang), Source(Hang)]

    async def read() -> None:
        async for _ in merged([source.stream() for source in sources]):
            pass

    task = asyncio.create_task(read())
    for source in sources:
        await source.hangs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.closed for source in sources)


# --- paced ------------------------------------------------------------------------------------


async def test_paced() -> None:
    source = Source("a", "b")
    assert [item async for item in paced(source.stream(), 60)] == ["a", "b"]
    assert source.closed


async def test_paced_closes_its_source() -> None:
    source = Source("a", "b")
    async with aclosing(paced(source.stream(), 60)) as items:
        assert await anext(items) == "a"
        assert not source.closed
    assert source.closed


async def test_paced_closes_a_source_that_is_waited_for() -> None:
    source = Source("a", Hang)
    async with aclosing(paced(source.stream(), 0.001)) as items:
        assert await anext(items) == "a"
        assert [await anext(items), await anext(items)] == [None, None]
        assert not source.closed
    assert source.closed


async def test_paced_raises_what_its_source_raises() -> None:
    source = Source("a", ApiError(503, "x"))
    items = paced(source.stream(), 60)
    assert await anext(items) == "a"
    with pytest.raises(ApiError):
        await anext(items)
    assert source.closed
