"""`build`, the import path of the serve YAMLs: from settings to a Serve application."""

import os
from typing import Any

from ray import serve

from service.api.keys import load_keys
from service.api.protocol import MAX_CHOICES
from service.config import Settings, parse_settings
from service.ingress import Ingress, most_inside
from service.pipeline.blueprint import make_blueprint
from service.replica import Pipeline

# Serve's own limits lie above ours, which answer as OpenAI does.
SPARE_REQUESTS = 256


def build(args: dict[str, Any]) -> serve.Application:
    """Raises ConfigError, before anything is deployed, for settings or a target that can't work."""
    settings = parse_settings(args)
    # Here and not in the replicas, which may run where neither file nor variable is.
    keys = load_keys(settings.api.keys_file, os.environ)
    make_blueprint(settings)
    pipeline = serve.deployment(Pipeline).options(**pipeline_options(settings)).bind(settings)

    return (
        serve.deployment(Ingress)
        .options(**ingress_options(settings))
        .bind(settings, keys, pipeline)
    )


def ingress_options(settings: Settings) -> dict[str, Any]:
    """Serve's options for an ingress replica. Its streams end with it, so it is given time."""
    return {
        "name": "Ingress",
        "ray_actor_options": {"num_cpus": settings.pipeline.cpus_per_actor},
        "max_ongoing_requests": most_inside(settings) + SPARE_REQUESTS,
        "graceful_shutdown_timeout_s": settings.limits.grace_s,
        "graceful_shutdown_wait_loop_s": 0.2,
    }


def pipeline_options(settings: Settings) -> dict[str, Any]:
    """Serve's options for a pipeline replica: its resources and those of its actors.

    Bundle 0 of the placement group is the replica, then come the stages, then the drafter.
    """
    pipeline = settings.pipeline
    actor: dict[str, float] = {"CPU": pipeline.cpus_per_actor}
    if settings.device == "cuda":
        actor["GPU"] = pipeline.gpus  # 1 with NCCL: every actor has a GPU of its own
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
        "num_replicas": pipeline.replicas,
        "max_ongoing_requests": most_inside(settings) + MAX_CHOICES + SPARE_REQUESTS,
        "health_check_period_s": 1,  # how soon a dead replica is noticed
        "health_check_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
