"""What is asked for on the command line, and the configurations that it spans."""

from dataclasses import dataclass
from pathlib import Path

from service.config import ConfigError, Settings, parse_settings

OFF = "off"
EARLY_EXIT = "early-exit"  # also behind lookup; in replays only


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    model: str
    checkpoint: str | None
    widths: tuple[int, ...]
    drafters: tuple[str, ...]
    temperatures: tuple[float, ...]
    prompts: tuple[Path, ...]
    max_tokens: int
    max_len: int
    limit: int | None
    slots: int
    dtype: str
    threads: int
    seed: int
    out: Path | None
    seeded: bool = False
    replay: Path | None = None
    corpus: Path | None = None
    early_exit_visits: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run over all prompts."""

    width: int  # n
    drafter: str
    temperature: float
    replayed: bool = False

    def __str__(self) -> str:
        name = f"n={self.width} {self.drafter} T={self.temperature:g}"
        return f"{name} replayed" if self.replayed else name

    @property
    def exits_early(self) -> bool:
        return EARLY_EXIT in self.drafter.split("+")

    def settings(self, options: Options) -> Settings:
        """The deployment's settings, with the stages as threads. Raises ConfigError. An early exit
        stands in the PDM's place: it is asked for a draft, and gives it, in the same cycle."""
        kind = self.drafter.replace(EARLY_EXIT, "pdm") if self.exits_early else self.drafter
        return parse_settings(
            {
                "model": options.model,
                "dtype": options.dtype,
                "pipeline": {
                    "graph": "local",
                    "stages": self.width,
                    "slots": options.slots,
                    "max_len": options.max_len,
                    "threads": options.threads,
                },
                "drafter": {"kind": kind, "checkpoint": options.checkpoint},
            }
        )


def configurations(options: Options) -> list[Configuration]:
    """All combinations, but `off` at n = 1 alone: without drafts a token takes n cycles in n stages
    by the scheduler's rule, and its text does not depend on the cut. So its equivalent accept
    length is 1 at every width, and n = 1 is where it runs fastest."""
    if too_small := [width for width in options.widths if width < 2]:
        raise ConfigError(
            f"--widths: at n = {too_small[0]} nothing is in flight to draft for; give 2 or more"
        )
    combined = [
        Configuration(
            1 if drafter == OFF else width, drafter, temperature, options.replay is not None
        )
        for temperature in options.temperatures
        for drafter in options.drafters
        for width in options.widths
    ]
    _check_replay(options, combined)
    return list(dict.fromkeys(combined))


def _check_replay(options: Options, asked: list[Configuration]) -> None:
    if options.replay is not None and any(options.temperatures):
        raise ConfigError(
            "--replay: the text is known beforehand at temperature 0 alone. Give --temperatures 0."
        )
    if options.replay is not None and options.dtype != "float32":
        raise ConfigError(f"--replay: works in float32; --dtype is {options.dtype}")
    if any(c.exits_early for c in asked):
        if options.replay is None:
            raise ConfigError(f"--drafters: {EARLY_EXIT} can't be served; it needs --replay")
        if options.corpus is None:
            raise ConfigError(f"--drafters: {EARLY_EXIT} needs a --corpus to be trained on")
