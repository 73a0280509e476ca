"""What the routes need of the rest of the server: a pipeline and a tokenizer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from service.api.door import RETRY_AFTER_S, queue_full
from service.api.errors import ApiError
from service.messages import Delta, Event, Failure, GenerateRequest, Grammar, PromptScored

logger = logging.getLogger(__name__)
T = TypeVar("T")


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

    @property
    def chat_template(self) -> str | None: ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """The tokens that are never split."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, in which special tokens are left out."""

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The prompt of a conversation. Raises ValueError, with a message for the client, where the
        model has no chat template or the template refuses the messages."""


class AnswerGrammars(Protocol):
    """The model's tokens as grammars see them, see `service.text.grammar.Grammars`."""

    def check(self, grammar: Grammar) -> None:
        """Raises ValueError, with a message for the client, for a grammar that can't be used."""

    def token_bytes(self, token_id: int) -> bytes: ...


async def sound(
    events: AsyncGenerator[Event, None],
) -> AsyncGenerator[PromptScored | Delta, None]:
    """The events of a request, the last with its statistics. Closing it closes `events`.

    Raises ApiError where the pipeline fails, can't be reached, or stops before the end.
    """
    finished = False
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Failure):
                    raise _failed(event)
                finished = isinstance(event, Delta) and event.stats is not None
                yield event
    except PipelineUnavailableError as error:
        raise ApiError(503, str(error)) from error
    if not finished:
        raise ApiError(500, "The pipeline ended before the text did.")


def _failed(failure: Failure) -> ApiError:
    """What a client learns of a failure, whose message is for the operator."""
    if failure.kind == "overloaded":
        return queue_full()
    if failure.kind == "expired":
        return ApiError(
            503,
            "The request has waited for too long; try again.",
            code="queue_timeout",
            retry_after_s=RETRY_AFTER_S,
        )
    logger.error("The pipeline failed: %s", failure.message)
    return ApiError(503, "The pipeline failed; try again.")


async def merged(
    streams: Sequence[AsyncGenerator[T, None]], timeout_s: float | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """What comes from all streams, as it comes, with the stream's number. The first exception ends
    all of them, and so does closing it: all are closed when it is over.

    Raises ApiError 504 where they have no end after so long."""
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((number, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(streams)]
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        running = len(pumps)
        while running:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await queue.get()
            except TimeoutError:
                message = f"The request took more than the {timeout_s:g} s that it may."
                raise ApiError(504, message, code="request_timeout") from None
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
