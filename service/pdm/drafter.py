"""Runs the PDM beside the stages. A plain class, like `Stage`: the graphs wrap it."""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from service.device_sampling import drafted, fetched
from service.messages import (
    Copy,
    CyclePlan,
    Draft,
    DraftOrder,
    DraftReport,
    Proposal,
    ProposalKind,
    Rows,
    spans,
)
from service.pdm.checkpoint import load_pdm
from service.pdm.features import depth_types, tapped_stages
from service.pdm.module import CachedPDM
from service.pipeline.cache import Batch, SlotCache
from service.pipeline.cuda import wait_for
from service.pipeline.decode_step import DecodeStep, StepShape
from service.pipeline.layers import EMBEDDING, WeightReader
from service.pipeline.spec import ActorSpec
from service.pipeline.texts import SlotTexts
from service.sampling import draft, uses_q

log = logging.getLogger(__name__)

MOST_UNREAD = 4  # rows of one slot

Drawn = tuple[Proposal, Tensor | None]  # a draft, and the q [D] that it was drawn from, if from one
States = dict[Rows, Tensor]  # rows -> their hidden states [count, anchors so far, H]


class Drafter:
    """Drafts the next token of each sequence from the hidden states of the rows in flight.

    State: `_in_flight[d]`, what the rows that have finished d stages (1 <= d <= n) have tapped so
    far; those at n have just left the pipeline. `_behind` is the same of the cycle before, while
    the taps of a cycle come in. And, in slots: texts, the PDM's keys and values, and the features
    of the rows that have left the pipeline. Those that are `_unread`, oldest first, are not in
    there yet: they wait for the next draft, since a few rows take no longer than one.
    """

    def __init__(self, spec: ActorSpec, checkpoint: str | None) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._device = spec.device_of(spec.stages)
        folder = Path(spec.folder)
        config = spec.target
        self._embedding = WeightReader(folder)(EMBEDDING, spec.torch_dtype, self._device)
        dtype, device = spec.torch_dtype, self._device
        made_for, self.pdm = load_pdm(spec, checkpoint)
        slots, max_len = spec.slots, spec.max_len
        self._cache = SlotCache(
            config, made_for.layers, slots, max_len, dtype, device, scratch=spec.static_steps
        )
        self._cached = CachedPDM(self.pdm, self._cache, spec.weights)
        vocabulary = len(self._embedding)
        self._texts = SlotTexts(
            spec.grammar_tokens, vocabulary, slots, max_len, device, self.pdm.draft_ids
        )
        self._left = torch.zeros(slots, max_len, config.hidden_size, dtype=dtype, device=device)
        self._types = depth_types(spec.anchors, spec.bounds)
        self._tapped = tapped_stages(spec.anchors, spec.bounds)
        self._in_flight = self._behind = self._nothing()
        self._unread: dict[int, States] = {}  # by slot
        self._report = DraftReport(0.0)
        self._step: DecodeStep | None = None
        if spec.static_steps:
            most = spec.stages + MOST_UNREAD  # rows of a slot: in flight and unread
            shape = StepShape(slots, max_len, config.hidden_size, dtype, most)
            self._step = DecodeStep(self._cached.decoded, shape, device)

    def _nothing(self) -> list[States]:
        return [{} for _ in range(self._spec.stages + 1)]

    @torch.inference_mode()  # on every method: Ray runs graph methods on a thread of its own
    def draft(self, plan: CyclePlan) -> Tensor | None:
        """Drafts what the plan orders. Returns q [drafts whose verification needs it, D], or None
        where none does.

        An error here costs speculation, not the cycle: it is reported as data.
        """
        began = time.perf_counter()
        drafts: list[Draft] = []
        q: list[Tensor] = []
        error = None
        try:
            self._texts.take(plan)
            logits = self._logits(plan)
            draft_all = self._draft_each if self._step is None else self._draft_at_once
            for order, row, (proposal, probs) in zip(
                plan.drafts, logits, draft_all(plan.drafts, logits), strict=True
            ):
                drafts.append(Draft(order.slot, order.position, proposal))
                if uses_q(self._texts.sampling(order.slot)):
                    q.append(torch.zeros_like(row) if probs is None else probs)
            self._copy(plan.copies)
        except Exception as exception:
            log.exception("drafting failed; this cycle goes on without drafts")
            error, drafts, q = f"{type(exception).__name__}: {exception}", [], []
        out = torch.stack(q) if q else None
        wait_for(self._device)
        self._report = DraftReport(time.perf_counter() - began, tuple(drafts), error)
        self._behind, self._in_flight = self._in_flight, self._nothing()
        return out

    @torch.inference_mode()
    def accept(self, plan: CyclePlan, stage: int, output: Tensor | None) -> None:
        """Takes the taps of a stage's rows [1 + taps, R, H] (None without rows, or where the stage
        has no anchor), for the next cycle."""
        for r, at in spans(plan.stages[stage]):
            known = self._embed(plan, r)[:, None] if stage == 0 else self._behind[stage][r]
            if self._tapped[stage]:
                assert output is not None
                taps = output[1:, at].transpose(0, 1).to(self._device)  # [count, taps, H]
                known = torch.cat([known, taps], dim=1)
            self._in_flight[stage + 1][r] = known

    def _draft_each(self, orders: tuple[DraftOrder, ...], logits: Tensor) -> Iterable[Drawn]:
        """Drafts from the PDM's logits [orders, D]."""
        for o, row in zip(orders, logits, strict=True):
            scores, only = self._scores(o, row)
            sampling = self._texts.sampling(o.slot)
            yield (only, None) if only else draft(scores, self.pdm.draft_ids, sampling, o.position)

    def _draft_at_once(self, orders: tuple[DraftOrder, ...], logits: Tensor) -> Iterable[Drawn]:
        """The same on a device, which is waited for but once."""
        known, found, q = [], [], []
        for o, row in zip(orders, logits, strict=True):
            scores, only = self._scores(o, row)
            sampling = self._texts.sampling(o.slot)
            numbers, probs = drafted(scores, self.pdm.draft_ids, sampling, o.position)
            known.append(only)
            found.append(numbers)
            q.append(probs)
        for only, (token, from_q), probs in zip(known, fetched(found), q, strict=True):
            kind: ProposalKind = "pdm" if from_q else "point"
            yield only or Proposal(token, kind), probs if from_q and not only else None

    def _scores(self, order: DraftOrder, logits: Tensor) -> tuple[Tensor, Proposal | None]:
        """What a draft is drawn from [D], or, where all that may follow is beyond the draft's
        words, one that may."""
        slot, position = order.slot, order.position
        scores = self._texts.scores(logits, slot, position)
        if scores is not logits and not bool((scores > -math.inf).any()):
            allowed = self._texts.allowed(slot, position)
            if allowed is not None:
                return scores, Proposal(int(allowed.nonzero()[0]), "point")
        return scores, None

    def _copy(self, orders: tuple[Copy, ...]) -> None:
        """Prefixes to other slots; after the rows that have just left were computed."""
        for order in orders:
            self._cache.copy(order)
            self._left[order.target, : order.length] = self._left[order.source, : order.length]

    def differing(self, texts: Mapping[int, Sequence[int]]) -> list[int]:
        """The slots that hold other tokens than these."""
        return self._texts.differing(texts)

    def report(self) -> DraftReport:
        """What the engine wants to know of this cycle."""
        return self._report

    def _embed(self, plan: CyclePlan, rows: Rows) -> Tensor:
        """The embeddings [count, H] of rows that enter stage 0: their anchor 0, before any tap."""
        ids = plan.tokens[plan.stages[0].index(rows)]
        return nn.functional.embedding(torch.tensor(ids, device=self._device), self._embedding)

    def _logits(self, plan: CyclePlan) -> Tensor:
        """One forward over the rows of this cycle -> logits [drafts, D]."""
        parts = self.rows(plan)
        if not parts:
            return self._left.new_empty(0, 0)
        rows = [r for r, _ in parts]
        features = torch.cat([feature for _, feature in parts])  # [R, H]
        newest = {(r.slot, r.end): at.stop - 1 for r, at in spans(rows)}
        wanted = [newest[o.slot, o.position] for o in plan.drafts]
        if self._step is None or not self._step.covers(rows):
            return self._cached(features, Batch(rows, self._device), wanted)
        (logits,) = self._step.run(rows, features, range(len(features)))
        places = self._step.places(rows)
        return torch.stack([logits[places[k]] for k in wanted]) if wanted else logits[:0]

    def rows(self, plan: CyclePlan) -> list[tuple[Rows, Tensor]]:
        """The PDM's rows of this cycle, without gaps for each sequence, and their features [R, H].

        Where a draft is ordered, these are the rows that have left the pipeline and are unread, as
        deepest type (their keys and values are kept), and all rows in flight, each as the type of
        its depth. Unread rows of other slots wait, unless somebody else builds on them.
        """
        deepest = self._spec.stages
        for r, states in self._in_flight[deepest].items():
            self._unread.setdefault(r.slot, {})[r] = states
        drafting = {order.slot for order in plan.drafts}
        due = drafting | {a.slot for a in plan.admitted} | {c.source for c in plan.copies}
        by_slot: dict[int, list[tuple[Rows, Tensor]]] = {}
        for slot, unread in list(self._unread.items()):
            if slot in due or sum(r.count for r in unread) >= MOST_UNREAD:
                by_slot[slot] = [self._read(slot)]
        for depth in range(deepest - 1, -1, -1):  # oldest first
            for r in plan.stages[depth]:
                if r.slot in drafting:
                    states = self._in_flight[depth][r] if depth else self._embed(plan, r)[:, None]
                    by_slot.setdefault(r.slot, []).append((r, self._features(states, depth)))
        return [
            self._joined(slot, parts, drafts=slot in drafting) for slot, parts in by_slot.items()
        ]

    def _read(self, slot: int) -> tuple[Rows, Tensor]:
        """The unread rows of a slot, as one, and their features, which are kept."""
        unread = self._unread.pop(slot)
        start = next(iter(unread)).start
        features = self._features(torch.cat(list(unread.values())), self._spec.stages)
        self._left[slot, start : start + len(features)] = features
        return Rows(slot, start, len(features)), features

    def _features(self, states: Tensor, depth: int) -> Tensor:
        """States [R, anchors so far, H] of rows that have finished `depth` stages -> [R, H]."""
        features: Tensor = self.pdm.aggregation(states.flatten(1), self._types[depth])
        return features

    def _joined(
        self, slot: int, parts: list[tuple[Rows, Tensor]], *, drafts: bool
    ) -> tuple[Rows, Tensor]:
        """The rows of one slot as one, with the newest one's extra input where it drafts."""
        start, end = parts[0][0].start, parts[-1][0].end
        features = torch.cat([feature for _, feature in parts])  # [R, H]
        reach = min(self.pdm.distances, self._spec.stages)
        if drafts and reach:
            first = max(0, end - 1 - reach)
            older = self._left[slot, first:start]
            before = torch.cat([older, features[max(0, first - start) : -1]])
            features[-1:] = self.pdm.previous(features[-1:], before.flip(0)[:, None])
        return Rows(slot, start, end - start), features
