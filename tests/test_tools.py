"""Function calls: templates, instructions, parsing of answers, grammars of forced calls."""

import json
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.messages import Grammar
from service.text.grammar import Grammars
from service.text.tokenizer import Tokenizer
from service.text.tools import ToolCall, ToolFormat

QWEN = (
    "{%- if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
    "{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}\n<tool_call>\n{{ {'name': call.function.name,"
    " 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}"
)
MISTRAL = (
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}"
    "[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{{ c.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ m.tool_call_id }}={{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": arguments}.'
    "{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather # at // a place",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/count"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, CLOCK]
TEMPLATES = {"hermes": QWEN, "mistral": MISTRAL, "llama": LLAMA}

PARIS = ToolCall("get_weather", '{"city": "Paris"}')
TIME = ToolCall("get_time", "{}")


def tool_format(form: str, **added_tokens: int) -> ToolFormat:
    return ToolFormat.of(TEMPLATES[form], added_tokens)


def parse(form: str, *pieces: str) -> tuple[str, list[ToolCall]]:
    return parse_with(tool_format(form), TOOLS, *pieces)


def parse_with(
    found: ToolFormat, tools: list[dict[str, Any]], *pieces: str
) -> tuple[str, list[ToolCall]]:
    """Everything that an answer gives."""
    parser = found.parser(tools)
    text, calls = "", []
    for out in (*map(parser.push, pieces), parser.finish()):
        text += out[0]
        calls += out[1]
    return text, calls


# --- templates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "form", "renders"),
    [
        (QWEN, "hermes", True),
        (MISTRAL, "mistral", True),
        (LLAMA, "llama", True),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama", True),
        (PLAIN, "hermes", False),
        (None, "hermes", False),
        ("Use your tools.{{ 'no tools' + \"tools\" }}{# tools #}", "hermes", False),
        ("{%- set a = 'it\\'s' %}{{- tools[0] }}", "hermes", True),
        ("{{ my_tools }}", "hermes", False),
    ],
)
def test_format_of_a_template(template: str | None, form: str, renders: bool) -> None:
    found = ToolFormat.of(template, {})
    assert (found.form, found.renders_tools) == (form, renders)


def test_default_model_needs_instructions(default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    found = ToolFormat.of(tokenizer.chat_template, tokenizer.added_tokens)
    assert (found.form, found.renders_tools) == ("hermes", False)


def test_instructions() -> None:
    short: dict[str, Any] = {"name": "größe", "description": None, "strict": True}
    text = ToolFormat.of(PLAIN, {}).instructions([CLOCK, {"type": "function", "function": short}])
    assert text == (
        'You can call these functions:\n<tools>\n{"name": "get_time"}\n{"name": "größe"}\n'
        "</tools>\nTo call one, answer with its name and arguments in this form:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    assert '"parameters": {"type": "object"' in ToolFormat.of(PLAIN, {}).instructions(TOOLS)


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather and time in Paris?", "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            call("call_1", "get_weather", '{"city": "Ulm ü"}'),
            call("abcdefgh9", "get_time", "{}"),
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "abcdefgh9", "content": "noon"},
    {"role": "assistant", "content": "Rain.", "tool_calls": []},
]


def render(template: str) -> str:
    messages = ToolFormat.of(template, {}).call_messages(CHAT)
    environment = jinja2.Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.from_string(template).render(messages=messages, tools=None)


def test_calls_are_rendered_by_templates_that_can() -> None:
    before = json.dumps(CHAT)
    assert render(QWEN) == (
        "[user]Weather and time in Paris?\n[assistant]\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        "[tool]rain\n[tool]noon\n[assistant]Rain.\n"
    )
    assert render(LLAMA) == "Weather and time in Paris?11rainnoonRain."  # each call by itself
    assert json.dumps(CHAT) == before


def test_mistral_has_ids_of_nine_characters() -> None:
    messages = tool_format("mistral").call_messages(CHAT)
    [first, second] = (c["id"] for c in messages[1]["tool_calls"])
    assert second == "abcdefgh9"
    assert len(first) == 9
    assert first.isalnum()
    assert [m["tool_call_id"] for m in messages[2:4]] == [first, second]
    assert f"{first}=rain" in render(MISTRAL)


def test_calls_are_text_for_other_templates() -> None:
    assert render(PLAIN) == (
        "user: Weather and time in Paris?\nassistant: "
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        "assistant: Rain.\n"
    )
    wordy = [{"role": "assistant", "content": "So:", "tool_calls": [call("x", "get_time", "{}")]}]
    [message] = ToolFormat.of(PLAIN, {}).call_messages(wordy)
    assert message["content"].startswith("So:\n<tool_call>\n")


@pytest.mark.parametrize("arguments", ["", "{", "[]", '"{}"', "[" * 100_000])
def test_arguments_that_are_no_object(arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [call("x", "get_time", arguments)]}
    with pytest.raises(ValueError, match="arguments of a call of 'get_time' are not the JSON text"):
        ToolFormat.of(PLAIN, {}).call_messages([message])


