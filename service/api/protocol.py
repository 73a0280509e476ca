"""The bodies of OpenAI's requests, as far as this server speaks them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from service.api.fields import (
    Alternatives,
    Content,
    JsonObject,
    LogitBias,
    Prompts,
    ResponseFormat,
    Stop,
    Strict,
    Text,
    TextLogprobs,
    ToolChoice,
    Tools,
)

MAX_CHOICES = 64  # of one request: prompts times n
MAX_STOP_IDS = 64

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class CalledFunction(Strict):
    name: Text
    arguments: Text


class MadeToolCall(Strict):
    """A call that an earlier answer asked for."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text | None = None
    tool_calls: list[MadeToolCall] | None = None
    tool_call_id: Text | None = Field(None, validate_default=True)
    content: Content | None = Field(None, validate_default=True)

    @field_validator("tool_call_id")
    @classmethod
    def _answers_a_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticCustomError("no_call", "A tool's message needs the id of the call")
        return value

    @field_validator("content")
    @classmethod
    def _says_something(cls, value: str | None, info: ValidationInfo) -> str | None:
        calls = info.data.get("role") == "assistant" and info.data.get("tool_calls")
        if value is None and not calls:
            raise PydanticCustomError(
                "no_content", "Should be text; only an assistant's message with tool_calls has none"
            )
        return value


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_pipeline: bool | None = Field(
        None,
        description="Chunks tell, in a field `pipeline`, what the stages did since the one before: "
        "see docs/pipeline-events.md.",
    )


class GenerationBody(BaseModel):
    """What both endpoints take. Unknown fields are kept, so that those which would change the text
    can be refused by name (`service.api.requests`); the rest are ignored."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    speculation: bool | None = Field(
        None, description="`false`: nothing is drafted for this request. Its text is the same."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompts
    echo: bool | None = None
    best_of: int | None = None
    logprobs: TextLogprobs = None
