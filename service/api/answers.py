"""The bodies of OpenAI's responses, whole and in chunks. Fields that need not be there are those
that vLLM adds for `return_token_ids`, and our own `pipeline`."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from service.messages import FinishReason, Outcome

# --- what both endpoints have -----------------------------------------------------------------


class CompletionTokensDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails
    prompt_tokens_details: PromptTokensDetails


class _Answer(TypedDict):
    id: str
    created: int
    model: str


class _Whole(_Answer):
    usage: Usage


class PipelineRow(TypedDict):
    position: int
    count: int
    token: int | None
    text: str
    source: Literal["prompt", "target", "lookup", "pdm"]


class PipelineVerdict(TypedDict):
    position: int
    token: int
    text: str
    outcome: Outcome


class PipelineCycle(TypedDict):
    cycle: int
    milliseconds: float
    rows: list[PipelineRow | None]
    verdict: PipelineVerdict | None
    void: list[int]


class PipelineEvents(TypedDict):
    stages: int
    drafter: str
    cycles: list[PipelineCycle]


class _Chunk(_Answer):
    usage: NotRequired[Usage | None]
    pipeline: NotRequired[PipelineEvents]


# --- chat -------------------------------------------------------------------------------------


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall):
    index: int


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: NotRequired[list[int]]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


# --- completions ------------------------------------------------------------------------------


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(_TextChoice):
    finish_reason: FinishReason


class TextChunkChoice(_TextChoice):
    finish_reason: FinishReason | None


class TextCompletion(_Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextCompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


# --- models -----------------------------------------------------------------------------------


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


# --- operations -------------------------------------------------------------------------------


class Readiness(TypedDict):
    ready: bool
    detail: str
    speculation: str | None