# --- parsing -----------------------------------------------------------------------------------

BRACES = '{"city": "</tool_call> {[\\"\\\\", "days": [{}]}'
WELL_FORMED = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
     "", [PARIS]),
    ("hermes", 'I look.\n<tool_call>{"arguments":{"city":"Paris"},"name":"get_weather"}'
     "</tool_call>", "I look.", [PARIS]),
    ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}},'
     ' {"name": "get_time", "arguments": {}}]</tool_call>', "", [PARIS, TIME]),
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n<tool_call>\n'
     '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n\nDone.',
     "\n\nDone.", [TIME, PARIS]),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {BRACES}}}</tool_call>',
     "", [ToolCall("get_weather", BRACES)]),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [TIME]),
    ("hermes", '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n{"name": "get_time"}',
     "", [PARIS, TIME]),  # where the tags are special tokens
    ("hermes", '<tool_call><tool_call>{"name": "get_time"}', "<tool_call>", [TIME]),
    ("hermes", '<tool_call>{"name": <tool_call>{"name": "get_time"}', '<tool_call>{"name": ',
     [TIME]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "",
     [PARIS]),
    ("mistral", '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time",'
     ' "arguments": {}}]', "", [PARIS, TIME]),
    ("mistral", 'Well [TOOL_CALLS][{ "name": "get_time" }] ', "Well", [TIME]),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama", '{ "name" : "get_time", "parameters": {}}; {"name": "get_weather",'
     ' "parameters": {"city": "Paris"}}', "", [TIME, PARIS]),
    ("llama", '<|python_tag|>{"name": "get_time", "parameters": {}}', "", [TIME]),
]  # fmt: skip
# Only the last brackets are missing.
READABLE = [
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>',
     "", [PARIS]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_time"}\n</tool_', "", [TIME]),
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}', "", [TIME]),
    ("mistral", '[{"name": "get_time", "arguments": {}', "", [TIME]),
]  # fmt: skip
NO_CALLS = [
    ("hermes", "Hello, <b>world</b> {\"name\": \"get_time\"}!\n"),
    ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>\n'),
    ("hermes", '<tool_call>[{"name": "get_time"}, {"name": "rm"}]</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["get_time"]}</tool_call>'),
    ("hermes", "<tool_call>get_time()</tool_call>"),
    ("hermes", "<tool_call>[]</tool_call> "),
    ("hermes", "a <tool_"),
    ("hermes", "<tool_call> "),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1'),  # of 12, perhaps
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": {}'),
    ("hermes", '{"name": "Bob", "age": 3}'),
    ("hermes", ' {"age": 3}'),
    ("hermes", '{\x0b"name": "get_time"}'),
    ("hermes", "<tool_call>" + "[" * 2000),
    ("hermes", '{"name": "get_time", "arguments": ' + '{"a": ' * 3000 + "1" + "}" * 3001),
    ("hermes", "   \n"),
    ("hermes", ""),
    ("mistral", '[TOOL_CALLS]get_time{"a": 1}'),
    ("mistral", "[1, 2]"),
    ("llama", 'Sure: {"name": "get_time", "parameters": {}}'),
    ("llama", '<|python_tag|>get_time.call(a="b")'),
]  # fmt: skip
CASES = [*WELL_FORMED, *READABLE, *((form, text, text, []) for form, text in NO_CALLS)]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_answer(form: str, answer: str, text: str, calls: list[ToolCall]) -> None:
    assert parse(form, answer) == (text, calls)
    assert parse(form, *answer) == (text, calls)  # character by character


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_make_no_difference(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(TEMPLATES)))
    parts = [answer for _, answer, _, _ in CASES if len(answer) < 500]
    fragments = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name"', "{", "}", "]", '"', " "]
    answer = "".join(
        data.draw(st.lists(st.sampled_from(parts + fragments) | st.text(), max_size=6))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=12)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    text, calls = parse(form, *pieces)
    assert (text, calls) == parse(form, answer)
    assert calls or text == answer


def test_what_goes_out_at_once() -> None:
    parser = tool_format("hermes").parser(TOOLS)
    pieces = [
        "Hi",
        " there",
        " <",
        "b",
        '> <tool_call>\n{"name": "get_time"',
        "}",
        "\n</tool_call>",
    ]
    assert [parser.push(piece) for piece in pieces] == [
        ("Hi", []), (" there", []), ("", []), (" <b", []), (">", []), ("", [TIME]), ("", []),
    ]  # fmt: skip
    assert parser.finish() == ("", [])
    parser = tool_format("llama").parser(TOOLS)  # an answer in JSON is not held back for long
    assert [parser.push(piece) for piece in ('{"', "na", "tion", '": 1}')] == [
        ("", []), ("", []), ('{"nation', []), ('": 1}', []),
    ]  # fmt: skip


