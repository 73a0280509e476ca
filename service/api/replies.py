"""The responses of the two endpoints: the same text in different clothes."""

import time
import uuid
from typing import Any, Protocol

from service.api.protocol import Usage
from service.messages import FinishReason, RequestStats

Choice = dict[str, Any]


class Reply(Protocol):
    """One choice of one endpoint's responses, whole and in pieces. An opening piece is sent ahead
    of the text."""

    id_prefix: str
    object: str
    chunk_object: str

    def whole(self, text: str, reason: FinishReason) -> Choice: ...

    def opening(self) -> Choice | None: ...

    def piece(self, text: str) -> Choice: ...

    def finish(self, reason: FinishReason) -> Choice: ...


class ChatReply:
    """As of POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str, reason: FinishReason) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self) -> Choice:
        return self._delta({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Choice:
        return self._delta({"content": text}, None)

    def finish(self, reason: FinishReason) -> Choice:
        return self._delta({}, reason)

    def _delta(self, delta: dict[str, str], reason: FinishReason | None) -> Choice:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


class TextReply:
    """As of POST /v1/completions."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, text: str, reason: FinishReason | None) -> Choice:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self) -> None:
        return None

    def piece(self, text: str) -> Choice:
        return self.whole(text, None)

    def finish(self, reason: FinishReason) -> Choice:
        return self.whole("", reason)


class Envelope:
    """What all chunks of one response share."""

    def __init__(self, reply: Reply, model: str) -> None:
        self.reply = reply
        self.id = reply.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._model = model

    def wrap(self, object_: str, choices: list[Choice], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }


def usage(stats: RequestStats) -> Usage:
    """OpenAI's count of predicted tokens is ours of drafts."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
    }
