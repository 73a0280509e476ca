"""What becomes of each request: its id, and one line of the log about it."""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.choices import Choice
from service.api.errors import CLIENT_CLOSED_REQUEST
from service.api.replies import usage

# Ray Serve gives its handlers and its level to the loggers below `ray.serve`, and to no other.
logger = logging.getLogger("ray.serve.access")

# Asked every few seconds by those who watch the server and have no key: Kubernetes' probes, load
# balancers, Prometheus.
OPERATIONS = frozenset({"/health", "/ready", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def note_choices(request: Request, choices: Sequence[Choice]) -> None:
    """The line about `request` will tell what its choices took, as far as they got."""

    def tokens() -> dict[str, int]:
        used = usage(choices)
        return {name: used[name] for name in ("prompt_tokens", "completion_tokens")}

    request.state.access.append(tokens)


class Access:
    """Gives each request an id, the client's own where it is sane, echoes it, and logs the request
    once it is over. No prompt, no answer, no header and no query is logged.

    `request.state.access` is a list of functions, each for more fields of the line. They are called
    when it is written.
    """

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the application's start and end
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        entry: dict[str, Any] = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"],
        }
        notes: list[Callable[[], Mapping[str, Any]]] = []
        scope.setdefault("state", {}).update(request_id=request_id, access=notes)
        answer = _Answer(send, {"X-Request-Id": request_id} if self._echo else {})
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            answer.broken = True
            raise
        finally:
            if route_path(scope) not in OPERATIONS:
                entry["status"] = answer.outcome
                entry["duration_ms"] = round(answer.seconds * 1000, 1)
                for note in notes:
                    entry.update(note())
                logger.info(json.dumps(entry, separators=(",", ":")))


class _Answer:
    """Sends the messages of one answer with more headers, and knows how it went."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send = send
        self._headers = headers
        self._status = 0
        self._left = -1  # bytes of its Content-Length that have not been sent; it need not have one
        self._began = time.perf_counter()
        self._ended: float | None = None
        self.broken = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers.update(self._headers)
            self._left = int(headers.get("Content-Length", "-1"))
        await self._send(message)
        if message["type"] == "http.response.body" and self._ended is None:
            self._left -= len(message.get("body", b""))
            # A client that has all of it may go before the server says that it was all.
            if self._left == 0 or not message.get("more_body", False):
                self._ended = time.perf_counter()

    @property
    def outcome(self) -> int:
        """The status. Of an answer that had no end: 500 if it broke, else its client has gone."""
        if self._ended is not None:
            return self._status
        return 500 if self.broken else CLIENT_CLOSED_REQUEST

    @property
    def seconds(self) -> float:
        return (self._ended or time.perf_counter()) - self._began


def route_path(scope: Scope) -> str:
    """The path as the router sees it: below the route prefix of the deployment."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
