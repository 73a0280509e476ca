"""Runs the PDM beside the stages. A plain class, like `Stage`: the graphs wrap it."""

import logging
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from service.messages import CyclePlan, Draft, DraftReport, Rows
from service.pdm.checkpoint import (
    PdmConfig,
    build_pdm,
    load_tensors,
    untrained_pdm,
)
from service.pdm.features import type_of_depth
from service.pipeline.cache import Batch
from service.pipeline.layers import EMBEDDING, WeightReader
from service.pipeline.stage import ActorSpec
from service.sampling import draft
from service.target import load_target_config

log = logging.getLogger(__name__)

States = dict[Rows, Tensor]  # rows -> their hidden states [count, anchors so far, H]


class Drafter:
    """Drafts the next token of each sequence from the hidden states of the rows in flight.

    State: `_in_flight[d]`, what the rows that have finished d stages (1 <= d <= n) have tapped so
    far; those at n have just left the pipeline. And the PDM's keys and values, in slots.
    """

    def __init__(self, spec: ActorSpec, checkpoint: str | None) -> None:
        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._device = torch.device(spec.device)
        folder = Path(spec.folder)
        config = load_target_config(folder)
        if checkpoint is None:
            made_for, tensors = untrained_pdm(folder, config, spec.bounds, spec.anchors)
        else:
            made_for = PdmConfig.read(Path(checkpoint))
            tensors = load_tensors(Path(checkpoint))
        self._embedding = WeightReader(folder)(EMBEDDING, spec.torch_dtype, self._device)
        self.pdm = build_pdm(
            made_for, tensors, config, spec.slots, spec.max_len, spec.torch_dtype, self._device
        )
        self._types = [type_of_depth(spec.anchors, spec.bounds, d) for d in range(spec.stages + 1)]
        self._in_flight: list[States] = [{} for _ in range(spec.stages + 1)]
        self._report = DraftReport(0.0)

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
            for order, logits in zip(plan.drafts, self._logits(plan), strict=True):
                proposal, probs = draft(logits, self.pdm.draft_ids, order.sampling, order.position)
                drafts.append(Draft(order.slot, order.position, proposal))
                q += [] if probs is None else [probs]
        except Exception as exception:
            log.exception("drafting failed; this cycle goes on without drafts")
            error, drafts, q = f"{type(exception).__name__}: {exception}", [], []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._report = DraftReport(time.perf_counter() - began, tuple(drafts), error)
        return torch.stack(q) if q else None

    @torch.inference_mode()
    def accept(self, plan: CyclePlan, *outputs: Tensor | None) -> DraftReport:
        """Takes the taps of every stage's rows [1 + taps, R, H] (None without rows), for the next
        cycle."""
        behind = self._in_flight
        self._in_flight = [{} for _ in behind]
        for stage, (rows, output) in enumerate(zip(plan.stages, outputs, strict=True)):
            done = 0
            for r in rows:
                assert output is not None
                states = output[1:, done : done + r.count].transpose(0, 1)  # [count, taps, H]
                if stage > 0:
                    states = torch.cat([behind[stage][r], states], dim=1)
                else:
                    states = torch.cat([self._embed(plan, r)[:, None], states], dim=1)
                self._in_flight[stage + 1][r] = states
                done += r.count
        return self._report

    def _embed(self, plan: CyclePlan, rows: Rows) -> Tensor:
        """The embeddings [count, H] of rows that enter stage 0: their anchor 0, before any tap."""
        ids = plan.tokens[plan.stages[0].index(rows)]
        return nn.functional.embedding(torch.tensor(ids, device=self._device), self._embedding)

    def _logits(self, plan: CyclePlan) -> Tensor:
        """One forward over the rows of this cycle -> logits [drafts, D]."""
        spans = self.rows(plan)
        if not spans:
            return self.pdm.head.weight.new_empty(0, 0)
        batch = Batch([Rows(r.slot, r.start, len(f)) for r, f in spans], self._device)
        features = torch.cat([f for _, f in spans])  # [R, H]
        newest, done = {}, 0
        for r, f in spans:
            done += len(f)
            newest[r.slot, r.start + len(f)] = done - 1
        logits: Tensor = self.pdm(
            features, batch, [newest[o.slot, o.position] for o in plan.drafts]
        )
        return logits

    def rows(self, plan: CyclePlan) -> list[tuple[Rows, Tensor]]:
        """The PDM's rows of this cycle: for each sequence its first rows and the features [R, H] of
        them and their successors, without gaps.

        These are the rows that have just left the pipeline, as deepest type (their keys and values
        are kept), and, where a draft is ordered, all rows in flight, each as the type of its depth.
        """
        deepest = self._spec.stages
        drafting = {order.slot for order in plan.drafts}
        by_slot: dict[int, list[tuple[Rows, Tensor]]] = {}
        for depth in range(deepest, -1, -1):  # oldest first
            if depth == deepest:
                present = tuple(self._in_flight[deepest])
            else:
                present = tuple(r for r in plan.stages[depth] if r.slot in drafting)
            for r in present:
                states = self._in_flight[depth][r] if depth else self._embed(plan, r)[:, None]
                feature = self.pdm.aggregation(states.flatten(1), self._types[depth])
                by_slot.setdefault(r.slot, []).append((r, feature))
        return [
            (parts[0][0], torch.cat([feature for _, feature in parts]))
            for parts in by_slot.values()
        ]
