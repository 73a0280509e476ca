"""Notices what the engine's own thread can't: that it hangs, or that an idle actor is gone."""

import logging
import threading
from collections.abc import Callable

from service.engine.engine import Engine
from service.pipeline.graph import GraphError

log = logging.getLogger(__name__)

PERIOD_S = 1.0
MARGIN_S = 2.0  # the engine, which knows more, gives up a cycle first


class Watchdog:
    """Looks after the engine until it is closed."""

    def __init__(
        self,
        engine: Engine,
        bound_s: float,
        on_fault: Callable[[str], None],
        period_s: float = PERIOD_S,
    ) -> None:
        """`on_fault` is called once, in the watchdog's thread, with what is wrong: a cycle, or an
        actor's sign of life, takes more than `bound_s`, or an actor is dead."""
        self._engine, self._bound_s, self._on_fault = engine, bound_s, on_fault
        self._period_s = period_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="spd-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._period_s):
            fault = self._fault()
            if self._closed.is_set() or self._engine.failure is not None:
                return  # the engine tells of its own failures
            if fault is not None:
                self._on_fault(fault)
                return

    def _fault(self) -> str | None:
        if self._engine.cycle_seconds > self._bound_s + MARGIN_S:
            return f"a cycle has not ended for {self._bound_s + MARGIN_S:g} s"
        if self._engine.cycle_seconds > 0:
            return None  # whoever is dead or hangs holds up the cycle, which has its own bound
        try:
            self._engine.check(self._bound_s)
        except GraphError as error:
            return str(error)
        return None
