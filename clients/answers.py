"""What the server answers. Fields that are not named here are kept (`answer.model_extra`)."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from clients.pipeline import Pipeline


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


# --- what both endpoints have -----------------------------------------------------------------


class CompletionTokensDetails(_Answer):
    """Drafts that were verified, by what came of them."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(_Answer):
    cached_tokens: int = 0


class Usage(_Answer):
    """Token counts of a request, as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted; None where there were none."""
        details = self.completion_tokens_details or CompletionTokensDetails()
        accepted = details.accepted_prediction_tokens
        drafted = accepted + details.rejected_prediction_tokens
        return accepted / drafted if drafted else None


# --- chat -------------------------------------------------------------------------------------


class CalledFunction(_Answer):
    name: str | None = None
    arguments: str = ""


class ToolCall(_Answer):
    """A call that the model asks for; in chunks, `index` says which one goes on."""

    id: str | None = None
    index: int = 0
    function: CalledFunction


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(_Answer):
    content: list[ChosenLogprob] | None = None


class AssistantMessage(_Answer):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class _Choice(_Answer):
    index: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(_Answer):
    id: str
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """That of the first choice."""
        return self.choices[0].message.content or ""


class ChatChunkChoice(_Choice):
    delta: AssistantMessage
    logprobs: ChatLogprobs | None = None


class _Chunk(_Answer):
    id: str
    model: str
    usage: Usage | None = None
    pipeline: Pipeline | None = None


class ChatChunk(_Chunk):
    """Part of an answer. Only the last one, which has no choices, has the usage."""

    choices: list[ChatChunkChoice]

    @property
    def text(self) -> str:
        """What is new of the first choice."""
        return "".join(c.delta.content or "" for c in self.choices if c.index == 0)

    @property
    def finish_reason(self) -> str | None:
        return _first_reason(self.choices)


# --- completions ------------------------------------------------------------------------------


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None = None


class Completion(_Answer):
    id: str
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """That of the first choice."""
        return self.choices[0].text


class CompletionChunk(_Chunk):
    """Part of an answer. Only the last one, which has no choices, has the usage."""

    choices: list[TextChoice]

    @property
    def text(self) -> str:
        """What is new of the first choice."""
        return "".join(c.text for c in self.choices if c.index == 0)

    @property
    def finish_reason(self) -> str | None:
        return _first_reason(self.choices)


def _first_reason(choices: Sequence[_Choice]) -> str | None:
    return next((c.finish_reason for c in choices if c.index == 0), None)


# --- the rest ---------------------------------------------------------------------------------


class ModelCard(_Answer):
    id: str
    max_model_len: int | None = None


class ModelList(_Answer):
    data: list[ModelCard]


class Tokens(_Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(_Answer):
    prompt: str


class Version(_Answer):
    version: str
