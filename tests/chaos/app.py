"""The deployment of `service.app`, whose stages and drafter raise on demand: the import path of the
chaos tests' YAML. A file in the folder SPD_CHAOS names what is to happen, once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve

from service.api.keys import ApiKeys
from service.app import ingress_options, pipeline_options
from service.config import parse_settings
from service.ingress import Ingress
from service.pdm.drafter import Drafter
from service.pipeline.stage import Stage
from service.replica import Pipeline


def order(place: str) -> Path:
    """The file that asks for an exception at a place, such as `stage-1.forward`."""
    return Path(os.environ["SPD_CHAOS"]) / place


def obey(place: str) -> None:
    """Raises what the order for this place says; only whoever takes it raises."""
    file = order(place)
    try:
        text = file.read_text()
        file.unlink()
    except FileNotFoundError:
        return
    raise MemoryError(text) if text == "memory" else RuntimeError(text)


def obedient(method: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
    def obeying(self: Any, *args: Any) -> Any:
        obey(name(self))
        return method(self, *args)

    return obeying


class FaultyStage(Stage):
    forward = obedient(Stage.forward, lambda self: f"stage-{self.index}.forward")
    accept = obedient(Stage.accept, lambda self: f"stage-{self.index}.accept")
    report = obedient(Stage.report, lambda self: f"stage-{self.index}.report")

    def differing(self, texts: Any) -> list[int]:
        try:
            obey(f"stage-{self.index}.differing")
        except RuntimeError:
            return [0]
        return super().differing(texts)


class FaultyDrafter(Drafter):
    _logits = obedient(Drafter._logits, lambda _: "drafter.draft")
    accept = obedient(Drafter.accept, lambda _: "drafter.accept")


class FaultyPipeline(Pipeline):
    def __init__(self, settings: Any) -> None:
        from service.pipeline import ray_graph

        ray_graph.stage_class = lambda _: FaultyStage
        ray_graph.drafter_class = lambda _: FaultyDrafter
        super().__init__(settings)


def build(args: dict[str, Any]) -> serve.Application:
    settings = parse_settings(args)
    options = pipeline_options(settings)
    pipeline = serve.deployment(FaultyPipeline).options(**options).bind(settings)
    ingress = serve.deployment(Ingress).options(**ingress_options(settings))
    return ingress.bind(settings, ApiKeys(), pipeline)
