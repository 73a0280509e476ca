"""Function calls: how models are told of functions, how they write calls, and what is read back.

`tools` are OpenAI's, validated: {"type": "function", "function": {"name", "description",
"parameters"}}. Three forms of a call are known, by the families that use them:

    hermes   <tool_call>\\n{"name": .., "arguments": {..}}\\n</tool_call>    Qwen, SmolLM, Hermes
    mistral  [TOOL_CALLS][{"name": .., "arguments": {..}}, ..]
    llama    {"name": .., "parameters": {..}}                              since 3.1
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Self

from service.messages import Grammar
from service.text.grammar import JSON_STYLE
from service.text.tool_parser import CallForm, CallParser, ToolCall, ToolParser

__all__ = ["ToolCall", "ToolFormat", "ToolParser"]

Message = dict[str, Any]
Tool = dict[str, Any]

_FORMS = {
    "hermes": CallForm("<tool_call>", ("</tool_call>",), "arguments"),
    "mistral": CallForm("[TOOL_CALLS]", (), "arguments"),
    "llama": CallForm("<|python_tag|>", (";",), "parameters"),
}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one target's chat template and model deal with functions."""

    form: Literal["hermes", "mistral", "llama"]
    renders_tools: bool  # the template shows `tools` to the model, and calls and their results
    added_tokens: Mapping[str, int]  # those tokens that the tokenizer never splits, with their ids

    @classmethod
    def of(cls, chat_template: str | None, added_tokens: Mapping[str, int]) -> Self:
        """The format of a template. `added_tokens` are those of the tokenizer: where "<tool_call>"
        is one of them, the model writes it as one token."""
        template = chat_template or ""
        form: Literal["hermes", "mistral", "llama"] = "hermes"
        if "<tool_call>" not in template:
            if "[TOOL_CALLS]" in template:
                form = "mistral"
            elif "<|python_tag|>" in template or '"parameters"' in template:
                form = "llama"
        return cls(form, _mentions_tools(template), added_tokens)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """A system text that tells the functions, for templates that don't. Short: it is for small
        models."""
        functions = (
            {key: t["function"][key] for key in _SHOWN if t["function"].get(key)} for t in tools
        )
        signatures = "\n".join(json.dumps(f, ensure_ascii=False) for f in functions)
        return (
            f"You can call these functions:\n<tools>\n{signatures}\n</tools>\n"
            "To call one, answer with its name and arguments in this form:\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
        )

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """Calls of functions that are not among `tools` stay plain text."""
        return CallParser(_FORMS[self.form], {t["function"]["name"] for t in tools})

    def grammar(self, tools: Sequence[Tool], name: str | None, *, parallel: bool) -> Grammar:
        """An answer that is exactly one call, of the function `name` or (None) of any; `parallel`:
        one call or more, where the form has more. Arguments follow the function's JSON schema."""
        functions = [t["function"] for t in tools if name in (None, t["function"]["name"])]
        lines = [
            f"start: {self._answer(parallel)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        for i, function in enumerate(functions):
            key = _FORMS[self.form].arguments
            head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
            # Each schema is the root of its own grammar: a "$ref" in it begins at its root.
            schema = (function.get("parameters") or {}) | {"type": "object"} | JSON_STYLE
            lines.append(f'call_{i}: {json.dumps(head)} arguments_{i} "}}"')
            lines.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return Grammar("lark", "\n".join(lines))

    def _answer(self, parallel: bool) -> str:
        """The body of the grammar's first rule."""
        form = _FORMS[self.form]
        opener = self._literal(form.opener)
        match self.form:
            case "hermes":
                call = f'{opener} "\\n" call "\\n" {self._literal(form.closers[0])}'
                return f'{call} ("\\n" {call})*' if parallel else call
            case "mistral":
                more = '(", " call)*' if parallel else ""
                return f'{opener} "[" call {more} "]"'
            case "llama":  # its templates allow one call per message
                return "call"

    def _literal(self, text: str) -> str:
        token = self.added_tokens.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def call_messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of a chat, with their `tool_calls` and those of role "tool", as the template
        takes them. Raises ValueError if a call's arguments are not the JSON text of an object.

        Templates that render calls get the arguments as a dict, as in transformers. Others get
        plain text: calls in the Hermes form, results as the user's.
        """
        plain = [_plain_message(message) for message in messages]
        if not self.renders_tools:
            return list(_as_text(plain))
        if self.form == "llama":
            return [single for message in plain for single in _one_call_each(message)]
        return [_short_ids(message) for message in plain] if self.form == "mistral" else plain


_SHOWN = ("name", "description", "parameters")
_STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)


def _mentions_tools(template: str) -> bool:
    """Whether a template uses the variable `tools`, and not just the word in its text."""
    code = " ".join(re.findall(r"\{[{%].*?[}%]\}", template, re.DOTALL))
    return bool(re.search(r"\btools\b", _STRING.sub("", code)))


# --- calls in the messages of a chat ------------------------------------------------------------


def _plain_message(message: Message) -> Message:
    """Arguments as dicts. No `tool_calls` where there are none: templates ask for the key alone."""
    result = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls := message.get("tool_calls"):
        result["content"] = message.get("content") or ""
        result["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _arguments(call["function"])}}
            for call in calls
        ]
    return result


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"The arguments of a call of {function['name']!r} are not the JSON text of an object."
        )
    return arguments


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Results in a row are one message: some templates want the roles to alternate."""
    for role, group in groupby(messages, key=lambda message: message["role"]):
        if role == "tool":
            results = (f"<tool_response>\n{m['content']}\n</tool_response>" for m in group)
            yield {"role": "user", "content": "\n".join(results)}
        else:
            yield from map(_written, group)


def _written(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        written = {"name": call["name"], "arguments": call["arguments"]}
        texts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(texts)}


def _one_call_each(message: Message) -> Iterator[Message]:
    """Llama's templates refuse messages with several calls."""
    calls = message.get("tool_calls", [])
    yield from ([message | {"tool_calls": [call]} for call in calls] if calls else [message])


def _short_ids(message: Message) -> Message:
    """Mistral's templates refuse ids that don't have nine letters and digits."""
    result = dict(message)
    if "tool_call_id" in message:
        result["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        result["tool_calls"] = [c | {"id": _short_id(c["id"])} for c in message["tool_calls"]]
    return result


def _short_id(call_id: str) -> str:
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
