"""Our own clients against the API over a scripted pipeline, and against broken servers."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from clients import (
    ApiError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    ClientError,
    IncompleteStreamError,
    InvalidAnswerError,
    NotFoundError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    Retries,
    ServerError,
    TransportError,
)
from clients.requests import Streaming
from service.messages import Delta
from tests.api_server import LIMIT, MAX_LEN, MODEL, WAIT_S, guarded_api
from tests.fake_pipeline import FakePipeline, Hang, obliging, text
from tests.serving import free_port

HELLO = [{"role": "user", "content": "hi"}]
ONCE = Retries(most=0)


class Asked:
    """One of the two clients, for tests that hold for both."""

    def __init__(self, *, is_async: bool) -> None:
        self.is_async = is_async

    def whole(self, url: str, name: str, *args: Any, client: Any = None, **options: Any) -> Any:
        """What a method returns."""
        if not self.is_async:
            with Client(url, **client or {}) as made:
                return getattr(made, name)(*args, **options)

        async def ask() -> Any:
            async with AsyncClient(url, **client or {}) as made:
                return await getattr(made, name)(*args, **options)

        return asyncio.run(ask())

    def chunks(
        self, url: str, name: str, *args: Any, client: Any = None, most: int = 99, **options: Any
    ) -> Iterator[Any]:
        """Up to `most` chunks of a stream, as far as they come before an exception."""
        if not self.is_async:
            with (
                Client(url, **client or {}) as made,
                getattr(made, name)(*args, **options) as stream,
            ):
                for _, chunk in zip(range(most), stream, strict=False):
                    yield chunk
            return
        found: list[Any] = []

        async def ask() -> None:
            async with (
                AsyncClient(url, **client or {}) as made,
                getattr(made, name)(*args, **options) as stream,
            ):
                async for chunk in stream:
                    found.append(chunk)
                    if len(found) == most:
                        break

        try:
            asyncio.run(ask())
        finally:
            yield from found


@pytest.fixture(params=["Client", "AsyncClient"])
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(is_async=request.param == "AsyncClient")


# --- the API ----------------------------------------------------------------------------------


def test_chat(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hel", "lo"))
    answer = asked.whole(url, "chat", HELLO, temperature=0.5, extra={"top_k": 7}, max_tokens=9)
    assert (answer.text, answer.choices[0].finish_reason) == ("Hello", "stop")
    assert answer.model == MODEL  # asked for without being named
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 2)
    assert answer.usage.acceptance == 0.5
    (request,) = pipeline.requests
    assert (request.sampling.temperature, request.sampling.top_k, request.max_tokens) == (0.5, 7, 9)


def test_chat_stream(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hé", "l", "lo"))
    chunks = list(asked.chunks(f"{url}/v1/", "stream_chat", HELLO))
    assert [chunk.text for chunk in chunks] == ["", "Hé", "l", "lo", "", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["stop", None]
    assert [chunk.usage is None for chunk in chunks] == [True] * 5 + [False]


def test_a_stream_without_usage(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("a"))
    chunks = list(asked.chunks(url, "stream_chat", HELLO, Streaming(usage=False)))
    assert [chunk.usage for chunk in chunks] == [None] * 3


def test_completions(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"))
    answer = asked.whole(url, "complete", "x", n=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab"]
    assert answer.text == "ab"
    pipeline.play(text("a", "b"))
    chunks = list(asked.chunks(url, "stream_complete", [120, 121]))
    assert [chunk.text for chunk in chunks] == ["a", "b", "", ""]
    assert pipeline.requests[0].prompt_ids == (120, 121)
    assert chunks[-1].usage.total_tokens == 4


def test_logprobs(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(obliging)
    answer = asked.whole(url, "chat", HELLO, logprobs=True, top_logprobs=1)
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, token.top_logprobs[0].logprob) == ("B", -1.0, -0.5)
    pipeline.play(obliging)
    answer = asked.whole(url, "complete", "x", logprobs=1)
    assert answer.choices[0].logprobs.token_logprobs == [-1.0]


def test_the_rest(asked: Asked, url: str) -> None:
    (model,) = asked.whole(url, "models")
    assert (model.id, model.max_model_len) == (MODEL, MAX_LEN)
    tokens = asked.whole(url, "tokenize", "hé")
    assert (tokens.tokens, tokens.count, tokens.max_model_len) == ([104, 233], 2, MAX_LEN)
    assert asked.whole(url, "tokenize", HELLO).count == len("<user>hi")
    assert asked.whole(url, "detokenize", [104, 233]) == "hé"
    assert asked.whole(url, "version").count(".") == 2


def test_url_and_key_from_the_environment(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    with guarded_api() as (pipeline, url):
        monkeypatch.setenv("SPD_BASE_URL", url)
        with pytest.raises(AuthenticationError) as caught:
            asked.whole(None, "chat", HELLO)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert caught.value.request_id
        monkeypatch.setenv("SPD_API_KEY", "sk-one")
        assert asked.whole(None, "chat", HELLO).text == "ok"
        assert asked.whole(None, "chat", HELLO, client={"api_key": "sk-two"}).text == "ok"
        with pytest.raises(AuthenticationError):
            asked.whole(None, "chat", HELLO, client={"api_key": "sk-three"})
        with pytest.raises(RequestTooLargeError):
            asked.whole(None, "complete", "x" * LIMIT)
        assert len(pipeline.requests) == 2


def test_no_url(asked: Asked) -> None:
    with pytest.raises(ValueError, match="'localhost:8000' should begin with http"):
        asked.whole("localhost:8000", "models")


# --- to go before the end ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream_chat", "stream_complete"])
def test_leaving_a_stream_aborts_it(
    asked: Asked, url: str, pipeline: FakePipeline, name: str
) -> None:
    pipeline.play([Delta(0, "a"), Delta(1, "b"), Hang()])
    prompt = HELLO if name == "stream_chat" else "x"
    assert len(list(asked.chunks(url, name, prompt, most=2))) == 2
    assert pipeline.ended.wait(WAIT_S)


async def test_a_cancelled_task_aborts_its_stream(url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    seen = asyncio.Event()
    async with AsyncClient(url) as client:

        async def read() -> None:
            async with client.stream_complete("x") as stream:
                async for _ in stream:
                    seen.set()

        task = asyncio.create_task(read())
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(pipeline.ended.wait, WAIT_S)
        pipeline.play(text("a"))
        assert (await client.complete("x")).text == "a"


def test_an_exception_inside_aborts(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])

    def fail() -> None:
        with Client(url) as client, client.stream_complete("x") as stream:
            for _ in stream:
                raise KeyError

    async def fail_async() -> None:
        async with AsyncClient(url) as client, client.stream_complete("x") as stream:
            async for _ in stream:
                raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(fail_async()) if asked.is_async else fail()
    assert pipeline.ended.wait(WAIT_S)


# --- errors -----------------------------------------------------------------------------------


def test_bad_requests(asked: Asked, url: str) -> None:
    with pytest.raises(BadRequestError, match="temperature") as caught:
        asked.whole(url, "chat", HELLO, temperature=9)
    assert (caught.value.param, caught.value.status) == ("temperature", 400)
    with pytest.raises(NotFoundError) as caught:
        list(asked.chunks(url, "stream_chat", HELLO, client={"model": "other"}))
    assert caught.value.code == "model_not_found"


def test_an_error_in_mid_stream(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), RuntimeError("secret")])
    chunks = asked.chunks(url, "stream_complete", "x")
    assert next(chunks).text == "a"
    with pytest.raises(ServerError) as caught:
        list(chunks)
    assert (caught.value.status, str(caught.value)) == (None, "Internal server error.")


def test_no_server(asked: Asked) -> None:
    with pytest.raises(TransportError, match=r"can't be reached .* Is the server running"):
        asked.whole(f"http://127.0.0.1:{free_port()}", "models", client={"retries": ONCE})


def test_silence(asked: Asked, url: str, pipeline: FakePipeline) -> None:
    """Not asked again: the server may still be at work."""
    pipeline.play([Hang()])
    client = {"timeout_s": 0.2, "model": MODEL}
    with pytest.raises(RequestTimeoutError):
        asked.whole(url, "complete", "x", client=client)
    assert pipeline.ended.wait(WAIT_S)
    assert len(pipeline.requests) == 1


# --- against a server that does anything ------------------------------------------------------

CHUNK = b'data: {"id":"x","model":"m","choices":[{"index":0,"text":"a"}]}\n\n'
WHOLE = b'{"id":"x","model":"m","choices":[{"index":0,"text":"a"}]}'


class Script:
    """Answers one after another; counts the requests and the pauses between them."""

    def __init__(self, *answers: httpx2.Response | Exception) -> None:
        self.answers = list(answers)
        self.count = 0

    def __call__(self, _: httpx2.Request) -> httpx2.Response:
        self.count += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    # The clients' names alone: servers of other tests wait in this process too.
    monkeypatch.setattr("clients.client.time", SimpleNamespace(sleep=found.append))
    monkeypatch.setattr("clients.async_client.asyncio", SimpleNamespace(sleep=sleep))
    return found


def ask(asked: Asked, script: Script, name: str = "complete", **retries: Any) -> Any:
    client = {
        "model": "m",
        "transport": httpx2.MockTransport(script),
        "retries": Retries(**retries),
    }
    if name == "complete":
        return asked.whole("http://x", name, "x", client=client).text
    return "".join(chunk.text for chunk in asked.chunks("http://x", name, "x", client=client))


def failed(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, headers=headers, json={"error": {"message": "no"}})


@pytest.mark.parametrize("name", ["complete", "stream_complete"])
@pytest.mark.parametrize(
    "failure",
    [
        lambda: failed(429),
        lambda: failed(500),
        lambda: failed(503),
        lambda: httpx2.ConnectError("refused"),
        lambda: httpx2.ConnectTimeout("slow"),
        lambda: httpx2.RemoteProtocolError("gone"),
    ],
)
def test_failures_that_may_pass(
    asked: Asked, pauses: list[float], failure: Callable[[], Any], name: str
) -> None:
    whole = WHOLE if name == "complete" else CHUNK + b"data: [DONE]\n\n"
    script = Script(failure(), failure(), httpx2.Response(200, content=whole))
    assert ask(asked, script, name) == "a"
    assert 0.375 <= pauses[0] <= 0.5
    assert 0.75 <= pauses[1] <= 1.0
    script = Script(failure(), failure(), failure())
    with pytest.raises(ClientError):
        ask(asked, script, name)
    assert script.count == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 504])
def test_failures_that_stay(asked: Asked, pauses: list[float], status: int) -> None:
    script = Script(failed(status))
    with pytest.raises(ApiError) as caught:
        ask(asked, script)
    assert caught.value.status == status
    assert (script.count, pauses) == (1, [])


def test_retry_after(asked: Asked, pauses: list[float]) -> None:
    script = Script(failed(429, **{"Retry-After": "7"}), httpx2.Response(200, content=WHOLE))
    assert ask(asked, script) == "a"
    assert 7 <= pauses[0] <= 8.75


def test_a_date_in_retry_after(asked: Asked, pauses: list[float]) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    script = Script(failed(503, **{"Retry-After": date}), httpx2.Response(200, content=WHOLE))
    assert ask(asked, script) == "a"
    assert 10 <= pauses[0] <= 25


def test_a_pause_that_is_too_long(asked: Asked, pauses: list[float]) -> None:
    with pytest.raises(RateLimitError) as caught:
        ask(asked, Script(failed(429, **{"Retry-After": "3600"})))
    assert (caught.value.retry_after_s, pauses) == (3600, [])


def test_a_pause_without_end(asked: Asked, pauses: list[float]) -> None:
    with pytest.raises(RateLimitError):
        ask(asked, Script(failed(429, **{"Retry-After": "9" * 5000})))
    assert pauses == []


@pytest.mark.parametrize("value", ["soon", "", "1e3", "-5", "Mon, 99 Foo 99999 99:99:99 GMT"])
def test_a_retry_after_of_nonsense(asked: Asked, pauses: list[float], value: str) -> None:
    script = Script(failed(503, **{"Retry-After": value}), httpx2.Response(200, content=WHOLE))
    assert ask(asked, script) == "a"
    assert pauses[0] <= 0.5


def test_pauses_double_up_to_the_longest() -> None:
    retries, error = Retries(most=9, longest_pause_s=3), ServerError("no", status=503)
    for failures, most in enumerate((0.5, 1, 2, 3, 3), start=1):
        pauses = [retries.pause_s(failures, error, Random(seed)) for seed in range(50)]
        assert 0.75 * most <= min(pauses) < max(pauses) <= most


class Broken(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The body of an answer whose connection breaks."""

    def __iter__(self) -> Iterator[bytes]:
        yield CHUNK
        raise httpx2.ReadError("reset")

    async def __aiter__(self):
        for data in self:
            yield data


