"""The messages between ingress, engine, stages and drafter. Read these first: they are the map.

Nothing here needs torch or Ray. Tensors travel beside them, from actor to actor
(`service.pipeline.stage`, `service.pdm.drafter`); what the engine sees is small and plain.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
ProposalKind = Literal["pdm", "point"]

# --- ingress <-> pipeline: one request and its stream -----------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the target's distribution.

    `key` (64 bits) is where all of a request's randomness comes from. `seeded` says how it is used:
    by Gumbel-max, so that the key alone fixes the text, or by rejection sampling, which accepts
    more drafts and promises the distribution alone.
    """

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seeded: bool = False
    key: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One text to generate."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a finished request cost. Cycles count from its first generated token's entry into stage
    0; that first token is not among `decoded`. `drafted` counts verified proposals."""

    prompt_tokens: int
    generated_tokens: int
    decoded: int
    cycles: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token, and the text that it lets out (empty while text is held back for an
    incomplete character or a possible stop string). The last one has a reason and statistics."""

    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a stream that the engine could not finish."""

    message: str


Event = Delta | Failure

# --- engine -> stages and drafter: the plan of one cycle --------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one sequence at `count` consecutive positions from `start`, at one stage: one
    generated token, or a chunk of a prompt."""

    slot: int
    start: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.count


def spans(rows: Iterable[Rows]) -> Iterator[tuple[Rows, slice]]:
    """Rows laid end to end in a tensor's dimension: each with its place."""
    done = 0
    for r in rows:
        yield r, slice(done, done + r.count)
        done += r.count


@dataclass(frozen=True, slots=True)
class Proposal:
    """A token that was put into the pipeline before the target confirmed it.

    `pdm`: drawn from the PDM's shaped distribution q. `point`: certain for the proposer (a lookup
    hit or a greedy draft), so q is 1 at the token.
    """

    token: int
    kind: ProposalKind


@dataclass(frozen=True, slots=True)
class Verify:
    """Asks the last stage for the target's token at `position` of `slot` (its predecessor is the
    newest of the slot's rows there), and for its verdict on the proposal, if there was one."""

    slot: int
    position: int
    sampling: Sampling
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Asks the PDM for the token at `position` of `slot`, whose predecessor enters stage 0 now."""

    slot: int
    position: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class CyclePlan:
    """All that one cycle does. `stages[k]` are the rows that stage k runs: those of stage k-1 in
    the cycle before, less the void ones. `tokens` are the token ids of `stages[0]`, row for row."""

    cycle: int
    stages: tuple[tuple[Rows, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    verify: tuple[Verify, ...]
    drafts: tuple[DraftOrder, ...]


# --- stages and drafter -> engine: the result of one cycle ------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's token at `position`; `accepted` is None where nothing was proposed."""

    slot: int
    position: int
    token: int
    accepted: bool | None


@dataclass(frozen=True, slots=True)
class Draft:
    """The PDM's token for `position`, drawn from its q (`pdm`) or its best one (`point`)."""

    slot: int
    position: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage tells the engine of a cycle. Verdicts come from the last stage alone."""

    seconds: float
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What the drafter tells the engine of a cycle. With an `error` there are no drafts: the cycle
    itself is sound and serving goes on without speculation."""

    seconds: float
    drafts: tuple[Draft, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CycleResult:
    """The reports of all actors; `drafter` is None where none runs."""

    stages: tuple[StageReport, ...]
    drafter: DraftReport | None
    seconds: float  # from the plan's departure to the last report's arrival
