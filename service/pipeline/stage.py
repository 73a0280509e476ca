"""One stage of the pipeline: some decoder layers of the target, and what is special about the first
(embedding) and the last (norm, head, verification). A plain class: the graphs wrap it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from service.device_sampling import fetched, verified
from service.messages import (
    CyclePlan,
    Rows,
    Sampling,
    Score,
    Scored,
    StageReport,
    Verdict,
    Verify,
    spans,
)
from service.pdm.features import stage_anchors
from service.pipeline.cache import Batch, SlotCache
from service.pipeline.cuda import wait_for
from service.pipeline.decode_step import DecodeStep, StepShape
from service.pipeline.layers import (
    EMBEDDING,
    WeightReader,
    read_layers,
    read_norm,
)
from service.pipeline.linear import make_linear
from service.pipeline.padded import PaddedBatch
from service.pipeline.spec import ActorSpec
from service.pipeline.texts import SlotTexts
from service.sampling import DraftDistribution, logprobs, uses_q, verify

# Some of a forward's rows, by their numbers or from one to another -> their logits [.., V]
Logits = Callable[[list[int] | slice], Tensor]


class Stage:
    """Runs its layers on the rows that the plan names, then takes over the next ones.

    State: keys and values in the slots, the inbox (the upstream stage's rows of the last cycle)
    and, in the last stage, the texts and the distributions q of drafts that are still unverified.
    """

    def __init__(self, spec: ActorSpec, index: int, draft_ids: Tensor | None = None) -> None:
        """`draft_ids` [D]: the draft vocabulary, for the last stage."""
        torch.set_num_threads(spec.threads)
        self.index = index
        self.is_first, self.is_last = index == 0, index == spec.stages - 1
        self._device = spec.device_of(index)
        start, end = spec.bounds[index], spec.bounds[index + 1]
        self._taps = tuple(a - start for a in stage_anchors(spec.anchors, spec.bounds, index))
        self._draft_ids = None if draft_ids is None else draft_ids.to(self._device)
        self._inbox: tuple[tuple[Rows, ...], Tensor] | None = None
        self._q: dict[tuple[int, int], Tensor] = {}
        self._report = StageReport(0.0)
        self._step: DecodeStep | None = None
        self._load(spec, start, end)

    def _load(self, spec: ActorSpec, start: int, end: int) -> None:
        folder, dtype, device = Path(spec.folder), spec.torch_dtype, self._device
        config, read = spec.target, WeightReader(folder)
        slots, max_len = spec.slots, spec.max_len
        self._cache = SlotCache(
            config, end - start, slots, max_len, dtype, device, scratch=spec.static_steps
        )
        self.layers = read_layers(config, read, start, self._cache, spec.weights)
        if self.is_first:
            self.embedding = read(EMBEDDING, dtype, device)  # [V, H]
        if self.is_last:
            self.norm = read_norm(config, read, dtype, device)
            head = read.head_name(config)
            shared = self.is_first and head == EMBEDDING
            weight = self.embedding if shared else read(head, dtype, device)  # [V, H]
            self.head = make_linear(weight, None, spec.weights)
            self._texts = SlotTexts(spec.grammar_tokens, len(weight), slots, max_len, device)
        if spec.static_steps:
            shape = StepShape(slots, max_len, config.hidden_size, dtype)
            self._step = DecodeStep(self._decoded, shape, device)

    def held(self) -> list[Tensor]:
        """All weights in memory, a shared one once. A head that is laid out anew is another one."""
        held: list[Tensor] = [*self.layers.parameters(), *self.layers.buffers()]
        held += [self.embedding] if self.is_first else []
        held += [*self.norm.parameters(), *self.head.buffers()] if self.is_last else []
        return list({id(tensor): tensor for tensor in held}.values())

    def parameter_count(self) -> int:
        return sum(tensor.numel() for tensor in self.held())

    def weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.held())

    @torch.inference_mode()  # on every method: Ray runs graph methods on a thread of its own
    def forward(self, plan: CyclePlan) -> Tensor | None:
        """Runs the plan's rows of this stage. Returns [1 + taps, R, H]: the hidden states that
        leave the stage, then those at its anchors, for the next stage and the drafter. None without
        rows: Ray can't carry an empty tensor."""
        began = time.perf_counter()
        rows = plan.stages[self.index]
        for order in plan.copies:
            self._cache.copy(order)
        if self.is_last:
            self._texts.take(plan)
            self._forget_void_q(plan)
        out = None
        verdicts: tuple[Verdict, ...] = ()
        scored: tuple[Scored, ...] = ()
        verify_seconds = 0.0
        if rows:
            is_covered = self._step is not None and self._step.covers(rows)
            run = self._run_step if is_covered else self._run
            out, logits = run(plan, rows)
            if self.is_last:
                verifying = time.perf_counter()
                verdicts = self._verify(plan.verify, rows, logits)
                scored = self._score(plan.scores, rows, logits)
                verify_seconds = time.perf_counter() - verifying
        wait_for(self._device)
        self._report = StageReport(time.perf_counter() - began, verdicts, scored, verify_seconds)
        return out

    def _run(self, plan: CyclePlan, rows: tuple[Rows, ...]) -> tuple[Tensor, Logits]:
        """Any rows -> [1 + taps, R, H], and what makes logits of them."""
        hidden = self._embed(plan) if self.is_first else self._take_from_inbox(rows)
        hidden, taps = self.layers(hidden, Batch(rows, self._device), self._taps)
        return torch.stack([hidden, *taps]), lambda chosen: self._logits(hidden[chosen])

    def _run_step(self, plan: CyclePlan, rows: tuple[Rows, ...]) -> tuple[Tensor, Logits]:
        """The same of single tokens, in one step."""
        assert self._step is not None
        if self.is_first:
            table, picks = self.embedding, [t for tokens in plan.tokens for t in tokens]
        else:
            assert self._inbox is not None, "rows are planned that no stage has sent"
            received, table = self._inbox
            places = dict(spans(received))
            picks = [places[r].start for r in rows]
        outputs = self._step.run(rows, table, picks)
        out = torch.stack([output[: len(rows)] for output in outputs[: 1 + len(self._taps)]])
        everything = list(range(len(rows)))
        logits = outputs[-1][: len(rows)]  # where this is the last stage
        return out, lambda chosen: logits if chosen == everything else logits[chosen]

    def _decoded(self, batch: PaddedBatch, hidden: Tensor) -> tuple[Tensor, ...]:
        """What a step computes of rows [R, H]: as they leave the stage, taps, in the last stage
        logits [R, V]."""
        hidden, taps = self.layers(hidden, batch, self._taps)
        return hidden, *taps, *([self._logits(hidden)] if self.is_last else [])

    @torch.inference_mode()
    def accept(self, plan: CyclePlan, upstream: Tensor | None) -> None:
        """Takes over, for the next cycle, the upstream stage's rows [1 + taps, R, H]."""
        if upstream is not None:
            self._inbox = (plan.stages[self.index - 1], upstream[0].to(self._device))

    @torch.inference_mode()
    def accept_q(self, plan: CyclePlan, q: Tensor | None) -> None:
        """Keeps the distributions [drafts that need one, D] of this cycle's drafts, in the last
        stage, until these are verified or void."""
        if q is not None:
            wanted = [d for d in plan.drafts if uses_q(self._texts.sampling(d.slot))]
            for order, probs in zip(wanted, q, strict=True):
                self._q[order.slot, order.position] = probs.to(self._device)

    def differing(self, texts: Mapping[int, Sequence[int]]) -> list[int]:
        """The slots that hold other tokens than these; only the last stage can tell."""
        return self._texts.differing(texts) if self.is_last else []

    def report(self) -> StageReport:
        """What the engine wants to know of this cycle."""
        return self._report

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
        self, orders: tuple[Verify, ...], rows: tuple[Rows, ...], logits_of: Logits
    ) -> tuple[Verdict, ...]:
        """The target's tokens. The head runs on the rows before the ordered positions alone."""
        if not orders:
            return ()
        newest = {(r.slot, r.end): at.stop - 1 for r, at in spans(rows)}
        logits = logits_of([newest[o.slot, o.position] for o in orders])
        tokens = self._tokens if self._step is None else self._tokens_at_once
        return tuple(
            self._verdict(order, row, *token)
            for order, row, token in zip(orders, logits, tokens(orders, logits), strict=True)
        )

    def _tokens(
        self, orders: tuple[Verify, ...], logits: Tensor
    ) -> Iterable[tuple[int, bool | None]]:
        """The target's tokens from logits [orders, V], and whether the proposals are accepted."""
        for o, row in zip(orders, logits, strict=True):
            scores, sampling = self._scores(o, row)
            yield verify(scores, sampling, o.position, o.proposal, self._q_of(o))

    def _tokens_at_once(
        self, orders: tuple[Verify, ...], logits: Tensor
    ) -> Iterable[tuple[int, bool | None]]:
        """The same on a device, which is waited for but once."""
        found = []
        for o, row in zip(orders, logits, strict=True):
            scores, sampling = self._scores(o, row)
            found.append(verified(scores, sampling, o.position, o.proposal, self._q_of(o)))
        for order, (token, accepted) in zip(orders, fetched(found), strict=True):
            yield token, None if order.proposal is None else bool(accepted)

    def _scores(self, order: Verify, logits: Tensor) -> tuple[Tensor, Sampling]:
        """What the token is drawn from, and how."""
        slot = order.slot
        return self._texts.scores(logits, slot, order.position), self._texts.sampling(slot)

    def _verdict(self, order: Verify, logits: Tensor, token: int, accepted: bool | None) -> Verdict:
        """With the log-probabilities in logits [V], where they are wanted."""
        wanted = self._texts.admission(order.slot).logprobs
        told = None if wanted is None else logprobs(logits, token, wanted)
        return Verdict(order.slot, order.position, token, accepted, told)

    def _score(
        self, orders: tuple[Score, ...], rows: tuple[Rows, ...], logits_of: Logits
    ) -> tuple[Scored, ...]:
        """The log-probabilities of prompt tokens."""
        places = {(r.slot, r.start): at.start for r, at in spans(rows)}
        scored = []
        for order in orders:
            first, count = places[order.slot, order.start], len(order.next_ids)
            top = self._texts.admission(order.slot).logprobs or 0
            logits = logits_of(slice(first, first + count))
            told = (logprobs(r, i, top) for r, i in zip(logits, order.next_ids, strict=True))
            scored.append(Scored(order.slot, tuple(told)))
        return tuple(scored)

    def _logits(self, hidden: Tensor) -> Tensor:
        """The last layer's output [N, H] -> logits [N, V] float32."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits.float()

    def _q_of(self, order: Verify) -> DraftDistribution | None:
        probs = self._q.get((order.slot, order.position))
        if probs is None or self._draft_ids is None:
            return None
        return DraftDistribution(self._draft_ids, probs)
