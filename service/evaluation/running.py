"""Runs requests through scheduler and graph, as the engine's thread does, and watches."""

import sys
import time
from collections.abc import Callable, Sequence

from service.engine.scheduler import Scheduler
from service.evaluation.counting import Answer
from service.messages import CyclePlan, CycleResult, Delta, Event, GenerateRequest
from service.pipeline.graph import Graph, GraphError

PROGRESS_SECONDS = 10.0

Watch = Callable[[int, int], None]  # after a cycle: requests that ended in it, its new tokens


def run(
    scheduler: Scheduler, graph: Graph, requests: Sequence[GenerateRequest], watch: Watch
) -> dict[str, Answer]:
    """The answers by request id. Raises GraphError, also for a PDM that fails: a deployment goes on
    without drafts, and the counts would be of nothing."""
    answers = {r.request_id: Answer() for r in requests}
    for request in requests:
        scheduler.add(request, _ignore)
    while (plan := scheduler.plan()) is not None:
        result = graph.run(plan)
        if result.drafter is not None and result.drafter.error is not None:
            raise GraphError(f"in cycle {plan.cycle} the PDM failed: {result.drafter.error}")
        watch(*_take(answers, scheduler, plan, result))
    return answers


def _take(
    answers: dict[str, Answer], scheduler: Scheduler, plan: CyclePlan, result: CycleResult
) -> tuple[int, int]:
    """Notes each token beside what was proposed in its place. Returns how many requests ended, and
    how many tokens there were."""
    proposals = {(order.slot, order.position): order.proposal for order in plan.verify}
    verdicts = result.stages[-1].verdicts
    finished = 0
    for verdict, (sequence, delta) in zip(verdicts, scheduler.apply(result), strict=True):
        assert isinstance(delta, Delta), "no prompt's scores were asked for"
        proposal = proposals[verdict.slot, verdict.position]
        answers[sequence.request.request_id].take(verdict.token, proposal, delta.stats)
        finished += delta.stats is not None
    return finished, len(verdicts)


def _ignore(_event: Event) -> None:
    """The tokens are read from `apply`."""


class Progress:
    """Says now and then how far a run is."""

    def __init__(self, name: str, requests: int) -> None:
        self._name, self._requests = name, requests
        self._finished = self._tokens = 0
        self._began = self._said = time.monotonic()

    def __call__(self, finished: int, tokens: int) -> None:
        self._finished += finished
        self._tokens += tokens
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS and self._finished < self._requests:
            return
        self._said = now
        rate = self._tokens / max(now - self._began, 1e-9)
        say(
            f"{self._name}: {self._finished} of {self._requests} prompts, {self._tokens} tokens, "
            f"{rate:.1f} tokens/s"
        )


def say(message: str) -> None:
    """A line of progress on stderr: stdout has the table alone."""
    sys.stderr.write(f"spd-eval: {message}\n")
    sys.stderr.flush()
