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
from multiprocessing.connection import wait as wait_for

from service.messages import CyclePlan, CycleResult
from service.pipeline.blueprint import Blueprint, largest_tensor_bytes
from service.pipeline.graph import GraphError, audited
from service.pipeline.process_actor import Audit, Done, Failed, Order, Pipe, Task, receive, send
from service.pipeline.shared_tensors import Output

READY_SECONDS = 600.0  # weights are read from a disk that may be slow
END_SECONDS = 5.0
_PROGRAM = "from service.pipeline.process_actor import main; main()"


class ProcessGraph:
    """Owns the processes: the stages, then the drafter."""

    def __init__(self, blueprint: Blueprint, chunk: int, cycle_timeout_s: float) -> None:
        """Returns when all have read their weights. Raises GraphError."""
        self._stages, self._timeout = blueprint.spec.stages, cycle_timeout_s
        self._drafts = blueprint.with_drafter
        count = self._stages + self._drafts
        size = largest_tensor_bytes(blueprint, chunk)
        memory = tuple(os.memfd_create(f"spd-{k}") for k in range(count))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Pipe] = []
        self._before: tuple[CyclePlan, tuple[Output | None, ...]] | None = None
        for k in range(count):
            self._start(Task(blueprint, k, memory, size))
        for fd in memory:  # the processes have them
            os.close(fd)
        try:
            self._answers(READY_SECONDS)
        except GraphError as error:
            self.close()
            raise GraphError(f"the pipeline could not be built: {error}") from error

    def _start(self, task: Task) -> None:
        ours, theirs = multiprocessing.Pipe()
        for fd in task.memory:
            os.ftruncate(fd, 2 * task.size)
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *task.memory],
                stdin=subprocess.DEVNULL,
            )
        )
        theirs.close()  # so that a death is seen as the end of the pipe
        self._pipes.append(ours)
        send(ours, task)

    def run(self, plan: CyclePlan) -> CycleResult:
        began = time.perf_counter()
        done = self._ask(Order(plan, self._before))
        self._before = plan, tuple(d.output for d in done)
        reports = [d.report for d in done]
        return CycleResult(
            stages=tuple(reports[: self._stages]),  # type: ignore[arg-type]
            drafter=reports[-1] if self._drafts else None,  # type: ignore[arg-type]
            seconds=time.perf_counter() - began,
        )

    def _ask(self, message: Order | Audit) -> Sequence[Done]:
        try:
            for pipe in self._pipes:
                send(pipe, message)
        except OSError as error:
            raise GraphError("a stage or the drafter has died") from error
        return self._answers(self._timeout)

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
        name = f"stage {k}" if k < self._stages else "the drafter"
        try:
            answer = receive(self._pipes[k])
        except (EOFError, OSError) as error:
            raise GraphError(f"{name} has died") from error
        if isinstance(answer, Failed):
            raise GraphError(f"{name} failed: {answer.reason}")
        assert isinstance(answer, Done)
        return answer

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        differing = [done.differing for done in self._ask(Audit(texts))]
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
