"""What an emulation has measured, and what follows from it. Pure."""

import statistics
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from service.presentation import aligned


def theoretical_speed_up(width: int, acceptance: float) -> float:
    """n(k+1)/(n+k) with k = a/(1-a), over plain decoding."""
    return width / (width - (width - 1) * acceptance)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Setup(_Frozen):
    """One pipeline of emulated devices."""

    graph: Literal["local", "ray"]
    width: int
    stage_ms: float
    draft_ms: float
    link_ms: float
    acceptance: float
    layers: int
    hidden_size: int
    dtype: Literal["float32", "bfloat16", "float16"]


class Run(_Frozen):
    """One request. A cycle's time is from one cycle's end to the next one's: all of the engine's
    work is in it."""

    decoded: int
    cycles: int
    accepted: int
    cycle_ms: float  # mean
    median_cycle_ms: float
    slowest_stage_ms: float  # median: what the slowest stage really took

    def share(self, stage_ms: float) -> float:
        """How much of the theoretical speed-up reaches the wall: as its stages are all that a cycle
        of the theory takes, theirs of a cycle's time."""
        return stage_ms / self.cycle_ms


class Record(_Frozen):
    """A setup and its runs."""

    setup: Setup
    runs: tuple[Run, ...]

    @property
    def shares(self) -> list[float]:
        return [run.share(self.setup.stage_ms) for run in self.runs]

    @property
    def share(self) -> float:
        return statistics.median(self.shares)

    @property
    def typical_share(self) -> float:
        """The same of each run's median cycle: without what other programs take now and then."""
        return statistics.median(self.setup.stage_ms / run.median_cycle_ms for run in self.runs)

    @property
    def cycle_ms(self) -> float:
        return statistics.median(run.cycle_ms for run in self.runs)

    @property
    def slowest_stage_ms(self) -> float:
        return statistics.median(run.slowest_stage_ms for run in self.runs)

    @property
    def theory(self) -> float:
        return theoretical_speed_up(self.setup.width, self.setup.acceptance)

    @property
    def speed_up(self) -> float:
        """Over plain decoding, whose token takes n times a stage."""
        return self.theory * self.share

    @property
    def ms_per_token(self) -> float:
        return self.setup.width * self.setup.stage_ms / self.speed_up

    def figures(self) -> dict[str, Any]:
        """For the file of results."""
        decoded, cycles = (sum(getattr(r, n) for r in self.runs) for n in ("decoded", "cycles"))
        return {
            "setup": self.setup.model_dump(),
            "cycle_ms": self.cycle_ms,
            "slowest_stage_ms": self.slowest_stage_ms,
            "share": self.share,
            "share_best": max(self.shares),
            "share_worst": min(self.shares),
            "share_typical": self.typical_share,
            "theory": self.theory,
            "speed_up": self.speed_up,
            "ms_per_token": self.ms_per_token,
            # As counted; short texts differ from the rate that was asked for, and by their ends.
            "acceptance": sum(run.accepted for run in self.runs) / decoded,
            "accept_length": self.setup.width * decoded / cycles,
            "runs": [run.model_dump() for run in self.runs],
        }


HEADINGS = (
    "graph", "n", "stage ms", "PDM ms", "link ms", "acceptance", "cycle ms", "share", "best",
    "typical", "theory", "speed-up", "ms/token",
)  # fmt: skip

LEGEND = """\
share: of the theoretical speed-up, that reaches the wall (stage ms / cycle ms): the median run's,
and the best one's; typical: that of the median cycle. theory: n / (n - (n-1) acceptance), and
speed-up = theory * share, both over plain decoding at n * stage ms a token.
"""


def table(records: Sequence[Record]) -> str:
    return "\n".join([*aligned(HEADINGS, list(map(_row, records))), "", LEGEND])


def _row(record: Record) -> tuple[str, ...]:
    s = record.setup
    return (
        s.graph,
        str(s.width),
        f"{s.stage_ms:g}",
        f"{s.draft_ms:g}",
        f"{s.link_ms:g}",
        f"{s.acceptance:.0%}",
        f"{record.cycle_ms:.2f}",
        f"{record.share:.1%}",
        f"{max(record.shares):.1%}",
        f"{record.typical_share:.1%}",
        f"{record.theory:.2f}",
        f"{record.speed_up:.2f}",
        f"{record.ms_per_token:.2f}",
    )
