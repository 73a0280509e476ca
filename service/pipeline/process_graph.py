"""The graph as processes of one machine, without Ray: the fastest form on CPUs.

Threads of one process hinder each other there: each of a stage's many small steps needs Python's
lock. A waiting process sleeps, where a compiled graph polls. Plans and reports go through pipes,
tensors through memory that all processes share.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import wait as wait_for

from service.messages import CyclePlan, CycleResult
from service.pipeline.blueprint import Blueprint, largest_tensor_bytes
from service.pipeline.graph import GraphError, Meanwhile, audited, nothing
from service.pipeline.process_actor import (
    Audit,
    Done,
    Failed,
    Order,
    Pipe,
    TakeOver,
    Task,
    receive,
    send,
)

READY_SECONDS = 600.0  # weights are read from a disk that may be slow
END_SECONDS = 5.0
_PROGRAM = "from service.pipeline.process_actor import main; main()"


def hosts(stages: int, *, drafts: bool, cores: int) -> list[tuple[int, ...]]:
    """The actors of each process: the stages, then the drafter. It joins the last stage where it
    has no core of its own: as a third process on two cores it would be put beside either of the
    stages, and often beside the slower one while the other core rests."""
    processes: list[tuple[int, ...]] = [(k,) for k in range(stages)]
    if drafts and cores > stages:
        processes.append((stages,))
    elif drafts:
        processes[-1] = (stages - 1, stages)
    return processes


class ProcessGraph:
    """Owns the processes."""

    def __init__(
        self, blueprint: Blueprint, chunk: int, cycle_timeout_s: float, cores: int | None = None
    ) -> None:
        """Returns when all have read their weights. `cores`: by default those that this process may
        use. Raises GraphError."""
        spec = blueprint.spec
        self._stages, self._timeout = spec.stages, cycle_timeout_s
        drafts = blueprint.with_drafter
        cores = (cores or len(os.sched_getaffinity(0))) // spec.threads
        self._hosts = hosts(spec.stages, drafts=drafts, cores=cores)
        size = largest_tensor_bytes(blueprint, chunk)
        memory = tuple(os.memfd_create(f"spd-{k}") for k in range(spec.stages + drafts))
        for fd in memory:
            os.ftruncate(fd, 2 * size)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Pipe] = []
        for actors in self._hosts:
            self._start(Task(blueprint, actors, memory, size))
        for fd in memory:  # the processes have them
            os.close(fd)
        try:
            self._answers(READY_SECONDS)
        except GraphError as error:
            self.close()
            raise GraphError(f"the pipeline could not be built: {error}") from error

    def _start(self, task: Task) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *task.memory],
                stdin=subprocess.DEVNULL,
            )
        )
        theirs.close()  # so that a death is seen as the end of the pipe
        self._pipes.append(ours)
        send(task, ours)

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        began = time.perf_counter()
        self._tell(Order(plan))
        meanwhile()
        done = self._answers(self._timeout)
        self._tell(TakeOver(tuple(chain.from_iterable(d.outputs for d in done))))
        reports = list(chain.from_iterable(d.reports for d in done))
        return CycleResult(
            stages=tuple(reports[: self._stages]),  # type: ignore[arg-type]
            drafter=reports[-1] if len(reports) > self._stages else None,  # type: ignore[arg-type]
            seconds=time.perf_counter() - began,
        )

    def _tell(self, message: Order | TakeOver | Audit) -> None:
        try:
            send(message, *self._pipes)
        except OSError as error:
            raise GraphError("a stage or the drafter has died") from error

    def _answers(self, seconds: float) -> Sequence[Done]:
        """One from each process."""
        answers: dict[int, Done] = {}
        end = time.monotonic() + seconds
        while len(answers) < len(self._pipes):
            waiting = [p for k, p in enumerate(self._pipes) if k not in answers]
            ready = wait_for(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise GraphError(f"a stage or the drafter took more than {seconds} s")
            for pipe in ready:
                k = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[k] = self._answer(k)
        return [answers[k] for k in range(len(self._pipes))]

    def _answer(self, k: int) -> Done:
        names = [f"stage {i}" if i < self._stages else "the drafter" for i in self._hosts[k]]
        name = " or ".join(names)
        try:
            answer = receive(self._pipes[k])
        except (EOFError, OSError) as error:
            raise GraphError(f"{name} has died") from error
        if isinstance(answer, Failed):
            raise GraphError(f"{name} failed: {answer.reason}")
        assert isinstance(answer, Done)
        return answer

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        self._tell(Audit(texts))
        answers = self._answers(self._timeout)
        differing = list(chain.from_iterable(done.differing for done in answers))
        return audited(differing[self._stages - 1 : self._stages + drafter])

    def check(self, _seconds: float) -> None:
        """A process that only hangs is noticed in the next cycle."""
        if any(process.poll() is not None for process in self._processes):
            raise GraphError("a stage or the drafter has died")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Ends the processes: the end of its pipe is the end of each."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
