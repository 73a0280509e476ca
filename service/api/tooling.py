"""What tools and formats ask of an answer: what its prompt tells, what it must look like, and what
is read out of it."""

import json
from dataclasses import dataclass
from typing import Any, Self

from service.api.client import AnswerGrammars
from service.api.errors import ApiError
from service.api.fields import ResponseFormat, Tool
from service.api.protocol import ChatBody
from service.messages import Grammar
from service.text.tools import ToolFormat, ToolParser

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools that an answer may call."""

    tool_format: ToolFormat
    tools: tuple[dict[str, Any], ...] = ()
    must_call: bool = False  # one of them, or the one with this name
    name: str | None = None
    parallel: bool = True

    @classmethod
    def of(cls, body: ChatBody, tool_format: ToolFormat) -> Self:
        """Raises ApiError for a choice among tools that are not there."""
        choice = body.tool_choice or "auto"
        name = None if isinstance(choice, str) else choice["function"]["name"]
        tools = tuple(map(_plain, body.tools or ()))
        if choice not in ("none", "auto") and not tools:
            raise ApiError(400, "tool_choice: There are no tools.", param="tool_choice")
        if name is not None and name not in [tool["function"]["name"] for tool in tools]:
            raise ApiError(400, "tool_choice: There is no such tool.", param="tool_choice")
        return cls(
            tool_format=tool_format,
            tools=() if choice == "none" else tools,
            must_call=choice not in ("none", "auto"),
            name=name,
            parallel=body.parallel_tool_calls is not False,
        )

    def parser(self) -> ToolParser:
        """A new one, for one answer."""
        return self.tool_format.parser(self.tools)

    def grammar(self) -> Grammar | None:
        if not self.must_call:
            return None
        return self.tool_format.grammar(self.tools, self.name, parallel=self.parallel)


def answer_grammar(
    response_format: ResponseFormat | None, tooling: Tooling, grammars: AnswerGrammars
) -> Grammar | None:
    """What the answer must look like. Raises ApiError where that can't be had."""
    wanted = _format_grammar(response_format)
    if wanted is not None and tooling.must_call:
        raise ApiError(
            400,
            "The answer can't be a tool call and in this format; leave out one of tool_choice and "
            "response_format.",
            param="response_format",
        )
    try:
        grammar = wanted or tooling.grammar()
        if grammar is not None:
            grammars.check(grammar)
    except ValueError as error:
        param = "tools" if wanted is None else "response_format"
        raise ApiError(400, f"{param}: {error}", param=param) from error
    return grammar


def _format_grammar(response_format: ResponseFormat | None) -> Grammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object" or response_format.json_schema is None:
        return ANY_OBJECT
    return Grammar("json_schema", json.dumps(response_format.json_schema.schema_))


def _plain(tool: Tool) -> dict[str, Any]:
    """As templates know tools. OpenAI: a function without parameters has none."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or NOTHING
    return {"type": "function", "function": function}
