"""An early exit, for comparison: a head on stage 0 drafts from the newest token's own hidden state,
in the manner of PPSD. A linear adapter makes of the state at the deepest anchor within stage 0 what
the last layer would give; then come the target's final norm and head over the draft vocabulary.

Its draft is ready when the PDM's is: at the end of the cycle in which the newest token passes stage
0. (That the head makes stage 0 slower is not counted.)
"""

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from service.config import ConfigError
from service.evaluation.replay_graph import Table
from service.evaluation.running import say
from service.pdm.checkpoint import target_fingerprint
from service.pdm.corpus import Corpus, CorpusInfo, shard_info
from service.pdm.initial import Moments
from service.pdm.teacher import Target
from service.pdm.trainer import kl_divergence, learning_rate
from service.pipeline.blueprint import Blueprint

SAMPLE = 30_000  # tokens for the regression that training starts from
STEP = 1024  # tokens of a step
LEARNING_RATE = 5e-4
WARMUP = 20  # steps
SAY_EVERY = 100  # steps

Rows = tuple[Tensor, Tensor]  # hidden states [N, H] at the exit and behind the last layer


class EarlyExit:
    """The drafts of a trained exit. A `Source` of tables: every fill has the same draft."""

    def __init__(
        self, target: Target, anchor: int, adapter: Tensor, draft_ids: Tensor, note: str
    ) -> None:
        self.anchors: tuple[int, ...] = (anchor,)
        self.note = note
        self._target, self.adapter, self._draft_ids = target, adapter, draft_ids

    def __call__(self, states: Tensor, first: int) -> Table:
        logits = self._target.logits(states[first:, 0] @ self.adapter.T, self._draft_ids)
        return [self._draft_ids[logits.argmax(-1)].tolist()]


def train_early_exit(blueprint: Blueprint, folder: Path, visits: int) -> EarlyExit:
    """Fits the adapter on a corpus by regression, then by KL(target || exit) over the draft
    vocabulary. Raises ConfigError for a corpus that has not the states for it."""
    config, bounds, draft_ids = blueprint.spec.target, blueprint.spec.bounds, blueprint.draft_ids
    assert draft_ids is not None
    target_folder = Path(blueprint.spec.folder)
    info = CorpusInfo(target_fingerprint(target_folder, config), _anchors(folder))
    exits = [a for a in info.anchors if a <= bounds[1]]
    if not exits or info.anchors[-1] != config.num_hidden_layers:
        raise ConfigError(
            f"--corpus: {folder} has the states at the layers {list(info.anchors)}; an early exit "
            f"needs one up to {bounds[1]}, and {config.num_hidden_layers}"
        )
    target = Target(target_folder, config, torch.float32, torch.device("cpu"))
    batches = _batches(Corpus(folder, info), info.anchors.index(exits[-1]))
    adapter, loss = _train(batches, visits, target, draft_ids)
    note = (
        f"exit behind layer {exits[-1]} of stage 0's {bounds[1]}, trained on {visits:,} tokens of "
        f"{folder}; KL {loss:.3f} in the last {SAY_EVERY} steps"
    )
    return EarlyExit(target, exits[-1], adapter, draft_ids, note)


def _anchors(folder: Path) -> tuple[int, ...]:
    """Those of the corpus' first shard; `Corpus` checks that all have the same."""
    file = min(folder.glob("*.safetensors"), default=None)
    if file is None:
        raise ConfigError(f"--corpus: there are no shards in {folder}")
    return shard_info(file).anchors


def _batches(corpus: Corpus, exit_index: int) -> Iterator[Rows]:
    """Tokens of the corpus in steps, without end, in a new order in each round."""
    source, prefix = random.Random(0), corpus.common_prefix()
    waiting: list[Tensor] = []
    while True:
        for document in source.sample(corpus.train, len(corpus.train)):
            waiting.append(corpus.states(document)[prefix:, [exit_index, -1]])
            if sum(map(len, waiting)) < STEP:
                continue
            *steps, left = torch.split(torch.cat(waiting).float(), STEP)
            waiting = [left]
            for step in steps:
                yield step[:, 0], step[:, 1]


def _train(
    batches: Iterator[Rows], visits: int, target: Target, draft_ids: Tensor
) -> tuple[Tensor, float]:
    """The adapter [H, H], and the last steps' mean loss."""
    sample = list(islice(batches, max(1, SAMPLE // STEP)))
    inputs, wanted = (torch.cat(parts) for parts in zip(*sample, strict=True))
    scales = inputs.pow(2).mean(0).sqrt().clamp_min(1e-4)  # [H]; a step then moves all alike
    moments = Moments(inputs.shape[1], wanted.shape[1])
    moments.add(inputs / scales, wanted / wanted.pow(2).mean().sqrt())
    fitted = moments.ridge()
    adapter = nn.Parameter(fitted)
    optimizer = torch.optim.AdamW([adapter], betas=(0.9, 0.95), weight_decay=0.01)
    steps, losses = -(-visits // STEP), deque[float](maxlen=SAY_EVERY)
    for step, (states, last) in enumerate(islice(batches, steps)):
        optimizer.param_groups[0]["lr"] = learning_rate(LEARNING_RATE, step, steps, WARMUP)
        with torch.no_grad():
            wanted = torch.softmax(target.logits(last, draft_ids), -1)
        logits = target.logits((states / scales) @ adapter.T, draft_ids)
        loss = kl_divergence(logits, wanted)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % SAY_EVERY == 0:
            say(f"early exit: {step * STEP:,} of {visits:,} tokens, KL {fmean(losses):.3f}")
    return adapter.detach() / scales, fmean(losses)
