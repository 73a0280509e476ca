"""Streams of server-sent events, and what becomes of a request whose client has gone."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.errors import ApiError, internal_error
from service.api.replies import Envelope, usage
from service.messages import Delta

logger = logging.getLogger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold tokens back
}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, cancelled as soon as the client is gone, whose request body must have been
    read. Starlette itself does this for some streams and for nothing else.

    Raises ClientDisconnect.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        # Not before the pipeline has heard of it is the request over.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends `body`, and closes `source`, which it is made from, when it ends or the client goes."""

    def __init__(
        self, body: AsyncGenerator[bytes, None], source: AsyncGenerator[Delta, None]
    ) -> None:
        super().__init__(body, headers=HEADERS)
        self._body = body
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._source), aclosing(self._body):
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self.stream_response(send))


async def events(
    envelope: Envelope, first: Delta, rest: AsyncGenerator[Delta, None], *, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a response: a chunk for each token that lets text out, one for the finish, one
    for the usage if asked for. A failure is an event too, since the status has been sent.
    """
    try:
        async for chunk in _chunks(envelope, first, rest, with_usage):
            yield _event(chunk)
    except ApiError as error:
        yield _event(error.body())
    except Exception:
        logger.exception("The stream of %s broke", envelope.id)
        yield _event(internal_error().body())
    yield DONE


async def _chunks(
    envelope: Envelope, first: Delta, rest: AsyncGenerator[Delta, None], with_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    reply = envelope.reply
    name = reply.chunk_object
    # OpenAI: if usage is asked for, every chunk has it, null in all but the last.
    more: dict[str, Any] = {"usage": None} if with_usage else {}
    if (opening := reply.opening()) is not None:
        yield envelope.wrap(name, [opening], **more)
    delta: Delta | None = first
    while delta is not None:
        if delta.text:
            yield envelope.wrap(name, [reply.piece(delta.text)], **more)
        if delta.finish_reason is not None:
            yield envelope.wrap(name, [reply.finish(delta.finish_reason)], **more)
        if with_usage and delta.stats is not None:
            yield envelope.wrap(name, [], usage=usage(delta.stats))
        delta = await anext(rest, None)


def _event(payload: Mapping[str, Any]) -> bytes:
    # ASCII alone: some clients take U+2028 and U+0085 for ends of lines.
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
