"""What an evaluation counts, for one answer and for many. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from service.messages import Proposal, RequestStats

BUCKET = 8  # decoded tokens that share a count by position


@dataclass(slots=True)
class Answer:
    """What is seen of one request, token by token: `accepted` tells the decoded tokens that were
    proposals. `stats` are the engine's own, of its end."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)  # of each decoded token
    flushes: int = 0
    stats: RequestStats | None = None

    def take(self, token: int, proposal: Proposal | None, stats: RequestStats | None) -> None:
        """The target's next token, and what had been proposed in its place."""
        right = proposal is not None and proposal.token == token
        self.flushes += proposal is not None and not right
        if self.tokens:  # the first generated token is not counted
            self.accepted.append(right)
        self.tokens.append(token)
        self.stats = stats


class Counts(BaseModel):
    """The sums over some answers. All but the last three are the engine's (`RequestStats`)."""

    model_config = ConfigDict(frozen=True)

    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoded: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    flushes: int = 0
    # Of the decoded tokens 1 to 8 of each answer, 9 to 16, and so on.
    decoded_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @property
    def acceptance(self) -> float | None:
        """The acceptance rate; None where nothing was decoded, as below."""
        return ratio(self.accepted, self.decoded)

    @property
    def tokens_per_cycle(self) -> float | None:
        return ratio(self.decoded, self.cycles)

    def accept_length(self, width: int) -> float | None:
        """The equivalent accept length at n = `width`, which is the theoretical speed-up."""
        return ratio(width * self.decoded, self.cycles)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        pairs = zip(self.accepted_by_position, self.decoded_by_position, strict=True)
        return [ratio(accepted, decoded) for accepted, decoded in pairs]


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def count(answer: Answer) -> Counts:
    """The counts of one finished answer."""
    stats = answer.stats
    assert stats is not None, "counted before its end"
    starts = range(0, len(answer.accepted), BUCKET)
    buckets = [answer.accepted[start : start + BUCKET] for start in starts]
    return Counts(
        prompts=1,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        decoded=stats.decoded,
        cycles=stats.cycles,
        drafted=stats.drafted,
        accepted=stats.accepted,
        flushes=answer.flushes,
        decoded_by_position=tuple(map(len, buckets)),
        accepted_by_position=tuple(map(sum, buckets)),
    )


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of counts; a position that some answers did not reach counts for the others."""
    parts = list(counts)
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name, info in Counts.model_fields.items()
        if info.annotation is int
    }
    return Counts(
        **sums,
        decoded_by_position=_sum_columns([part.decoded_by_position for part in parts]),
        accepted_by_position=_sum_columns([part.accepted_by_position for part in parts]),
    )


def _sum_columns(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(map(len, rows), default=0)
    return tuple(sum(row[i] for row in rows if i < len(row)) for i in range(longest))
