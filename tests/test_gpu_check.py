"""The prepared check of the GPU path, as far as it goes on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from service.pipeline import decode_step

ARGS = ["--device", "cpu", "--dtype", "float32", "--stages", "2", "--tokens", "8", "--context", "9"]


def test_all_is_right_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for module in (gpu_check, decode_step):
        monkeypatch.setattr(module, "SHORTEST_CONTEXT", 32)
    file = tmp_path / "found.json"
    assert gpu_check.main([*ARGS, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["numbers"]["ok"]
    for way in ("cpu, plain", "cpu, steps"):
        assert {how["same as on a CPU"] for how in found["texts"][way].values()} == {True}
    for way in ("plain", "steps"):
        for chats in (1, 4):
            cycle = found["times"][way][f"{chats} chats, ms"]
            assert cycle["cycles"] > 8
            assert cycle["cycle"] > cycle["slowest stage"] > 0 < cycle["PDM"]


def test_a_part_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def failing(*_: Any) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(gpu_check, "numbers", failing)
    monkeypatch.setattr(gpu_check, "texts", lambda *_: {"ok": True})
    monkeypatch.setattr(gpu_check, "times", lambda *_: {"plain": {}})
    assert gpu_check.main(ARGS) == 1
    found = json.loads(capsys.readouterr().out)
    assert "ValueError: no memory" in found["numbers"]["error"]
    assert found["texts"]["ok"]
    assert "plain" in found["times"]
