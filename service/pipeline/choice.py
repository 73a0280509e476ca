"""Which graph a deployment runs."""

from typing import TYPE_CHECKING

from service.config import PipelineSettings
from service.pipeline.blueprint import Blueprint
from service.pipeline.graph import ServingGraph
from service.pipeline.local_graph import LocalGraph
from service.pipeline.process_graph import ProcessGraph

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def make_graph(
    blueprint: Blueprint,
    pipeline: PipelineSettings,
    placement_group: "PlacementGroup | None" = None,
) -> ServingGraph:
    """The graph of the settings. `local` is made of threads where these wait for devices, or where
    there is but one, and of processes where they compute. Raises GraphError."""
    if pipeline.graph == "ray":
        from service.pipeline.ray_graph import RayGraph  # the others do without Ray

        return RayGraph(blueprint, pipeline, placement_group)
    if blueprint.spec.device == "cpu" and blueprint.spec.stages > 1:
        return ProcessGraph(blueprint, pipeline.chunk, pipeline.cycle_timeout_s)
    return LocalGraph(blueprint)
