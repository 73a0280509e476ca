"""`build`, the import path of the serve YAMLs: from settings to a Serve application."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from service.api.client import PipelineStatus, PipelineUnavailableError
from service.api.keys import ApiKeys, load_keys
from service.api.routes import create_api
from service.config import ConfigError, Settings, parse_settings
from service.messages import Event, GenerateRequest
from service.metrics_page import MetricsPage
from service.pipeline.blueprint import make_blueprint
from service.replica import Pipeline
from service.target import load_target_config, resolve_target
from service.text.grammar import Grammars, NoGrammars
from service.text.tokenizer import Tokenizer

log = logging.getLogger("ray.serve")

STATUS_TIMEOUT_S = 5.0
UNAVAILABLE = (RayError, RayServeException)


def build(args: dict[str, Any]) -> serve.Application:
    """Raises ConfigError, before anything is deployed, for settings or a target that can't work."""
    settings = parse_settings(args)
    # Here and not in the replicas, which may run where neither file nor variable is.
    keys = load_keys(settings.api.keys_file, os.environ)
    make_blueprint(settings)
    pipeline = serve.deployment(Pipeline).options(**pipeline_options(settings)).bind(settings)

    def in_replica() -> FastAPI:  # Serve calls it there, where handle and proxy are known
        return make_ingress(settings, keys)

    ingress = serve.deployment(serve.ingress(in_replica)())
    return ingress.options(
        name="Ingress",
        ray_actor_options={"num_cpus": settings.pipeline.cpus_per_actor},
        max_ongoing_requests=1024,  # the engine has the queue
    ).bind(pipeline)


def pipeline_options(settings: Settings) -> dict[str, Any]:
    """Serve's options for a pipeline replica: its resources and those of its actors.

    Bundle 0 of the placement group is the replica, then come the stages, then the drafter.
    """
    pipeline = settings.pipeline
    actor: dict[str, float] = {"CPU": pipeline.cpus_per_actor}
    if settings.device == "cuda":
        actor["GPU"] = 1  # NCCL: every actor has a GPU of its own
    replica = {"CPU": pipeline.cpus_per_actor}
    bundles = [replica]
    if pipeline.graph == "local":
        bundles = [actor]
    else:
        bundles += [dict(actor) for _ in range(pipeline.stages + settings.runs_pdm)]
    return {
        "name": "Pipeline",
        "placement_group_bundles": bundles,
        "placement_group_strategy": "PACK",
        "ray_actor_options": {
            "num_cpus": bundles[0]["CPU"],
            "num_gpus": bundles[0].get("GPU", 0),
        },
        "max_ongoing_requests": 1024,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
    }


def make_ingress(settings: Settings, keys: ApiKeys) -> FastAPI:
    """The HTTP application of one ingress replica."""
    context = serve.get_replica_context()
    pipeline = HandlePipeline(serve.get_deployment_handle("Pipeline", context.app_name))
    folder = resolve_target(settings.model)
    app = create_api(
        pipeline=pipeline,
        tokenizer=Tokenizer.load(folder),
        grammars=load_grammars(folder),
        model=settings.name,
        max_len=settings.pipeline.max_len,
        metrics_text=MetricsPage(),
        settings=settings.api,
        keys=keys,
        echo_request_id=False,  # Serve's proxy does
    )
    announcement = asyncio.get_event_loop().create_task(announce(pipeline, settings, keys))
    app.state.announcement = announcement  # a task that nobody holds may be collected
    return app


def load_grammars(folder: Path) -> Grammars | NoGrammars:
    try:
        return Grammars.load(folder, load_target_config(folder).vocab_size)
    except ConfigError as error:
        return NoGrammars(folder, error)


class HandlePipeline:
    """The pipeline as the routes see it, through a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        stream = self._handle.options(stream=True).generate.remote(request)
        try:
            async for event in stream:
                yield event
        except UNAVAILABLE as error:
            log.warning("request %s lost its pipeline: %s", request.request_id, error)
            raise PipelineUnavailableError("The pipeline was lost; try again.") from error
        finally:
            with suppress(*UNAVAILABLE):  # where there was no replica, that is raised again
                stream.cancel()  # the replica aborts the request, if it still runs

    async def status(self) -> PipelineStatus:
        try:
            status: PipelineStatus = await asyncio.wait_for(
                self._handle.status.remote(), STATUS_TIMEOUT_S
            )
        except (*UNAVAILABLE, TimeoutError) as error:
            raise PipelineUnavailableError("The pipeline is not there (yet).") from error
        return status


async def announce(pipeline: HandlePipeline, settings: Settings, keys: ApiKeys) -> None:
    """Says, once the pipeline serves, where to send what."""
    while True:
        try:
            status = await pipeline.status()
            break
        except PipelineUnavailableError:
            await asyncio.sleep(1)
    url = await asyncio.to_thread(_proxy_url)
    log.info(
        "Ready: %s in %d stages, speculation %s.\n"
        "  chat:    POST %s/v1/chat/completions\n"
        '           {"model": "%s", "messages": [{"role": "user", "content": "Hello"}]}\n'
        "  also:    /v1/completions /v1/models /health /ready /metrics /docs\n"
        "  keys:    %s",
        settings.name,
        settings.pipeline.stages,
        status.speculation,
        url,
        settings.name,
        f"{len(keys.digests)}, one of which each request must have" if keys else "none are needed",
    )


def _proxy_url() -> str:
    """Where this node's proxy listens. Serve has no public call for it."""
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    return f"http://{options.host}:{options.port}"
