"""Whether the PDM is hidden behind the stages, as the method wants it."""

import logging
import statistics

from service.messages import CycleResult

log = logging.getLogger(__name__)

WINDOW = 100  # cycles with drafts


class Balance:
    """Watches the times that actors report. While the PDM takes less time than the slowest stage,
    drafting costs nothing; beyond it each cycle waits for the PDM."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []  # of the slowest stage, of the PDM
        self._was_told = False
        self.fault: str | None = None  # what is wrong, as of the last whole window

    def see(self, result: CycleResult) -> None:
        """A cycle is over. Logs once that the PDM is the slowest."""
        if result.drafter is None or not result.drafter.drafts:
            return
        slowest = max(stage.seconds for stage in result.stages)
        self._times.append((slowest, result.drafter.seconds))
        if len(self._times) < WINDOW:
            return
        stage_ms, pdm_ms = (
            1000 * statistics.median(times) for times in zip(*self._times, strict=True)
        )
        self._times.clear()
        self.fault = None
        if pdm_ms > stage_ms:
            self.fault = f"the PDM takes {pdm_ms:.1f} ms, the slowest stage {stage_ms:.1f}"
            if not self._was_told:
                self._was_told = True
                log.warning(
                    "%s: each cycle waits for it. Fewer stages, a smaller draft vocabulary or a "
                    "faster device for the PDM would help",
                    self.fault,
                )
