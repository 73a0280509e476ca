"""What the engine asks of a graph: run one cycle."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from service.messages import CyclePlan, CycleResult

Meanwhile = Callable[[], None]


def nothing() -> None:
    """What an engine has to do meanwhile that has nothing to do."""


class GraphError(RuntimeError):
    """A cycle that failed: an actor died, hung or raised. The graph is of no use any more."""


class Graph(Protocol):
    """The stages and the drafter, joined. All methods are called from one thread."""

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        """Runs one cycle, and calls `meanwhile` once its plan is on the way: what need not be done
        between two cycles is done there. Raises GraphError."""

    def close(self) -> None:
        """Ends the actors."""


class ServingGraph(Graph, Protocol):
    """A graph that can be looked after. `check` and `kill` may be called from any thread."""

    def audit(self, texts: Mapping[int, Sequence[int]], *, drafter: bool) -> list[str]:
        """Which of the actors that keep texts have other ones in the slots than these, in words;
        the drafter is asked if wanted. Between two cycles."""

    def check(self, seconds: float) -> None:
        """Raises GraphError unless all actors answer within so many seconds."""

    def kill(self) -> None:
        """Ends the actors at once, whatever they are doing."""


def audited(differing: Sequence[Sequence[int]]) -> list[str]:
    """What an audit has found, in words; the last stage comes first."""
    names = ("the last stage", "the drafter")[: len(differing)]
    return [
        f"{name} has another text in the slots {list(slots)}"
        for name, slots in zip(names, differing, strict=True)
        if slots
    ]
