"""One request as its client saw it, and how it is timed."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from clients import ApiError, ChatChunk, ClientError, RateLimitError, Usage

Outcome = Literal["whole", "aborted", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds count from the beginning of the block. `planned_s`: when it should have been sent;
    latencies count from there. `pieces_s`: when each piece of text came. Tokens as the server
    counts them; None where it had no occasion to."""

    variant: str
    round: int
    index: int
    planned_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    pieces_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    error: str | None = None

    @property
    def lag_s(self) -> float:
        """What the client itself was late by."""
        return self.sent_s - self.planned_s

    @property
    def first_token_s(self) -> float | None:
        return self.pieces_s[0] - self.planned_s if self.pieces_s else None

    @property
    def whole_s(self) -> float | None:
        """From the plan to the end; None for what did not come to its end."""
        return self.ended_s - self.planned_s if self.outcome == "whole" else None

    @property
    def per_token_s(self) -> float | None:
        """Each token's time behind the first one's."""
        if self.first_token_s is None or self.whole_s is None or (self.tokens or 0) < 2:
            return None
        return (self.whole_s - self.first_token_s) / ((self.tokens or 0) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between the pieces of text."""
        return [b - a for a, b in zip(self.pieces_s, self.pieces_s[1:], strict=False)]


@dataclass(slots=True)
class Recording:
    """Makes a sample while a request runs. `start`: `time.monotonic()` at the block's beginning."""

    variant: str
    round: int
    index: int
    start: float
    planned_s: float
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    usage: Usage | None = None

    def now(self) -> float:
        return time.monotonic() - self.start

    def sending(self) -> None:
        self.sent_s = self.now()

    def take(self, chunk: ChatChunk) -> None:
        if chunk.text:
            self.pieces_s.append(self.now())
        self.usage = chunk.usage or self.usage

    def ended(self, error: ClientError | None = None, *, aborted: bool = False) -> Sample:
        """The sample. A refusal is an answer of a full or closing server."""
        ended_s = self.now()
        outcome: Outcome = "aborted" if aborted else "whole"
        if error is not None:
            refused = isinstance(error, RateLimitError) or (
                isinstance(error, ApiError) and error.status == 503
            )
            outcome = "refused" if refused else "failed"
        return Sample(
            self.variant,
            self.round,
            self.index,
            self.planned_s,
            self.sent_s,
            ended_s,
            outcome,
            tuple(self.pieces_s),
            error=None if error is None else f"{type(error).__name__}: {error}",
            **_counts(self.usage),
        )


def _counts(usage: Usage | None) -> dict[str, Any]:
    if usage is None:
        return {}
    drafts, cached = usage.completion_tokens_details, usage.prompt_tokens_details
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": cached.cached_tokens if cached else None,
        "tokens": usage.completion_tokens,
        "accepted": drafts.accepted_prediction_tokens if drafts else None,
        "rejected": drafts.rejected_prediction_tokens if drafts else None,
    }


def write_samples(samples: Iterable[Sample], file: Path) -> None:
    """Adds a line of JSON for each."""
    with file.open("a") as out:
        for sample in samples:
            rounded = {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in asdict(sample).items()
            }
            rounded["pieces_s"] = [round(second, 5) for second in sample.pieces_s]
            out.write(json.dumps({k: v for k, v in rounded.items() if v is not None}) + "\n")


def read_samples(file: Path) -> list[Sample]:
    lines = map(json.loads, file.read_text().splitlines())
    return [Sample(**{**line, "pieces_s": tuple(line["pieces_s"])}) for line in lines]
