"""Requests that outlive their pipeline, as their clients see it; and the door."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import httpx
import openai
import pytest

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.api.door import Door
from service.api.errors import ApiError
from service.api.resume import PipelineLostError, Resuming
from service.config import ApiSettings
from service.messages import (
    Accepted,
    Delta,
    Event,
    Failure,
    GenerateRequest,
    Logprobs,
    PromptScored,
)
from tests.api_server import CHAT, MODEL, TEXT, WAIT_S, Connection, make_api, post, serving
from tests.fake_pipeline import STATS, FakePipeline, Gate, Hang, text

LOST = Failure("stage 1 died")
DEAD = PipelineLostError("there is no replica")
FULL = Failure("3 wait", "overloaded")
Step = Accepted | Event | Exception | Hang | Gate
WORDS = ["one", " two", " three", " four", " five"]


class FakePipelines:
    """Each run of a request follows the next script; the last one is followed by all others. A
    script is made from the request: what it has generated is not generated again."""

    def __init__(self, *scripts: Callable[[GenerateRequest], Sequence[Step]]) -> None:
        self.scripts = scripts
        self.runs: list[GenerateRequest] = []
        self.hopeless: str | None = None
        self.closed = 0
        self.ready = True
        self.started = threading.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Event, None]:
        script = self.scripts[min(len(self.runs), len(self.scripts) - 1)]
        self.runs.append(request)
        try:
            for step in script(request):
                await asyncio.sleep(0)
                self.started.set()
                if isinstance(step, Hang):
                    await asyncio.Event().wait()
                elif isinstance(step, Gate):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.closed += 1

    async def status(self) -> PipelineStatus:
        if not self.ready:
            raise PipelineUnavailableError("The pipeline is not there (yet).")
        return PipelineStatus(True, "serving", "off")

    async def given_up(self) -> str | None:
        return self.hopeless


def words(count: int | None = None, *then: Step) -> Callable[[GenerateRequest], list[Step]]:
    """The first `count` words that are left, and what follows them; all of them without."""

    def script(request: GenerateRequest) -> list[Step]:
        done = len(request.generated_ids)
        deltas = [
            Delta(i, word, *(("stop", STATS) if i == len(WORDS) - 1 else ()))
            for i, word in enumerate(WORDS)
        ]
        end = None if count is None else done + count
        return [Accepted(), *deltas[done:end], *then]

    return script


def steps(*given: Step) -> Callable[[GenerateRequest], Sequence[Step]]:
    return lambda _: given


async def no_pause(_: float) -> None:
    await asyncio.sleep(0)


def resuming(pipelines: FakePipelines, **options: Any) -> Resuming:
    return Resuming(pipelines, **{"max_losses": 3, "pause": no_pause} | options)


async def collected(client: Resuming, request: GenerateRequest | None = None) -> list[Event]:
    request = request or GenerateRequest("r", (1, 2), 9)
    return [event async for event in client.generate(request)]


async def broken(client: Resuming) -> tuple[list[str], str]:
    """The texts of a stream, and the words of its end."""
    found: list[str] = []
    try:
        async for event in client.generate(GenerateRequest("r", (1,), 9)):
            found.append(event.text)
    except PipelineUnavailableError as error:
        return found, str(error)
    raise AssertionError("the stream has a good end")


# --- resuming -----------------------------------------------------------------------------------


async def test_undisturbed() -> None:
    pipelines = FakePipelines(words())
    assert [e.text for e in await collected(resuming(pipelines))] == WORDS
    assert pipelines.runs == [GenerateRequest("r", (1, 2), 9)]


@pytest.mark.parametrize("end", [LOST, DEAD])
@pytest.mark.parametrize("cut", range(5))
async def test_lost_after_any_token(cut: int, end: Step) -> None:
    losses = []
    pipelines = FakePipelines(words(cut, end), words())
    client = resuming(pipelines, on_loss=lambda: losses.append(1))
    assert [e.text for e in await collected(client)] == WORDS
    assert [run.generated_ids for run in pipelines.runs] == [(), tuple(range(cut))]
    assert len({run.request_id for run in pipelines.runs}) == 2
    assert {run.prompt_ids for run in pipelines.runs} == {(1, 2)}
    assert losses == [1]
    assert pipelines.closed == 2


async def test_lost_again_and_again() -> None:
    pipelines = FakePipelines(words(1, LOST), words(2, DEAD), words(0, LOST), words())
    assert [e.text for e in await collected(resuming(pipelines))] == WORDS
    assert [len(run.generated_ids) for run in pipelines.runs] == [0, 1, 3, 3]


async def test_a_request_that_breaks_pipelines_ends() -> None:
    pipelines = FakePipelines(words(1, LOST))
    found, reason = await broken(resuming(pipelines, max_losses=2))
    assert "failed too often" in reason
    assert found == WORDS[:3]
    assert len(pipelines.runs) == 3


async def test_waiting_for_a_pipeline_is_no_loss() -> None:
    """While a replica starts, every try fails at once."""
    pipelines = FakePipelines(words(2, LOST), *[steps(LOST)] * 5, *[steps(DEAD)] * 5, words())
    assert [e.text for e in await collected(resuming(pipelines, max_losses=1))] == WORDS


async def test_an_error_of_the_request_itself_counts() -> None:
    pipelines = FakePipelines(steps(PipelineLostError("TypeError", counts=True)))
    with pytest.raises(PipelineUnavailableError):
        await collected(resuming(pipelines, max_losses=2))
    assert len(pipelines.runs) == 3


@pytest.mark.parametrize("kind", ["refused", "overloaded", "expired"])
async def test_other_failures_are_final(kind: str) -> None:
    failure = Failure("x", kind)
    pipelines = FakePipelines(steps(Accepted(), failure))
    assert await collected(resuming(pipelines)) == [failure]
    assert len(pipelines.runs) == 1


async def test_the_scores_of_a_prompt_come_once() -> None:
    scores = PromptScored((Logprobs(-1.0),))
    request = GenerateRequest("r", (1, 2), 9, logprobs=0, prompt_logprobs=True)
    pipelines = FakePipelines(steps(Accepted(), LOST), steps(Accepted(), scores, LOST), words())
    events = await collected(resuming(pipelines), request)
    assert events[0] == scores
    assert [e.text for e in events[1:]] == WORDS
    assert [run.prompt_logprobs for run in pipelines.runs] == [True, True, False]


@pytest.mark.parametrize("script", [steps(Hang()), steps(LOST), steps(DEAD)])
async def test_no_hope(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After too many restarts streams end, whether Serve lets them wait or not."""
    monkeypatch.setattr("service.api.resume.LOOK_S", 0.001)
    pipelines = FakePipelines(words(2, LOST), script)
    pipelines.hopeless = "It was restarted too often."
    found, reason = await broken(resuming(pipelines))
    assert "It was restarted too often" in reason
    assert found == WORDS[:2]
    assert pipelines.closed == len(pipelines.runs) == 2


