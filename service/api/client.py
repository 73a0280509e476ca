"""What the routes need of the rest of the server: a pipeline and a tokenizer."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from service.api.errors import ApiError
from service.messages import Delta, Event, Failure, GenerateRequest

logger = logging.getLogger(__name__)


class PipelineUnavailableError(Exception):
    """The pipeline can't be reached, or takes no more requests. A client may read the message."""


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """Whether requests are served, and how: `speculation` is e.g. `lookup+pdm` or `off`."""

    ready: bool
    detail: str
    speculation: str


class PipelineClient(Protocol):
    """A way to the pipeline. Both methods raise PipelineUnavailableError when there is none."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """The events of one request. Closing the generator, or cancelling who waits for it, aborts
        the request."""

    async def status(self) -> PipelineStatus: ...


class ChatTokenizer(Protocol):
    """The text side of the model."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt of a conversation. Raises ValueError, with a message for the client, where the
        model has no chat template or the template refuses the messages."""


async def deltas(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Delta, None]:
    """The tokens of a request, the last with its statistics. Closing it closes `events`.

    Raises ApiError where the pipeline fails, can't be reached, or stops before the end.
    """
    finished = False
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Failure):  # its message is for the operator
                    logger.error("The pipeline failed: %s", event.message)
                    raise ApiError(503, "The pipeline failed; try again.")
                finished = event.stats is not None
                yield event
    except PipelineUnavailableError as error:
        raise ApiError(503, str(error)) from error
    if not finished:
        raise ApiError(500, "The pipeline ended before the text did.")
