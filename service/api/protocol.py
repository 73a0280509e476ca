"""The bodies of OpenAI's requests and responses, as far as this server speaks them."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from service.messages import FinishReason

# --- requests ---------------------------------------------------------------------------------


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


def _one_prompt(prompt: Any) -> str | list[int]:
    """The only prompt, as text or as token ids. A union type would do the same with field names
    such as `prompt.list[int]` in its errors."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _unicode(prompt)
    if not isinstance(prompt, list):
        raise PydanticCustomError("prompt_type", "Should be a string or a list of token ids")
    if any(isinstance(item, str | list) for item in prompt):
        raise PydanticCustomError(
            "several_prompts", "Several prompts in one request are not supported yet"
        )
    if any(type(item) is not int for item in prompt):
        raise PydanticCustomError("prompt_type", "Token ids should be integers")
    return prompt


Text = Annotated[str, AfterValidator(_unicode)]
Content = Annotated[Text, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]
Prompt = Annotated[
    str | list[int], PlainValidator(_one_prompt, json_schema_input_type=str | list[int] | list[str])
]
Stop = Annotated[
    list[Annotated[Text, Field(min_length=1)]],
    Field(max_length=16),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(BaseModel):
    """What both endpoints take. Unknown fields are kept, so that those which would change the text
    can be refused by name (`service.api.requests`); the rest are ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Text
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt


# --- responses --------------------------------------------------------------------------------


class CompletionTokensDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishReason


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class _Response(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Response):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextCompletion(_Response):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
