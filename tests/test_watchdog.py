"""What the engine's own thread can't notice."""

import threading
from queue import SimpleQueue

import pytest

from service.engine.watchdog import Watchdog
from service.pipeline.graph import GraphError

WAIT_S = 30


class Engine:
    """What the watchdog looks at."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.cycle_seconds = 0.0
        self.error: str | None = None
        self.checks: SimpleQueue[float] = SimpleQueue()

    def check(self, seconds: float) -> None:
        self.checks.put(seconds)
        if self.error is not None:
            raise GraphError(self.error)


@pytest.fixture
def faults():
    return SimpleQueue()


@pytest.fixture
def watched(faults):
    engine = Engine()
    watchdog = Watchdog(engine, 5.0, faults.put, period_s=0.005)
    yield engine
    watchdog.close()


def test_a_sound_engine_is_let_be(watched: Engine, faults: SimpleQueue) -> None:
    for _ in range(5):
        assert watched.checks.get(timeout=WAIT_S) == 5.0
    assert faults.empty()


def test_an_idle_actor_that_is_gone(watched: Engine, faults: SimpleQueue) -> None:
    watched.error = "a stage is dead"
    assert faults.get(timeout=WAIT_S) == "a stage is dead"


def test_a_cycle_without_end(watched: Engine, faults: SimpleQueue) -> None:
    """The engine itself gives up after 5 s, where it can."""
    watched.cycle_seconds = 6.0
    threading.Event().wait(0.05)
    assert faults.empty()
    watched.cycle_seconds = 7.1
    assert faults.get(timeout=WAIT_S) == "a cycle has not ended for 7 s"


def test_it_tells_once(watched: Engine, faults: SimpleQueue) -> None:
    watched.error = "x"
    faults.get(timeout=WAIT_S)
    threading.Event().wait(0.05)
    assert faults.empty()


def test_the_engines_own_failures_are_its_own(watched: Engine, faults: SimpleQueue) -> None:
    watched.failure = watched.error = "cycle 3 took more than 5 s"
    threading.Event().wait(0.05)
    assert faults.empty()
