"""The API against OpenAI's own client, byte for byte, and against what no client would send."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.api.routes import create_api
from service.messages import Delta, Failure, Sampling
from tests.fake_pipeline import STATS, FakePipeline, FakeTokenizer, Hang, text

MODEL = "org/model"
MAX_LEN = 64
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
WAIT_S = 10
JSON_TYPE = {"Content-Type": "application/json"}


async def _metrics_text() -> bytes:
    return b"# TYPE spd_x gauge\nspd_x 1.0\n"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakePipeline, str]]:
    pipeline = FakePipeline()
    app = create_api(
        pipeline=pipeline,
        tokenizer=FakeTokenizer(),
        model=MODEL,
        max_len=MAX_LEN,
        metrics_text=_metrics_text,
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # listens: a client waits, not fails
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield pipeline, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(WAIT_S)


@pytest.fixture
def pipeline(served: tuple[FakePipeline, str]) -> FakePipeline:
    served[0].play(text("ok"))
    return served[0]


@pytest.fixture
def url(served: tuple[FakePipeline, str]) -> str:
    return served[1]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _post(http: httpx.Client, body: Any, path: str | None = None) -> httpx.Response:
    """Sends what httpx itself would refuse to encode, such as NaN and lone surrogates, too."""
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    return http.post(path, content=json.dumps(body), headers=JSON_TYPE)


# --- OpenAI's client --------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hel", "", "lo"))
    answer = client.chat.completions.create(**CHAT)
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", answer.id)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.total_tokens == STATS.prompt_tokens + STATS.generated_tokens
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 1
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 1


def test_completion(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hel", "lo", reason="length"))
    answer = client.completions.create(**TEXT)
    assert re.fullmatch("cmpl-[0-9a-f]{32}", answer.id)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")


def test_chat_stream(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b", "c"))
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a", "b", "c", None]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_completion_stream(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"))
    options: Any = {"include_usage": True}
    chunks = list(client.completions.create(**TEXT, stream=True, stream_options=options))
    assert [c.choices[0].text for c in chunks if c.choices] == ["a", "b", ""]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == STATS.generated_tokens


async def test_async_client(url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**CHAT)
        stream = await client.chat.completions.create(**CHAT, stream=True)
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert whole.choices[0].message.content == "ab"
    assert pieces == ["", "a", "b", None]


def test_models(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == MAX_LEN
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# --- bytes ------------------------------------------------------------------------------------


def _masked(response: httpx.Response) -> str:
    body = re.sub(r'"id":"(chat)?cmpl-[0-9a-f]{32}"', '"id":"ID"', response.text)
    return re.sub(r'"created":\d{10},', '"created":0,', body)


def _frame(kind: str, choices: str, usage: str = "") -> str:
    return (
        f'data: {{"id":"ID","object":"{kind}","created":0,"model":"{MODEL}",'
        f'"choices":[{choices}]{usage}}}\n\n'
    )


def _chat_choice(delta: str, reason: str = "null") -> str:
    return f'{{"index":0,"delta":{{{delta}}},"logprobs":null,"finish_reason":{reason}}}'


USAGE = (
    ',"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,'
    '"completion_tokens_details":{"accepted_prediction_tokens":1,"rejected_prediction_tokens":1}}'
)


def test_chat_stream_bytes(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("é\u2028", "", "", "b"))  # text held back: no chunks
    response = _post(http, CHAT | {"stream": True})
    kind = "chat.completion.chunk"
    assert _masked(response) == (
        _frame(kind, _chat_choice('"role":"assistant","content":""'))
        + _frame(kind, _chat_choice('"content":"\\u00e9\\u2028"'))
        + _frame(kind, _chat_choice('"content":"b"'))
        + _frame(kind, _chat_choice("", '"stop"'))
        + "data: [DONE]\n\n"
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_usage_stream_bytes(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", ""))
    options = {"include_usage": True}
    response = _post(http, TEXT | {"stream": True, "stream_options": options})
    kind, null = "text_completion", ',"usage":null'
    choice = '{"index":0,"text":"%s","logprobs":null,"finish_reason":%s}'
    assert _masked(response) == (
        _frame(kind, choice % ("a", "null"), null)
        + _frame(kind, choice % ("", '"stop"'), null)
        + _frame(kind, "", USAGE)
        + "data: [DONE]\n\n"
    )


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
def test_no_usage_unasked(http: httpx.Client, pipeline: FakePipeline, options: Any) -> None:
    response = _post(http, CHAT | {"stream": True, "stream_options": options})
    assert "usage" not in response.text
    assert pipeline.ended.is_set()


# --- clients that go --------------------------------------------------------------------------


def _hang_up(url: str, pipeline: FakePipeline, body: dict[str, Any], *, read: bytes = b"") -> None:
    """Sends a request, waits until it runs (and until `read` has come), and closes the socket."""
    content = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        assert pipeline.started.wait(WAIT_S)
        received = b""
        while read not in received:
            received += connection.recv(4096)
        assert not pipeline.ended.is_set()


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_first_token(url: str, pipeline: FakePipeline, stream: bool) -> None:
    pipeline.play([Hang()])
    _hang_up(url, pipeline, CHAT | {"stream": stream})
    assert pipeline.ended.wait(WAIT_S)


def test_disconnect_in_mid_stream(url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    _hang_up(url, pipeline, CHAT | {"stream": True}, read=b'"content":"a"')
    assert pipeline.ended.wait(WAIT_S)


def test_disconnect_in_mid_text(url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    _hang_up(url, pipeline, CHAT)
    assert pipeline.ended.wait(WAIT_S)


def test_client_closes_stream(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    with client.chat.completions.create(**CHAT, stream=True) as stream:
        next(stream)
    assert pipeline.ended.wait(WAIT_S)


# --- failures ---------------------------------------------------------------------------------


def _check_error(response: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    error = response.json()["error"]
    assert response.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert isinstance(error["message"], str)
    return error["message"]


FAILURES = [
    (Failure("A stage died."), 503, "The pipeline failed; try again."),
    (PipelineUnavailableError("No replica."), 503, "No replica."),
    (RuntimeError("secret"), 500, "Internal server error."),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("step", "status", "message"), FAILURES)
def test_failure_before_first_token(
    http: httpx.Client,
    pipeline: FakePipeline,
    step: Failure | Exception,
    status: int,
    message: str,
    stream: bool,
) -> None:
    pipeline.play([step])
    response = _post(http, CHAT | {"stream": stream})
    assert _check_error(response, status, None, None) == message
    assert len(response.headers["x-request-id"]) == 32
    assert pipeline.ended.is_set()


@pytest.mark.parametrize(("step", "status", "message"), FAILURES)
def test_failure_in_mid_stream(
    http: httpx.Client,
    client: openai.OpenAI,
    pipeline: FakePipeline,
    step: Failure | Exception,
    status: int,
    message: str,
) -> None:
    pipeline.play([Delta(0, "a"), step])
    response = _post(http, CHAT | {"stream": True})
    assert response.status_code == 200
    assert response.text.endswith(
        f'data: {{"error":{{"message":"{message}","type":"server_error","param":null,'
        '"code":null}}\n\ndata: [DONE]\n\n'
    )
    with pytest.raises(openai.APIError, match=message):
        list(client.chat.completions.create(**CHAT, stream=True))
    assert _check_error(_post(http, CHAT), status, None, None) == message


@pytest.mark.parametrize("script", [[], [Delta(0, "a")]])
def test_stream_without_end(http: httpx.Client, pipeline: FakePipeline, script: Any) -> None:
    pipeline.play(script)
    assert "ended before" in _check_error(_post(http, CHAT), 500, None, None)


# --- what is refused --------------------------------------------------------------------------


def _says(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (_says("hi", role="tool"), "messages.0.role"),
    (_says(None), "messages.0.content"),
    (_says(7), "messages.0.content"),
    (_says(["hi"]), "messages.0.content"),
    (_says([{"type": "image_url", "image_url": {}}]), "messages.0.content"),
    (_says([{"type": "text"}]), "messages.0.content"),
    (_says([{"type": "text", "text": "\ud800"}]), "messages.0.content"),
    (_says("\ud800"), "messages.0.content"),
    (_says("hi", role="assistant"), "messages"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": "yes"}, "stream"),
    ({"model": 7}, "model"),
    ({"model": "\udfff"}, "model"),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [FakeTokenizer.vocab_size]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"n": 2}, "n"),
    ({"n": "1"}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.1}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": True}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": 7}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "\ud800"}, "stop.0"),
]


@pytest.mark.parametrize(
    ("body", "param"),
    [(CHAT | change, param) for change, param in BAD_CHATS]
    + [(TEXT | change, param) for change, param in BAD_TEXTS],
)
def test_refused(
    http: httpx.Client, pipeline: FakePipeline, body: dict[str, Any], param: str
) -> None:
    _check_error(_post(http, body), 400, param, None)
    assert not pipeline.requests


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_refuses_numbers_that_are_none(http: httpx.Client, field: str, number: str) -> None:
    content = json.dumps(TEXT)[:-1] + f', "{field}": {number}}}'
    response = http.post("/v1/completions", content=content, headers=JSON_TYPE)
    _check_error(response, 400, field, None)


def test_unknown_model(http: httpx.Client) -> None:
    response = _post(http, CHAT | {"model": "gpt-5"})
    assert MODEL in _check_error(response, 404, "model", "model_not_found")
    _check_error(http.get("/v1/models/gpt-5"), 404, "model", "model_not_found")


def test_context_length(http: httpx.Client, pipeline: FakePipeline) -> None:
    code = "context_length_exceeded"
    message = _check_error(_post(http, TEXT | {"prompt": "x" * MAX_LEN}), 400, "prompt", code)
    assert f"{MAX_LEN} tokens. This model's context is {MAX_LEN} tokens" in message
    _check_error(_post(http, CHAT | _says("x" * MAX_LEN)), 400, "messages", code)
    assert _post(http, TEXT | {"prompt": "x" * (MAX_LEN - 1)}).status_code == 200
    assert pipeline.requests[0].max_tokens == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_no_object(http: httpx.Client, content: bytes) -> None:
    response = http.post("/v1/chat/completions", content=content, headers=JSON_TYPE)
    assert response.status_code == 400
    assert response.json()["error"]["param"] is None


def test_wrong_content_type(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = http.post("/v1/completions", content=json.dumps(TEXT), headers=headers)
    assert "application/json" in _check_error(response, 400, None, None)


def test_paths(http: httpx.Client) -> None:
    _check_error(http.get("/v2"), 404, None, "not_found")
    response = http.get("/v1/completions")
    _check_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_messages_hold_no_input(http: httpx.Client) -> None:
    assert "secret" not in _post(http, CHAT | {"temperature": "secret" * 9}).text
    assert "secret" not in _post(http, CHAT | {"model": "secret"}).text


# --- what reaches the pipeline ----------------------------------------------------------------


def test_request(http: httpx.Client, pipeline: FakePipeline) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {
        "model": MODEL,
        "messages": [{"role": "developer", "content": "s"}, *_says(parts)["messages"]],
        "max_completion_tokens": 9,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": -1,
        "stop": ["x", "y"],
    }
    assert _post(http, body).status_code == 200
    request = pipeline.requests[0]
    assert request.prompt_ids == tuple(map(ord, "<system>s<user>ab"))
    assert request.max_tokens == 9
    assert request.sampling == Sampling(0.5, 0.9, 40, seeded=True, key=2**64 - 1)
    assert request.stop == ("x", "y")


def test_request_defaults(http: httpx.Client, pipeline: FakePipeline) -> None:
    for _ in range(2):
        assert _post(http, TEXT).status_code == 200
    first, second = pipeline.requests[:2]
    assert first.max_tokens == 16  # as OpenAI's completions; a chat may fill the context
    assert _post(http, CHAT).status_code == 200
    assert pipeline.requests[2].max_tokens == MAX_LEN - len(pipeline.requests[2].prompt_ids)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1, 1, 0)
    assert not first.sampling.seeded
    assert first.sampling.key != second.sampling.key


HARMLESS: list[dict[str, Any]] = [
    {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "nonsense": []},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "n": 1, "best_of": 1, "logit_bias": {}},
    {"logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
    {"temperature": None, "top_p": None, "stop": None, "seed": None, "n": None, "stream": None},
    {"top_k": -1, "temperature": 2, "top_p": 1, "max_tokens": 10**30, "stop": "x"},
]


@pytest.mark.parametrize("extra", HARMLESS)
def test_harmless(http: httpx.Client, pipeline: FakePipeline, extra: dict[str, Any]) -> None:
    assert _post(http, TEXT | extra).status_code == 200
    assert pipeline.requests[0].sampling.top_k == 0
    assert pipeline.requests[0].max_tokens == (MAX_LEN - len("hi") if "max_tokens" in extra else 16)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98]])
def test_prompt_forms(http: httpx.Client, pipeline: FakePipeline, prompt: Any) -> None:
    assert _post(http, TEXT | {"prompt": prompt}).status_code == 200
    assert pipeline.requests[0].prompt_ids == (97, 98)


def test_request_id(http: httpx.Client, pipeline: FakePipeline) -> None:
    http.headers["X-Request-Id"] = "mine-1"
    answers = [_post(http, TEXT) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1", "mine-1"]
    ids = [request.request_id for request in pipeline.requests]
    assert ids == [f"{answer.json()['id']}-mine-1" for answer in answers]
    assert len(set(ids)) == 2
    for bad in ("a b", "x" * 129, ""):
        http.headers["X-Request-Id"] = bad
        assert re.fullmatch("[0-9a-f]{32}", http.get("/v2").headers["x-request-id"])


async def test_request_id_behind_a_proxy_that_echoes_it() -> None:
    app = create_api(
        pipeline=FakePipeline(),
        tokenizer=FakeTokenizer(),
        model=MODEL,
        max_len=MAX_LEN,
        metrics_text=_metrics_text,
        echo_request_id=False,
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        assert "x-request-id" not in (await http.get("/health")).headers


# --- operations -------------------------------------------------------------------------------


def test_probes(http: httpx.Client, pipeline: FakePipeline) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    ready = http.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"ready": True, "detail": "serving", "speculation": "lookup+pdm"}
    pipeline.current = PipelineStatus(False, "loading", "off")
    assert http.get("/ready").status_code == 503
    pipeline.current = PipelineUnavailableError("gone")
    ready = http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["detail"] == "gone"
    assert http.get("/health").status_code == 200


def test_metrics(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.text == "# TYPE spd_x gauge\nspd_x 1.0\n"


def test_openapi(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "422" not in schema["paths"]["/v1/completions"]["post"]["responses"]


# --- arbitrary bodies -------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for change, _ in BAD_CHATS + BAD_TEXTS for name in change} | {"user"})
BODIES = JSON | st.builds(
    lambda base, changes: base | changes,
    st.sampled_from([CHAT, TEXT, CHAT | TEXT]),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.usefixtures("pipeline")
@given(body=BODIES, path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_any_json(http: httpx.Client, body: Any, path: str) -> None:
    response = _post(http, body, path)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error = response.json()["error"]
        _check_error(response, response.status_code, error["param"], error["code"])
