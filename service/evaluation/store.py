"""results.json: what was run with what, and all counts. Written after each configuration, so that
an evaluation can be interrupted and resumed."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from service.config import ConfigError
from service.evaluation.configuration import Configuration
from service.evaluation.counting import Counts, total
from service.evaluation.prompts import OVERALL
from service.files import whole_file
from service.pdm.checkpoint import CONFIG_FILE, WEIGHTS_FILE

RESULTS_FILE = "results.json"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class DataSet(_Model):
    """The prompts of one data set; the digest is of their token ids."""

    prompts: int
    prompt_tokens: int
    sha256: str


class SharedSettings(_Model):
    """What all configurations of a file have in common: results of other settings are not mixed."""

    model: str
    target_fingerprint: str
    checkpoint: str | None
    checkpoint_sha256: str | None  # a PDM that was trained further is another one
    dtype: str
    max_tokens: int
    max_len: int
    slots: int
    threads: int
    seed: int
    seeded: bool = False
    lookup_min_match: int
    data_sets: dict[str, DataSet]
    corpus: str | None = None  # of the early exit
    early_exit_visits: int | None = None


class Rates(_Model):
    """Of the counts of one data set; None where nothing was decoded."""

    acceptance: float | None
    tokens_per_cycle: float | None
    equivalent_accept_length: float | None


class Record(_Model):
    """One finished configuration."""

    width: int
    layers: tuple[int, ...]  # of each stage
    drafter: str
    temperature: float
    date: str
    seconds: float
    machine: str
    versions: dict[str, str]
    data_sets: dict[str, Counts]
    replayed: bool = False  # counted over known texts, not run
    note: str = ""

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.width, self.drafter, self.temperature, self.replayed)

    @property
    def overall(self) -> Counts:
        return total(self.data_sets.values())

    @property
    def rows(self) -> dict[str, Counts]:
        """The data sets, then all of them together."""
        return {**self.data_sets, OVERALL: self.overall}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def rates(self) -> dict[str, Rates]:
        return {
            name: Rates(
                acceptance=counts.acceptance,
                tokens_per_cycle=counts.tokens_per_cycle,
                equivalent_accept_length=counts.accept_length(self.width),
            )
            for name, counts in self.rows.items()
        }


class Results(_Model):
    """The whole file."""

    format: Literal[1] = 1
    settings: SharedSettings
    configurations: tuple[Record, ...] = ()


class Store:
    """The results so far, in memory and, with a folder, on disk."""

    def __init__(self, folder: Path | None, settings: SharedSettings) -> None:
        """Raises ConfigError for a folder whose results are of other settings."""
        self._file = None if folder is None else folder / RESULTS_FILE
        self._results = Results(settings=settings)
        if self._file is None:
            return
        if self._file.exists():
            self._results = read_results(self._file, "--out")
            _check_same(self._file, self._results.settings, settings)
        else:
            self._write(self._file)  # now, not after an hour: the folder may not be writable

    @property
    def records(self) -> tuple[Record, ...]:
        return self._results.configurations

    def has(self, configuration: Configuration) -> bool:
        return any(record.configuration == configuration for record in self.records)

    def add(self, record: Record) -> None:
        self._results = self._results.model_copy(update={"configurations": (*self.records, record)})
        if self._file is not None:
            self._write(self._file)

    def _write(self, file: Path) -> None:
        try:
            with whole_file(file) as partial:
                partial.write_text(self._results.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: {file} can't be written: {error}") from error


def read_results(file: Path, option: str) -> Results:
    """Raises ConfigError, which names the option that the file was given by."""
    try:
        return Results.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{option}: {file} can't be read: {error}") from error
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, e["loc"])) or e["msg"] for e in error.errors())
        raise ConfigError(f"{option}: {file} is not of spd-eval; wrong: {wrong}") from None


def _check_same(file: Path, there: SharedSettings, now: SharedSettings) -> None:
    old, new = there.model_dump(), now.model_dump()
    if different := [name for name in new if old[name] != new[name]]:
        details = "".join(f"\n  {name}: {old[name]} there, {new[name]} now" for name in different)
        raise ConfigError(
            f"--out: {file} has results of other settings. Give another folder for these.{details}"
        )


def digest(texts: Iterable[tuple[int, ...]]) -> str:
    """Of token ids."""
    return hashlib.sha256(repr(list(texts)).encode()).hexdigest()[:16]


def checkpoint_digest(folders: Iterable[str]) -> str | None:
    """Of PDMs' files, if there are any. Raises ConfigError where they should be and are not."""
    files = [Path(folder) / name for folder in folders for name in (CONFIG_FILE, WEIGHTS_FILE)]
    try:
        content = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ConfigError(f"--checkpoint: {error}") from error
    return hashlib.sha256(content).hexdigest()[:16] if files else None
