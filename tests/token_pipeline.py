"""A pipeline of tokens instead of tensors: a graph for scheduler tests that checks each plan.

Every stage remembers the token that was last written at each (slot, position), as keys and values
are. The target's next token is a function of the whole text that the last stage holds, so a stale
or misplaced row shows in the text.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from service.messages import (
    CyclePlan,
    CycleResult,
    Draft,
    DraftReport,
    Logprobs,
    Proposal,
    Rows,
    Scored,
    StageReport,
    Verdict,
)

VOCABULARY = 1000


def target_token(text: Sequence[int]) -> int:
    """The toy target: any change anywhere in the text changes what follows."""
    state = 17
    for token in text:
        state = (state * 31 + token + 7) % 1_000_003
    return 10 + state % (VOCABULARY - 10)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(target_token(text))
    return text[len(prompt) :]


# From (text known to be right, position) to a drafted token, or None for a drafter that failed.
Drafting = Callable[[int, int], int | None]


class TokenPipeline:
    """Runs plans and asserts that they are lawful."""

    def __init__(self, stages: int, slots: int, max_len: int, drafting: Drafting) -> None:
        self.stages, self.max_len, self.drafting = stages, max_len, drafting
        self.memory = [[[-1] * max_len for _ in range(slots)] for _ in range(stages)]
        self.previous: tuple[dict[Rows, tuple[int, ...]], ...] = tuple({} for _ in range(stages))
        self.cycles = self.rows_run = 0
        self.prompt_lengths: dict[int, int] = {}

    def run(self, plan: CyclePlan) -> CycleResult:
        self.cycles += 1
        assert plan.cycle == self.cycles
        self._copy(plan)
        for admission in plan.admitted:
            self.prompt_lengths[admission.slot] = admission.prompt_length
        present = self._move(plan)
        self._write(present)
        verdicts = tuple(self._verdict(plan, order) for order in plan.verify)
        drafts = []
        for order in plan.drafts:
            newest = [r for r in plan.stages[0] if r.slot == order.slot]
            assert [r.start + r.count for r in newest] == [order.position]
            token = self.drafting(order.slot, order.position)
            if token is not None:
                drafts.append(Draft(order.slot, order.position, Proposal(token, "pdm")))
        self.previous = present
        last = StageReport(0.0, verdicts, tuple(self._scored(plan)))
        reports = (*[StageReport(0.0)] * (self.stages - 1), last)
        return CycleResult(reports, DraftReport(0.0, tuple(drafts)), 0.0)

    def _copy(self, plan: CyclePlan) -> None:
        for copy in plan.copies:
            assert copy.length > 0
            for memory in self.memory:
                copied = memory[copy.source][: copy.length]
                assert -1 not in copied
                memory[copy.target][: copy.length] = copied

    def _move(self, plan: CyclePlan) -> tuple[dict[Rows, tuple[int, ...]], ...]:
        """The rows of every stage with their tokens; they come from the stage before."""
        assert len(plan.stages) == self.stages
        present = [dict(zip(plan.stages[0], plan.tokens, strict=True))]
        for k in range(1, self.stages):
            assert set(plan.stages[k]) <= set(self.previous[k - 1]), "rows out of nowhere"
            present.append({r: self.previous[k - 1][r] for r in plan.stages[k]})
        for rows in present:
            slots = [r.slot for r in rows]
            assert len(slots) == len(set(slots)), "two runs of one sequence in one stage"
        self._check_windows(plan)
        return tuple(present)

    def _check_windows(self, plan: CyclePlan) -> None:
        """A sequence's rows in flight are contiguous, the oldest in the latest stage."""
        for slot in {r.slot for rows in plan.stages for r in rows}:
            window = [r for rows in reversed(plan.stages) for r in rows if r.slot == slot]
            for older, newer in pairwise(window):
                assert older.start + older.count == newer.start

    def _write(self, present: tuple[dict[Rows, tuple[int, ...]], ...]) -> None:
        for memory, rows in zip(self.memory, present, strict=True):
            for r, tokens in rows.items():
                assert r.count == len(tokens)
                self.rows_run += r.count
                assert r.start + r.count <= self.max_len
                memory[r.slot][r.start : r.start + r.count] = tokens

    def _scored(self, plan: CyclePlan) -> Iterator[Scored]:
        """As the log-probability of a token the number of its position."""
        for order in plan.scores:
            rows = [r for r in plan.stages[-1] if (r.slot, r.start) == (order.slot, order.start)]
            assert len(order.next_ids) in (rows[0].count, rows[0].count - 1)
            first = order.start + 1
            yield Scored(
                order.slot,
                tuple(Logprobs(first + i, ((t, 0.0),)) for i, t in enumerate(order.next_ids)),
            )

    def _verdict(self, plan: CyclePlan, order) -> Verdict:
        ends = [r.start + r.count for r in plan.stages[-1] if r.slot == order.slot]
        assert ends == [order.position], "verified without its row in the last stage"
        assert order.position >= self.prompt_lengths[order.slot]
        token = target_token(self.memory[-1][order.slot][: order.position])
        if order.proposal is None:
            return Verdict(order.slot, order.position, token, None)
        return Verdict(order.slot, order.position, token, token == order.proposal.token)
