"""What the engine tells whoever measures it. The engine itself knows no metrics library."""

from typing import Protocol

from service.messages import CyclePlan, CycleResult, GenerateRequest


class Recorder(Protocol):
    """Called from the engine's thread only: each call should cost microseconds and never fail."""

    def load(self, running: int, waiting: int) -> None:
        """So many requests are in slots and in the queue, before a cycle or before a rest."""

    def admitted(self, request: GenerateRequest, reused: int) -> None:
        """A request has its slot, in which so many of its known tokens are already."""

    def cycle(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None:
        """A cycle is over, in which so many texts were behind their first token."""

    def token(self, gap_seconds: float | None) -> None:
        """A request has a token, so long after the one before; None for the first of its run."""

    def speculation(self, *, works: bool) -> None:
        """Drafting fails, or works again."""


class NullRecorder:
    """Measures nothing."""

    def load(self, running: int, waiting: int) -> None: ...

    def admitted(self, request: GenerateRequest, reused: int) -> None: ...

    def cycle(self, plan: CyclePlan, result: CycleResult, decoding: int) -> None: ...

    def token(self, gap_seconds: float | None) -> None: ...

    def speculation(self, *, works: bool) -> None: ...
