"""What can go wrong, as exceptions."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2


class ClientError(Exception):
    """Any failure of a request."""


class TransportError(ClientError):
    """The server can't be reached, or the connection broke."""


class RequestTimeoutError(TransportError):
    """Nothing came for as long as the client's `timeout_s`."""


class IncompleteStreamError(ClientError):
    """The stream has ended, but the server did not say that it is complete."""


class InvalidAnswerError(ClientError):
    """The answer is none of OpenAI's API: perhaps the base URL is that of another server."""


@dataclass(eq=False)
class ApiError(ClientError):
    """The server's error object. `param` is the field at fault; `status` is None where the error
    came in the middle of a stream; the same request may do better after `retry_after_s`."""

    message: str
    status: int | None = None
    type: str | None = None
    param: str | None = None
    code: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.message if self.status is None else f"{self.status}: {self.message}"


class BadRequestError(ApiError):
    """400, and every other fault of the request that has no class of its own."""


class AuthenticationError(ApiError):
    """401 and 403."""


class NotFoundError(ApiError):
    """404: no such model or path."""


class RequestTooLargeError(ApiError):
    """413"""


class RateLimitError(ApiError):
    """429: the queue is full."""


class ServerError(ApiError):
    """500 and above, and failures in the middle of a stream."""


_BY_STATUS: dict[int, type[ApiError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    413: RequestTooLargeError,
    429: RateLimitError,
}
_BY_TYPE: dict[str | None, type[ApiError]] = {
    "rate_limit_error": RateLimitError,
    "invalid_request_error": BadRequestError,
}


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error of an answer whose status is none of success; any body will do."""
    kind = _BY_STATUS.get(status, BadRequestError if 400 <= status < 500 else ServerError)
    retry_after = _seconds(headers.get("retry-after"))
    return kind(
        status=status,
        request_id=headers.get("x-request-id"),
        retry_after_s=retry_after,
        **_fields(body),
    )


def from_event(error: object) -> ApiError:
    """The error of a stream's event, which has no status."""
    fields = _error_fields(error)
    return _BY_TYPE.get(fields["type"], ServerError)(**fields)


@contextmanager
def transport_errors(base_url: str) -> Iterator[None]:
    """Turns the HTTP library's exceptions into ours."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        message = f"{base_url} can't be reached ({_why(error)}). Is the server running?"
        raise TransportError(message) from error
    except httpx2.TimeoutException as error:
        raise RequestTimeoutError(f"{base_url} does not answer: {_why(error)}") from error
    except httpx2.RequestError as error:
        raise TransportError(f"The connection to {base_url} broke: {_why(error)}") from error


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    if error is None:
        error = body[:200].decode(errors="replace").strip() or "The server gives no reason."
    return _error_fields(error)


def _error_fields(error: object) -> dict[str, Any]:
    """Some servers send a string where OpenAI has an object, or a number as its code."""
    if not isinstance(error, dict):
        return {"message": str(error), "type": None, "param": None, "code": None}
    texts = {key: error.get(key) for key in ("type", "param", "code")}
    return {
        "message": str(error.get("message")),
        **{key: None if value is None else str(value) for key, value in texts.items()},
    }


def _seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After header, which may be a number or a date; None where it is neither."""
    if retry_after is None:
        return None
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