def test_arguments_are_json_that_can_be_sent() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Gr\\u00fcn\\ud83d"}}'
    assert parse("hermes", text)[1] == [ToolCall("get_weather", '{"city": "Gr\\u00fcn\\ud83d"}')]
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "two\nlines \\u00fc"}}'
    assert parse("hermes", text)[1] == [ToolCall("get_weather", '{"city": "two\\nlines ü"}')]


# --- grammars ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="session")
def grammars(default_model: Path, tokenizer: Tokenizer) -> Grammars:
    return Grammars.load(default_model, tokenizer.vocab_size)


def fits(grammars: Grammars, grammar: Grammar, ids: list[int]) -> bool:
    """Whether an answer is complete, with every token of it allowed."""
    follower = grammars.follow(grammar)
    for i, token in enumerate([*ids, 2]):
        mask = follower.allowed(ids[:i])
        if mask is None or not mask[token]:
            return False
    return True


HERMES_CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WEATHER_CALL = HERMES_CALL.format("get_weather", '{"city": "Paris", "days": 3}')
TIME_CALL = HERMES_CALL.format("get_time", '{"any": [1, null]}')


@pytest.mark.parametrize(
    ("name", "parallel", "answer", "allowed"),
    [
        (None, False, WEATHER_CALL, True),
        (None, False, TIME_CALL, True),
        (None, False, HERMES_CALL.format("get_time", "{}"), True),
        ("get_weather", False, WEATHER_CALL, True),
        ("get_time", False, WEATHER_CALL, False),
        (None, True, WEATHER_CALL, True),
        (None, True, f"{WEATHER_CALL}\n{TIME_CALL}\n{WEATHER_CALL}", True),
        (None, False, f"{WEATHER_CALL}\n{TIME_CALL}", False),
        (None, False, HERMES_CALL.format("get_weather", '{"city": "Paris", "days": 10}'), False),
        (None, False, HERMES_CALL.format("get_weather", "{}"), False),
        (None, False, HERMES_CALL.format("rm", "{}"), False),
        (None, False, "Hello", False),
        (None, False, "", False),
    ],
)
def test_hermes_grammar(
    grammars: Grammars,
    tokenizer: Tokenizer,
    name: str | None,
    parallel: bool,
    answer: str,
    allowed: bool,
) -> None:
    grammar = ToolFormat.of(PLAIN, tokenizer.added_tokens).grammar(TOOLS, name, parallel=parallel)
    grammars.check(grammar)
    assert fits(grammars, grammar, tokenizer.encode(answer)) is allowed


MISTRAL_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize(
    ("form", "answer", "allowed"),
    [
        ("mistral", f"[TOOL_CALLS][{MISTRAL_PARIS}]", True),
        ("mistral", f"[TOOL_CALLS][{MISTRAL_PARIS}, {MISTRAL_PARIS}]", True),
        ("mistral", "[TOOL_CALLS][]", False),
        ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', True),
        ("llama", MISTRAL_PARIS, False),
    ],
)
def test_other_grammars(
    grammars: Grammars, tokenizer: Tokenizer, form: str, answer: str, allowed: bool
) -> None:
    grammar = tool_format(form).grammar(TOOLS, None, parallel=True)
    grammars.check(grammar)
    assert fits(grammars, grammar, tokenizer.encode(answer)) is allowed


def test_tags_that_are_tokens_are_written_as_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    tags = {"<tool_call>": 5, "</tool_call>": 6}  # stand-ins: the default model has no such tokens
    grammar = ToolFormat.of(QWEN, tags).grammar(TOOLS, None, parallel=True)
    body = tokenizer.encode('\n{"name": "get_time", "arguments": {}}\n')
    assert fits(grammars, grammar, [5, *body, 6])
    assert fits(grammars, grammar, [5, *body, 6, *tokenizer.encode("\n"), 5, *body, 6])
    assert not fits(grammars, grammar, tokenizer.encode(HERMES_CALL.format("get_time", "{}")))


NARROW: dict[str, Any] = {  # no text in it can go on for long
    "type": "object",
    "properties": {
        "kind": {"enum": ["<tool_call>", "ß", "plain"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["flags"],
    "additionalProperties": False,
}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), form=st.sampled_from(sorted(TEMPLATES)), parallel=st.booleans())
def test_forced_calls_can_be_read(
    grammars: Grammars, tokenizer: Tokenizer, seed: int, form: str, parallel: bool
) -> None:
    """A model that says anything at all, kept to the grammar, calls functions."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": NARROW}}
        for name in ("set", "set_all")
    ]
    grammar = tool_format(form).grammar(tools, None, parallel=parallel)
    follower, generator = grammars.follow(grammar), np.random.default_rng(seed)
    ids: list[int] = []
    while (mask := follower.allowed(ids)) is not None and not mask[2]:
        ids.append(int(generator.choice(np.flatnonzero(mask))))
    assert mask is not None
    text, calls = parse_with(tool_format(form), tools, tokenizer.decode(ids))
    assert text == ""
    assert len(calls) == 1 or parallel
    for found in calls:
        assert found.name in ("set", "set_all")
        jsonschema.validate(json.loads(found.arguments), NARROW)
