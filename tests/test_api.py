"""The API against OpenAI's own client, byte for byte, and against what no client would send."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from service.api.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
)
from service.api.client import PipelineStatus, PipelineUnavailableError
from service.messages import Delta, Failure, Sampling, Stopping
from tests.api_server import CHAT, JSON_TYPE, MAX_LEN, MODEL, TEXT, WAIT_S, hang_up, make_api, post
from tests.fake_pipeline import FakePipeline, FakeTokenizer, Hang, obliging, text

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
    assert answer.usage.prompt_tokens == len("<user>hi")
    assert answer.usage.completion_tokens == 3
    assert answer.usage.total_tokens == len("<user>hi") + 3
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 1
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


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
    assert chunks[-1].usage.completion_tokens == 2


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
    ',"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4,'
    '"completion_tokens_details":{"accepted_prediction_tokens":1,"rejected_prediction_tokens":1},'
    '"prompt_tokens_details":{"cached_tokens":4}}'
)


def test_chat_stream_bytes(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("é\u2028", "", "", "b"))  # text held back: no chunks
    response = post(http, CHAT | {"stream": True})
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
    response = post(http, TEXT | {"stream": True, "stream_options": options})
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
    response = post(http, CHAT | {"stream": True, "stream_options": options})
    assert "usage" not in response.text
    assert pipeline.ended.is_set()


# --- clients that go --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_first_token(url: str, pipeline: FakePipeline, stream: bool) -> None:
    pipeline.play([Hang()])
    hang_up(url, pipeline, CHAT | {"stream": stream})
    assert pipeline.ended.wait(WAIT_S)


def test_disconnect_in_mid_stream(url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    hang_up(url, pipeline, CHAT | {"stream": True}, read=b'"content":"a"')
    assert pipeline.ended.wait(WAIT_S)


def test_disconnect_in_mid_text(url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    hang_up(url, pipeline, CHAT)
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
    response = post(http, CHAT | {"stream": stream})
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
    response = post(http, CHAT | {"stream": True})
    assert response.status_code == 200
    assert response.text.endswith(
        f'data: {{"error":{{"message":"{message}","type":"server_error","param":null,'
        '"code":null}}\n\ndata: [DONE]\n\n'
    )
    with pytest.raises(openai.APIError, match=message):
        list(client.chat.completions.create(**CHAT, stream=True))
    assert _check_error(post(http, CHAT), status, None, None) == message


@pytest.mark.parametrize("script", [[], [Delta(0, "a")]])
def test_stream_without_end(http: httpx.Client, pipeline: FakePipeline, script: Any) -> None:
    pipeline.play(script)
    assert "ended before" in _check_error(post(http, CHAT), 500, None, None)


# --- what is refused --------------------------------------------------------------------------


def _says(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def _calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]}


def _tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _forced_json(tool_choice: Any) -> dict[str, Any]:
    answer = {"type": "json_object"}
    return {"tools": [_tool("f")], "tool_choice": tool_choice, "response_format": answer}


def _schema(schema: Any) -> dict[str, Any]:
    given = {} if schema is None else {"schema": schema}
    return {"type": "json_schema", "json_schema": {"name": "s", **given}}


def _nested(depth: int) -> list[Any]:
    return [_nested(depth - 1)] if depth else []


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (_says("hi", role="function"), "messages.0.role"),
    (_says("hi", role="tool"), "messages.0.tool_call_id"),
    (_says(None), "messages.0.content"),
    (_says(7), "messages.0.content"),
    (_says(["hi"]), "messages.0.content"),
    (_says([{"type": "image_url", "image_url": {}}]), "messages.0.content"),
    (_says([{"type": "text"}]), "messages.0.content"),
    (_says([{"type": "text", "text": "\ud800"}]), "messages.0.content"),
    (_says("\ud800"), "messages.0.content"),
    (_says("hi", role="assistant"), "messages"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "regex"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": _schema(None)}, "response_format.json_schema.schema"),
    ({"response_format": _schema({"bad": 1})}, "response_format"),
    ({"response_format": _schema({"a": "\ud800"})}, "response_format.json_schema.schema"),
    ({"response_format": _schema({"a": float("nan")})}, "response_format.json_schema.schema"),
    ({"response_format": _schema({"a": _nested(64)})}, "response_format.json_schema.schema"),
    ({"tools": [{}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type"),
    ({"tools": [_tool("")]}, "tools.0.function.name"),
    ({"tools": [_tool("f g")]}, "tools.0.function.name"),
    ({"tools": [_tool("f\n")]}, "tools.0.function.name"),
    ({"tools": [_tool("f" * 65)]}, "tools.0.function.name"),
    ({"tools": [_tool("f"), _tool("f")]}, "tools"),
    ({"tools": [_tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [_tool("f", parameters=7)]}, "tools.0.function.parameters"),
    ({"tools": [_tool("f", parameters={"\ud800": 1})]}, "tools.0.function.parameters"),
    ({"tools": [_tool("bad")], "tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": _named("f")}, "tool_choice"),
    ({"tools": [_tool("f")], "tool_choice": _named("g")}, "tool_choice"),
    (_forced_json("required"), "response_format"),
    (_forced_json(_named("f")), "response_format"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"logprobs": 0}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"echo": True}, "echo"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"web_search_options": {}}, "web_search_options"),
    (_calls({"function": {"name": "f", "arguments": "{}"}}), "messages.0.tool_calls.0.id"),
    (_calls({"id": "a", "function": {"name": "f"}}), "messages.0.tool_calls.0.function.arguments"),
    (_calls({"id": "a", "function": {"name": "f", "arguments": "{"}}), "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (
        {"stream": True, "stream_options": {"include_pipeline": "yes"}},
        "stream_options.include_pipeline",
    ),
    ({"speculation": "off"}, "speculation"),
    ({"speculation": 0}, "speculation"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
        "stream_options.continuous_usage_stats",
    ),
    ({"stream": "yes"}, "stream"),
    ({"model": 7}, "model"),
    ({"model": "\udfff"}, "model"),
]
BAD_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", [1]], "n": 33}, "n"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], [True]]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt"),
    ({"prompt": ["a", "\ud800"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [FakeTokenizer.vocab_size]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": "1"}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"echo": "yes"}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"tools": [{}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {str(FakeTokenizer.vocab_size): 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.1}, "repetition_penalty"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": MAX_LEN, "max_tokens": MAX_LEN}, "min_tokens"),
    ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"stop_token_ids": 7}, "stop_token_ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids.0"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [FakeTokenizer.vocab_size]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": _schema({"bad": 1})}, "response_format"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
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
    _check_error(post(http, body), 400, param, None)
    assert not pipeline.requests


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_refuses_numbers_that_are_none(http: httpx.Client, field: str, number: str) -> None:
    content = json.dumps(TEXT)[:-1] + f', "{field}": {number}}}'
    response = http.post("/v1/completions", content=content, headers=JSON_TYPE)
    _check_error(response, 400, field, None)


def test_unknown_model(http: httpx.Client) -> None:
    response = post(http, CHAT | {"model": "gpt-5"})
    assert MODEL in _check_error(response, 404, "model", "model_not_found")
    _check_error(http.get("/v1/models/gpt-5"), 404, "model", "model_not_found")


def test_context_length(http: httpx.Client, pipeline: FakePipeline) -> None:
    code = "context_length_exceeded"
    message = _check_error(post(http, TEXT | {"prompt": "x" * MAX_LEN}), 400, "prompt", code)
    assert f"{MAX_LEN} tokens. This model's context is {MAX_LEN} tokens" in message
    _check_error(post(http, CHAT | _says("x" * MAX_LEN)), 400, "messages", code)
    assert post(http, TEXT | {"prompt": "x" * (MAX_LEN - 1)}).status_code == 200
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
    assert "secret" not in post(http, CHAT | {"temperature": "secret" * 9}).text
    assert "secret" not in post(http, CHAT | {"model": "secret"}).text


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
    assert post(http, body).status_code == 200
    request = pipeline.requests[0]
    assert request.prompt_ids == tuple(map(ord, "<system>s<user>ab"))
    assert request.max_tokens == 9
    assert request.sampling == Sampling(0.5, 0.9, 40, seeded=True, key=2**64 - 1)
    assert request.stop == Stopping(("x", "y"))


def test_request_defaults(http: httpx.Client, pipeline: FakePipeline) -> None:
    for _ in range(2):
        assert post(http, TEXT).status_code == 200
    first, second = pipeline.requests[:2]
    assert first.max_tokens == 16  # as OpenAI's completions; a chat may fill the context
    assert post(http, CHAT).status_code == 200
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
    assert post(http, TEXT | extra).status_code == 200
    assert pipeline.requests[0].sampling.top_k == 0
    assert pipeline.requests[0].max_tokens == (MAX_LEN - len("hi") if "max_tokens" in extra else 16)


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98]])
def test_prompt_forms(http: httpx.Client, pipeline: FakePipeline, prompt: Any) -> None:
    assert post(http, TEXT | {"prompt": prompt}).status_code == 200
    assert pipeline.requests[0].prompt_ids == (97, 98)


def test_request_id(http: httpx.Client, pipeline: FakePipeline) -> None:
    http.headers["X-Request-Id"] = "mine-1"
    answers = [post(http, TEXT) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1", "mine-1"]
    ids = [request.request_id for request in pipeline.requests]
    assert ids == [f"{answer.json()['id']}-mine-1-0" for answer in answers]
    assert len(set(ids)) == 2
    for bad in ("a b", "x" * 129, ""):
        http.headers["X-Request-Id"] = bad
        assert re.fullmatch("[0-9a-f]{32}", http.get("/v2").headers["x-request-id"])


async def test_request_id_behind_a_proxy_that_echoes_it() -> None:
    app = make_api(FakePipeline(), echo_request_id=False)
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
    statuses = {path: set() for path in schema["paths"]}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                assert response["content"]
                statuses[path].add(status)
    generation = {"200", "400", "401", "404", "413", "429", "500", "503", "504", "default"}
    assert statuses["/v1/chat/completions"] == statuses["/v1/completions"] == generation
    assert statuses["/v1/models"] == {"200", "401", "default"}
    assert statuses["/v1/models/{model}"] == {"200", "401", "404", "default"}
    assert statuses["/tokenize"] == {"200", "400", "401", "404", "413", "default"}
    assert statuses["/ready"] == {"200", "503"}
    assert {"ChatCompletion", "TextCompletion", "ErrorObject"} <= set(
        schema["components"]["schemas"]
    )


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


many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PATHS = st.sampled_from(["/v1/chat/completions", "/v1/completions"])


@many
@pytest.mark.usefixtures("pipeline")
@given(body=BODIES, path=PATHS)
def test_any_json(http: httpx.Client, body: Any, path: str) -> None:
    response = post(http, body, path)
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        error = response.json()["error"]
        _check_error(response, response.status_code, error["param"], error["code"])


IDS = st.integers(0, 9)
PLAUSIBLE = {
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "max_tokens": st.integers(0, 3),
    "min_tokens": st.integers(0, 2),
    "stop": st.sampled_from(["x", ["x", "y"]]),
    "stop_token_ids": st.lists(IDS, max_size=2),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=2),
    "seed": st.integers(0, 9),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "return_token_ids": st.booleans(),
    "speculation": st.booleans(),
    "prompt": st.sampled_from(["a", ["a", "b"], [65, 66], [[65], [66, 67]]]),
    "echo": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 2),
    "top_logprobs": st.integers(0, 2),
    "tools": st.sampled_from([[], [_tool("f")], [_tool("f"), _tool("g")]]),
    "tool_choice": st.sampled_from(["none", "auto", "required", _named("f")]),
    "continue_final_message": st.booleans(),
}


@many
@given(fields=st.fixed_dictionaries({}, optional=PLAUSIBLE), path=PATHS)
def test_answers_are_what_they_are_said_to_be(
    http: httpx.Client, pipeline: FakePipeline, fields: dict[str, Any], path: str
) -> None:
    pipeline.play(obliging)
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True, "include_pipeline": True}
    response = post(http, CHAT | TEXT | fields, path)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        return
    whole, chunk = ANSWERS[path]
    if not fields.get("stream"):
        assert whole.validate_python(response.json(), strict=True) == response.json()
        return
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for frame in frames:
        body = json.loads(frame.removeprefix("data: "))
        assert chunk.validate_python(body, strict=True) == body


ANSWERS: dict[str, tuple[TypeAdapter[Any], TypeAdapter[Any]]] = {
    "/v1/chat/completions": (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    "/v1/completions": (TypeAdapter(TextCompletion), TypeAdapter(TextCompletionChunk)),
}
