"""A typed client of the server, or of any other that speaks OpenAI's API: docs/clients.md."""

from clients.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    ModelCard,
    Tokens,
    Usage,
)
from clients.async_client import AsyncClient, AsyncStream
from clients.client import Client, Stream
from clients.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    ClientError,
    IncompleteStreamError,
    InvalidAnswerError,
    NotFoundError,
    RateLimitError,
    RequestTimeoutError,
    RequestTooLargeError,
    ServerError,
    TransportError,
)
from clients.pipeline import Cycle, Pipeline, Row, Verdict
from clients.requests import ChatOptions, CompletionOptions, Message, Streaming
from clients.retries import Retries

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "BadRequestError",
    "ChatChunk",
    "ChatCompletion",
    "ChatOptions",
    "Client",
    "ClientError",
    "Completion",
    "CompletionChunk",
    "CompletionOptions",
    "Cycle",
    "IncompleteStreamError",
    "InvalidAnswerError",
    "Message",
    "ModelCard",
    "NotFoundError",
    "Pipeline",
    "RateLimitError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "Retries",
    "Row",
    "ServerError",
    "Stream",
    "Streaming",
    "Tokens",
    "TransportError",
    "Usage",
    "Verdict",
]
