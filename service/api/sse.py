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

logger = logging.getLogger(__name__)
T = TypeVar("T")
Payload = Mapping[str, Any]

KEEP_ALIVE = b": keep-alive\n\n"
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
        self, body: AsyncGenerator[bytes, None], source: AsyncGenerator[Payload | None, None]
    ) -> None:
        super().__init__(body, headers=HEADERS)
        self._body = body
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with aclosing(self._source), aclosing(self._body):
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self.stream_response(send))


async def paced(source: AsyncGenerator[T, None], pause_s: float) -> AsyncGenerator[T | None, None]:
    """What comes from `source`, and None whenever nothing has come for so long. Closing it closes
    `source`."""
    async with aclosing(source):
        while True:
            step = asyncio.create_task(following(source))
            try:
                while not (await asyncio.wait((step,), timeout=pause_s))[0]:
                    yield None
            finally:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
            if (item := step.result()) is None:
                return
            yield item


async def following(source: AsyncGenerator[T, None]) -> T | None:
    """The next item, None behind the last one: a coroutine, which `anext` is not."""
    return await anext(source, None)


async def events(
    name: str, first: Payload | None, rest: AsyncGenerator[Payload | None, None]
) -> AsyncGenerator[bytes, None]:
    """The events of a response, each from a chunk, and a comment from None. A failure is an event
    too, since the status has been sent. `name` is that of the response, for the log."""
    try:
        yield _event(first)
        async for chunk in rest:
            yield _event(chunk)
    except ApiError as error:
        yield _event(error.body())
    except Exception:
        logger.exception("The stream of %s broke", name)
        yield _event(internal_error().body())
    yield DONE


def _event(payload: Payload | None) -> bytes:
    if payload is None:
        return KEEP_ALIVE
    # ASCII alone: some clients take U+2028 and U+0085 for ends of lines.
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
