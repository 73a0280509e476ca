"""What is asked for on the command line, and the configurations that it spans."""

from dataclasses import dataclass
from pathlib import Path

from service.config import ConfigError, Settings, parse_settings

OFF = "off"


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


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run over all prompts."""

    width: int  # n
    drafter: str
    temperature: float

    def __str__(self) -> str:
        return f"n={self.width} {self.drafter} T={self.temperature:g}"

    def settings(self, options: Options) -> Settings:
        """The deployment's settings, with the stages as threads. Raises ConfigError."""
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
                "drafter": {"kind": self.drafter, "checkpoint": options.checkpoint},
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
        Configuration(1 if drafter == OFF else width, drafter, temperature)
        for temperature in options.temperatures
        for drafter in options.drafters
        for width in options.widths
    ]
    return list(dict.fromkeys(combined))
