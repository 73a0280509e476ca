"""A process that runs a stage, the drafter, or both; see `service.pipeline.process_graph`."""

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from service.messages import CyclePlan, DraftReport, StageReport
from service.pipeline.actors import drafter_class, stage_class
from service.pipeline.blueprint import Blueprint
from service.pipeline.shared_tensors import Output, SharedTensors


@dataclass(frozen=True, slots=True)
class Task:
    """The first message to a process: what it runs. `memory`: descriptors of what each sends in."""

    blueprint: Blueprint
    actors: tuple[int, ...]  # stages by number; the one behind the last is the drafter
    memory: tuple[int, ...]  # one for each actor of the graph
    size: int  # of a tensor, in bytes, at most


@dataclass(frozen=True, slots=True)
class Order:
    """One cycle."""

    plan: CyclePlan


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Where all actors have put out what they did in the cycle that was ordered last. There is no
    answer, so that the engine plans the next one meanwhile."""

    outputs: tuple[Output | None, ...]


@dataclass(frozen=True, slots=True)
class Audit:
    """Asks for the slots that hold other texts than these."""

    texts: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to an order or an audit: of each actor of the process."""

    outputs: tuple[Output | None, ...] = ()
    reports: tuple[StageReport | DraftReport, ...] = ()
    differing: tuple[Sequence[int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer instead. It is the last one."""

    reason: str


Message = Task | Order | TakeOver | Audit | Done | Failed
Pipe: TypeAlias = "Connection[bytes, bytes]"


def send(message: Message, *pipes: Pipe) -> None:
    """By plain pickle: that of pipes would share the tensors in a message behind our back."""
    written = pickle.dumps(message)
    for pipe in pipes:
        pipe.send_bytes(written)


def receive(pipe: Pipe) -> Message:
    message: Message = pickle.loads(pipe.recv_bytes())
    return message


class HostedActor:
    """A stage or the drafter, and the memory of all."""

    def __init__(self, blueprint: Blueprint, index: int, memory: Sequence[SharedTensors]) -> None:
        spec = blueprint.spec
        self._index, self._stages, self._memory = index, spec.stages, memory
        self._is_drafter = index == spec.stages
        self._plan: CyclePlan | None = None
        self._actor: Any
        if self._is_drafter:
            self._actor = drafter_class(spec)(spec, blueprint.checkpoint)
        else:
            self._actor = stage_class(spec)(spec, index, blueprint.draft_ids)

    def cycle(self, plan: CyclePlan) -> tuple[Output | None, StageReport | DraftReport]:
        self._plan = plan
        run = self._actor.draft if self._is_drafter else self._actor.forward
        return self._memory[self._index].put(run(plan)), self._actor.report()

    def take_over(self, outputs: tuple[Output | None, ...]) -> None:
        """As a `LocalGraph` does for all."""
        plan, memory = self._plan, self._memory
        if self._is_drafter:
            for k in range(self._stages):
                self._actor.accept(plan, k, memory[k].get(outputs[k]))
            return
        if self._index > 0:
            before = self._index - 1
            self._actor.accept(plan, memory[before].get(outputs[before]))
        if self._index == self._stages - 1 and len(outputs) > self._stages:
            self._actor.accept_q(plan, memory[-1].get(outputs[-1]))

    def differing(self, texts: Mapping[int, Sequence[int]]) -> Sequence[int]:
        slots: Sequence[int] = self._actor.differing(texts)
        return slots


def _hosted(task: Task) -> list[HostedActor]:
    memory = [SharedTensors(fd, task.size) for fd in task.memory]
    for fd in task.memory:
        os.close(fd)
    return [HostedActor(task.blueprint, index, memory) for index in task.actors]


def _answer(actors: Sequence[HostedActor], asked: Order | Audit) -> Done:
    if isinstance(asked, Audit):
        return Done(differing=tuple(actor.differing(asked.texts) for actor in actors))
    outputs, reports = zip(*[actor.cycle(asked.plan) for actor in actors], strict=True)
    return Done(outputs, reports)


def main() -> None:
    """Until the other end of the pipe closes, or an order fails."""
    pipe: Pipe = Connection(int(sys.argv[1]))
    try:
        task = receive(pipe)
        assert isinstance(task, Task)
        actors = _hosted(task)
        send(Done(), pipe)
        while True:
            asked = receive(pipe)
            if isinstance(asked, TakeOver):
                for actor in actors:
                    actor.take_over(asked.outputs)
            else:
                assert isinstance(asked, Order | Audit)
                send(_answer(actors, asked), pipe)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        send(Failed(f"{type(error).__name__}: {error}"), pipe)
