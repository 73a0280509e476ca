"""The Ingress deployment: the HTTP API, over the pipelines' Serve handle."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.api.door import Door
from service.api.keys import ApiKeys
from service.api.observed import Observed, Observer
from service.api.resume import PipelineLostError, Resuming
from service.api.routes import create_api
from service.config import ConfigError, Settings
from service.messages import Accepted, Event, GenerateRequest
from service.metrics_page import MetricsPage
from service.recording import IngressMetrics
from service.restarts import ClusterStore, Restarts
from service.target import load_target_config, resolve_target
from service.text.grammar import Grammars, NoGrammars
from service.text.tokenizer import Tokenizer

log = logging.getLogger("ray.serve")

STATUS_TIMEOUT_S = 2.0
UNAVAILABLE = (RayError, RayServeException)


@serve.ingress()
class Ingress:
    """One replica of the API. It holds the requests, and so outlives the pipelines that run
    them."""

    def __init__(self, settings: Settings, keys: ApiKeys, pipelines: DeploymentHandle) -> None:
        self._settings, self._keys, self._pipelines = settings, keys, pipelines
        self._metrics = IngressMetrics(settings.name, settings.pipeline.stages)
        self._door = Door(most_inside(settings), self._metrics.rejected)

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings, limits = self._settings, self._settings.limits
        app_name = serve.get_replica_context().app_name
        restarts = Restarts(app_name, settings, ClusterStore())
        self._metrics.keep_restarts(restarts)
        pipelines = HandlePipelines(self._pipelines, restarts)
        folder = resolve_target(settings.model)
        resuming = Resuming(
            pipelines,
            max_losses=limits.max_restarts,
            patience_s=limits.queue_timeout_s,
            on_loss=self._metrics.resumed,
        )
        app = create_api(
            pipeline=Observed(resuming, self._observers()),
            tokenizer=Tokenizer.load(folder),
            grammars=load_grammars(folder),
            model=settings.name,
            max_len=settings.pipeline.max_len,
            metrics_text=MetricsPage(),
            settings=settings.api,
            keys=self._keys,
            echo_request_id=False,  # Serve's proxy does
            door=self._door,
            timeout_s=limits.request_timeout_s,
            is_traced=settings.tracing.endpoint is not None,
        )
        announcement = asyncio.get_event_loop().create_task(
            announce(pipelines, settings, self._keys)
        )
        app.state.announcement = announcement  # a task that nobody holds may be collected
        return app

    def _observers(self) -> list[Observer]:
        endpoint = self._settings.tracing.endpoint
        if endpoint is None:
            return [self._metrics]
        from service.api.tracing import otlp_tracer  # imports OpenTelemetry

        return [self._metrics, otlp_tracer(endpoint, self._settings.name)]

    async def drain(self) -> int:
        """Takes no more requests; returns how many texts are still being generated."""
        self._door.is_closed = True
        return self._door.inside


def most_inside(settings: Settings) -> int:
    """How many texts may run and wait at once."""
    return settings.pipeline.replicas * (settings.pipeline.slots + settings.limits.queue)


def load_grammars(folder: Path) -> Grammars | NoGrammars:
    try:
        return Grammars.load(folder, load_target_config(folder).vocab_size)
    except ConfigError as error:
        return NoGrammars(folder, error)


class HandlePipelines:
    """The pipelines, through a Serve handle, which chooses one for each request."""

    def __init__(self, handle: DeploymentHandle, restarts: Restarts) -> None:
        self._handle, self._restarts = handle, restarts

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Accepted | Event, None]:
        stream = self._handle.options(stream=True).generate.remote(request)
        try:
            async for event in stream:
                yield event
        except UNAVAILABLE as error:
            is_death = isinstance(error, RayActorError) or not isinstance(error, RayTaskError)
            raise PipelineLostError(str(error), counts=not is_death) from error
        finally:
            with suppress(*UNAVAILABLE):  # where there was no replica, that is raised again
                stream.cancel()  # the replica aborts the request, if it still runs

    async def status(self) -> PipelineStatus:
        try:
            status: PipelineStatus = await asyncio.wait_for(
                self._handle.status.remote(), STATUS_TIMEOUT_S
            )
        except (*UNAVAILABLE, TimeoutError) as error:
            reason = await self.given_up() or ""
            raise PipelineUnavailableError(
                f"The pipeline is not there (yet). {reason}".rstrip()
            ) from error
        return status

    async def given_up(self) -> str | None:
        return await asyncio.to_thread(self._restarts.given_up)


async def announce(pipelines: HandlePipelines, settings: Settings, keys: ApiKeys) -> None:
    """Says, once the pipeline serves, where to send what."""
    while True:
        try:
            status = await pipelines.status()
            break
        except PipelineUnavailableError:
            await asyncio.sleep(1)
    url = await asyncio.to_thread(_proxy_url)
    log.info(
        "Ready: %s in %d stages, speculation %s.\n"
        "  page:    %s/\n"
        "  chat:    POST %s/v1/chat/completions\n"
        '           {"model": "%s", "messages": [{"role": "user", "content": "Hello"}]}\n'
        "  also:    /v1/completions /v1/models /health /ready /metrics /docs\n"
        "  keys:    %s",
        settings.name,
        settings.pipeline.stages,
        status.speculation,
        url,
        url,
        settings.name,
        f"{len(keys.digests)}, one of which each request must have" if keys else "none are needed",
    )


def _proxy_url() -> str:
    """Where this node's proxy listens. Serve has no public call for it."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    return f"http://{options.host}:{options.port}"
