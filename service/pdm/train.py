"""The command `spd-train`: from a target to a PDM checkpoint."""

import argparse
import logging
import math
import multiprocessing
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from service.config import DEFAULT_MODEL, ConfigError
from service.pdm.corpus import Corpus, read_documents, shard_tokens
from service.pdm.features import shared_anchors
from service.pdm.fit import Job, corpus_info, fit, show
from service.pdm.memory import keep_freed_memory
from service.pdm.reading import conversations, read_texts
from service.pdm.synthesis import synthesise
from service.pdm.trainer import TrainSettings
from service.pipeline.blueprint import balanced_bounds
from service.target import load_target_config, resolve_target
from service.text.tokenizer import Tokenizer

DESCRIPTION = """\
Makes a PDM checkpoint for a target. The texts to train on are written by the target itself
(--tokens) or given (--texts, --conversations); its hidden states over them are kept in the corpus
folder, so that it runs once. What was interrupted goes on when the same command is given again."""

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    log_to_stderr()
    try:
        run(args)
    except ConfigError as error:
        sys.stderr.write(f"spd-train: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("spd-train: interrupted; the same command goes on from here\n")
        return 130
    return 0


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )


def run(args: argparse.Namespace) -> None:
    """Data, then training. Raises ConfigError."""
    keep_freed_memory()
    target = resolve_target(args.model)
    config = load_target_config(target)
    check_form(args, config.num_hidden_layers)
    bounds = [balanced_bounds(config, n) for n in args.widths]
    job = Job(
        target=target,
        corpus=args.corpus or args.out / "corpus",
        out=args.out,
        anchors=args.anchors or shared_anchors(config.num_hidden_layers, bounds),
        settings=TrainSettings(
            widths=args.widths,
            layers=args.layers,
            previous=max(args.widths) if args.previous is None else args.previous,
            draft_vocabulary=args.draft_vocabulary,
            visits=args.visits,
            learning_rate=args.learning_rate,
            answers_only=args.answers_only,
            train_head=args.train_head,
            dtype=args.dtype,
            seed=args.seed,
        ),
        start=args.start,
    )
    gather(job, args)
    if args.visits == 0:
        show(job, Corpus(job.corpus, corpus_info(target, job.anchors)))
    else:
        torch.set_num_threads(args.threads)
        train(job, args.processes)


