"""The results as a picture. Needs matplotlib, which is an extra."""

from collections.abc import Sequence
from pathlib import Path

from service.emulation.results import Record
from service.presentation import blank_figure

LINES = {"local": "-", "ray": "--"}


def draw(records: Sequence[Record], file: Path) -> None:
    """Speed-up over width, in theory and on the wall, and the share of one in the other. Raises
    ConfigError without matplotlib."""
    figure = blank_figure(file, (12, 5))
    speed, share = figure.subplots(1, 2)
    rates = sorted({r.setup.acceptance for r in records})
    for (graph, rate, link), line in _lines(records).items():
        widths = [r.setup.width for r in line]
        colour, label = f"C{rates.index(rate)}", f"{graph}, acceptance {rate:.0%}, link {link:g} ms"
        style = {"color": colour, "linestyle": LINES[graph], "marker": "o"}
        speed.plot(widths, [r.speed_up for r in line], label=label, **style)
        share.plot(widths, [r.share for r in line], label=label, **style)
    for rate in rates:
        theory = {r.setup.width: r.theory for r in records if r.setup.acceptance == rate}
        speed.plot(*zip(*sorted(theory.items()), strict=True), color="0.6", linestyle=":")
    speed.set_ylabel("speed-up over plain decoding (dotted: the theory)")
    share.set_ylabel("share of the theoretical speed-up that reaches the wall")
    share.set_ylim(0, 1)
    for axes in (speed, share):
        axes.set_xlabel("width n (stages)")
        axes.set_xticks(sorted({r.setup.width for r in records}))
        axes.grid(alpha=0.3)
    speed.legend(fontsize="small")
    figure.savefig(file, dpi=120)


def _lines(records: Sequence[Record]) -> dict[tuple[str, float, float], list[Record]]:
    lines: dict[tuple[str, float, float], list[Record]] = {}
    for r in sorted(records, key=lambda r: r.setup.width):
        key = (r.setup.graph, r.setup.acceptance, r.setup.link_ms)
        lines.setdefault(key, []).append(r)
    return lines
