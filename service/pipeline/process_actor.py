"""A stage or the drafter as a process of its own, see `service.pipeline.process_graph`."""

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
    """The first message to a process: what it is. `memory`: descriptors of what each sends in."""

    blueprint: Blueprint
    index: int  # of the stages, then the drafter
    memory: tuple[int, ...]
    size: int  # of a tensor, in bytes, at most


@dataclass(frozen=True, slots=True)
class Order:
    """One cycle. What the one `before` has put out is taken over first."""

    plan: CyclePlan
    before: tuple[CyclePlan, tuple[Output | None, ...]] | None


@dataclass(frozen=True, slots=True)
class Audit:
    """Asks for the slots that hold other texts than these."""

    texts: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to everything."""

    output: Output | None = None
    report: StageReport | DraftReport | None = None
    differing: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer instead. It is the last one."""

    reason: str


Message = Task | Order | Audit | Done | Failed
Pipe: TypeAlias = "Connection[bytes, bytes]"


def send(pipe: Pipe, message: Message) -> None:
    """By plain pickle: that of pipes would share the tensors in a message behind our back."""
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Pipe) -> Message:
    message: Message = pickle.loads(pipe.recv_bytes())
    return message


class ProcessActor:
    """What this process is, and the memory of all."""

    def __init__(self, task: Task) -> None:
        spec = task.blueprint.spec
        self._index, self._stages = task.index, spec.stages
        self._memory = [SharedTensors(fd, task.size) for fd in task.memory]
        for fd in task.memory:
            os.close(fd)
        self._is_drafter = task.index == spec.stages
        self._actor: Any
        if self._is_drafter:
            self._actor = drafter_class(spec)(spec, task.blueprint.checkpoint)
        else:
            self._actor = stage_class(spec)(spec, task.index, task.blueprint.draft_ids)

    def answer(self, asked: Order | Audit) -> Done:
        if isinstance(asked, Audit):
            return Done(differing=self._actor.differing(asked.texts))
        return self._cycle(asked)

    def _cycle(self, order: Order) -> Done:
        if order.before is not None:
            self._take_over(*order.before)
        run = self._actor.draft if self._is_drafter else self._actor.forward
        output = self._memory[self._index].put(run(order.plan))
        return Done(output, self._actor.report())

    def _take_over(self, plan: CyclePlan, outputs: tuple[Output | None, ...]) -> None:
        """As a `LocalGraph` does for all."""
        if self._is_drafter:
            for k in range(self._stages):
                self._actor.accept(plan, k, self._memory[k].get(outputs[k]))
            return
        if self._index > 0:
            before = self._index - 1
            self._actor.accept(plan, self._memory[before].get(outputs[before]))
        if self._index == self._stages - 1 and len(outputs) > self._stages:
            self._actor.accept_q(plan, self._memory[-1].get(outputs[-1]))


def main() -> None:
    """Until the other end of the pipe closes, or an order fails."""
    pipe: Pipe = Connection(int(sys.argv[1]))
    try:
        task = receive(pipe)
        assert isinstance(task, Task)
        actor = ProcessActor(task)
        send(pipe, Done())
        while True:
            asked = receive(pipe)
            assert isinstance(asked, Order | Audit)
            send(pipe, actor.answer(asked))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        send(pipe, Failed(f"{type(error).__name__}: {error}"))
