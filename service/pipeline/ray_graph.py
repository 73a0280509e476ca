"""The graph as Ray actors joined by a compiled graph. All use of `ray.dag` is here.

One execution is one cycle. Tensor edges use NCCL between GPUs and shared memory on CPUs.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.exceptions import GetTimeoutError, RayChannelTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from service.config import PipelineSettings
from service.messages import CyclePlan, CycleResult, DraftReport, StageReport
from service.pdm.features import tapped_stages
from service.pipeline.actors import drafter_class, stage_class
from service.pipeline.blueprint import Blueprint, largest_tensor_bytes
from service.pipeline.graph import GraphError, Meanwhile, audited, nothing

log = logging.getLogger(__name__)
logging.getLogger("ray.dag").setLevel(logging.WARNING)

_ENVELOPE_BYTES = 64 * 1024  # plan, reports and serialisation around the tensors
_ADMISSION_BYTES = 512 * 1024  # the one grammar that a plan may hold, or a bias for many tokens
_LOGPROBS_BYTES = 1024  # of one token, with 20 alternatives


def buffer_bytes(blueprint: Blueprint, chunk: int) -> int:
    """The largest message: a tensor, a plan or a report."""
    plain = _ADMISSION_BYTES + (chunk + blueprint.spec.slots) * _LOGPROBS_BYTES
    return max(largest_tensor_bytes(blueprint, chunk), plain) + _ENVELOPE_BYTES


def _size_buffers(size: int) -> None:
    """Must happen in the driver and in every actor before compiling. A message that outgrows its
    buffer resizes it silently, and tear-down then hangs; the argument of `experimental_compile`
    does not reach the tensor channels."""
    DAGContext.get_current().buffer_size_bytes = size


class _Actor:
    """What stages and drafter need in a graph of actors, beside what they do; see `wire`."""

    report: Any

    def __init__(self, buffers: int, *args: Any) -> None:
        _size_buffers(buffers)
        super().__init__(*args)

    def send(self, output: Tensor | None) -> Tensor | None:
        return output

    def report_after(self, *_done: None) -> StageReport | DraftReport:
        report: StageReport | DraftReport = self.report()
        return report


def _as_actor(cls: type) -> type:
    return type(f"{cls.__name__}Actor", (_Actor, cls), {})


def wire(
    stages: Sequence[Any], drafter: Any, tapped: Sequence[bool], transport: str
) -> MultiOutputNode:
    """The nodes of one cycle, over actor handles; `drafter` may be None. It is sent what `tapped`
    stages put out: of many stages most have no anchor.

    Each actor first runs `forward` (or `draft`), which depends on the plan alone: all run at once.
    What other actors read leaves by a `send` of its own, and each `accept` takes one such
    message: Ray places an NCCL write and its reads together, as soon as the write is ready, and
    allows a reader no other input. The last node of each actor, which follows all others, tells
    the engine. So the plan goes to every actor, and one small report comes back from each.
    """
    with InputNode() as plan:
        forwards = [stage.forward.bind(plan) for stage in stages]
        draft = drafter.draft.bind(plan) if drafter else None
        taps = [drafter is not None and tap for tap in tapped]
        sent = [
            stage.send.bind(forward).with_tensor_transport(transport)
            for stage, forward in zip(stages[:-1], forwards, strict=False)
        ]
        if taps[-1]:  # nobody else reads the last one
            sent.append(stages[-1].send.bind(forwards[-1]).with_tensor_transport(transport))
        done: list[list[Any]] = [[forward] for forward in forwards]
        for k, upstream in enumerate(sent[: len(stages) - 1], start=1):
            done[k].append(stages[k].accept.bind(plan, upstream))
        if drafter:
            q = drafter.send.bind(draft).with_tensor_transport(transport)
            done[-1].append(stages[-1].accept_q.bind(plan, q))
            accepts = [
                drafter.accept.bind(plan, k, sent[k] if tap else None) for k, tap in enumerate(taps)
            ]
            done.append([draft, *accepts])
        actors = [*stages, *([drafter] if drafter else [])]
        return MultiOutputNode(
            [actor.report_after.bind(*nodes) for actor, nodes in zip(actors, done, strict=True)]
        )


class RayGraph:
    """Owns the actors. Compile, execute and get happen in the thread that makes it."""

    def __init__(
        self,
        blueprint: Blueprint,
        settings: PipelineSettings,
        placement_group: PlacementGroup | None = None,
    ) -> None:
        """In the placement group, bundle 0 is the caller's, then come the stages and the drafter.
        Raises GraphError."""
        spec, self._timeout = blueprint.spec, settings.cycle_timeout_s
        buffers = buffer_bytes(blueprint, settings.chunk)
        _size_buffers(buffers)

        def actor(cls: type, bundle: int, *args: Any) -> Any:
            chosen: dict[str, Any] = {
                "num_cpus": settings.cpus_per_actor,
                "num_gpus": 1 if spec.device == "cuda" else 0,
            }
            if placement_group is not None:
                chosen["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=bundle
                )
            return ray.remote(cls).options(**chosen).remote(buffers, *args)

        stage = _as_actor(stage_class(spec))
        self.stages = [
            actor(stage, 1 + k, spec, k, blueprint.draft_ids) for k in range(spec.stages)
        ]
        self.drafter = None
        if blueprint.with_drafter:
            drafter = _as_actor(drafter_class(spec))
            self.drafter = actor(drafter, 1 + spec.stages, spec, blueprint.checkpoint)
        self._graph: Any = None
        try:
            ray.get([a.__ray_ready__.remote() for a in self._actors])
            taps = tapped_stages(spec.anchors, spec.bounds)
            transport = "nccl" if spec.device == "cuda" else "shm"
            cycle = wire(self.stages, self.drafter, taps, transport)
            # Plan c+1 is a function of result c, so one execution is outstanding.
            self._graph = cycle.experimental_compile(_max_inflight_executions=1)
        except Exception as error:  # compiling raises what it likes
            self.close()
            raise GraphError(f"the pipeline could not be built: {_reason(error)}") from error

    @property
    def _actors(self) -> list[Any]:
        return [*self.stages, *([self.drafter] if self.drafter else [])]

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        began = time.perf_counter()
        try:
            running = self._graph.execute(plan)
            meanwhile()
            reports = ray.get(running, timeout=self._timeout)
        except RayChannelTimeoutError as error:
            raise GraphError(f"cycle {plan.cycle} took more than {self._timeout} s") from error
        except RayError as error:
            raise GraphError(
                f"in cycle {plan.cycle} a stage or the drafter failed: {_reason(error)}"
            ) from error
        count = len(self.stages)
        drafter = reports[count] if self.drafter else None
        return CycleResult(tuple(reports[:count]), drafter, time.perf_counter() - began)

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        actors = [self.stages[-1], *([self.drafter] if self.drafter and drafter else [])]
        try:
            found = ray.get([a.differing.remote(texts) for a in actors], timeout=self._timeout)
        except RayError as error:
            raise GraphError(f"an idle actor failed: {_reason(error)}") from error
        return audited(found)

    def check(self, seconds: float) -> None:
        answers = [actor.__ray_ready__.remote() for actor in self._actors]
        try:
            ray.get(answers, timeout=seconds)
        except GetTimeoutError as error:
            raise GraphError(f"an actor has not answered for {seconds} s") from error
        except RayError as error:
            raise GraphError(f"a stage or the drafter is dead: {_reason(error)}") from error

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def call(self, method: str, *args: Any) -> Sequence[Any]:
        """An ordinary call to each stage, beside the graph."""
        results: list[Any] = ray.get([getattr(s, method).remote(*args) for s in self.stages])
        return results

    def close(self) -> None:
        """Kills the actors, then tears down: the other order hangs after a death or a resize."""
        self.kill()
        if self._graph is not None:
            # Tear-down reports each killed actor with a traceback.
            logging.getLogger("ray.dag").setLevel(logging.CRITICAL)
            self._graph.teardown()


def _reason(error: BaseException) -> str:
    """The last line of Ray's text, which names the actor's own exception."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
