"""Tools, formats of answers, and the conversations that go with them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from service.messages import Delta, Grammar, Logprobs
from tests.api_server import CHAT, TEXT, make_api, post, serving
from tests.fake_pipeline import STATS, FakePipeline, FakeTokenizer, text

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Today's.", "parameters": SCHEMA},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CLOCK_STRICT: Any = {"type": "function", "function": {"name": "clock", "strict": True}}
TOOLS: dict[str, Any] = {"tools": [WEATHER, CLOCK]}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
STREAM = {"stream": True}
NAMED = {"type": "function", "function": {"name": "clock"}}


def _calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for call in message["tool_calls"]:
        assert re.fullmatch("call_[0-9a-f]{32}", call["id"])
        assert call["type"] == "function"
        function = call["function"]
        found.append((function["name"], json.loads(function["arguments"])))
    return found


def _choices(response: httpx.Response) -> list[dict[str, Any]]:
    frames = response.text.split("\n\n")[:-2]
    return [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames]


# --- calls in answers -------------------------------------------------------------------------


def test_a_call(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text(*OSLO))
    answer = client.chat.completions.create(**CHAT, **TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(OSLO)


def test_calls_in_a_stream(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("So", ".", *OSLO, "\n", *NOW))
    deltas, reasons = [], []
    for chunk in client.chat.completions.create(**CHAT, **TOOLS, stream=True):
        deltas.append(chunk.choices[0].delta)
        reasons.append(chunk.choices[0].finish_reason)
    assert [delta.content for delta in deltas] == ["", "So", ".", None, None, None]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert [(call.index, call.function and call.function.name) for call in calls] == [
        (0, "weather"),
        (1, "clock"),
    ]
    assert len({call.id for call in calls}) == 2
    assert reasons == [None] * 5 + ["tool_calls"]


class City(BaseModel):
    city: str


def test_the_clients_own_reading(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    """OpenAI's client puts streams together itself, and parses formats and arguments."""
    pipeline.play(text(*'{"city": "Oslo"}'))
    parsed = client.chat.completions.parse(**CHAT, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Oslo")
    assert pipeline.requests[0].grammar is not None
    pipeline.play(text("So", *OSLO, NOW), text("Hi"))
    tool = openai.pydantic_function_tool(City, name="weather")
    with client.chat.completions.stream(**CHAT, tools=[tool, CLOCK_STRICT], n=2) as stream:
        first, second = stream.get_final_completion().choices
    assert first.message.content == "So"
    assert first.message.tool_calls is not None
    calls = [call.function for call in first.message.tool_calls]
    assert [call.name for call in calls] == ["weather", "clock"]
    assert calls[0].parsed_arguments == City(city="Oslo")
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert second.message.content == "Hi"


def test_call_stream_bytes(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text(NOW))
    response = post(http, CHAT | TOOLS | {"stream": True})
    body = re.sub("call_[0-9a-f]{32}", "CALL", response.text)
    assert (
        '"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"CALL","type":"function",'
        '"function":{"name":"clock","arguments":"{}"}}]},"logprobs":null,"finish_reason":null}]}'
    ) in body
    assert '{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls"}' in body
    assert '"content":"<' not in body


def test_text_and_calls(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("So: ", OSLO, NOW))
    message = post(http, CHAT | TOOLS).json()["choices"][0]["message"]
    assert message["content"].strip() == "So:"
    assert _calls(message) == [("weather", {"city": "Oslo"}), ("clock", {})]


@pytest.mark.parametrize("stream", [True, False])
def test_one_call_at_most(http: httpx.Client, pipeline: FakePipeline, stream: bool) -> None:
    for script in (text(OSLO + "\n" + NOW), text(OSLO, "\n", NOW)):
        pipeline.play(script)
        response = post(http, CHAT | TOOLS | {"parallel_tool_calls": False, "stream": stream})
        if stream:
            messages = [c["delta"] for c in _choices(response) if "tool_calls" in c["delta"]]
        else:
            messages = [response.json()["choices"][0]["message"]]
        assert [_calls(message) for message in messages] == [[("weather", {"city": "Oslo"})]]


def test_no_call(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hi", " <tool"))
    choice = post(http, CHAT | TOOLS).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hi <tool", "refusal": None}
    assert choice["finish_reason"] == "stop"
    pieces = [c["delta"].get("content") for c in _choices(post(http, CHAT | TOOLS | STREAM))]
    assert pieces[0] == ""
    assert "".join(piece or "" for piece in pieces) == "Hi <tool"


def test_a_call_cut_short_is_text(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text(*OSLO[:30], reason="length"))
    choice = post(http, CHAT | TOOLS).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (OSLO[:30], "length")
    assert "tool_calls" not in choice["message"]


def test_a_call_that_lacks_its_last_bracket(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text(NOW.split("}\n")[0]))
    for body in (CHAT | TOOLS, CHAT | TOOLS | STREAM):
        response = post(http, body)
        choices = _choices(response) if "stream" in body else response.json()["choices"]
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert '"name":"clock"' in response.text


def test_length_stays_the_reason(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text(NOW, " and", reason="length"))
    choice = post(http, CHAT | TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert _calls(choice["message"]) == [("clock", {})]


def test_logprobs_of_a_call_come_with_it(http: httpx.Client, pipeline: FakePipeline) -> None:
    tokens = [Delta(ord(c), c, logprobs=Logprobs(-1.0)) for c in NOW]
    pipeline.play([*tokens, Delta(2, "", "stop", STATS, Logprobs(-2.0))])
    body = CHAT | TOOLS | STREAM | {"logprobs": True, "return_token_ids": True}
    choices = _choices(post(http, body))
    counts = [len(c["logprobs"]["content"]) if c["logprobs"] else 0 for c in choices]
    assert sum(counts) == len(NOW) + 1
    assert [len(choice["token_ids"]) for choice in choices] == counts
    assert counts[0] == 0


def test_choices_have_calls_of_their_own(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text(*OSLO), text(*NOW), text("Hi"))
    answer = post(http, CHAT | TOOLS | {"n": 3}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == [
        "tool_calls", "tool_calls", "stop",
    ]  # fmt: skip
    assert _calls(answer["choices"][1]["message"]) == [("clock", {})]


@pytest.mark.parametrize("body", [{}, TOOLS | {"tool_choice": "none"}, {"tools": []}])
def test_calls_nobody_asked_for_are_text(
    http: httpx.Client, pipeline: FakePipeline, body: dict[str, Any]
) -> None:
    pipeline.play(text(NOW))
    choice = post(http, CHAT | body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (NOW, "stop")


# --- what the model is told -------------------------------------------------------------------


def test_tools_are_rendered(
    http: httpx.Client, pipeline: FakePipeline, fake_tokenizer: FakeTokenizer
) -> None:
    assert post(http, CHAT | {"tools": [WEATHER, CLOCK | {"x": 1}]}).status_code == 200
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    clock = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    assert fake_tokenizer.rendered["tools"] == [WEATHER, clock]
    assert pipeline.requests[0].grammar is None
    post(http, CHAT | TOOLS | {"tool_choice": "none"})
    assert fake_tokenizer.rendered["tools"] is None


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[FakePipeline, httpx.Client, FakeTokenizer]]:
    """A model whose template knows no tools."""
    pipeline, tokenizer = FakePipeline(), FakeTokenizer()
    tokenizer.chat_template = "{{ messages }}"
    app = make_api(pipeline, tokenizer=tokenizer, max_len=1000)
    with serving(app) as url, httpx.Client(base_url=url) as http:
        yield pipeline, http, tokenizer


@pytest.mark.parametrize("system", [[], [{"role": "developer", "content": "Be brief."}]])
def test_instructions(
    plain: tuple[FakePipeline, httpx.Client, FakeTokenizer], system: list[dict[str, str]]
) -> None:
    pipeline, http, tokenizer = plain
    pipeline.play(text(OSLO))
    body = CHAT | TOOLS | {"messages": system + CHAT["messages"]}
    choice = post(http, body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    first, user = tokenizer.rendered["messages"]
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief.\n\n" if system else "You can call")
    assert "weather" in first["content"]
    assert user == {"role": "user", "content": "hi"}


def test_calls_in_the_past(
    http: httpx.Client, fake_tokenizer: FakeTokenizer, pipeline: FakePipeline
) -> None:
    call = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "?"}], "name": "ann"},
        {"role": "user", "content": "-", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
        {"role": "assistant", "content": ".", "tool_calls": None},
        {"role": "user", "content": "!"},
    ]
    assert post(http, CHAT | {"messages": messages}).status_code == 200
    function = {"name": "clock", "arguments": {"zone": "CET"}}
    assert fake_tokenizer.rendered["messages"] == [
        {"role": "user", "name": "ann", "content": "?"},
        {"role": "user", "content": "-"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12"},
        {"role": "assistant", "content": "."},
        {"role": "user", "content": "!"},
    ]
    assert pipeline.requests


@pytest.mark.parametrize(
    ("body", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": True}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
def test_where_the_answer_begins(
    http: httpx.Client,
    fake_tokenizer: FakeTokenizer,
    body: dict[str, Any],
    begins: bool,
    continues: bool,
) -> None:
    assert post(http, CHAT | body).status_code == 200
    rendered = fake_tokenizer.rendered
    assert rendered["add_generation_prompt"] is begins
    assert rendered["continue_final_message"] is continues


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": 3}},
            {"reasoning_effort": 3},
        ),
    ],
)
def test_template_kwargs(
    http: httpx.Client, fake_tokenizer: FakeTokenizer, body: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert post(http, CHAT | body).status_code == 200
    assert fake_tokenizer.rendered["template_kwargs"] == kwargs


# --- grammars ---------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_formats(http: httpx.Client, pipeline: FakePipeline, body: dict[str, Any]) -> None:
    schema = {"name": "s", "schema": {"type": "string"}, "strict": True}
    for answer, grammar in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"type": "json_schema", "json_schema": schema},
            Grammar("json_schema", '{"type": "string"}'),
        ),
    ]:
        assert post(http, body | {"response_format": answer}).status_code == 200
        assert pipeline.requests[-1].grammar == grammar


def test_bad_schema(client: openai.OpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"bad": 1}}}
    with pytest.raises(openai.BadRequestError, match="This grammar is bad") as caught:
        client.chat.completions.create(**CHAT, response_format=schema)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("parallel", [True, False, None])
def test_calls_that_must_be(
    http: httpx.Client, pipeline: FakePipeline, parallel: bool | None
) -> None:
    pipeline.play(text(NOW))
    body = CHAT | TOOLS | {"parallel_tool_calls": parallel}
    grammars = []
    for choice in ("required", NAMED, "auto"):
        answer = post(http, body | {"tool_choice": choice}).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        grammars.append(pipeline.requests[-1].grammar)
    required, named, auto = grammars
    assert required is not None
    assert named is not None
    assert auto is None
    assert "weather" in required.text
    assert "weather" not in named.text
    assert (")*" in required.text.splitlines()[0]) is (parallel is not False)


def test_json_leaves_no_room_for_calls(http: httpx.Client, pipeline: FakePipeline) -> None:
    answer = '{"name": "clock", "arguments": {}}'
    pipeline.play(text(answer))
    body = CHAT | TOOLS | {"response_format": {"type": "json_object"}}
    choice = post(http, body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer, "stop")
