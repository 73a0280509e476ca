"""What is asked for, and the requests that are made of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "SPD_BASE_URL"
KEY_VARIABLE = "SPD_API_KEY"


class _Message(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]


class Message(_Message, total=False):
    """One turn of a conversation."""

    content: str | None
    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str


class _Options(TypedDict, total=False):
    """What both endpoints take; each is left to the server where it is left out."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    response_format: Mapping[str, Any]
    return_token_ids: bool
    speculation: bool
    extra: Mapping[str, Any]
    """Any other fields of the body."""


class ChatOptions(_Options, total=False):
    """What a chat takes besides its messages."""

    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    reasoning_effort: str


class CompletionOptions(_Options, total=False):
    """What a completion takes besides its prompt."""

    logprobs: int
    echo: bool
    best_of: int


Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request: with a body it is a POST."""

    path: str
    body: dict[str, Any] | None = None

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


@dataclass(frozen=True, slots=True)
class Streaming:
    """What a stream brings besides the text."""

    usage: bool = True  # token counts, in the last chunk
    pipeline: bool = False  # what the pipeline did for each chunk

    def fields(self) -> dict[str, Any]:
        wanted = {"include_usage": self.usage, "include_pipeline": self.pipeline}
        options = {name: True for name, is_wanted in wanted.items() if is_wanted}
        return {"stream": True, "stream_options": options}


def chat(
    model: str, messages: Sequence[Message], options: ChatOptions, stream: Streaming | None = None
) -> Call:
    """POST /v1/chat/completions"""
    body = {"model": model, "messages": list(messages)}
    return Call("/v1/chat/completions", {**body, **_fields(options, stream)})


def completion(
    model: str, prompt: Prompt, options: CompletionOptions, stream: Streaming | None = None
) -> Call:
    """POST /v1/completions"""
    return Call("/v1/completions", {"model": model, "prompt": prompt, **_fields(options, stream)})


def tokenize(text: str | Sequence[Message]) -> Call:
    """POST /tokenize, of a prompt or of a conversation"""
    given = {"prompt": text} if isinstance(text, str) else {"messages": list(text)}
    return Call("/tokenize", given)


def _fields(options: ChatOptions | CompletionOptions, stream: Streaming | None) -> dict[str, Any]:
    fields: dict[str, Any] = dict(options)
    extra = fields.pop("extra", {})
    return {**fields, **extra, **(stream.fields() if stream else {})}


def server_url(given: str | None) -> str:
    """Of the server's root: as given, else from the environment. OpenAI's clients want /v1 at its
    end, so it may be there. Raises ValueError for what is no URL."""
    url = given or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"The base URL {url!r} should begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def headers(api_key: str | None) -> dict[str, str]:
    """A key as given, else from the environment; without one none is sent."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}
