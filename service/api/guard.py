"""The door: API keys, the limit on bodies, CORS, and an answer for every exception."""

import asyncio
from contextlib import suppress

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.access import OPERATIONS, Access, route_path
from service.api.errors import CLIENT_CLOSED_REQUEST, ApiError, internal_error
from service.api.keys import ApiKeys
from service.api.page import is_page
from service.config import ApiSettings

DRAIN_S = 1.0


def install_guards(
    app: FastAPI,
    settings: ApiSettings,
    keys: ApiKeys,
    *,
    echo_request_id: bool,
    is_traced: bool = False,
) -> None:
    """Puts the door before the routes. The one that is added last is met first."""
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(Unforeseen)
    if settings.cors_origins:
        # Before the keys: a preflight carries none, and errors need the headers too, or a page
        # can't read them.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's client for browsers sends a dozen of its own
            expose_headers=("X-Request-Id",),
        )
    if is_traced:
        from service.api.tracing import TraceContext  # imports OpenTelemetry

        app.add_middleware(TraceContext)
    app.add_middleware(Access, echo=echo_request_id)


class RequireKey:
    """Answers 401 to requests without one of the keys, before any of their body is read."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("Authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() == "bearer" and self._keys.has(key):
            await self._app(scope, receive, send)
            return
        message = "This API key is not known here." if key else "An API key is needed."
        error = ApiError(
            401, f"{message} Send it as Authorization: Bearer <key>.", code="invalid_api_key"
        )
        await _refuse(error, receive, send, headers={"WWW-Authenticate": "Bearer"})


class BodyLimit:
    """Reads a request's body, and answers 413 where it is too large: at once if it says so itself,
    else when the first byte too many is there."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        too_large = _declared_length(scope) > self._max_bytes
        more = not too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
                return
            body += message.get("body", b"")
            too_large = len(body) > self._max_bytes
            more = message.get("more_body", False) and not too_large
        if too_large:
            text = f"The body is larger than {self._max_bytes} bytes, the most that is taken here."
            await _refuse(ApiError(413, text, code="request_too_large"), receive, send)
            return
        await self._app(scope, _replay(bytes(body), receive), send)


class Unforeseen:
    """Answers 500 to exceptions that no handler knows, and passes them on to whoever logs them.
    Starlette's own handler stands outside all others: no CORS headers, no request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception:
            if scope["type"] == "http" and not started:
                await JSONResponse(internal_error().body(), 500)(scope, receive, send)
            raise


def _is_open(scope: Scope) -> bool:
    path = route_path(scope)
    return path in OPERATIONS or is_page(scope["method"], path)


async def _refuse(
    error: ApiError, receive: Receive, send: Send, *, headers: dict[str, str] | None = None
) -> None:
    """Answers without having read the whole body, and ends the connection.

    The answer goes out at once, so that `Expect: 100-continue` spares the body. Then what comes is
    thrown away for a moment: to close a socket with unread bytes in it is a reset, which may take
    the answer from a client that writes all before it reads.
    """
    headers = {"Connection": "close", **(headers or {})}
    response = JSONResponse(error.body(), error.status, headers=headers)
    await send(
        {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, and then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def _declared_length(scope: Scope) -> int:
    try:
        return int(Headers(scope=scope).get("Content-Length", "0"))
    except ValueError:  # it is counted anyway
        return 0
