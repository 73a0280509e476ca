"""The results as a table."""

from collections.abc import Sequence

from service.evaluation.counting import Counts
from service.evaluation.store import Record
from service.presentation import aligned

HEADINGS = (
    "T", "n", "drafter", "data set", "prompts", "decoded", "drafted", "flushes", "cycles",
    "acceptance", "tokens/cycle", "accept length",
)  # fmt: skip
TEXT_COLUMNS = ("drafter", "data set")

LEGEND = (
    "acceptance = accepted / decoded; flushes: proposals that were rejected;\n"
    "accept length: the equivalent one, n * decoded / cycles, which is the theoretical speed-up\n"
    "(`off` has 1 at every n).\n"
)
REPLAYED = (
    "replayed: the scheduler's counts over the target's own texts, with all drafts computed before;"
    "\nthe pipeline did not run.\n"
)


def table(records: Sequence[Record]) -> str:
    """A row for each data set, and for all together, of each record."""
    rows = [
        _row(record, name, counts) for record in records for name, counts in record.rows.items()
    ]
    heading, rule, *body = aligned(HEADINGS, rows, TEXT_COLUMNS)
    lines = [heading, rule]
    for before, row, line in zip([None, *rows], rows, body, strict=False):
        if before is not None and before[:3] != row[:3]:
            lines.append("")
        lines.append(line)
    notes = [f"{r.configuration}: {r.note}\n" for r in records if r.note]
    replayed = REPLAYED if any(r.replayed for r in records) else ""
    return "\n".join([*lines, "", LEGEND]) + replayed + "".join(notes)


def _row(record: Record, name: str, counts: Counts) -> tuple[str, ...]:
    return (
        f"{record.temperature:g}",
        str(record.width),
        f"{record.drafter} (replayed)" if record.replayed else record.drafter,
        name,
        str(counts.prompts),
        str(counts.decoded),
        str(counts.drafted),
        str(counts.flushes),
        str(counts.cycles),
        _number(counts.acceptance, ".1%"),
        _number(counts.tokens_per_cycle, ".3f"),
        _number(counts.accept_length(record.width), ".2f"),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
