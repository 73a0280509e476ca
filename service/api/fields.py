"""What single fields of a body may hold, where that takes more than a range.

Every message of a validator is for the client and holds no input; its place is the field's name.
"""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

MAX_BIASES = 1024
MAX_DEPTH = 64  # of JSON that is handed on: templates and grammars descend into it
MAX_TOOLS = 128
_TOKEN_ID = re.compile("[0-9]{1,9}")


class Strict(BaseModel):
    """Part of a body: takes no 1 for true and no "1" for 1. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)


# --- text -------------------------------------------------------------------------------------


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def _unicode(text: str) -> str:
    """Refuses lone surrogates, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("surrogate", "Should be valid Unicode") from None
    return text


def _joined(content: Any) -> Any:
    """The text of a message's content, which may come in parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("part_type", "Only parts of type 'text' are supported")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("part_text", "A part of type 'text' needs a string 'text'")
    return "".join(part["text"] for part in content)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Text = Annotated[str, AfterValidator(_unicode)]
Content = Annotated[Text, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]
Stop = Annotated[
    list[Annotated[Text, Field(min_length=1)]],
    Field(max_length=16),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


# --- prompts ----------------------------------------------------------------------------------


def _prompts(value: Any) -> list[str | list[int]]:
    """Each prompt, as text or as token ids. A union type would do the same with field names such
    as `prompt.list[int]` in its errors."""
    if isinstance(value, str) or (isinstance(value, list) and _are_ids(value)):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(prompt, str | list) for prompt in value):
        raise PydanticCustomError(
            "prompt_type", "Should be a string, a list of token ids, or a list of either"
        )
    for prompt in value:
        if isinstance(prompt, str):
            _unicode(prompt)
        elif not _are_ids(prompt):
            raise PydanticCustomError("prompt_type", "Token ids should be integers")
    return value


def _are_ids(prompt: list[Any]) -> bool:
    return all(type(item) is int for item in prompt)


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


# --- numbers ----------------------------------------------------------------------------------


def _biases(value: Any) -> dict[int, float]:
    """Token ids to what is added to their scores. The vocabulary is checked later."""
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "Should be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias_count", f"Should have at most {MAX_BIASES} token ids")
    if not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise PydanticCustomError("bias_key", "Keys should be token ids, such as '50256'")
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise PydanticCustomError("bias_value", "Values should be numbers from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _count_or_none(logprobs: Any) -> Any:
    return None if logprobs is False else logprobs


LogitBias = Annotated[
    dict[int, float], PlainValidator(_biases, json_schema_input_type=dict[str, float])
]
Alternatives = Annotated[int, Field(ge=0, le=20)]
# `false`, the chat's way to ask for none, is sent to completions too.
TextLogprobs = Annotated[
    Alternatives | None, BeforeValidator(_count_or_none, json_schema_input_type=int | None)
]


# --- JSON that is handed on -------------------------------------------------------------------


def _sound(value: dict[str, Any]) -> dict[str, Any]:
    if _deeper(value, MAX_DEPTH):
        raise PydanticCustomError("depth", f"Should be nested at most {MAX_DEPTH} deep")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        message = "Should hold finite numbers and valid Unicode alone"
        raise PydanticCustomError("json", message) from None
    return value


def _deeper(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return depth == 0 or any(_deeper(item, depth - 1) for item in value)


JsonObject = Annotated[dict[str, Any], AfterValidator(_sound)]


# --- tools ------------------------------------------------------------------------------------


class Function(Strict):
    """A function that the model may ask the client to call."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


def _unique(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("tool_names", "Functions should have different names")
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_unique)]


class NamedFunction(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    """A union type would put its members' names into the errors' field names."""
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return {"type": "function", "function": {"name": function["name"]}}
    message = (
        "Should be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
    )
    raise PydanticCustomError("tool_choice", message)


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    ToolMode | NamedTool,
    PlainValidator(_tool_choice, json_schema_input_type=ToolMode | NamedTool),
]


# --- formats ----------------------------------------------------------------------------------


class JsonSchema(Strict):
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: Text | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer's text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _is_there(cls, value: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if value is None and info.data.get("type") == "json_schema":
            raise PydanticCustomError("no_schema", "The type 'json_schema' needs it")
        return value