def check_form(args: argparse.Namespace, layers: int) -> None:
    """Raises ConfigError for a PDM that can't be."""
    if min(args.widths) < 2:
        raise ConfigError(f"--widths: {min(args.widths)} has nothing to draft for; give 2 or more")
    if args.layers > layers:
        raise ConfigError(f"--layers: {args.layers} is more than the target's {layers}")
    anchors = args.anchors or (0, layers)
    ascending = all(a < b for a, b in pairwise(anchors))
    if anchors[0] != 0 or anchors[-1] != layers or not ascending:
        raise ConfigError(
            f"--anchors: {','.join(map(str, anchors))} should ascend from 0, the embedding, to "
            f"{layers}, the last layer, whose output is what training compares with"
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spd-train", description=DESCRIPTION)
    add = parser.add_argument
    defaults = TrainSettings()
    add("out", type=Path, help="folder of the checkpoint, and of the state to go on from")
    add("--model", default=DEFAULT_MODEL, help="target: a folder or hub id (%(default)s)")
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--corpus", type=Path, help="folder of the texts and hidden states (OUT/corpus)")
    add("--tokens", type=_count, default=2_000_000, help="that the corpus shall have; the target "
        "writes what is missing (%(default)s)")  # fmt: skip
    add("--writers", type=_positive, default=2, help="processes that write (%(default)s)")
    add("--texts", type=Path, nargs="+", default=[], metavar="FILE.safetensors",
        help="texts of another corpus, to be read again")  # fmt: skip
    add("--conversations", type=Path, nargs="+", default=[], metavar="FILE.jsonl",
        help='chats to learn from: on each line {"messages": [...]}')  # fmt: skip
    form = parser.add_argument_group("form of the PDM")
    add = form.add_argument
    add("--widths", type=_numbers, default=defaults.widths, help="numbers of stages that it shall "
        "serve (2,3,5)")  # fmt: skip
    add("--anchors", type=_numbers, help="hidden states that it sees; unset: where stages end")
    add("--layers", type=_positive, default=defaults.layers, help="(%(default)s)")
    add("--previous", type=_count, help="rows before the newest that it sees directly, 0 in the "
        "paper's form (the largest width)")  # fmt: skip
    add("--draft-vocabulary", type=_positive, default=defaults.draft_vocabulary,
        help="tokens that it can draft (%(default)s)")  # fmt: skip
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--visits", type=_count, default=defaults.visits, help="tokens of all steps; 0: data alone "
        "(%(default)s)")  # fmt: skip
    add("--learning-rate", type=float, default=defaults.learning_rate, help="(%(default)s)")
    add("--start", type=Path, metavar="CHECKPOINT", help="a PDM to go on from; unset: the target")
    add("--train-head", action="store_true", help="train the head as well; unset: it stays the "
        "target's")  # fmt: skip
    add("--answers-only", action="store_true", help="learn from answers alone, not from what users "
        "say")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float32"), default=defaults.dtype, help="(%(default)s)")
    add("--threads", type=_positive, default=1, help="torch threads (%(default)s)")
    add("--processes", type=_positive, default=1, help="by Ray Train, a GPU each where there are "
        "some (%(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of texts and training (%(default)s)")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} should be like 2,3,5") from None


def _count(text: str) -> int:
    digits = text.replace("_", "")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number")
    return int(digits)


def _positive(text: str) -> int:
    if (count := _count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be at least 1")
    return count


def gather(job: Job, args: argparse.Namespace) -> None:
    """Fills the corpus folder: given texts first, then what the target writes."""
    for file in (*args.texts, *args.conversations):
        if not file.is_file():
            raise ConfigError(f"there is no file {file}")
    info = corpus_info(job.target, job.anchors)
    for file in args.texts:
        read_texts(job.target, job.corpus, f"texts-{file.stem}", info, read_documents(file))
    for file in args.conversations:
        documents = list(conversations(file, Tokenizer.load(job.target)))
        read_texts(job.target, job.corpus, f"chats-{file.stem}", info, documents)
    there = sum(shard_tokens(file) for file in job.corpus.glob("*.safetensors"))
    if there >= args.tokens:
        return
    log.info("the corpus %s has %d tokens; %d are to be there", job.corpus, there, args.tokens)
    each = math.ceil((args.tokens - there) / args.writers)
    spawn = multiprocessing.get_context("spawn")
    writers = []
    for worker in range(args.writers):
        own = job.corpus.glob(f"{args.seed}-{worker}-*.safetensors")
        goal = each + sum(shard_tokens(file) for file in own)
        how = {"seed": args.seed, "worker": worker}
        arguments = (job.target, job.corpus, info, goal)
        writers.append(spawn.Process(target=write, args=arguments, kwargs=how))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if any(writer.exitcode for writer in writers):
        raise ConfigError("a process that writes texts has failed; see above")


def write(*args: Any, **kwargs: Any) -> None:
    """`synthesise` in a process of its own, which begins without any logging."""
    log_to_stderr()
    synthesise(*args, **kwargs)


def train(job: Job, processes: int) -> None:
    """In this process, or in several by Ray Train."""
    if processes == 1:
        fit(job)
        return
    try:
        from service.pdm.distributed import fit_distributed
    except ImportError as error:
        raise ConfigError(
            "--processes: Ray Train is not installed; pip install 'spd-serve[train]'"
        ) from error
    fit_distributed(job, processes)


if __name__ == "__main__":
    sys.exit(main())
