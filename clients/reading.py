"""Answers from bytes, for both clients."""

import json
from collections.abc import Iterator
from typing import Generic, TypeVar

import httpx2
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

    def feed(self, data: bytes) -> Iterator[ChunkT]:
        """The chunks that these bytes complete. Raises ClientError behind those before it."""
        for event in self._decoder.feed(data):
            if event.data == DONE:
                self.is_done = True
            if self.is_done:
                return
            yield self._chunk(event.data)

    def end(self) -> None:
        """There are no more bytes. Raises IncompleteStreamError if there should be."""
        if not self.is_done:
            raise IncompleteStreamError("The stream ended early; its text is not complete.")

    def _chunk(self, data: str) -> ChunkT:
        try:
            fields = json.loads(data)
            if not (isinstance(fields, dict) and "error" in fields):
                return self._kind.model_validate(fields)
        except ValueError as error:  # a ValidationError is one
            raise _no_such(self._kind, error) from error
        raise from_event(fields["error"])


class OpenStream(Generic[ChunkT]):
    """What both clients' streams hold."""

    def __init__(self, response: httpx2.Response, kind: type[ChunkT], base_url: str) -> None:
        self._response = response
        self._reader = ChunkReader(kind)
        self._base_url = base_url
        self.request_id: str | None = response.headers.get("x-request-id")


def _no_such(kind: type[BaseModel], error: ValueError) -> InvalidAnswerError:
    return InvalidAnswerError(f"What came is no {kind.__name__} of OpenAI's API: {error}")
