"""One training from its files to a checkpoint: where it starts, the loop with its progress, what it
keeps. Runs in one process or, by Ray Train, in several that share each step."""

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from service.config import ConfigError
from service.pdm.batches import pack, packed_states
from service.pdm.checkpoint import PdmConfig, load_tensors, target_fingerprint
from service.pdm.corpus import Corpus, CorpusInfo, write_shard
from service.pdm.features import depth_types
from service.pdm.initial import deeper, initial_tensors
from service.pdm.layout import Packed
from service.pdm.memory import give_back_freed_memory
from service.pdm.state import STATE_FILE, State
from service.pdm.teacher import Target
from service.pdm.trainer import Score, Trainer, TrainSettings
from service.pipeline.blueprint import balanced_bounds
from service.target import load_target_config
from service.target_config import TargetConfig

log = logging.getLogger(__name__)

TEXTS_FILE = "texts.safetensors"  # what `spd-train --texts` takes
_SAMPLE_ROWS = 160  # of texts from which scales and the first FCs are computed
_SMALLEST_SCALE = 1e-4
_GIVE_BACK_EVERY = 50  # steps
_MAY_CHANGE = {"visits", "evaluate_every", "save_every_s"}  # when training goes on


@dataclass(frozen=True, slots=True)
class Job:
    """What a training is made of. `start` is a checkpoint to go on from; unset: the target."""

    target: Path
    corpus: Path
    out: Path
    anchors: tuple[int, ...]
    settings: TrainSettings
    start: Path | None = None


def corpus_info(target: Path, anchors: tuple[int, ...]) -> CorpusInfo:
    fingerprint = target_fingerprint(target, load_target_config(target))
    return CorpusInfo(fingerprint, tuple(a for a in anchors if a > 0))


def show(job: Job, corpus: Corpus) -> None:
    """Tells what the corpus is, and keeps its texts beside the checkpoint."""
    log.info("%s", corpus.summary())
    write_shard(job.out / TEXTS_FILE, corpus.info, corpus.documents)


def fit(job: Job, rank: int = 0, world: int = 1) -> None:
    """Trains until the settings' number of visits; the best checkpoint so far is in `job.out`, and
    the state to go on from beside it."""
    trainer = make_trainer(job, rank, world)
    if rank == 0:
        show(job, trainer.corpus)
    settings, progress = job.settings, Progress(trainer)
    if trainer.step_number == 0 and rank == 0:
        progress.evaluate(job.out)
    saved = time.monotonic()
    for batch in trainer.batches():
        if trainer.visited >= settings.visits:
            break
        progress.after_step(trainer.step(batch))
        if trainer.step_number % _GIVE_BACK_EVERY == 0:
            give_back_freed_memory()
        if rank > 0:
            continue
        if progress.is_due(settings.evaluate_every):
            progress.evaluate(job.out)
        if time.monotonic() - saved > settings.save_every_s:
            trainer.save(job.out)
            saved = time.monotonic()
    if rank == 0 and not progress.evaluated_now:
        progress.evaluate(job.out)
    if rank == 0:
        trainer.save(job.out)


