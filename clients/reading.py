"""Answers from bytes, for both clients."""

import json
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from clients.answers import ModelCard
from clients.errors import IncompleteStreamError, InvalidAnswerError, from_event
from clients.sse import EventDecoder

AnswerT = TypeVar("AnswerT", bound=BaseModel)
ChunkT = TypeVar("ChunkT", bound=BaseModel)
DONE = "[DONE]"


def parsed(kind: type[AnswerT], body: bytes) -> AnswerT:
    """A whole answer. Raises InvalidAnswerError."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _no_such(kind, error) from error


def first_model(models: list[ModelCard]) -> str:
    if not models:
        raise InvalidAnswerError("The server has no models.")
    return models[0].id


class ChunkReader(Generic[ChunkT]):
    """The chunks of a stream from its bytes. `is_done` when the server has said so."""

    def __init__(self, kind: type[ChunkT]) -> None:
        self._kind = kind
        self._decoder = EventDecoder()
        self.is_done = False

    def feed(self, data: bytes) -> list[ChunkT | Exception]:
        """The chunks that these bytes complete; an exception is what the stream ends with, behind
        the chunks before it."""
        found: list[ChunkT | Exception] = []
        for event in self._decoder.feed(data):
            if event.data == DONE:
                self.is_done = True
            if self.is_done:
                break
            found.append(self._chunk(event.data))
        return found

    def end(self) -> None:
        """There are no more bytes. Raises IncompleteStreamError if there should be."""
        if not self.is_done:
            raise IncompleteStreamError("The stream ended early; its text is not complete.")

    def _chunk(self, data: str) -> ChunkT | Exception:
        try:
            fields = json.loads(data)
            if isinstance(fields, dict) and "error" in fields:
                return from_event(fields["error"])
            return self._kind.model_validate(fields)
        except ValueError as error:  # a ValidationError is one
            return _no_such(self._kind, error)


def _no_such(kind: type[BaseModel], error: ValueError) -> InvalidAnswerError:
    return InvalidAnswerError(f"What came is no {kind.__name__} of OpenAI's API: {error}")
