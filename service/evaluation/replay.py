"""What replays need: the gold texts, generated where they are missing, and all drafts over them."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from service.config import ConfigError
from service.evaluation.configuration import OFF, Configuration, Options
from service.evaluation.gold import Gold, GoldFile
from service.evaluation.replay_graph import ReplayGraph
from service.evaluation.running import Progress, run, say
from service.evaluation.tables import PdmSource, Source, make_tables
from service.messages import GenerateRequest
from service.pdm.checkpoint import target_fingerprint
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.local_graph import LocalGraph
from service.replica import make_scheduler
from service.target import eos_token_ids
from service.text.tokenizer import Tokenizer

_Key = tuple[int, bool]  # width, exits early


class Replays:
    """The graphs that replay some configurations. What they need is computed together, so that the
    target reads each text once."""

    def __init__(
        self,
        options: Options,
        planned: Sequence[tuple[Configuration, Blueprint]],
        requests: Sequence[GenerateRequest],
    ) -> None:
        """`requests` are those of all configurations. Raises ConfigError and GraphError."""
        self._golds = gold_texts(options, requests)
        self._sources: dict[_Key, Source] = {}
        for configuration, blueprint in planned:
            key = configuration.width, configuration.exits_early
            if blueprint.with_drafter and key not in self._sources:
                self._sources[key] = _source(configuration, blueprint, options)
        if self._sources:
            say(f"drafts over {len(self._golds)} texts: computing")
        folder = Path(planned[0][1].spec.folder)
        made = make_tables(folder, self._golds, list(self._sources.values()))
        self._tables = dict(zip(self._sources, made, strict=True))

    def graph(self, configuration: Configuration, blueprint: Blueprint) -> ReplayGraph:
        key = configuration.width, configuration.exits_early
        tables = self._tables[key] if blueprint.with_drafter else None
        return ReplayGraph(blueprint.spec.stages, self._golds, tables)

    def note(self, configuration: Configuration) -> str:
        source = self._sources.get((configuration.width, configuration.exits_early))
        return source.note if source is not None and configuration.drafter != OFF else ""


def _source(configuration: Configuration, blueprint: Blueprint, options: Options) -> Source:
    if not configuration.exits_early:
        return PdmSource(blueprint)
    if options.corpus is None:
        raise ConfigError("an early exit needs a corpus")
    from service.evaluation.early_exit import train_early_exit  # with all that training needs

    say(f"{configuration}: training the early exit")
    return train_early_exit(blueprint, options.corpus, options.early_exit_visits)


def gold_texts(options: Options, requests: Sequence[GenerateRequest]) -> list[Gold]:
    """The texts of requests at temperature 0, in their order. What the file lacks is generated and
    written now and then. Raises ConfigError and GraphError."""
    assert options.replay is not None
    settings = Configuration(1, OFF, 0.0).settings(options)
    blueprint = make_blueprint(settings)
    folder = Path(blueprint.spec.folder)
    file = GoldFile(
        options.replay,
        target_fingerprint(folder, blueprint.spec.target),
        eos_token_ids(folder, Tokenizer.load(folder)),
    )
    if unknown := file.missing(requests):
        say(f"{options.replay} lacks {len(unknown)} of {len(requests)} texts: generating")
        with closing(LocalGraph(blueprint)) as graph:
            for start in range(0, len(unknown), 2 * options.slots):
                some = unknown[start : start + 2 * options.slots]
                name = f"texts {start + 1} to {start + len(some)} of {len(unknown)}"
                scheduler = make_scheduler(settings, blueprint)
                answers = run(scheduler, graph, some, Progress(name, len(some)))
                file.add(some, {name: answer.tokens for name, answer in answers.items()})
    return [file[request] for request in requests]
