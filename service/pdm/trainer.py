"""The training loop of a PDM: distils the target's next-token distribution into it.

The arithmetic runs in the settings' precision, the optimiser on float32 copies of the weights. What
a step does depends on the seed and its number alone, so an interrupted run goes on exactly.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from service.pdm.batches import Batch, pack, packed_states, shuffled
from service.pdm.checkpoint import PdmConfig, build_pdm, save_pdm
from service.pdm.corpus import Corpus
from service.pdm.features import depth_types
from service.pdm.layout import Packed, newest_hidden
from service.pdm.module import PDM
from service.pdm.state import STATE_FILE, State, scale_inputs
from service.pdm.teacher import Target
from service.pipeline.blueprint import balanced_bounds

_AT_ONCE = 256  # positions whose scores over the whole vocabulary are in memory


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a PDM is trained. Numbers of tokens are of text, not of rows."""

    widths: tuple[int, ...] = (2, 3, 5)
    layers: int = 1
    previous: int = 5
    draft_vocabulary: int = 8192
    visits: int = 10_000_000  # tokens in all steps; a text is visited many times
    rows: int = 6  # of a batch
    row_tokens: int = 512
    learning_rate: float = 6e-4
    warmup: int = 60_000  # tokens
    average: float = 0.99  # of the averaged weights, by step
    answers_only: bool = False
    train_head: bool = False  # frozen, it stays the target's
    dtype: str = "bfloat16"
    seed: int = 0
    evaluate_every: int = 500_000  # tokens
    save_every_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Score:
    """What drafts would be worth on held-out text: how many of the target's likeliest tokens are
    the draft's too (all answers; those drawn at temperature 0), and the share of drafts that
    rejection sampling accepts at temperature 1."""

    greedy: float
    greedy_at_0: float
    sampled: float


def kl_divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || softmax(logits)) in nats, the mean over rows [N, D]; no gradient reaches
    `wanted`."""
    entropy = -(wanted * wanted.clamp_min(1e-20).log()).sum(-1).mean()
    return F.cross_entropy(logits, wanted) - entropy


def learning_rate(peak: float, visited: int, visits: int, warmup: int) -> float:
    """Linear warm-up, then a cosine to zero at the last visit."""
    warm = min(1.0, (visited + 1) / max(warmup, 1))
    progress = min(1.0, visited / visits)
    return peak * warm * 0.5 * (1 + math.cos(math.pi * progress))


class Loss(nn.Module):
    """KL(target || PDM) over the draft vocabulary, in nats per position. A module, so that
    DistributedDataParallel can wrap it."""

    def __init__(self, pdm: PDM) -> None:
        super().__init__()
        self.pdm = pdm

    def forward(self, packed: Packed, types: Sequence[int], fill: int, wanted: Tensor) -> Tensor:
        """`wanted` [N, D]: the target's probabilities at the wanted positions."""
        logits = self.pdm.logits(newest_hidden(self.pdm, packed, types, fill))
        return kl_divergence(logits, wanted)


