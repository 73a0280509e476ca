"""The graph in one process: a thread for each stage and one for the drafter.

It is the oracle of the tests, and it serves the GPUs of one machine, or a single stage. Torch
releases Python's lock inside its kernels and where it waits for a GPU: the stages do run at once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from service.messages import CyclePlan, CycleResult
from service.pipeline.actors import drafter_class, stage_class
from service.pipeline.blueprint import Blueprint
from service.pipeline.crew import Crew
from service.pipeline.cuda import new_stream, on
from service.pipeline.graph import GraphError, Meanwhile, audited, nothing


class LocalGraph:
    """Runs a cycle as its definition says: all forwards at once, then every take-over.

    On GPUs each actor has a stream of its own, and its forward returns when all of it is done; what
    it has put out is a new tensor. A take-over is queued on the stream of the actor that takes, and
    nobody waits for it but the next forward there. So the outputs are kept until that is over.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        spec = blueprint.spec
        stage, drafter = stage_class(spec), drafter_class(spec)
        count = spec.stages + blueprint.with_drafter
        self._streams = [
            new_stream(spec.device_of(k)) if spec.device == "cuda" else None for k in range(count)
        ]
        self.stages = []
        for k in range(spec.stages):
            with on(self._streams[k]):
                self.stages.append(stage(spec, k, blueprint.draft_ids))
        self.drafter = None
        if blueprint.with_drafter:
            with on(self._streams[-1]):
                self.drafter = drafter(spec, blueprint.checkpoint)
        self._outputs: list[Tensor | None] = []
        self._crew: Crew[Tensor | None] = Crew(count, "spd-stage")

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        began = time.perf_counter()
        try:
            work = [stage.forward for stage in self.stages]
            if self.drafter:
                work.append(self.drafter.draft)
            self._outputs = self._crew.run(
                [partial(_run_on, s, w, plan) for s, w in zip(self._streams, work, strict=True)],
                meanwhile,
            )
            self._take_over(plan)
        except Exception as error:
            raise GraphError(
                f"in cycle {plan.cycle} a stage failed: {type(error).__name__}: {error}"
            ) from error
        return CycleResult(
            stages=tuple(stage.report() for stage in self.stages),
            drafter=self.drafter.report() if self.drafter else None,
            seconds=time.perf_counter() - began,
        )

    def _take_over(self, plan: CyclePlan) -> None:
        count = len(self.stages)
        for k in range(1, count):
            with on(self._streams[k]):
                self.stages[k].accept(plan, self._outputs[k - 1])
        if self.drafter:
            with on(self._streams[count - 1]):
                self.stages[-1].accept_q(plan, self._outputs[-1])
            with on(self._streams[-1]):
                for k, output in enumerate(self._outputs[:count]):
                    self.drafter.accept(plan, k, output)

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        actors = [self.stages[-1], *([self.drafter] if self.drafter and drafter else [])]
        return audited([actor.differing(texts) for actor in actors])

    def check(self, seconds: float) -> None:
        """There is nobody to ask."""

    def kill(self) -> None:
        """Threads end with their process."""

    def close(self) -> None:
        self._crew.close()


def _run_on(
    stream: torch.cuda.Stream | None, work: Callable[[CyclePlan], Tensor | None], plan: CyclePlan
) -> Tensor | None:
    with on(stream):
        return work(plan)
