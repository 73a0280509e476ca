"""Which classes a graph's stages and drafter are of."""

from service.pdm.drafter import Drafter
from service.pipeline.emulated import EmulatedDrafter, EmulatedStage
from service.pipeline.spec import ActorSpec
from service.pipeline.stage import Stage


def stage_class(spec: ActorSpec) -> type[Stage] | type[EmulatedStage]:
    return Stage if spec.emulation is None else EmulatedStage


def drafter_class(spec: ActorSpec) -> type[Drafter] | type[EmulatedDrafter]:
    return Drafter if spec.emulation is None else EmulatedDrafter
