"""The state of one running request. All of it is here; the scheduler moves it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from service.engine.lookup import FIRST_UP_TO, Proposer
from service.messages import (
    Event,
    GenerateRequest,
    Logprobs,
    Proposal,
    ProposedBy,
    RequestStats,
    Rows,
)

if TYPE_CHECKING:
    from service.engine.watch import Watch

Sink = Callable[[Event], None]


class Text(Protocol):
    """Token ids to text, see `service.text.stream.TextStream`."""

    def push(self, token_id: int) -> tuple[str, bool]: ...

    def finish(self) -> str: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """Positions [0, len(tokens)) are certain; `ahead` are the proposals at the positions after
    them; `entered` counts the positions whose rows have entered stage 0 and are not void."""

    request: GenerateRequest
    sink: Sink
    text: Text
    proposer: Proposer | None
    uses_pdm: bool
    slot: int
    limit: int  # no token is generated at this position or beyond
    rows: list[Rows | None]  # at each stage, in the cycle that was planned last
    tokens: list[int]
    end_ids: frozenset[int]  # tokens that end the answer
    watch: "Watch | None" = None  # where its client asked for it
    reused: int = 0  # known tokens whose keys and values were there already
    left: int = 0  # positions whose rows have left the last stage: they can be reused
    prompt_scores: list[Logprobs] = field(default_factory=list)
    ahead: deque[Proposal] = field(default_factory=deque)
    entered: int = 0
    draft: Proposal | None = None  # the PDM's, for the position `entered`
    proposer_said: tuple[int, int | None] | None = None  # at which position, and which token
    proposed_by: ProposedBy = "pdm"  # the newest of `ahead`
    cycles: int = 0
    decoded: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def known_length(self) -> int:
        """Of what is read in chunks: the prompt, and what a resumed request has generated before.
        The first token of this run stands behind it."""
        return self.prompt_length + len(self.request.generated_ids)

    @property
    def min_end(self) -> int:
        """The first position at which the answer may end."""
        return self.prompt_length + self.request.stop.min_tokens

    @property
    def is_reading(self) -> bool:
        return self.entered < self.known_length

    @property
    def end(self) -> int:
        """The position after the last token that is certain or proposed."""
        return len(self.tokens) + len(self.ahead)

    @property
    def drafter(self) -> str:
        """What proposes for it, by the names of the settings."""
        used = {"lookup": self.proposer is not None, "pdm": self.uses_pdm}
        return "+".join(name for name, is_used in used.items() if is_used) or "off"

    @property
    def proposer_overrides(self) -> bool:
        """Whether the proposer goes before a draft of the PDM."""
        sampling = self.request.sampling
        return sampling.seeded or sampling.temperature <= FIRST_UP_TO

    def propose(self) -> int | None:
        """The proposer's token for the position `end`; it is asked once."""
        if self.proposer is None:
            return None
        if self.proposer_said is None or self.proposer_said[0] != self.end:
            text = [*self.tokens, *(p.token for p in self.ahead)]
            self.proposer_said = self.end, self.proposer(text)
        return self.proposer_said[1]

    def flush(self) -> None:
        """Voids the rows behind the last stage and their tokens."""
        self.rows[:-1] = [None] * (len(self.rows) - 1)
        self.ahead.clear()
        self.draft = self.proposer_said = None

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self.prompt_length,
            generated_tokens=len(self.tokens) - self.prompt_length,
            decoded=self.decoded,
            cycles=self.cycles,
            drafted=self.drafted,
            accepted=self.accepted,
            cached=min(self.reused, self.prompt_length),
        )
