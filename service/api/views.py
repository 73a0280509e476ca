"""What a pipeline has done for a request, as its stream tells it (docs/pipeline-events.md)."""

from service.api.answers import PipelineCycle, PipelineEvents, PipelineRow, PipelineVerdict
from service.api.logprobs import TokenNames
from service.messages import CycleView, PipelineView, RowView, VerdictView


def pipeline_events(view: PipelineView, names: TokenNames) -> PipelineEvents:
    return {
        "stages": len(view.cycles[0].rows),
        "drafter": view.drafter,
        "cycles": [_cycle(cycle, names) for cycle in view.cycles],
    }


def _cycle(cycle: CycleView, names: TokenNames) -> PipelineCycle:
    return {
        "cycle": cycle.cycle,
        "milliseconds": round(1000 * cycle.seconds, 2),
        "rows": [None if row is None else _row(row, names) for row in cycle.rows],
        "verdict": None if cycle.verdict is None else _verdict(cycle.verdict, names),
        "void": list(cycle.void),
    }


def _row(row: RowView, names: TokenNames) -> PipelineRow:
    return {
        "position": row.position,
        "count": row.count,
        "token": row.token,
        "text": "" if row.token is None else names.text(row.token),
        "source": row.source,
    }


def _verdict(verdict: VerdictView, names: TokenNames) -> PipelineVerdict:
    return {
        "position": verdict.position,
        "token": verdict.token,
        "text": names.text(verdict.token),
        "outcome": verdict.outcome,
    }
