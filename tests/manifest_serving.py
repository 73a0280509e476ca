"""Whether manifests serve what they should, and have room for it. A check returns its complaints,
in words."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from service.app import pipeline_options
from service.config import ConfigError, Settings, parse_settings
from service.preflight import IMPORT_PATH
from tests.manifests import Manifest, find, head_and_workers


def serve_config(manifests: Sequence[Manifest]) -> list[str]:
    """Serve's schema, which lets unknown fields pass, without any; then our settings."""
    text = find(manifests, "RayService")["spec"]["serveConfigV2"]
    if find(manifests, "ConfigMap", "spd-serve-config")["data"]["serve.yaml"] != text:
        return ["the init containers check another deployment than is served"]
    config = yaml.safe_load(text) or {}
    problems = list(unknown_fields(config, ServeDeploySchema, "serveConfigV2"))
    try:
        schema = ServeDeploySchema.model_validate(config)
        for application in config["applications"]:
            parse_settings(application["args"])
            for deployment in application["deployments"]:
                AutoscalingConfig.model_validate(deployment.get("autoscaling_config") or {})
    except (ValidationError, ConfigError, ValueError) as error:
        return [*problems, str(error)]
    http = schema.http_options
    if (http.host, http.port) != ("0.0.0.0", 8000):
        problems.append(f"http_options: pods are reached at 0.0.0.0:8000, not {http.host}")
    if schema.proxy_location != "EveryNode":
        problems.append("proxy_location: workers without a proxy never become ready")
    for application in config["applications"]:
        if (application.get("import_path"), application.get("route_prefix")) != (IMPORT_PATH, "/"):
            problems.append(f"import_path and route_prefix should be {IMPORT_PATH} and /")
    named = {d["name"] for a in config["applications"] for d in a["deployments"]}
    if named != {"Ingress", "Pipeline"}:
        problems.append(f"deployments are named Ingress and Pipeline, not {sorted(named)}")
    return problems


def unknown_fields(value: Any, model: type[BaseModel], path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, model, f"{path}.{index}")
        return
    if not isinstance(value, dict):
        return
    for name, item in value.items():
        if name not in model.model_fields:
            yield f"{path}: {model.__name__} has no field {name!r}"
        elif inner := _model_in(model.model_fields[name].annotation):
            yield from unknown_fields(item, inner, f"{path}.{name}")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = [_model_in(argument) for argument in get_args(annotation)]
    return next((m for m in models if m is not None), None)


def pipelines_fit(manifests: Sequence[Manifest]) -> list[str]:
    """The fewest and the most pipelines into the fewest and the most workers, and not one more: a
    second pipeline in the room of one would take its processors."""
    service = find(manifests, "RayService")
    (group,) = head_and_workers(service)[1]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    settings = parse_settings(application["args"])
    given = {d["name"]: d for d in application["deployments"]}
    scaling = given["Pipeline"]["autoscaling_config"]
    ingresses = given["Ingress"].get("num_replicas", 1)
    size = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    fewest, most = group["minReplicas"], group["maxReplicas"]

    def fit(pipelines: int, workers: int) -> bool:
        return _fits(demand(settings, pipelines, ingresses), size, workers)

    low, high = scaling["min_replicas"], scaling["max_replicas"]
    autoscaled = service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    problems = []
    if not fit(low, fewest):
        problems.append(f"{low} pipelines do not fit {fewest} workers")
    if autoscaled and not fit(high, most):
        problems.append(f"{high} pipelines do not fit {most} workers")
    if fit(low + 1, fewest):
        problems.append(f"{fewest} workers have room for more than {low} pipelines")
    budget = find(manifests, "PodDisruptionBudget", "spd-worker")["spec"].get("minAvailable")
    if budget != fewest:
        problems.append(f"a pipeline needs {fewest} workers, and the budget keeps {budget}")
    return problems


def demand(settings: Settings, pipelines: int, ingresses: int) -> list[tuple[float, float]]:
    """(GPUs, CPUs) of each bundle of the pipelines and of each ingress."""
    bundles = pipeline_options(settings)["placement_group_bundles"] * pipelines
    bundles += [{"CPU": settings.pipeline.cpus_per_actor}] * ingresses
    return [(b.get("GPU", 0), b["CPU"]) for b in bundles]


def _fits(bundles: list[tuple[float, float]], size: dict[str, str], workers: int) -> bool:
    free = [[float(size.get("nvidia.com/gpu", 0)), float(size["cpu"])] for _ in range(workers)]
    for gpus, cpus in sorted(bundles, reverse=True):
        room = next((f for f in free if f[0] >= gpus and f[1] >= cpus - 1e-9), None)
        if room is None:
            return False
        room[0] -= gpus
        room[1] -= cpus
    return True


def ends_gracefully(manifests: Sequence[Manifest]) -> list[str]:
    """Serve's time for streams < the drained node's < the pod's, and the old cluster's."""
    service = find(manifests, "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    streams = [d.get("graceful_shutdown_timeout_s", 20) for d in application["deployments"]]
    problems = []
    if service["spec"].get("rayClusterDeletionDelaySeconds", 60) <= max(streams):
        problems.append("an old cluster goes before its streams may end")
    for group in head_and_workers(service)[1]:
        spec = group["template"]["spec"]
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {})
        drained = re.search(r"ray drain-node .*--deadline-remaining-seconds (\d+)", str(hook))
        if drained is None:
            problems.append("Serve is not told that a worker's pod goes")
        elif not max(streams) < int(drained[1]) < spec.get("terminationGracePeriodSeconds", 30):
            problems.append("the times of Serve, of the drained node and of its pod do not ascend")
    return problems
