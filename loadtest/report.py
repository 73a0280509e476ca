"""Samples as a report: README.md and report.html, with a picture for each scenario."""

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loadtest.figures import PERCENTS, Figures, Spread, figures
from loadtest.memory import Memory, by_time
from loadtest.sample import Sample
from loadtest.scenario import Scenario
from service.presentation import blank_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 }
img { max-width: 100% }
th, td { padding: .2em .7em; border-bottom: 1px solid #ccc; text-align: right }
th:first-child, td:first-child { text-align: left }
pre { background: #f4f4f4; padding: 1em }
"""


SHOWN: dict[str, Callable[[Sample], Sequence[float | None]]] = {
    "first token": lambda sample: [sample.first_token_s],
    "between pieces of text": lambda sample: sample.gaps_s,
    "whole answer": lambda sample: [sample.whole_s],
}


@dataclass(frozen=True)
class Measured:
    """A scenario, its YAML, and what came of it; the server's memory if it was started for it."""

    scenario: Scenario
    text: str
    samples: Sequence[Sample]
    memory: Sequence[Memory] = ()

    def tables(self) -> list["Table"]:
        found = self.figures()
        tables = [rates(found), latencies(found)]
        held = by_time(self.memory)
        return [*tables, memory(held)] if held else tables

    def figures(self) -> list[Figures]:
        return [
            figures(name, [s for s in self.samples if s.variant == name], self.scenario.goal)
            for name in self.scenario.variants
        ]


@dataclass(frozen=True)
class Table:
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        rule = ["---"] * len(self.headings)
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.headings, rule, *self.rows))

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.headings)
        rows = (
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def write_report(measured: Sequence[Measured], about: Mapping[str, str], folder: Path) -> None:
    """Writes README.md, report.html and the pictures into `folder`. Raises ConfigError without
    matplotlib."""
    for each in measured:
        draw(each, folder / f"{each.scenario.name}.png")
    (folder / "README.md").write_text(_markdown(measured, about))
    (folder / "report.html").write_text(_page(measured, about, folder))


def latencies(found: Sequence[Figures]) -> Table:
    """A row for each variant and each latency."""
    rows = []
    for one in found:
        spreads = {
            "first token": one.first_token,
            "between pieces": one.gap,
            "per token": one.per_token,
            "whole": one.whole,
            "client lag": one.lag,
        }
        rows += [
            [one.variant, name, str(spread.count), *_cells(spread)]
            for name, spread in spreads.items()
        ]
    return Table(["variant", "ms", "values", *(f"p{p}" for p in PERCENTS)], rows)


def rates(found: Sequence[Figures]) -> Table:
    """A row for each variant."""
    headings = ["variant", "whole", "aborted", "refused", "failed", "tokens/s", "good", "good/s",
                "accepted", "prompt tokens", "of these cached"]  # fmt: skip
    rows = [
        [
            one.variant,
            *(str(count) for count in one.outcomes.values()),
            f"{one.tokens_per_s:.1f}",
            _percent(one.good_share),
            f"{one.good_per_s:.2f}",
            _percent(one.acceptance),
            "-" if one.prompt_tokens is None else f"{one.prompt_tokens:.0f}",
            _percent(one.cached_share),
        ]
        for one in found
    ]
    return Table(headings, rows)


def memory(held: Sequence[tuple[str, Sequence[float]]]) -> Table:
    """A row for each kind of process, a column for each part of the time."""
    parts = len(held[0][1])
    headings = [f"{100 * k // parts} to {100 * (k + 1) // parts} %" for k in range(parts)]
    rows = [[kind, *(f"{mib:.0f}" for mib in medians)] for kind, medians in held]
    return Table(["MiB of the server, by time", *headings], rows)


def draw(measured: Measured, file: Path) -> None:
    """The share of requests that were served within a time, for each latency and variant."""
    figure = blank_figure(file, (12, 3.6))
    places = figure.subplots(1, 3, sharey=True)
    by_variant = {
        name: [s for s in measured.samples if s.variant == name]
        for name in measured.scenario.variants
    }
    for axes, (title, seconds) in zip(places, SHOWN.items(), strict=True):
        ms = {name: _ms(map(seconds, samples)) for name, samples in by_variant.items()}
        _share_within(axes, title, ms)
    places[0].set_ylabel("share")
    figure.suptitle(measured.scenario.name)
    figure.savefig(file, dpi=110)


def _ms(seconds: Iterable[Sequence[float | None]]) -> list[float]:
    return [1000 * s for some in seconds for s in some if s is not None]


def _share_within(axes: "Axes", title: str, by_variant: Mapping[str, list[float]]) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("ms")
    axes.grid(alpha=0.3)
    shown = {name: ms for name, ms in by_variant.items() if ms}
    for name, ms in shown.items():
        axes.ecdf(ms, label=f"{name} ({len(ms)})")
    if shown:
        axes.legend(fontsize="small")
        # A few late ones would press the rest against the axis.
        axes.set_xlim(0, 1.2 * max(float(np.percentile(ms, 99)) for ms in shown.values()))


def _cells(spread: Spread) -> list[str]:
    return [f"{ms:.1f}" if spread.count else "-" for ms in spread.ms]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _goal(scenario: Scenario) -> str:
    goal = scenario.goal
    return (
        f"Good: whole, the first token within {goal.first_token_ms:.0f} ms and "
        f"{goal.per_token_ms:.0f} ms for each further one."
    )


def _markdown(measured: Sequence[Measured], about: Mapping[str, str]) -> str:
    parts = ["# Load test", "\n".join(f"* {name}: {text}" for name, text in about.items())]
    for each in measured:
        parts += [
            f"## {each.scenario.name}",
            f"{each.scenario.about} {_goal(each.scenario)}",
            *(table.markdown() for table in each.tables()),
            f"![shares of requests within a time]({each.scenario.name}.png)",
            f"```yaml\n{each.text.strip()}\n```",
        ]
    return "\n\n".join(parts) + "\n"


def _page(measured: Sequence[Measured], about: Mapping[str, str], folder: Path) -> str:
    facts = "".join(
        f"<li>{html.escape(name)}: {html.escape(text)}</li>" for name, text in about.items()
    )
    body = f"<h1>Load test</h1><ul>{facts}</ul>"
    for each in measured:
        name = each.scenario.name
        picture = base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
        body += (
            f"<h2>{name}</h2><p>{html.escape(each.scenario.about)} {_goal(each.scenario)}</p>"
            f"{''.join(table.html() for table in each.tables())}"
            f'<img alt="shares of requests within a time" src="data:image/png;base64,{picture}">'
            f"<pre>{html.escape(each.text.strip())}</pre>"
        )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Load test</title>'
        f"<style>{STYLE}</style>{body}</html>\n"
    )
