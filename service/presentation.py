"""Figures as text and as pictures, for the commands that measure."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def aligned(
    headings: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[str] = ()
) -> list[str]:
    """The lines of a table: the headings, a rule, and a line for each row. The columns `texts`
    stand to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if heading in texts else cell.rjust(width)
            for heading, cell, width in zip(headings, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [line(headings), "  ".join("-" * width for width in widths), *map(line, rows)]


def blank_figure(file: Path, size: tuple[float, float], advice: str = "") -> "Figure":
    """An empty picture, `size` in inches, that can be saved to `file` without a display. Raises
    ConfigError without matplotlib, which is an extra; `advice` ends its message."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"{file.name} is not drawn: matplotlib is missing. "
            f"`pip install 'spd-serve[eval]'`{advice}"
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
