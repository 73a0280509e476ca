"""Decides everything about a cycle: what enters, what is verified, what is void, who is finished.

Pure Python, without threads, clocks, torch or Ray. A cycle is `plan()`, its execution by a graph,
and `apply(result)`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from service.engine.lookup import Proposer
from service.engine.sequence import Sequence, Sink, Text
from service.engine.slots import Place, Slots, reusable
from service.engine.watch import Watch
from service.messages import (
    Admission,
    Copy,
    CyclePlan,
    CycleResult,
    Delta,
    DraftOrder,
    FinishReason,
    GenerateRequest,
    PipelineView,
    PromptScored,
    Proposal,
    Rows,
    Score,
    Verdict,
    Verify,
)


class QueueFullError(Exception):
    """As many requests wait as may."""


class Scheduler:
    """Slots, the sequences in them, and those that wait for one."""

    def __init__(
        self,
        *,
        stages: int,
        slots: int,
        max_len: int,
        chunk: int,
        eos_ids: frozenset[int],
        new_text: Callable[[GenerateRequest], Text],
        new_proposer: Callable[[], Proposer] | None = None,
        uses_pdm: bool = False,
        queue: int | None = None,
    ) -> None:
        """A request's own proposer goes first, the PDM drafts where it has nothing. With one stage
        there is nothing to fill, and neither is asked. `queue`: how many requests may wait for a
        slot."""
        self._stages, self._max_len, self._chunk = stages, max_len, chunk
        self._eos_ids, self._new_text = eos_ids, new_text
        self._new_proposer = new_proposer if stages > 1 else None
        self._uses_pdm = uses_pdm and stages > 1
        self._slots = Slots(slots)
        self._waiting: deque[tuple[GenerateRequest, Sink]] = deque()
        self._running: dict[str, Sequence] = {}  # by request id, oldest first
        self._queue = queue
        self._cycle = 0
        self._prompt_budget = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """How many texts are behind their first token in the cycle that was planned last."""
        return sum(s.entered > s.known_length for s in self._running.values())

    def admitted(self, plan: CyclePlan) -> list[Sequence]:
        """Those that have their slots by this plan, the one that was made last."""
        slots = {admission.slot for admission in plan.admitted}
        return [s for s in self._running.values() if s.slot in slots]

    @property
    def new_in_queue(self) -> list[str]:
        """The ids of those that wait for their first token."""
        return [request.request_id for request, _ in self._waiting if not request.generated_ids]

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        """Queues a request, whose known tokens are 1 to max_len - 1. Its events go to `sink`. One
        that goes on after a failure goes first, however many wait: its client has seen a part.

        Raises ValueError for one that can't be run, or whose id is in use, and QueueFullError.
        """
        known = len(request.known_ids)
        if not request.prompt_ids or known >= self._max_len:
            raise ValueError(
                f"a prompt of {known} tokens does not fit a slot of {self._max_len} positions"
            )
        if request.max_tokens <= len(request.generated_ids):
            raise ValueError(
                f"max_tokens is {request.max_tokens}; at least 1 is generated, behind "
                f"{len(request.generated_ids)} that are there"
            )
        if request.prompt_logprobs and request.generated_ids:
            raise ValueError("the log-probabilities of a resumed request's prompt have gone out")
        waiting = {w.request_id for w, _ in self._waiting}
        if request.request_id in self._running or request.request_id in waiting:
            raise ValueError(f"the request id {request.request_id!r} is in use")
        if request.generated_ids:
            self._waiting.appendleft((request, sink))
            return
        if self._queue is not None and len(self._waiting) >= self._queue + len(self._slots.free):
            raise QueueFullError(f"{len(self._waiting)} requests wait for a slot")
        self._waiting.append((request, sink))

    def abort(self, request_id: str) -> bool:
        """Forgets a request; its slot is free for the next plan. Says whether it was known."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._release(sequence)
            return True
        return self.unqueue(request_id) is not None

    def unqueue(self, request_id: str) -> Sink | None:
        """Forgets a request that waits, and returns its sink; None where it does not wait."""
        for request, sink in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove((request, sink))
                return sink
        return None

    def drop_all(self) -> list[Sink]:
        """Forgets all requests and returns their sinks: the pipeline has failed."""
        sinks = [s.sink for s in self._running.values()] + [sink for _, sink in self._waiting]
        for sequence in list(self._running.values()):
            self._release(sequence)
        self._waiting.clear()
        return sinks

    def faults(self) -> list[str]:
        """What is wrong with the bookkeeping of a scheduler that has nothing to do."""
        found = []
        if self._running or self._waiting:
            found.append(f"{self.running} requests run and {self.waiting} wait, without a plan")
        if missing := sorted(set(range(self._slots.count)) - set(self._slots.free)):
            found.append(f"the slots {missing} are neither free nor in use")
        return found

    @property
    def held(self) -> dict[int, list[int]]:
        """The tokens whose keys and values are in each free slot, by slot."""
        return self._slots.held

    # --- planning -------------------------------------------------------------------------------

    def plan(self) -> CyclePlan | None:
        """The next cycle, or None when there is nothing to do."""
        admitted = self._admit()
        if not self._running:
            return None
        self._cycle += 1
        self._prompt_budget = self._chunk
        sequences = list(self._running.values())
        for sequence in sequences:
            sequence.rows = [self._enter(sequence), *sequence.rows[:-1]]
            if sequence.entered > sequence.known_length:
                sequence.cycles += 1
            if sequence.watch is not None:
                sequence.watch.planned(self._cycle, sequence)
        stages = tuple(
            tuple(r for s in sequences if (r := s.rows[k]) is not None) for k in range(self._stages)
        )
        return CyclePlan(
            cycle=self._cycle,
            stages=stages,
            tokens=tuple(self._tokens(s) for s in sequences if s.rows[0] is not None),
            verify=tuple(v for s in sequences if (v := self._verification(s)) is not None),
            drafts=tuple(d for s in sequences if (d := self._draft_order(s)) is not None),
            admitted=tuple(admission for admission, _ in admitted),
            copies=tuple(copy for _, copy in admitted if copy is not None),
            scores=tuple(o for s in sequences if (o := self._score_order(s)) is not None),
        )

    def _admit(self) -> list[tuple[Admission, Copy | None]]:
        """Gives slots to those who wait, oldest first."""
        admitted = []
        while self._slots.free and self._waiting:
            request, sink = self._waiting[0]
            running = {s.slot: s.tokens[: s.left] for s in self._running.values()}
            place = self._slots.place(request, running)
            if self._soon_there(request, place.reused):
                break
            self._waiting.popleft()
            self._slots.take(place)
            sequence = self._sequence(request, sink, place)
            self._running[request.request_id] = sequence
            copy = None
            if place.source != place.slot:
                copy = Copy(place.source, place.slot, place.reused)
            admitted.append((_admission(sequence), copy))
            if request.grammar is not None or request.sampling.logit_bias:
                break  # these may be long, and the size of a message is bounded
        return admitted

    def _soon_there(self, request: GenerateRequest, reused: int) -> bool:
        """Whether waiting is better than reading the prompt: a running request is about to bring a
        much longer beginning of it, as that of the same prompt's other answers is."""
        return any(
            s.left < s.known_length
            and reusable(request, s.request.known_ids) > reused + self._chunk
            for s in self._running.values()
        )

    def _sequence(self, request: GenerateRequest, sink: Sink, place: Place) -> Sequence:
        stop, text = request.stop, self._new_text(request)
        for token in request.generated_ids:  # has gone out; what it holds back is there again
            text.push(token)
        new_proposer = self._new_proposer if request.speculates else None
        return Sequence(
            request=request,
            sink=sink,
            text=text,
            proposer=None if new_proposer is None else new_proposer(),
            uses_pdm=self._uses_pdm and request.speculates,
            watch=Watch(self._stages) if request.shows_pipeline else None,
            slot=place.slot,
            limit=min(len(request.prompt_ids) + request.max_tokens, self._max_len),
            rows=[None] * self._stages,
            tokens=list(request.known_ids),
            end_ids=(frozenset() if stop.ignore_eos else self._eos_ids) | set(stop.token_ids),
            reused=place.reused,
            left=place.reused,
            entered=place.reused,
        )

    def _enter(self, s: Sequence) -> Rows | None:
        """The rows of a sequence that enter stage 0 now."""
        start = s.entered
        if s.is_reading:
            count = min(s.known_length - start, self._prompt_budget)
            self._prompt_budget -= count
        else:
            count = 1 if self._has_token(s) else 0
        if count == 0:
            return None
        s.entered += count
        return Rows(s.slot, start, count)

    def _has_token(self, s: Sequence) -> bool:
        """Whether there is a token for the position `entered`, certain or proposed (it is then
        ahead). A token after which nothing is generated need not enter; and drafting starts behind
        the first generated token, which is the prompt's own result."""
        if s.entered >= s.limit - 1:
            return False
        if s.entered == s.end > s.known_length and (proposal := self._proposal(s)) is not None:
            s.ahead.append(proposal)
        return s.entered < s.end

    def _proposal(self, s: Sequence) -> Proposal | None:
        """The proposer's token, else the PDM's; at high temperatures without a seed the other way
        round. Whether the proposer overrides does not depend on which token the PDM drew: else the
        accepted tokens would not have the target's distribution."""
        draft, s.draft = s.draft, None
        if draft is None or s.proposer_overrides:
            token = s.propose()
            if token is not None:
                s.proposed_by = "lookup"
                return Proposal(token, "point")
        s.proposed_by = "pdm"
        return draft

    def _tokens(self, s: Sequence) -> tuple[int, ...]:
        """The token ids of the rows that enter stage 0."""
        rows = s.rows[0]
        assert rows is not None
        if rows.start < len(s.tokens):
            return tuple(s.tokens[rows.start : rows.end])
        return (s.ahead[rows.start - len(s.tokens)].token,)

    def _verification(self, s: Sequence) -> Verify | None:
        """Due when the row before the first uncertain position is in the last stage."""
        rows, position = s.rows[-1], len(s.tokens)
        if rows is None or rows.end != position:
            return None
        return Verify(s.slot, position, s.ahead[0] if s.ahead else None)

    def _score_order(self, s: Sequence) -> Score | None:
        """Due for the rows of a prompt in the last stage. What follows its last token is drawn."""
        rows, prompt = s.rows[-1], s.request.prompt_ids
        if not s.request.prompt_logprobs or rows is None or rows.start >= len(prompt) - 1:
            return None
        return Score(s.slot, rows.start, prompt[rows.start + 1 : rows.end + 1])

    def _draft_order(self, s: Sequence) -> DraftOrder | None:
        """A draft is wanted behind a generated token that enters, if it could enter itself, and if
        the proposer has nothing for its place: its word is kept."""
        rows = s.rows[0]
        if not s.uses_pdm or rows is None or rows.start < s.known_length:
            return None
        if s.entered >= s.limit - 1 or (s.proposer_overrides and s.propose() is not None):
            return None
        return DraftOrder(s.slot, s.entered)

    # --- results --------------------------------------------------------------------------------

    def apply(self, result: CycleResult) -> list[tuple[Sequence, PromptScored | Delta]]:
        """Takes the verdicts and drafts of the cycle planned last; returns the tokens that are now
        certain (and, ahead of them, the scores of a prompt), with the sequences they belong to."""
        by_slot = {s.slot: s for s in self._running.values()}
        for sequence in by_slot.values():
            if (rows := sequence.rows[-1]) is not None:
                sequence.left = rows.end
            if sequence.watch is not None:
                sequence.watch.ran(result.seconds)
        last = result.stages[-1]
        for scored in last.scored:
            by_slot[scored.slot].prompt_scores += scored.logprobs
        emitted: list[tuple[Sequence, PromptScored | Delta]] = []
        for verdict in last.verdicts:
            sequence = by_slot[verdict.slot]
            if sequence.request.prompt_logprobs and verdict.position == sequence.known_length:
                emitted.append((sequence, PromptScored(tuple(sequence.prompt_scores))))
            emitted.append((sequence, self._take(sequence, verdict)))
        for draft in result.drafter.drafts if result.drafter else ():
            sequence = by_slot[draft.slot]
            if draft.position == sequence.entered == sequence.end:  # else void: a flush came first
                sequence.draft = draft.proposal
        return emitted

    def _take(self, s: Sequence, verdict: Verdict) -> Delta:
        """One more certain token. If it is not the proposed one, all behind it is void."""
        position, entered = verdict.position, s.entered
        assert position == len(s.tokens)
        s.tokens.append(verdict.token)
        s.decoded += position > s.known_length
        accepted = s.ahead.popleft().token == verdict.token if s.ahead else None
        if accepted is not None:
            s.drafted += 1
            s.accepted += accepted
        if accepted is False:
            s.flush()
            s.entered = position
        delta = self._delta(s, verdict)
        if s.watch is None:
            return delta
        first_void = entered  # none
        if accepted is False:
            first_void = position
        elif delta.finish_reason is not None:
            first_void = position + 1
        cycles = s.watch.decided(verdict, accepted, range(first_void, entered))
        return replace(delta, pipeline=PipelineView(s.drafter, cycles))

    def _delta(self, s: Sequence, verdict: Verdict) -> Delta:
        token = verdict.token
        reason: FinishReason | None = None
        if token in s.end_ids:  # none is drawn too early, unless a grammar leaves nothing else
            shown = s.request.stop.include_in_text and token not in self._eos_ids
            text = (s.text.push(token)[0] if shown else "") + s.text.finish()
            reason = "stop"
        else:
            text, stopped = s.text.push(token)
            if stopped:
                reason = "stop"
            elif len(s.tokens) == s.limit:
                text, reason = text + s.text.finish(), "length"
        if reason is None:
            return Delta(token, text, logprobs=verdict.logprobs)
        self._release(s)
        return Delta(token, text, reason, s.stats(), verdict.logprobs)

    def _release(self, s: Sequence) -> None:
        """Its rows in flight are in no further plan, so the slot can be given away at once. What
        has left the pipeline stays there for requests that begin alike."""
        del self._running[s.request.request_id]
        self._slots.release(s.slot, s.tokens[: s.left])


def _admission(s: Sequence) -> Admission:
    """What the last stage and the drafter are told of a sequence."""
    return Admission(
        slot=s.slot,
        prompt_length=s.prompt_length,
        sampling=s.request.sampling,
        grammar=s.request.grammar,
        logprobs=s.request.logprobs,
        end_ids=tuple(sorted(s.end_ids)),
        min_end=s.min_end,
    )
