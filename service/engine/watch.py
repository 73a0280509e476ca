"""Notes what a pipeline does for one request, for a client that asked to see it."""

from dataclasses import replace

from service.engine.sequence import Sequence
from service.messages import CycleView, Outcome, RowView, Verdict, VerdictView


class Watch:
    """The cycles of one sequence. It looks at the sequence and changes nothing."""

    def __init__(self, stages: int) -> None:
        self._rows: tuple[RowView | None, ...] = (None,) * stages
        self._cycles: list[CycleView] = []  # those that have not been handed out

    def planned(self, cycle: int, s: Sequence) -> None:
        """The sequence's rows have moved on for this cycle."""
        moved = [
            None if rows is None else view
            for rows, view in zip(s.rows[1:], self._rows[:-1], strict=True)
        ]
        self._rows = (_entering(s), *moved)
        self._cycles.append(CycleView(cycle, 0.0, self._rows))

    def ran(self, seconds: float) -> None:
        """The cycle took so long."""
        self._cycles[-1] = replace(self._cycles[-1], seconds=seconds)

    def decided(
        self, verdict: Verdict, accepted: bool | None, void: range
    ) -> tuple[CycleView, ...]:
        """The cycle's verdict; returns the cycles that have not been handed out."""
        outcome: Outcome = "undrafted"
        if accepted is not None:
            outcome = "accepted" if accepted else "rejected"
        view = VerdictView(verdict.position, verdict.token, outcome)
        *before, last = self._cycles
        self._cycles = []
        return (*before, replace(last, verdict=view, void=tuple(void)))


def _entering(s: Sequence) -> RowView | None:
    """The rows at stage 0."""
    rows = s.rows[0]
    if rows is None:
        return None
    position = rows.start
    if position < s.known_length:
        return RowView(position, rows.count, None, "prompt")
    if position < len(s.tokens):
        return RowView(position, 1, s.tokens[position], "target")
    return RowView(position, 1, s.ahead[position - len(s.tokens)].token, s.proposed_by)