@pytest.mark.parametrize("script", [steps(Hang()), steps(DEAD)])
async def test_patience_has_an_end(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.resume.LOOK_S", 0.001)
    with pytest.raises(PipelineUnavailableError, match="not there"):
        await collected(resuming(FakePipelines(script), patience_s=0.05))


async def test_patience_is_for_pipelines_not_for_slots() -> None:
    """A request that was accepted waits as long as its pipeline lets it."""
    gate = Gate()
    pipelines = FakePipelines(lambda r: [Accepted(), gate, *words()(r)[1:]])
    task = asyncio.create_task(collected(resuming(pipelines, patience_s=0.01)))
    await asyncio.sleep(0.1)
    gate.open()
    assert [e.text for e in await task] == WORDS


@pytest.mark.parametrize("script", [steps(Hang()), steps(Accepted(), Hang()), words(1, Hang())])
async def test_a_client_that_goes_while_its_request_waits(script: Any) -> None:
    pipelines = FakePipelines(words(2, LOST), script)
    async with aclosing(resuming(pipelines).generate(GenerateRequest("r", (1,), 9))) as events:
        await anext(events)
        await anext(events)
        step = asyncio.create_task(anext(events))
        while len(pipelines.runs) < 2:
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
    assert pipelines.closed == 2


# --- over HTTP ----------------------------------------------------------------------------------


@contextmanager
def api(pipelines: FakePipelines, **options: Any):
    app = make_api(resuming(pipelines), settings=ApiSettings(keep_alive_s=0.02), **options)
    with serving(app) as url, httpx.Client(base_url=url, timeout=WAIT_S) as http:
        yield http, url


def test_a_client_sees_a_pause() -> None:
    gate = Gate()
    pipelines = FakePipelines(words(2, LOST), lambda r: [gate, *words()(r)])
    with api(pipelines) as (http, _):
        received, opened = "", False
        body = json.dumps(TEXT | {"stream": True})
        with http.stream(
            "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        ) as response:
            for piece in response.iter_text():
                received += piece
                if ": keep-alive" in received and not opened:
                    gate.open()
                    opened = True
    frames = [f for f in received.split("\n\n") if f.startswith("data: {")]
    texts = [json.loads(f.removeprefix("data: "))["choices"][0]["text"] for f in frames]
    assert opened
    assert "".join(texts) == "".join(WORDS)
    assert "error" not in received


def test_several_choices_and_whole_answers() -> None:
    scripts = [words(1, LOST), words(2, DEAD), words()]
    with api(FakePipelines(*scripts)) as (http, _):
        answer = post(http, TEXT | {"n": 2}).json()
    assert [c["text"] for c in answer["choices"]] == ["".join(WORDS)] * 2
    assert answer["usage"]["completion_tokens"] == 2 * len(WORDS)


def test_after_too_many_losses_the_stream_ends_with_an_error() -> None:
    with api(FakePipelines(words(1, LOST))) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        pieces = []
        stream = iter(client.chat.completions.create(**CHAT, stream=True))
        for _ in range(5):
            pieces.append(next(stream).choices[0].delta.content)
        with pytest.raises(openai.APIError, match="failed too often"):
            next(stream)
    assert pieces == ["", *WORDS[:4]]


# --- the door -----------------------------------------------------------------------------------


def retry_of(response: httpx.Response) -> dict[str, Any]:
    assert int(response.headers["retry-after"]) > 0
    return response.json()["error"]


def test_beyond_the_queue_it_is_429_at_once() -> None:
    pipeline, door = FakePipeline(), Door(3)
    pipeline.play([Hang()], [Hang()], [Hang()])
    with serving(make_api(pipeline, door=door)) as url, Connection(url) as running:
        body = json.dumps(CHAT | {"n": 3}).encode()
        running.post("/v1/chat/completions", f"Content-Length: {len(body)}")
        running.send(body)
        assert pipeline.started.wait(WAIT_S)
        with httpx.Client(base_url=url, timeout=WAIT_S) as http:
            for asked in (CHAT, TEXT, CHAT | {"stream": True}):
                response = post(http, asked)
                assert response.status_code == 429
                assert retry_of(response) == {
                    "message": "Too many requests wait for this server; try again.",
                    "type": "rate_limit_error",
                    "param": None,
                    "code": "queue_full",
                }
            assert http.get("/ready").status_code == http.get("/health").status_code == 200
    assert pipeline.ended.wait(WAIT_S)
    assert door.inside == 0
    assert len(pipeline.requests) == 3


def test_a_long_overload_leaves_nothing_behind() -> None:
    """Thousands are refused, the others are answered, and the door counts none in the end."""
    pipeline, door = FakePipeline(), Door(4)
    pipeline.play(text("a"))

    async def flood() -> list[int]:
        transport = httpx.ASGITransport(make_api(pipeline, door=door))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:

            async def ask() -> int:
                return (await http.post("/v1/completions", json=TEXT)).status_code

            return await asyncio.gather(*(ask() for _ in range(500)))

    statuses = asyncio.run(flood()) + asyncio.run(flood())
    assert set(statuses) == {200, 429}
    assert door.inside == 0
    assert pipeline.running == 0


def test_an_engines_full_queue_is_429_too() -> None:
    pipeline = FakePipeline()
    with serving(make_api(pipeline)) as url, httpx.Client(base_url=url) as http:
        pipeline.play([FULL])
        response = post(http, CHAT)
        assert (response.status_code, retry_of(response)["code"]) == (429, "queue_full")
        pipeline.play([Failure("x", "expired")])
        response = post(http, CHAT)
        assert (response.status_code, retry_of(response)["code"]) == (503, "queue_timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_deadline(stream: bool) -> None:
    pipeline, door = FakePipeline(), Door()
    pipeline.play([Delta(0, "a"), Hang()])
    with serving(make_api(pipeline, door=door, timeout_s=0.2)) as url:
        with httpx.Client(base_url=url, timeout=WAIT_S) as http:
            response = post(http, TEXT | {"stream": stream})
        assert pipeline.ended.wait(WAIT_S)
        assert door.inside == 0
    if stream:
        *_, last, done, _ = response.text.split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "request_timeout"
    assert "0.2 s" in error["message"]


def test_a_closed_door() -> None:
    """Running requests go on, new ones are sent elsewhere, and readiness says so."""
    pipeline, door, gate = FakePipeline(), Door(), Gate()
    pipeline.play([Delta(0, "a"), gate, *text("b")])
    with serving(make_api(pipeline, door=door)) as url, httpx.Client(base_url=url) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model=MODEL, prompt="hi", stream=True)
        assert next(iter(stream)).choices[0].text == "a"
        door.is_closed = True
        response = post(http, CHAT)
        assert (response.status_code, retry_of(response)["code"]) == (503, "shutting_down")
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["detail"] == "shutting down; 1 requests are left"
        assert http.get("/health").status_code == 200
        gate.open()
        assert "".join(chunk.choices[0].text for chunk in stream) == "b"
    assert door.inside == 0


def test_a_door_counts_choices_and_lets_a_request_in_as_a_whole() -> None:
    door = Door(2)
    with door.entered(5), pytest.raises(ApiError):
        door.check()
    door.check()