def make_trainer(job: Job, rank: int = 0, world: int = 1) -> Trainer:
    """A trainer where an interrupted run stood, else at a checkpoint, else at the target's own
    weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = Corpus(job.corpus, corpus_info(job.target, job.anchors))
    config, dtype = load_target_config(job.target), getattr(torch, job.settings.dtype)
    target = Target(job.target, config, dtype, device)
    state = read_state(job) if (job.out / STATE_FILE).exists() else None
    if state is not None:
        made_for, tensors, scales = state.made_for, state.checkpoint_tensors(), state.scales
    else:
        made_for, tensors, scales = beginning(job, target, corpus)
    trainer = Trainer(job.settings, target, corpus, made_for, tensors, scales, device, rank, world)
    if state is not None:
        trainer.restore(state)
    return trainer


def read_state(job: Job) -> State:
    """Raises ConfigError if the interrupted run was one with other settings."""
    state = State.read(job.out / STATE_FILE)
    now = json.loads(json.dumps(asdict(job.settings)))
    changed = [k for k in now if k not in _MAY_CHANGE and state.settings.get(k) != now[k]]
    if tuple(state.made_for.anchors) != job.anchors:
        changed.append("anchors")
    if changed:
        raise ConfigError(
            f"{job.out} has a training with other settings: {', '.join(changed)}. Give the same "
            "ones to go on with it, or another folder."
        )
    return state


def beginning(
    job: Job, target: Target, corpus: Corpus
) -> tuple[PdmConfig, dict[str, Tensor], Tensor]:
    """What the PDM is made for, its first tensors, and the scales [A + 1, H] of hidden states."""
    s, config = job.settings, target.config
    sample = sample_of(corpus, target, s.row_tokens)
    squares = [part.states[part.there].float().pow(2).sum(0) for part in sample.parts(1)]
    scales = (torch.stack(squares).sum(0) / sample.there.sum()).sqrt().clamp_min(_SMALLEST_SCALE)
    if job.start is not None:
        return *started(job, config), scales
    widths = [depth_types(job.anchors, balanced_bounds(config, n)) for n in s.widths]
    draft_ids = likeliest_ids(corpus, config.vocab_size, s.draft_vocabulary)
    made_for = PdmConfig(
        format=1,
        target_fingerprint=corpus.info.target_fingerprint,
        hidden_size=config.hidden_size,
        widths=s.widths,
        anchors=job.anchors,
        types=tuple(sorted({k for types in widths for k in types})),
        layers=s.layers,
        previous=s.previous,
        draft_vocabulary=len(draft_ids),
    )
    tensors = initial_tensors(
        job.target, config, sample, job.anchors, widths, draft_ids, s.layers, s.previous
    )
    return made_for, tensors, scales


def started(job: Job, config: TargetConfig) -> tuple[PdmConfig, dict[str, Tensor]]:
    """The PDM to go on from, made deeper if the settings want more layers. Raises ConfigError if it
    has another form than they say."""
    assert job.start is not None
    s, made_for = job.settings, PdmConfig.read(job.start)
    same = {"widths": s.widths, "previous": s.previous, "anchors": job.anchors}
    other = [
        f"{k} {getattr(made_for, k)}, not {v}" for k, v in same.items() if getattr(made_for, k) != v
    ]
    if made_for.layers > s.layers:
        other.append(f"layers {made_for.layers}, more than {s.layers}")
    if other:
        raise ConfigError(f"--start: the PDM in {job.start} has {'; '.join(other)}")
    tensors = load_tensors(job.start)
    more = s.layers - made_for.layers
    if more:
        tensors = deeper(job.target, config, tensors, made_for.layers, more)
    return made_for.model_copy(update={"layers": s.layers}), tensors


def sample_of(corpus: Corpus, target: Target, size: int) -> Packed:
    """Some texts of the corpus, the same ones each time."""
    lengths = corpus.lengths
    rows = pack(lengths, corpus.train[: 4 * _SAMPLE_ROWS], _SAMPLE_ROWS, size)[0]
    return packed_states(corpus, rows, target.embedding.cpu(), size, [0] * len(lengths))


def likeliest_ids(corpus: Corpus, vocabulary: int, count: int) -> Tensor:
    """The draft vocabulary [D], ascending: the tokens most frequent in answers, then, as a BPE puts
    frequent tokens first, the first ones."""
    counts = corpus.token_counts(vocabulary).double()
    order = torch.argsort(counts - torch.arange(vocabulary) / vocabulary, descending=True)
    return order[:count].sort().values


class Progress:
    """Says how training goes, scores it on held-out text, and keeps the best weights."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._losses: list[float] = []
        self._began, self._visited = time.monotonic(), trainer.visited
        self._evaluated = trainer.curve[-1]["visited"] if trainer.curve else -1

    @property
    def evaluated_now(self) -> bool:
        return self._evaluated == self._trainer.visited

    def after_step(self, loss: float) -> None:
        self._losses.append(loss)

    def is_due(self, every: int) -> bool:
        return self._trainer.visited - max(self._evaluated, 0) >= every

    def evaluate(self, out: Path) -> None:
        """Scores the averaged weights at each width, notes it, and exports them if they are the
        best so far."""
        trainer = self._trainer
        now = time.monotonic()
        entry: dict[str, Any] = {
            "visited": trainer.visited,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "tokens_per_s": round((trainer.visited - self._visited) / (now - self._began)),
            "scores": {str(n): asdict(score) for n, score in trainer.scores().items()},
        }
        best = max((mean_score(e) for e in trainer.curve), default=-1.0)
        trainer.curve.append(entry)
        log.info("%s", line_of(entry, trainer.settings.visits))
        out.mkdir(parents=True, exist_ok=True)
        (out / "curve.json").write_text(json.dumps(trainer.curve, indent=1) + "\n")
        if mean_score(entry) > best:
            trainer.export(out)
        self._losses = []
        self._began, self._visited = time.monotonic(), trainer.visited
        self._evaluated = trainer.visited


def mean_score(entry: dict[str, Any]) -> float:
    """The greedy score, over all widths."""
    scores = [Score(**s).greedy for s in entry["scores"].values()]
    return sum(scores) / len(scores)


def line_of(entry: dict[str, Any], visits: int) -> str:
    """A line of progress."""
    loss = "" if entry["loss"] is None else f", loss {entry['loss']:.3f}"
    scores = "; ".join(
        f"n={n} {s['greedy']:.1%} (T=0 texts {s['greedy_at_0']:.1%}, sampling {s['sampled']:.1%})"
        for n, s in entry["scores"].items()
    )
    return (
        f"{entry['visited']:,} of {visits:,} tokens, {entry['tokens_per_s']} tokens/s{loss}; "
        f"held-out acceptance {scores}"
    )
