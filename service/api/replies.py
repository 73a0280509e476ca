"""The responses of the two endpoints: the same pieces in different clothes."""

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from service.api.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    TextChoice,
    TextChunkChoice,
    ToolCall,
    Usage,
)
from service.api.choices import Call, Choice, Piece
from service.api.logprobs import TokenNames, chat_logprobs, text_logprobs
from service.api.views import pipeline_events


class Reply(ABC):
    """One response, whole or in chunks. `token_ids`: with those of prompts and answers."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, names: TokenNames, *, token_ids: bool) -> None:
        self.id = self.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._model = model
        self._names = names
        self._token_ids = token_ids

    def whole(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response, each choice in one piece."""
        bodies = [self._whole(*pair) for pair in zip(choices, pieces, strict=True)]
        return {
            **self._around(self.whole_object, bodies),
            **self._beside(choices[0], pieces[0]),
            "usage": usage(choices),
        }

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        chunk = {
            **self._around(self.chunk_object, [self._chunk(choice, piece)]),
            **self._beside(choice, piece),
        }
        if piece.pipeline is not None:
            chunk["pipeline"] = pipeline_events(piece.pipeline, self._names)
        return chunk

    def last_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What all of it took."""
        return {**self._around(self.chunk_object, []), "usage": usage(choices)}

    @abstractmethod
    def _whole(self, choice: Choice, piece: Piece) -> Mapping[str, Any]: ...

    @abstractmethod
    def _chunk(self, choice: Choice, piece: Piece) -> Mapping[str, Any]: ...

    def _beside(self, choice: Choice, piece: Piece) -> dict[str, Any]:  # noqa: ARG002
        """What stands beside the choices."""
        return {}

    def _around(self, object_: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class ChatReply(Reply):
    """As of POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole(self, choice: Choice, piece: Piece) -> ChatChoice:
        assert piece.reason is not None, "joined pieces have the last one's reason"
        content = None if piece.calls and not piece.text else piece.text
        message: AssistantMessage = {"role": "assistant", "content": content, "refusal": None}
        if piece.calls:
            message["tool_calls"] = [_called(call) for call in piece.calls]
        body: ChatChoice = {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(piece.scored, self._names),
            "finish_reason": piece.reason,
        }
        if self._token_ids:
            body["token_ids"] = list(piece.token_ids)
        return body

    def _chunk(self, choice: Choice, piece: Piece) -> ChatChunkChoice:
        body: ChatChunkChoice = {
            "index": choice.index,
            "delta": _delta(piece),
            "logprobs": chat_logprobs(piece.scored, self._names),
            "finish_reason": piece.reason,
        }
        if self._token_ids:
            body["token_ids"] = list(piece.token_ids)
        return body

    def _beside(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if self._token_ids and piece.is_first:
            return {"prompt_token_ids": choice.request.prompt_ids}
        return {}


class TextReply(Reply):
    """As of POST /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, model: str, names: TokenNames, *, token_ids: bool) -> None:
        super().__init__(model, names, token_ids=token_ids)
        self._offsets: Counter[int] = Counter()  # where the next token of a choice begins

    def _whole(self, choice: Choice, piece: Piece) -> TextChoice:
        body = self._chunk(choice, piece)
        assert piece.reason in ("stop", "length"), "completions have no tools"
        return {**body, "finish_reason": piece.reason}

    def _chunk(self, choice: Choice, piece: Piece) -> TextChunkChoice:
        assert piece.reason != "tool_calls", "completions have no tools"
        logprobs, self._offsets[choice.index] = text_logprobs(
            piece.scored, self._names, self._offsets[choice.index]
        )
        body: TextChunkChoice = {
            "index": choice.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.reason,
        }
        if self._token_ids:
            body["token_ids"] = list(piece.token_ids)
            if piece.is_first:
                body["prompt_token_ids"] = list(choice.request.prompt_ids)
        return body


def _delta(piece: Piece) -> ChatDelta:
    if piece.is_first:
        return {"role": "assistant", "content": ""}
    if piece.calls:
        return {"tool_calls": [{"index": call.index, **_called(call)} for call in piece.calls]}
    return {"content": piece.text} if piece.text else {}


def _called(call: Call) -> ToolCall:
    function = call.function
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments},
    }


def usage(choices: Sequence[Choice]) -> Usage:
    """What all choices took together. A prompt counts once, and what was cached of it is what its
    first choice found: the others find what that one has left. OpenAI's predicted tokens are our
    drafts."""
    prompts = [choice for choice in choices if choice.leads]
    prompt_tokens = sum(len(choice.request.prompt_ids) for choice in prompts)
    generated = sum(choice.generated for choice in choices)
    finished = [choice.stats for choice in choices if choice.stats is not None]
    accepted = sum(stats.accepted for stats in finished)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(stats.drafted for stats in finished) - accepted,
        },
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.stats.cached for choice in prompts if choice.stats)
        },
    }
