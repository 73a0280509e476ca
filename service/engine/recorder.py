"""What the engine tells whoever measures it. The engine itself knows no metrics library."""

from typing import Literal, Protocol

from service.messages import CycleResult, FinishReason

Outcome = FinishReason | Literal["abort", "error"]


class Recorder(Protocol):
    """Called from the engine's thread only: each call should cost microseconds and never fail."""

    def load(self, running: int, waiting: int) -> None:
        """So many requests are in slots and in the queue, before a cycle or before a rest."""

    def cycle(self, result: CycleResult) -> None:
        """A cycle is over. Its verdicts count as drafts, accepted drafts and flushes."""

    def request_started(self, prompt_tokens: int) -> None:
        """A request has come, and is queued."""

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it arrived."""

    def token(self, gap_seconds: float) -> None:
        """A request has a further token, so long after the one before."""

    def request_finished(self, reason: Outcome, e2e_seconds: float) -> None:
        """A request is over, for whatever reason, so long after it arrived."""

    def speculation(self, *, works: bool) -> None:
        """Drafting fails, or works again."""


class NullRecorder:
    """Measures nothing."""

    def load(self, running: int, waiting: int) -> None: ...

    def cycle(self, result: CycleResult) -> None: ...

    def request_started(self, prompt_tokens: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def token(self, gap_seconds: float) -> None: ...

    def request_finished(self, reason: Outcome, e2e_seconds: float) -> None: ...

    def speculation(self, *, works: bool) -> None: ...
