"""The results as a picture. Needs matplotlib, which is an extra."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.evaluation.configuration import OFF
from service.evaluation.counting import BUCKET
from service.evaluation.store import Record
from service.presentation import blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "acceptance.png"
LINES = ("-", "--", ":", "-.")  # by temperature
MARKERS = "osD^v<>p*"  # by width


def draw(records: Sequence[Record], file: Path) -> None:
    """Acceptance by position in the answer, and by width, over all data sets. Raises ConfigError
    without matplotlib."""
    figure = blank_figure(
        file, (13, 5.5), ", and run the same command again: what is done is not run again."
    )
    by_position, by_width = figure.subplots(1, 2, sharey=True)
    drafting = [record for record in records if record.drafter != OFF]
    _by_position(by_position, drafting)
    _by_width(by_width, drafting)
    by_position.set_ylim(0, 1)
    for axes in (by_position, by_width):
        axes.grid(alpha=0.3)
        if drafting:
            axes.legend(fontsize="small", ncols=2)
    figure.savefig(file, dpi=120)


def _style(record: Record, records: Sequence[Record]) -> tuple[str, str]:
    """Colour by drafter, line by temperature."""
    drafters = list(dict.fromkeys(r.drafter for r in records))
    temperatures = sorted({r.temperature for r in records})
    line = LINES[temperatures.index(record.temperature) % len(LINES)]
    return f"C{drafters.index(record.drafter)}", line


def _by_position(axes: "Axes", records: Sequence[Record]) -> None:
    widths = sorted({record.width for record in records})
    for record in records:
        colour, line = _style(record, records)
        rates = record.overall.acceptance_by_position
        points = [(BUCKET * (i + 0.5), rate) for i, rate in enumerate(rates) if rate is not None]
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linestyle=line,
            marker=MARKERS[widths.index(record.width) % len(MARKERS)],
            markersize=4,
            label=str(record.configuration),
        )
    axes.set_xlabel(f"decoded token of the answer ({BUCKET} share a point)")
    axes.set_ylabel("acceptance rate")


def _by_width(axes: "Axes", records: Sequence[Record]) -> None:
    lines: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: r.width):
        if record.overall.acceptance is not None:
            name = str(record.configuration).partition(" ")[2]  # without the width
            lines.setdefault(name, []).append(record)
    for name, line in lines.items():
        colour, linestyle = _style(line[0], records)
        axes.plot(
            [record.width for record in line],
            [record.overall.acceptance or 0.0 for record in line],
            color=colour,
            linestyle=linestyle,
            marker="o",
            label=name,
        )
    axes.set_xticks(sorted({record.width for record in records}))
    axes.set_xlabel("width n (stages)")
