"""One stage of the pipeline: some decoder layers of the target, and what is special about the first
(embedding) and the last (norm, head, verification). A plain class: the graphs wrap it."""

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from service.messages import CyclePlan, Rows, StageReport, Verdict, Verify, spans
from service.pdm.features import stage_anchors
from service.pipeline.cache import Batch, SlotCache
from service.pipeline.layers import (
    EMBEDDING,
    WeightReader,
    model_skeleton,
    read_layers,
    read_norm,
)
from service.pipeline.spec import ActorSpec
from service.sampling import DraftDistribution, uses_q, verify
from service.target import load_target_config


class Stage:
    """Runs its layers on the rows that the plan names, then takes over the next ones.

    State: keys and values in the slots, the inbox (the upstream stage's rows of the last cycle)
    and, in the last stage, the distributions q of drafts that are still unverified.
    """

    def __init__(self, spec: ActorSpec, index: int, draft_ids: Tensor | None = None) -> None:
        """`draft_ids` [D]: the draft vocabulary, for the last stage."""
        torch.set_num_threads(spec.threads)
        self.index = index
        self.is_first, self.is_last = index == 0, index == spec.stages - 1
        self._device = torch.device(spec.device)
        start, end = spec.bounds[index], spec.bounds[index + 1]
        self._taps = tuple(a - start for a in stage_anchors(spec.anchors, spec.bounds, index))
        self._draft_ids = None if draft_ids is None else draft_ids.to(self._device)
        self._inbox: tuple[tuple[Rows, ...], Tensor] | None = None
        self._q: dict[tuple[int, int], Tensor] = {}
        self._verdicts: tuple[Verdict, ...] = ()
        self._seconds = 0.0
        self._load(spec, start, end)

    def _load(self, spec: ActorSpec, start: int, end: int) -> None:
        folder, dtype, device = Path(spec.folder), spec.torch_dtype, self._device
        config = load_target_config(folder)
        skeleton = model_skeleton(config)
        read = WeightReader(folder)
        cache = SlotCache(config, end - start, start, spec.slots, spec.max_len, dtype, device)
        self.layers = read_layers(skeleton, read, config, start, cache, dtype, device)
        if self.is_first:
            self.embedding = read(EMBEDDING, dtype, device)  # [V, H]
        if self.is_last:
            self.norm = read_norm(skeleton, read, dtype, device)
            head = read.head_name(config)
            shared = self.is_first and head == EMBEDDING
            self.head = self.embedding if shared else read(head, dtype, device)  # [V, H]

    def parameter_count(self) -> int:
        """Numbers held as weights, a shared tensor counted once."""
        held: list[Tensor] = list(self.layers.parameters())
        held += [self.embedding] if self.is_first else []
        held += [*self.norm.parameters(), self.head] if self.is_last else []
        return sum({p.data_ptr(): p.numel() for p in held}.values())

    @torch.inference_mode()  # on every method: Ray runs graph methods on a thread of its own
    def forward(self, plan: CyclePlan) -> Tensor | None:
        """Runs the plan's rows of this stage. Returns [1 + taps, R, H]: the hidden states that
        leave the stage, then those at its anchors, for the next stage and the drafter. None without
        rows: Ray can't carry an empty tensor."""
        began = time.perf_counter()
        rows = plan.stages[self.index]
        self._verdicts = ()
        self._forget_void_q(plan)
        out = None
        if rows:
            hidden = self._embed(plan) if self.is_first else self._take_from_inbox(rows)
            hidden, taps = self.layers(hidden, Batch(rows, self._device), self._taps)
            self._verdicts = self._verify(plan.verify, rows, hidden) if self.is_last else ()
            out = torch.stack([hidden, *taps])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds = time.perf_counter() - began
        return out

    @torch.inference_mode()
    def accept(self, plan: CyclePlan, upstream: Tensor | None) -> None:
        """Takes over, for the next cycle, the upstream stage's rows [1 + taps, R, H]."""
        if upstream is not None:
            self._inbox = (plan.stages[self.index - 1], upstream[0])

    @torch.inference_mode()
    def accept_q(self, plan: CyclePlan, q: Tensor | None) -> None:
        """Keeps the distributions [drafts that need one, D] of this cycle's drafts, in the last
        stage, until these are verified or void."""
        if q is not None:
            wanted = [d for d in plan.drafts if uses_q(d.sampling)]
            for order, probs in zip(wanted, q, strict=True):
                self._q[order.slot, order.position] = probs

    def report(self) -> StageReport:
        """What the engine wants to know of this cycle."""
        return StageReport(self._seconds, self._verdicts)

    def _embed(self, plan: CyclePlan) -> Tensor:
        ids = torch.tensor(
            [t for tokens in plan.tokens for t in tokens], dtype=torch.int64, device=self._device
        )
        return nn.functional.embedding(ids, self.embedding)  # [R, H]

    def _take_from_inbox(self, rows: tuple[Rows, ...]) -> Tensor:
        """The hidden states [R, H] of the plan's rows; the void ones stay behind."""
        assert self._inbox is not None, "rows are planned that no stage has sent"
        received, hidden = self._inbox
        if rows == received:
            return hidden
        places = dict(spans(received))
        return torch.cat([hidden[places[r]] for r in rows])

    def _forget_void_q(self, plan: CyclePlan) -> None:
        in_flight = {(r.slot, r.start) for rows in plan.stages for r in rows}
        self._q = {at: q for at, q in self._q.items() if at in in_flight}

    def _verify(
        self, orders: tuple[Verify, ...], rows: tuple[Rows, ...], hidden: Tensor
    ) -> tuple[Verdict, ...]:
        """The target's tokens. The head runs on the rows before the ordered positions alone."""
        if not orders:
            return ()
        newest = {(r.slot, r.end): at.stop - 1 for r, at in spans(rows)}
        picked = hidden[[newest[order.slot, order.position] for order in orders]]
        logits = nn.functional.linear(self.norm(picked), self.head).float()  # [orders, V]
        return tuple(
            Verdict(
                o.slot,
                o.position,
                *verify(scores, o.sampling, o.position, o.proposal, self._q_of(o)),
            )
            for o, scores in zip(orders, logits, strict=True)
        )

    def _q_of(self, order: Verify) -> DraftDistribution | None:
        probs = self._q.get((order.slot, order.position))
        if probs is None or self._draft_ids is None:
            return None
        return DraftDistribution(self._draft_ids, probs)
