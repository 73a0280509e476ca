"""A graph that runs nothing: it answers plans from gold texts and tables of drafts.

At temperature 0 the text does not depend on the drafts, and a draft matters only while all tokens
in flight are right. Then it is a function of the text, its position and the fill, the number of
tokens in flight. So all drafts can be computed before (`service.evaluation.tables`), and the
scheduler drives and counts as in a real run.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from service.evaluation.gold import Gold
from service.messages import (
    CyclePlan,
    CycleResult,
    Draft,
    DraftOrder,
    DraftReport,
    Proposal,
    StageReport,
    Verdict,
    Verify,
)
from service.pipeline.graph import Meanwhile, nothing

# [fill - 1][t]: the draft behind token t of the answer. The last list stands for all fuller
# pipelines: a drafter that looks at the newest token alone has one.
Table = list[list[int]]

ANYTHING = 0  # a token that will be void: the end of the text is in flight before it


class ReplayGraph:
    """Verdicts and drafts of known texts."""

    def __init__(
        self, stages: int, golds: Sequence[Gold], tables: Sequence[Table] | None = None
    ) -> None:
        """`tables` are of the texts, one for each; None where no PDM drafts."""
        self._stages = stages
        self._drafts = tables is not None
        self._known = {
            gold.prompt: (gold, table)
            for gold, table in zip(golds, tables or [[]] * len(golds), strict=True)
        }
        self._texts: dict[int, list[int]] = defaultdict(list)  # by slot: the tokens that entered
        self._running: dict[int, tuple[Gold, Table]] = {}

    def run(self, plan: CyclePlan, meanwhile: Meanwhile = nothing) -> CycleResult:
        meanwhile()
        for copy in plan.copies:
            self._texts[copy.target] = self._texts[copy.source][: copy.length]
        for admission in plan.admitted:
            self._running.pop(admission.slot, None)
        for rows, tokens in zip(plan.stages[0], plan.tokens, strict=True):
            self._texts[rows.slot][rows.start :] = tokens
        # Where a draft is ordered, the whole prompt has left: all rows are of one token.
        fills = Counter(rows.slot for stage in plan.stages for rows in stage)
        verdicts = tuple(self._verdict(order) for order in plan.verify)
        drafts = tuple(self._draft(order, fills[order.slot]) for order in plan.drafts)
        reports = [StageReport(0.0)] * (self._stages - 1) + [StageReport(0.0, verdicts)]
        return CycleResult(
            stages=tuple(reports),
            drafter=DraftReport(0.0, drafts) if self._drafts else None,
            seconds=0.0,
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _verdict(self, order: Verify) -> Verdict:
        if order.slot not in self._running:  # the first token of an answer
            prompt = tuple(self._texts[order.slot][: order.position])
            self._running[order.slot] = self._known[prompt]
        gold, _ = self._running[order.slot]
        token = gold.answer[order.position - len(gold.prompt)]
        accepted = None if order.proposal is None else order.proposal.token == token
        return Verdict(order.slot, order.position, token, accepted)

    def _draft(self, order: DraftOrder, fill: int) -> Draft:
        gold, table = self._running[order.slot]
        drafts = table[min(fill, len(table)) - 1]
        newest = order.position - 1 - len(gold.prompt)
        token = drafts[newest] if newest < len(drafts) else ANYTHING
        return Draft(order.slot, order.position, Proposal(token, "point"))
