"""The record of restarts, and what follows from it."""

import pytest

from service.config import parse_settings
from service.restarts import Restarts


class Shelf:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.reads = 0

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def all(self, prefix: str) -> dict[str, str]:
        self.reads += 1
        return {k: v for k, v in self.values.items() if k.startswith(prefix)}

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("service.restarts.time.time", lambda: self.now)
        monkeypatch.setattr("service.restarts.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def restarts(shelf: Shelf, replicas: int = 1, app: str = "spd", most: int = 2) -> Restarts:
    settings = parse_settings(
        {
            "pipeline": {"replicas": replicas},
            "limits": {"max_restarts": most, "restart_window_s": 60},
        }
    )
    return Restarts(app, settings, shelf)


@pytest.mark.usefixtures("clock")
def test_first_starts_are_no_restarts() -> None:
    shelf = Shelf()
    for name in "ab":
        assert not restarts(shelf, replicas=2).started(name).is_restart
    assert restarts(shelf, replicas=2).started("c").is_restart
    assert not restarts(shelf, app="other").started("a").is_restart
    assert not restarts(shelf, replicas=3).started("a").is_restart, "another configuration"


def test_after_too_many_the_next_one_waits_for_the_window(clock: Clock) -> None:
    shelf = Shelf()
    record = restarts(shelf)
    for at, name in enumerate("abc"):
        clock.now = 1000.0 + 10 * at
        record.started(name)
        assert record.wait_s() == 0
        assert record.given_up() is None
    clock.now = 1030.0  # the third restart, two of which may be
    record.started("d")
    assert record.wait_s() == pytest.approx(40), "until the first restart is 60 s old"
    assert "more than 2 times in 60 s; the next try is in 40 s" in (record.given_up() or "")
    assert restarts(shelf).given_up() is not None, "the ingress sees the same"
    clock.now = 1071.0
    assert record.wait_s() == 0
    assert restarts(shelf).given_up() is None


@pytest.mark.usefixtures("clock")
def test_none_allowed() -> None:
    record = restarts(Shelf(), most=0)
    record.started("a")
    assert record.wait_s() == 0
    record.started("b")
    assert record.wait_s() == pytest.approx(60)


@pytest.mark.usefixtures("clock")
def test_a_replica_that_was_told_to_end_is_forgotten() -> None:
    """Updates of the configuration are no failures."""
    record = restarts(Shelf())
    for name in "abcdef":
        assert not record.started(name).is_restart
        record.ended(name)
    assert record.wait_s() == 0


def test_why_it_failed(clock: Clock) -> None:
    record = restarts(Shelf())
    assert record.last_failure() is None
    record.failed("a", record.started("a"), "stage 1 died")
    clock.now += 1
    record.failed("b", record.started("b"), "cycle 7 took more than 60 s")
    clock.now += 1
    assert record.started("c").is_restart
    assert record.last_failure() == "cycle 7 took more than 60 s"


def test_many_requests_ask_the_cluster_once_a_second(clock: Clock) -> None:
    shelf = Shelf()
    record = restarts(shelf)
    for _ in range(100):
        record.given_up()
    assert shelf.reads == 1
    clock.now += 2
    record.given_up()
    assert shelf.reads == 2
