"""The routes, as an application made from its parts."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.client import ChatTokenizer, PipelineClient, PipelineUnavailableError, deltas
from service.api.errors import ErrorObject, install_handlers
from service.api.protocol import (
    ChatBody,
    ChatCompletion,
    CompletionBody,
    ModelCard,
    ModelList,
    TextCompletion,
)
from service.api.replies import ChatReply, Envelope, Reply, TextReply, usage
from service.api.requests import Served
from service.api.sse import EventStream, events, until_disconnect
from service.messages import Delta

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_api(
    *,
    pipeline: PipelineClient,
    tokenizer: ChatTokenizer,
    model: str,
    max_len: int,
    metrics_text: Callable[[], Awaitable[bytes]],
    echo_request_id: bool = True,
) -> FastAPI:
    """OpenAI's API over `pipeline`. `metrics_text` is the exposition that GET /metrics returns.

    Ray Serve's proxy echoes X-Request-Id itself; a second header would reach clients as `a, a`.
    """
    app = FastAPI(title="spd-serve", description="Speculative Pipeline Decoding, served.")
    app.add_middleware(RequestIds, echo=echo_request_id)
    install_handlers(app)
    served = Served(model, max_len, tokenizer)
    app.include_router(_generation(pipeline, served))
    app.include_router(_models(served))
    app.include_router(_operations(pipeline, metrics_text))
    return app


class RequestIds:
    """Gives each request an id, the client's own where it is sane, and echoes it."""

    def __init__(self, app: ASGIApp, *, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the application's start and end
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("X-Request-Id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        echo = {"X-Request-Id": request_id} if self._echo else {}
        scope.setdefault("state", {}).update(request_id=request_id, echo=echo)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(echo)
            await send(message)

        await self._app(scope, receive, send_with_id)


def _generation(pipeline: PipelineClient, served: Served) -> APIRouter:
    router = APIRouter(responses={"4XX": {"model": ErrorObject}, "5XX": {"model": ErrorObject}})

    async def answer(request: Request, body: ChatBody | CompletionBody, reply: Reply) -> Response:
        envelope = Envelope(reply, served.model)
        # The client's id alone may come twice.
        request_id = f"{envelope.id}-{request.state.request_id}"
        # In a thread: a long prompt takes its time, and other streams go through this loop.
        generate = await asyncio.to_thread(served.request, body, request_id)
        stream = deltas(pipeline.generate(generate))
        if not body.stream:
            return await until_disconnect(request.receive, _whole(envelope, stream))
        # The first token decides the status, so it is awaited before any of the response is sent.
        first = await until_disconnect(request.receive, _first(stream))
        body_events = events(envelope, first, stream, with_usage=body.wants_usage)
        return EventStream(body_events, source=stream)

    @router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}})
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await answer(request, body, ChatReply())

    @router.post("/v1/completions", responses={200: {"model": TextCompletion}})
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await answer(request, body, TextReply())

    return router


async def _first(stream: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(stream)


async def _whole(envelope: Envelope, stream: AsyncGenerator[Delta, None]) -> Response:
    async with aclosing(stream):
        tokens = [delta async for delta in stream]
    last = tokens[-1]
    assert last.finish_reason is not None, "deltas() ends with a finish"
    assert last.stats is not None, "deltas() ends with statistics"
    reply = envelope.reply
    choice = reply.whole("".join(delta.text for delta in tokens), last.finish_reason)
    return JSONResponse(envelope.wrap(reply.object, [choice], usage=usage(last.stats)))


def _models(served: Served) -> APIRouter:
    router = APIRouter(responses={"4XX": {"model": ErrorObject}})
    card: ModelCard = {
        "id": served.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "spd-serve",
        "max_model_len": served.max_len,
    }

    @router.get("/v1/models")
    async def models() -> ModelList:
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{model:path}")
    async def model_card(model: str) -> ModelCard:
        served.check_model(model)
        return card

    return router


def _operations(
    pipeline: PipelineClient, metrics_text: Callable[[], Awaitable[bytes]]
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether this process lives."""
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "No requests can be served now."}})
    async def ready() -> JSONResponse:
        """Whether the pipeline takes requests, and with what speculation."""
        try:
            status = await pipeline.status()
        except PipelineUnavailableError as error:
            return JSONResponse({"ready": False, "detail": str(error), "speculation": None}, 503)
        body = {"ready": status.ready, "detail": status.detail, "speculation": status.speculation}
        return JSONResponse(body, 200 if status.ready else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """The metrics of the whole cluster, as Prometheus reads them."""
        return Response(await metrics_text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