class Trainer:
    """A PDM in training, and everything needed to go on with it later."""

    def __init__(
        self,
        settings: TrainSettings,
        target: Target,
        corpus: Corpus,
        made_for: PdmConfig,
        tensors: dict[str, Tensor],
        scales: Tensor,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`tensors` as in a checkpoint; `scales` [A + 1, H] are what hidden states are divided by
        in training (the weights of the FCs count for the divided ones)."""
        self.settings, self.target, self.corpus, self.made_for = settings, target, corpus, made_for
        self._rank, self._world, self._device = rank, world, device
        self._dtype = getattr(torch, settings.dtype)
        scaled = scale_inputs(tensors, scales)
        self.pdm = build_pdm(made_for, scaled, target.config, self._dtype, device)
        self.pdm.requires_grad_(True)
        self.pdm.head.requires_grad_(settings.train_head)
        self._scales = scales.to(device)
        self._embedding = target.embedding.cpu()
        loss = Loss(self.pdm)
        # Types that a narrow pipeline does not reach get no gradient in its steps.
        self._loss = (
            DistributedDataParallel(loss, find_unused_parameters=True) if world > 1 else loss
        )
        trained = [(name, p) for name, p in self.pdm.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in trained]
        self._parameters = [p for _, p in trained]
        self._weights = [p.detach() for p in self._parameters]
        self.masters = [scaled[n].to(device, torch.float32).clone() for n in self._names]
        self.averages = [m.clone() for m in self.masters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._types = {
            n: depth_types(made_for.anchors, balanced_bounds(target.config, n))
            for n in settings.widths
        }
        self.step_number = self.visited = self.epoch = self.index = 0
        self.curve: list[dict[str, Any]] = []
        prefix = 0 if settings.answers_only else corpus.common_prefix()
        self._first_wanted = [
            d.answer_start - 1 if settings.answers_only else prefix for d in corpus.documents
        ]

    # --- a step ---------------------------------------------------------------------------------

    def batches(self) -> Iterator[Batch]:
        """This worker's batches, from where training stands on, without end."""
        s = self.settings
        lengths = self.corpus.lengths
        while True:
            order = shuffled(self.corpus.train, s.seed, self.epoch)
            planned = pack(lengths, order, s.rows, s.row_tokens)
            planned = planned[: len(planned) // self._world * self._world] or planned
            for index in range(self.index, len(planned), self._world):
                self.index = index + self._world
                yield planned[min(index + self._rank, len(planned) - 1)]
            self.epoch, self.index = self.epoch + 1, 0

    def step(self, batch: Batch) -> float:
        """One step of the optimiser. Returns the loss."""
        s = self.settings
        draw = random.Random(f"{s.seed} {self.step_number}")
        n = draw.choice(s.widths)
        fill = draw.randint(1, n)
        packed = self._packed(batch, s.row_tokens, self._first_wanted)
        types = self._types[n]
        self.pdm.zero_grad(set_to_none=True)
        loss: Tensor = self._loss(self._scaled(packed), types, fill, self._wanted(packed))
        torch.autograd.backward(loss)
        self._update()
        tokens = int(packed.there.sum())
        self.step_number, self.visited = self.step_number + 1, self.visited + tokens * self._world
        return float(loss.detach())

    def _update(self) -> None:
        s = self.settings
        rate = learning_rate(s.learning_rate, self.visited, s.visits, s.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        torch._foreach_copy_(self._weights, self.masters)
        early = (1 + self.step_number) / (10 + self.step_number)
        torch._foreach_lerp_(self.averages, self.masters, 1 - min(s.average, early))

    def _packed(self, batch: Batch, size: int, first_wanted: Sequence[int]) -> Packed:
        packed = packed_states(self.corpus, batch, self._embedding, size, first_wanted)
        return packed.to(self._device)

    def _scaled(self, packed: Packed) -> Packed:
        scales = self._scales.to(packed.states.dtype)
        return replace(packed, states=packed.states / scales)

    @torch.no_grad()
    def _wanted(self, packed: Packed) -> Tensor:
        """The target's probabilities [N, D] over the draft vocabulary at the wanted positions."""
        last = packed.states[:, :, -1][packed.wanted]
        return torch.softmax(self.target.logits(last, self.pdm.draft_ids), dim=-1)

    # --- how good it is -------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self) -> dict[int, Score]:
        """The averaged weights on the held-out answers, in full pipelines of each width."""
        documents, lengths = self.corpus.documents, self.corpus.lengths
        answers = [d.answer_start - 1 for d in documents]
        cold = torch.tensor([d.temperature == 0 for d in documents])
        at_0: list[Tensor] = []
        worth: dict[int, list[Tensor]] = {n: [] for n in self.settings.widths}
        torch._foreach_copy_(self._weights, self.averages)
        for batch in pack(lengths, self.corpus.held_out, self.settings.rows, max(lengths)):
            packed = self._packed(batch, max(lengths), answers)
            at_0.append(cold[packed.texts[packed.wanted].cpu()])
            for n, part in self._worth(packed).items():
                worth[n].append(part)
        torch._foreach_copy_(self._weights, self.masters)
        asked_at_0 = torch.cat(at_0)
        scores = {}
        for n, parts in worth.items():
            hit, overlap = torch.cat(parts).cpu().unbind(-1)
            scores[n] = Score(
                float(hit.mean()), float(hit[asked_at_0].mean()), float(overlap.mean())
            )
        return scores

    def _worth(self, packed: Packed) -> dict[int, Tensor]:
        """For each width, of the drafts at the wanted positions [wanted, 2]: whether it is the
        target's likeliest token, and the overlap of both distributions."""
        scaled = self._scaled(packed)
        drafted = {
            n: newest_hidden(self.pdm, scaled, t, len(t) - 1) for n, t in self._types.items()
        }
        parts: dict[int, list[Tensor]] = {n: [] for n in drafted}
        last = packed.states[:, :, -1][packed.wanted]
        for at in torch.split(torch.arange(len(last), device=last.device), _AT_ONCE):
            target = self.target.logits(last[at])
            likeliest, p = target.argmax(-1), torch.softmax(target, -1)[:, self.pdm.draft_ids]
            for n, hidden in drafted.items():
                logits = self.pdm.logits(hidden[at])
                hit = self.pdm.draft_ids[logits.argmax(-1)] == likeliest
                overlap = torch.minimum(p, torch.softmax(logits, -1)).sum(-1)
                parts[n].append(torch.stack([hit.float(), overlap], dim=-1))
        return {n: torch.cat(part) for n, part in parts.items()}

    # --- files ----------------------------------------------------------------------------------

    def export(self, folder: Path) -> None:
        """Writes the averaged weights as a checkpoint, in bfloat16."""
        named = dict(zip(self._names, self.averages, strict=True))
        tensors = {
            name: tensor.to(torch.bfloat16)
            for name, tensor in scale_inputs(named, 1 / self._scales).items()
        }
        tensors.setdefault("head.weight", self.pdm.head.weight.to(torch.bfloat16))
        tensors["draft_ids"] = self.pdm.draft_ids.int()
        save_pdm(folder, self.made_for, tensors)

    def save(self, folder: Path) -> None:
        """Everything that `restore` needs."""
        weights, optimizer = {}, {}
        for name, master in zip(self._names, self.masters, strict=True):
            weights[name] = master
            for key, value in self.optimizer.state.get(master, {}).items():
                optimizer[f"{key}.{name}"] = value
        State(
            settings=asdict(self.settings),
            made_for=self.made_for,
            scales=self._scales,
            masters=weights,
            averages=dict(zip(self._names, self.averages, strict=True)),
            optimizer=optimizer,
            progress={
                "documents": len(self.corpus.documents),
                "step_number": self.step_number,
                "visited": self.visited,
                "epoch": self.epoch,
                "index": self.index,
            },
            curve=self.curve,
            head=self.pdm.head.weight,
            draft_ids=self.pdm.draft_ids.int(),
        ).write(folder / STATE_FILE)

    def restore(self, state: State) -> None:
        """Goes on where `save` stood. If the corpus has grown since, a new epoch begins."""
        for name, master, average in zip(self._names, self.masters, self.averages, strict=True):
            master.copy_(state.masters[name])
            average.copy_(state.averages[name])
            self.optimizer.state[master] = {
                key: state.optimizer[f"{key}.{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}.{name}" in state.optimizer
            }
        torch._foreach_copy_(self._weights, self.masters)
        progress = state.progress
        self.step_number, self.visited = progress["step_number"], progress["visited"]
        self.epoch, self.index = progress["epoch"], progress["index"]
        self.curve = state.curve
        if progress["documents"] != len(self.corpus.documents):
            self.epoch, self.index = self.epoch + 1, 0
