"""The routes, as an application made from its parts."""

import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from service.api.answers import ModelCard, ModelList, Readiness
from service.api.client import (
    AnswerGrammars,
    ChatTokenizer,
    PipelineClient,
    PipelineUnavailableError,
)
from service.api.door import Door
from service.api.errors import documented, install_handlers
from service.api.generation import Generating, generation_routes
from service.api.guard import install_guards
from service.api.keys import ApiKeys
from service.api.page import install_page
from service.api.requests import Served
from service.api.text_routes import text_routes
from service.config import ApiSettings

logger = logging.getLogger(__name__)

_DEFAULTS = ApiSettings()
_NO_KEYS = ApiKeys()


def create_api(
    *,
    pipeline: PipelineClient,
    tokenizer: ChatTokenizer,
    grammars: AnswerGrammars,
    model: str,
    max_len: int,
    metrics_text: Callable[[], Awaitable[bytes]],
    settings: ApiSettings = _DEFAULTS,
    keys: ApiKeys = _NO_KEYS,
    echo_request_id: bool = True,
    door: Door | None = None,
    timeout_s: float | None = None,
    is_traced: bool = False,
) -> FastAPI:
    """OpenAI's API over `pipeline`. `metrics_text` is the exposition that GET /metrics returns.
    Without keys the API is open. A request may take `timeout_s`. `is_traced`: who observes the
    requests makes spans, and has to know their callers'.

    Ray Serve's proxy echoes X-Request-Id itself; a second header would reach clients as `a, a`.
    """
    app = FastAPI(title="spd-serve", description="Speculative Pipeline Decoding, served.")
    install_guards(app, settings, keys, echo_request_id=echo_request_id, is_traced=is_traced)
    install_handlers(app)
    served = Served(model, max_len, tokenizer, grammars, settings.speculation_switch)
    door = door or Door()
    generating = Generating(pipeline, door, timeout_s)
    app.include_router(generation_routes(generating, served, keep_alive_s=settings.keep_alive_s))
    app.include_router(_models(served))
    app.include_router(text_routes(served))
    app.include_router(_operations(pipeline, door, metrics_text))
    install_page(app)
    return app


def _models(served: Served) -> APIRouter:
    router = APIRouter(responses=documented(401))
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

    @router.get("/v1/models/{model:path}", responses=documented(404))
    async def model_card(model: str) -> ModelCard:
        served.check_model(model)
        return card

    return router


def _operations(
    pipeline: PipelineClient, door: Door, metrics_text: Callable[[], Awaitable[bytes]]
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether this process lives."""
        return {"status": "ok"}

    @router.get("/ready", responses={200: {"model": Readiness}, 503: {"model": Readiness}})
    async def ready() -> JSONResponse:
        """Whether the pipeline takes requests, and with what speculation."""
        if door.is_closed:
            detail = f"shutting down; {door.inside} requests are left"
            return JSONResponse({"ready": False, "detail": detail, "speculation": None}, 503)
        try:
            status = await pipeline.status()
        except PipelineUnavailableError as error:
            return JSONResponse({"ready": False, "detail": str(error), "speculation": None}, 503)
        body = {"ready": status.ready, "detail": status.detail, "speculation": status.speculation}
        return JSONResponse(body, 200 if status.ready else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics of the whole cluster, as Prometheus reads them."""
        return Response(await metrics_text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
