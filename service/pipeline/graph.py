"""What the engine asks of a graph: run one cycle."""

from typing import Protocol

from service.messages import CyclePlan, CycleResult


class GraphError(RuntimeError):
    """A cycle that failed: an actor died, hung or raised. The graph is of no use any more."""


class Graph(Protocol):
    """The stages and the drafter, joined. All methods are called from one thread."""

    def run(self, plan: CyclePlan) -> CycleResult:
        """Runs one cycle. Raises GraphError."""

    def close(self) -> None:
        """Ends the actors."""