def test_nothing_is_repeated_behind_the_first_byte(asked: Asked, pauses: list[float]) -> None:
    for name in ("complete", "stream_complete"):
        script = Script(httpx2.Response(200, stream=Broken()))
        with pytest.raises(TransportError, match="broke: reset"):
            ask(asked, script, name)
        assert (script.count, pauses) == (1, [])


def test_a_stream_without_its_end(asked: Asked) -> None:
    with pytest.raises(IncompleteStreamError):
        ask(asked, Script(httpx2.Response(200, content=CHUNK)), "stream_complete")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"id":"x"}', b"\xff", b"null"])
def test_answers_that_are_none(asked: Asked, body: bytes) -> None:
    with pytest.raises(InvalidAnswerError):
        ask(asked, Script(httpx2.Response(200, content=body)))
    content = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    with pytest.raises(InvalidAnswerError):
        ask(asked, Script(httpx2.Response(200, content=content)), "stream_complete")


def test_no_models(asked: Asked) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json={"data": []}))
    with pytest.raises(InvalidAnswerError, match="no models"):
        asked.whole("http://x", "chat", HELLO, client={"transport": transport})


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b"", "The server gives no reason.", None),
        (b"<h1>Bad gateway</h1>", "<h1>Bad gateway</h1>", None),
        (b'{"error": "Unauthorized"}', "Unauthorized", None),
        (b'{"error": {"message": "no", "code": 400}}', "no", "400"),
        (b'{"detail": "no"}', '{"detail": "no"}', None),
    ],
)
def test_errors_of_other_servers(asked: Asked, body: bytes, message: str, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        ask(asked, Script(httpx2.Response(400, content=body)))
    assert (caught.value.message, caught.value.code) == (message, code)


def test_it_is_light() -> None:
    """Neither the server nor what it needs is imported."""
    code = (
        "import clients, sys; heavy = {'service', 'torch', 'ray', 'numpy', 'transformers', "
        "'fastapi'}; assert not heavy & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
