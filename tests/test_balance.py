"""The word on a PDM that is slower than the slowest stage."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from service.config import parse_settings
from service.emulation.measure import NoText
from service.engine.balance import WINDOW, Balance
from service.engine.engine import Engine
from service.engine.recorder import NullRecorder
from service.engine.scheduler import Scheduler
from service.messages import (
    CycleResult,
    Delta,
    Draft,
    DraftReport,
    GenerateRequest,
    Proposal,
    StageReport,
)
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.local_graph import LocalGraph
from service.replica import Pipeline
from tests.toys import toy_target

DRAFTS = (Draft(0, 5, Proposal(1, "point")),)


def cycle(stages_ms: tuple[float, ...], pdm_ms: float, *, drafts: bool = True) -> CycleResult:
    stages = tuple(StageReport(ms / 1000) for ms in stages_ms)
    return CycleResult(stages, DraftReport(pdm_ms / 1000, DRAFTS if drafts else ()), 0.0)


def test_a_slow_pdm_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    balance = Balance()
    for _ in range(WINDOW - 1):
        balance.see(cycle((2.0, 5.25), 7.04))
    assert balance.fault is None
    balance.see(cycle((2.0, 5.25), 7.04))
    assert balance.fault == "the PDM takes 7.0 ms, the slowest stage 5.2"
    for _ in range(3 * WINDOW):
        balance.see(cycle((2.0, 5.25), 8.0))
    assert balance.fault == "the PDM takes 8.0 ms, the slowest stage 5.2"
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warnings] == [
        "the PDM takes 7.0 ms, the slowest stage 5.2: each cycle waits for it. Fewer stages, a "
        "smaller draft vocabulary or a faster device for the PDM would help"
    ]


def test_a_hidden_pdm_is_none_of_ones_business() -> None:
    """And a few slow cycles are not either, nor those without drafts or without a PDM."""
    balance = Balance()
    for k in range(3 * WINDOW):
        balance.see(cycle((5.0, 2.0), 50.0 if k % 3 == 0 else 4.9))
        balance.see(cycle((5.0, 2.0), 9.0, drafts=False))
        balance.see(CycleResult((StageReport(0.001),), None, 0.0))
    assert balance.fault is None


def test_it_is_over_when_it_is_over() -> None:
    balance = Balance()
    for _ in range(WINDOW):
        balance.see(cycle((5.0,), 6.0))
    assert balance.fault is not None
    for _ in range(WINDOW):
        balance.see(cycle((5.0,), 4.0))
    assert balance.fault is None


@pytest.fixture
def emulated(tmp_path: Any) -> Blueprint:
    """Devices whose PDM is slow, and always right."""
    args = {
        "model": str(toy_target(tmp_path)),
        "device": "emulated",
        "emulated": {"stage_ms": 0.5, "draft_ms": 4, "acceptance": 1.0},
        "pipeline": {"stages": 2, "max_len": 200},
    }
    return make_blueprint(parse_settings(args))


def test_the_engine_watches_what_actors_report(emulated: Blueprint) -> None:
    scheduler = Scheduler(
        stages=2,
        slots=2,
        max_len=200,
        chunk=8,
        eos_ids=frozenset(),
        new_text=lambda _: NoText(),
        uses_pdm=True,
    )
    engine = Engine(lambda: LocalGraph(emulated), scheduler, NullRecorder())
    faults: list[str | None] = []

    def sink(event: Any) -> None:
        if isinstance(event, Delta):
            faults.append(engine.balance.fault)
            if event.finish_reason is not None:
                engine.close()

    engine.submit(GenerateRequest("0", (1, 2), WINDOW + 20), sink)
    engine._thread.join(60)
    assert faults[0] is None
    assert "the PDM takes " in (faults[-1] or "")


@pytest.mark.parametrize(
    ("untrained", "fault", "told"),
    [
        (False, None, "lookup+pdm"),
        (True, None, "lookup+pdm (untrained PDM)"),
        (False, "it is slow", "lookup+pdm (it is slow)"),
        (True, "it is slow", "lookup+pdm (untrained PDM; it is slow)"),
    ],
)
def test_the_ready_line_tells_it(untrained: bool, fault: str | None, told: str) -> None:
    engine = SimpleNamespace(draft_error=None, balance=SimpleNamespace(fault=fault))
    replica: Any = SimpleNamespace(
        _settings=parse_settings({}), _broken_pdm=None, _engine=engine, _untrained=untrained
    )
    assert Pipeline._speculation(replica) == told
