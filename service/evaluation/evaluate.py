"""A whole evaluation: everything is checked first, then one configuration after the other is run
and stored, then the results are shown."""

import platform
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from os import cpu_count
from pathlib import Path

from service.config import ConfigError, Settings
from service.evaluation.configuration import Configuration, Options, configurations
from service.evaluation.counting import Counts, count, total
from service.evaluation.plot import PLOT_FILE, draw
from service.evaluation.prompts import Prompt, encode, make_requests, read_data_sets
from service.evaluation.replay import Replays
from service.evaluation.report import table
from service.evaluation.running import Progress, run, say
from service.evaluation.store import (
    DataSet,
    Record,
    SharedSettings,
    Store,
    checkpoint_digest,
    digest,
)
from service.messages import GenerateRequest
from service.pdm.checkpoint import target_fingerprint
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.graph import Graph
from service.pipeline.local_graph import LocalGraph
from service.replica import make_scheduler
from service.text.tokenizer import Tokenizer

Planned = tuple[Configuration, Settings, Blueprint]


def evaluate(options: Options) -> None:
    """Raises ConfigError and GraphError; what was finished before is stored."""
    prompts = read_data_sets(options.prompts, options.limit)
    pending: list[Planned] = []
    for configuration in configurations(options):
        settings = configuration.settings(options)
        blueprint = make_blueprint(settings)
        if blueprint.broken_pdm is not None:
            raise ConfigError(blueprint.broken_pdm)
        pending.append((configuration, settings, blueprint))
    _, settings, blueprint = pending[0]
    tokenizer = Tokenizer.load(Path(blueprint.spec.folder))
    encoded = encode(prompts, tokenizer, options.max_len, options.max_tokens)
    checkpoints = _checkpoints(options, [b for _, _, b in pending])
    store = Store(options.out, _shared(options, settings, blueprint, checkpoints, prompts, encoded))
    pdms = [b for c, _, b in pending if b.with_drafter and not c.exits_early]
    if untrained := sorted({b.spec.stages for b in pdms if b.checkpoint is None}):
        widths = ", ".join(map(str, untrained))
        say(f"there is no --checkpoint for n = {widths}: the PDM is untrained and rarely right")
    replays = _replays(options, store, pending, prompts, encoded)
    for number, (configuration, settings, blueprint) in enumerate(pending, start=1):
        name = f"{configuration} ({number} of {len(pending)})"
        if store.has(configuration):
            say(f"{name}: in {options.out} already")
            continue
        requests = make_requests(
            prompts,
            encoded,
            options.max_tokens,
            configuration.temperature,
            options.seed,
            options.seeded,
        )
        store.add(
            run_configuration(configuration, settings, blueprint, prompts, requests, name, replays)
        )
    _show(store, options.out)


def _replays(
    options: Options,
    store: Store,
    pending: list[Planned],
    prompts: list[Prompt],
    encoded: list[tuple[int, ...]],
) -> Replays | None:
    """What the configurations need that are to be replayed; None if they are to be run."""
    planned = [(c, blueprint) for c, _, blueprint in pending if not store.has(c)]
    if options.replay is None or not planned:
        return None
    return Replays(
        options, planned, make_requests(prompts, encoded, options.max_tokens, 0.0, options.seed)
    )


def run_configuration(
    configuration: Configuration,
    settings: Settings,
    blueprint: Blueprint,
    prompts: list[Prompt],
    requests: list[GenerateRequest],
    name: str,
    replays: Replays | None,
) -> Record:
    """Runs all prompts, with a pipeline made for it, or replays them. Raises GraphError."""
    say(f"{name}: starting")
    graph: Graph = replays.graph(configuration, blueprint) if replays else LocalGraph(blueprint)
    with closing(graph):
        scheduler = make_scheduler(settings, blueprint)
        began = time.monotonic()
        answers = run(scheduler, graph, requests, Progress(name, len(requests)))
        seconds = time.monotonic() - began
    by_data_set: dict[str, list[Counts]] = {}
    for prompt in prompts:
        by_data_set.setdefault(prompt.data_set, []).append(count(answers[prompt.name]))
    return Record(
        width=configuration.width,
        layers=tuple(end - start for start, end in pairwise(blueprint.spec.bounds)),
        drafter=configuration.drafter,
        temperature=configuration.temperature,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 2),
        machine=_machine(),
        versions=_versions(),
        data_sets={data_set: total(counts) for data_set, counts in by_data_set.items()},
        replayed=configuration.replayed,
        note=replays.note(configuration) if replays else "",
    )


def _show(store: Store, out: Path | None) -> None:
    sys.stdout.write(table(store.records))
    if out is None:
        return
    try:
        draw(store.records, out / PLOT_FILE)
    except ConfigError as error:
        say(str(error))  # the numbers are there


def _checkpoints(options: Options, blueprints: list[Blueprint]) -> list[str]:
    """The PDM that is asked for, else those that come with the project and are used."""
    if options.checkpoint is not None:
        return [options.checkpoint]
    return sorted({b.checkpoint for b in blueprints if b.checkpoint is not None})


def _shared(
    options: Options,
    settings: Settings,
    blueprint: Blueprint,
    checkpoints: list[str],
    prompts: list[Prompt],
    encoded: list[tuple[int, ...]],
) -> SharedSettings:
    ids: dict[str, list[tuple[int, ...]]] = {}
    for prompt, tokens in zip(prompts, encoded, strict=True):
        ids.setdefault(prompt.data_set, []).append(tokens)
    return SharedSettings(
        model=options.model,
        target_fingerprint=target_fingerprint(Path(blueprint.spec.folder), blueprint.spec.target),
        checkpoint=", ".join(checkpoints) or None,
        checkpoint_sha256=checkpoint_digest(checkpoints),
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        max_len=options.max_len,
        slots=options.slots,
        threads=options.threads,
        seed=options.seed,
        seeded=options.seeded,
        lookup_min_match=settings.drafter.lookup_min_match,
        data_sets={
            name: DataSet(
                prompts=len(texts), prompt_tokens=sum(map(len, texts)), sha256=digest(texts)
            )
            for name, texts in ids.items()
        },
        corpus=None if options.corpus is None else str(options.corpus),
        early_exit_visits=None if options.corpus is None else options.early_exit_visits,
    )


def _machine() -> str:
    """The processor's name where Linux tells it, and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {cpu_count()} cores, {platform.system()}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("spd-serve", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # spd-serve, in a checkout that was not installed
            found[package] = "not installed"
    return found
