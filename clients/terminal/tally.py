"""What an answer's chunks say about its speed."""

import time
from dataclasses import dataclass, field

from clients.answers import ChatChunk, Usage


@dataclass(slots=True)
class Tally:
    """Counts while an answer comes. Tokens and drafts are those of the pipeline events, at the end
    those of the usage; without either, a piece of text counts as a token."""

    begun_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    usage: Usage | None = None
    _pieces: int = 0
    _verdicts: int = 0
    _accepted: int = 0
    _rejected: int = 0

    def take(self, chunk: ChatChunk) -> None:
        if chunk.text:
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
            self._pieces += 1
        for cycle in chunk.pipeline.cycles if chunk.pipeline else ():
            if cycle.verdict is not None:
                self._verdicts += 1
                self._accepted += cycle.verdict.outcome == "accepted"
                self._rejected += cycle.verdict.outcome == "rejected"
        self.usage = chunk.usage or self.usage

    @property
    def tokens(self) -> int:
        if self.usage is not None:
            return self.usage.completion_tokens
        return self._verdicts or self._pieces

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted."""
        if self.usage is not None:
            return self.usage.acceptance
        drafted = self._accepted + self._rejected
        return self._accepted / drafted if drafted else None

    @property
    def tokens_per_s(self) -> float | None:
        """Behind the first token."""
        if self.first_s is None or self.last_s <= self.first_s or self.tokens < 2:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)

    def line(self) -> str:
        """All of it in a few words."""
        parts = [f"{self.tokens} token{'' if self.tokens == 1 else 's'}"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.first_s is not None:
            parts.append(f"first after {1000 * (self.first_s - self.begun_s):.0f} ms")
        if self.acceptance is not None:
            parts.append(f"{self.acceptance:.0%} of the drafts accepted")
        return ", ".join(parts)
