"""The graph in one process: a thread for each stage and one for the drafter.

It is the oracle of the tests, and it serves machines with one GPU or none. Torch releases Python's
lock inside its kernels, so the stages do run at once.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from service.messages import CyclePlan, CycleResult
from service.pipeline.actors import drafter_class, stage_class
from service.pipeline.blueprint import Blueprint
from service.pipeline.crew import Crew
from service.pipeline.graph import GraphError, Meanwhile, audited, nothing


class LocalGraph:
    """Runs a cycle as its definition says: all forwards at once, then every take-over."""

    def __init__(self, blueprint: Blueprint) -> None:
        spec = blueprint.spec
        stage, drafter = stage_class(spec), drafter_class(spec)
        self.stages = [stage(spec, k, blueprint.draft_ids) for k in range(spec.stages)]
        self.drafter = drafter(spec, blueprint.checkpoint) if blueprint.with_drafter else None
        self._crew: Crew[Tensor | None] = Crew(spec.stages + blueprint.with_drafter, "spd-stage")

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        began = time.perf_counter()
        try:
            tasks = [partial(stage.forward, plan) for stage in self.stages]
            if self.drafter:
                tasks.append(partial(self.drafter.draft, plan))
            outputs = self._crew.run(tasks, meanwhile)
            for stage, upstream in zip(self.stages[1:], outputs, strict=False):
                stage.accept(plan, upstream)
            if self.drafter:
                self.stages[-1].accept_q(plan, outputs.pop())
                for k, output in enumerate(outputs):
                    self.drafter.accept(plan, k, output)
        except Exception as error:
            raise GraphError(
                f"in cycle {plan.cycle} a stage failed: {type(error).__name__}: {error}"
            ) from error
        return CycleResult(
            stages=tuple(stage.report() for stage in self.stages),
            drafter=self.drafter.report() if self.drafter else None,
            seconds=time.perf_counter() - began,
        )

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        actors = [self.stages[-1], *([self.drafter] if self.drafter and drafter else [])]
        return audited([actor.differing(texts) for actor in actors])

    def check(self, seconds: float) -> None:
        """There is nobody to ask."""

    def kill(self) -> None:
        """Threads end with their process."""

    def close(self) -> None:
        self._crew.close()
