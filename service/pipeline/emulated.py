"""Stages and a drafter that wait instead of computing: the rest of the server without weights.

They answer as `Stage` and `Drafter` do, and send tensors of the real size. The target's token at a
position is a hash, and so is whether its draft is right: runs repeat, on every graph. A chunk of a
prompt takes as long as one row, grammars are not followed, and an end token is never drawn.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from service.messages import (
    Admission,
    CyclePlan,
    Draft,
    DraftOrder,
    DraftReport,
    Logprobs,
    Proposal,
    ProposalKind,
    Scored,
    StageReport,
    Verdict,
    Verify,
)
from service.pdm.features import stage_anchors
from service.pipeline.spec import ActorSpec, Emulation
from service.sampling import Stream, uniform, uses_q

_CERTAIN = Logprobs(0.0)  # of each token: there is no distribution
_PR_SET_TIMERSLACK = 29
_thread = threading.local()


def target_token(admission: Admission, position: int, vocabulary: int) -> int:
    """The target's token at a position, which ends no text."""
    token = int(uniform(_key(admission), Stream.RESIDUAL, position) * vocabulary)
    while token in admission.end_ids:
        token = (token + 1) % vocabulary
    return token


def draft_is_right(admission: Admission, position: int, acceptance: float) -> bool:
    return uniform(_key(admission), Stream.ACCEPT, position) < acceptance


def _key(admission: Admission) -> int:
    """Greedy requests share a key; their drafts should not fail all at once."""
    return admission.sampling.key * 1009 + admission.slot


def wait_until(moment: float) -> None:
    """Sleeps to a moment of `time.perf_counter`. A spinning thread would be more exact and take
    the cores from the others; so the kernel is asked not to round this thread's sleeps up."""
    if not hasattr(_thread, "exact"):
        _thread.exact = True
        if sys.platform == "linux":  # it adds 50 us otherwise
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


class _Emulated:
    """What emulated stages and drafter have in common."""

    def __init__(self, spec: ActorSpec) -> None:
        torch.set_num_threads(spec.threads)
        assert spec.emulation is not None
        self._emulation: Emulation = spec.emulation
        self._dtype = spec.torch_dtype
        self._admissions: dict[int, Admission] = {}

    def _take(self, plan: CyclePlan) -> None:
        for admission in plan.admitted:
            self._admissions[admission.slot] = admission

    def differing(self, _texts: Mapping[int, Sequence[int]]) -> list[int]:
        return []

    def _wait(self, began: float, seconds: float) -> float:
        """Works until so long after `began`, then sends; returns how long the work took."""
        wait_until(began + seconds)
        done = time.perf_counter()
        if self._emulation.link_s:
            wait_until(done + self._emulation.link_s)
        return done - began


class EmulatedStage(_Emulated):
    """A stage without layers. The last one verifies."""

    def __init__(self, spec: ActorSpec, index: int, _draft_ids: Tensor | None = None) -> None:
        super().__init__(spec)
        self.index, self.is_last = index, index == spec.stages - 1
        self._taps = len(stage_anchors(spec.anchors, spec.bounds, index))
        self._outputs: dict[int, Tensor] = {}  # by number of rows
        self.inbox: Tensor | None = None
        self.q: Tensor | None = None
        self._report = StageReport(0.0)

    def parameter_count(self) -> int:
        return 0

    def forward(self, plan: CyclePlan) -> Tensor | None:
        """Waits for as long as a stage with rows would compute. Returns [1 + taps, R, H]."""
        began = time.perf_counter()
        self._take(plan)
        rows = plan.stages[self.index]
        if not rows:
            self._report = StageReport(time.perf_counter() - began)
            return None
        assert self.index == 0 or self.inbox is not None, "rows are planned that no stage has sent"
        out = self._output(sum([r.count for r in rows]))
        verdicts: tuple[Verdict, ...] = ()
        scored: tuple[Scored, ...] = ()
        verifying = time.perf_counter()
        if self.is_last:
            verdicts = tuple(map(self._verdict, plan.verify))
            scored = tuple(Scored(s.slot, (_CERTAIN,) * len(s.next_ids)) for s in plan.scores)
        verified = time.perf_counter() - verifying
        seconds = self._wait(began, self._emulation.stage_s)
        self._report = StageReport(seconds, verdicts, scored, verified)
        return out

    def _output(self, rows: int) -> Tensor:
        """[1 + taps, R, H]. A device makes it while it works; here it is made once."""
        if rows not in self._outputs:
            size = self._emulation.hidden_size
            self._outputs[rows] = torch.zeros(1 + self._taps, rows, size, dtype=self._dtype)
        return self._outputs[rows]

    def accept(self, _plan: CyclePlan, upstream: Tensor | None) -> None:
        """The upstream stage's rows [1 + taps, R, H]."""
        self.inbox = upstream

    def accept_q(self, _plan: CyclePlan, q: Tensor | None) -> None:
        """The distributions [drafts that need one, D]."""
        self.q = q

    def report(self) -> StageReport:
        return self._report

    def _verdict(self, order: Verify) -> Verdict:
        admission = self._admissions[order.slot]
        token = target_token(admission, order.position, self._emulation.vocabulary)
        accepted = None if order.proposal is None else order.proposal.token == token
        told = None if admission.logprobs is None else _CERTAIN
        return Verdict(order.slot, order.position, token, accepted, told)


class EmulatedDrafter(_Emulated):
    """A PDM without weights, right at the given rate."""

    def __init__(self, spec: ActorSpec, _checkpoint: str | None) -> None:
        super().__init__(spec)
        self.inbox: dict[int, Tensor | None] = {}
        self._rows_left = False  # rows have left the pipeline, which costs a forward too
        self._report = DraftReport(0.0)

    def draft(self, plan: CyclePlan) -> Tensor | None:
        """Waits for as long as a PDM with rows would compute. Returns q [drafts that need one, D],
        or None where none does."""
        began = time.perf_counter()
        self._take(plan)
        drafts = tuple(map(self._draft, plan.drafts))
        with_q = sum(d.proposal.kind == "pdm" for d in drafts)
        q = torch.zeros(with_q, self._emulation.draft_vocabulary) if with_q else None
        busy = bool(drafts) or self._rows_left
        seconds = self._wait(began, self._emulation.draft_s) if busy else 0.0
        self._rows_left = bool(plan.stages[-1])
        self._report = DraftReport(seconds, drafts)
        return q

    def accept(self, _plan: CyclePlan, stage: int, output: Tensor | None) -> None:
        """The taps of a stage's rows [1 + taps, R, H]."""
        self.inbox[stage] = output

    def report(self) -> DraftReport:
        return self._report

    def _draft(self, order: DraftOrder) -> Draft:
        admission, vocabulary = self._admissions[order.slot], self._emulation.vocabulary
        token = target_token(admission, order.position, vocabulary)
        if not draft_is_right(admission, order.position, self._emulation.acceptance):
            token = (token + 1) % vocabulary
        kind: ProposalKind = "pdm" if uses_q(admission.sampling) else "point"
        return Draft(order.slot, order.position, Proposal(token, kind))
