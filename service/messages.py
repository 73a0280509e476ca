"""The messages between ingress, engine, stages and drafter. Read these first: they are the map.

Nothing here needs torch or Ray. Tensors travel beside them, from actor to actor
(`service.pipeline.stage`, `service.pdm.drafter`); what the engine sees is small and plain.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]
ProposalKind = Literal["pdm", "point"]
ProposedBy = Literal["lookup", "pdm"]
Outcome = Literal["accepted", "rejected", "undrafted"]

# --- ingress <-> pipeline: one request and its stream -----------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from the target's distribution. In this order: bias, penalties,
    temperature, top-k, top-p, min-p (that of transformers' processors).

    `key` (64 bits) is where all of a request's randomness comes from. `seeded` says how it is used:
    by Gumbel-max, so that the key alone fixes the text, or by rejection sampling, which accepts
    more drafts and promises the distribution alone.
    """

    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # as a share of the likeliest token's probability
    presence_penalty: float = 0.0  # subtracted from the score of each generated token
    frequency_penalty: float = 0.0  # the same, for each time that it was generated
    repetition_penalty: float = 1.0  # divides (negative: multiplies) scores of all tokens so far
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its score)
    seeded: bool = False
    key: int = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether earlier tokens change the distribution."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like, in llguidance's terms."""

    kind: Literal["json_schema", "lark", "regex"]
    text: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """What ends an answer before its limit, beside the target's own end tokens."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    include_in_text: bool = False  # the stop string or token that was found
    min_tokens: int = 0  # before these are generated, nothing ends it and no end token is drawn
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One text to generate, or the rest of one: then `generated_ids` are what another pipeline has
    generated of it, and what follows is an exact continuation. They count against `max_tokens`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: Stopping = Stopping()
    grammar: Grammar | None = None
    logprobs: int | None = None  # with each token its log-probability and so many alternatives
    prompt_logprobs: bool = False  # those of the prompt too, ahead of the first token
    generated_ids: tuple[int, ...] = ()
    speculates: bool = True  # else nothing is drafted for it; its text is the same
    shows_pipeline: bool = False  # its deltas tell what the pipeline does for it

    @property
    def known_ids(self) -> tuple[int, ...]:
        """What is read before anything is generated."""
        return self.prompt_ids + self.generated_ids


@dataclass(frozen=True, slots=True)
class Accepted:
    """A pipeline has taken the request: it runs, or waits for a slot there."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Where a finished request's time went, in seconds: waiting for a slot, from there to its first
    token, from there to its last."""

    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a finished request cost. Cycles count from its first generated token's entry into stage
    0; that first token is not among `decoded`. `drafted` counts verified proposals; `cached` prompt
    tokens did not go through the pipeline, as their keys and values were there. The scheduler has
    no clock: the engine adds the times. Of a resumed one all but the first two numbers are of its
    last run."""

    prompt_tokens: int
    generated_tokens: int
    decoded: int
    cycles: int
    drafted: int
    accepted: int
    cached: int = 0
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of a token, and of the likeliest ones (best first), the natural logarithm of its probability
    in the target's own distribution, before bias, penalties, grammar and temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log-probabilities of the prompt's tokens from its second one on."""

    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class RowView:
    """What a stage worked on for a request: `count` known tokens from `position` (`source` is then
    "prompt"), or the one token there. `source` tells where that came from when it entered stage 0:
    the target's verdict, or one of the proposers."""

    position: int
    count: int
    token: int | None  # None for known tokens
    source: Literal["prompt", "target"] | ProposedBy


@dataclass(frozen=True, slots=True)
class VerdictView:
    """The target's token at `position`, and whether it is the one that was proposed there."""

    position: int
    token: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CycleView:
    """One cycle as one request sees it: its rows at each stage, stage 0 first (None: a bubble),
    the verdict, and the positions in flight that it made void, or that nobody needs behind it."""

    cycle: int
    seconds: float
    rows: tuple[RowView | None, ...]
    verdict: VerdictView | None = None
    void: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineView:
    """The cycles of a request since its last token, oldest first, at least one. `drafter`: what
    proposes for it, e.g. `lookup+pdm` or `off`."""

    drafter: str
    cycles: tuple[CycleView, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """One generated token, and the text that it lets out (empty while text is held back for an
    incomplete character or a possible stop string). The last one has a reason and statistics."""

    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    logprobs: Logprobs | None = None
    pipeline: PipelineView | None = None  # for requests that asked for it


FailureKind = Literal["lost", "refused", "overloaded", "expired"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a stream that the engine could not finish. `lost`: the pipeline is of no use any
    more, and another one can go on with the request; `refused`: none can run it; `overloaded`: the
    queue was full; `expired`: it waited too long for a slot. The message is for the operator."""

    message: str
    kind: FailureKind = "lost"


Event = PromptScored | Delta | Failure

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
class Admission:
    """A request takes a slot. Last stage and drafter keep this until the next one takes it."""

    slot: int
    prompt_length: int  # tokens at and behind this position are generated
    sampling: Sampling
    grammar: Grammar | None = None
    logprobs: int | None = None
    end_ids: tuple[int, ...] = ()  # tokens that end the answer ..
    min_end: int = 0  # .. and stand at no position before this one


@dataclass(frozen=True, slots=True)
class Copy:
    """The first `length` positions of a slot are copied to another one, before this cycle's rows
    are written: keys, values, and what is kept beside them."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Asks the last stage for the target's token at `position` of `slot` (its predecessor is the
    newest of the slot's rows there), and for its verdict on the proposal, if there was one."""

    slot: int
    position: int
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class Score:
    """Asks the last stage for the log-probabilities of prompt tokens: the row at `start + i` of
    `slot` is followed by `next_ids[i]`."""

    slot: int
    start: int
    next_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Asks the PDM for the token at `position` of `slot`, whose predecessor enters stage 0 now."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class CyclePlan:
    """All that one cycle does. `stages[k]` are the rows that stage k runs: those of stage k-1 in
    the cycle before, less the void ones. `tokens` are the token ids of `stages[0]`, row for row."""

    cycle: int
    stages: tuple[tuple[Rows, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    verify: tuple[Verify, ...]
    drafts: tuple[DraftOrder, ...]
    admitted: tuple[Admission, ...] = ()
    copies: tuple[Copy, ...] = ()
    scores: tuple[Score, ...] = ()


# --- stages and drafter -> engine: the result of one cycle ------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's token at `position`; `accepted` is None where nothing was proposed."""

    slot: int
    position: int
    token: int
    accepted: bool | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """The log-probabilities that a `Score` asked for."""

    slot: int
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The PDM's token for `position`, drawn from its q (`pdm`) or its best one (`point`)."""

    slot: int
    position: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage tells the engine of a cycle. Verdicts come from the last stage alone, and
    `verify_seconds` is what they take of its `seconds`."""

    seconds: float
    verdicts: tuple[Verdict, ...] = ()
    scored: tuple[Scored, ...] = ()
    verify_seconds: float = 0.0


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
