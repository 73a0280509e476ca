"""The benchmark of one chat: who takes turns with whom, what is made of it, and a run on a toy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.comparison import Result, allowed, groups, ratios, table
from benchmarks.ways import all_ways
from benchmarks.worker import Chat, Figures
from tests.toys import toy_chat_target

WAYS = {way.name: way for way in all_ways("org/model", 2)}
BASELINE = WAYS["n=1 off, local"]


@pytest.mark.parametrize("together", [2, 3, 6, 100])
def test_groups(together: int) -> None:
    ways = list(WAYS.values())
    found = list(groups(ways, together))
    assert all(group[0] is BASELINE for group in found)
    assert sorted(w.name for group in found for w in group[1:]) == sorted(w.name for w in ways[1:])
    assert all(2 <= len(group) <= together for group in found)
    assert all(sum(way.uses_ray for way in group) <= 1 for group in found)


def test_the_first_group_has_the_headline() -> None:
    first = next(groups(list(WAYS.values()), 6))
    names = {
        "n=2 off, local",
        "n=2 lookup+pdm, local",
        "n=2 lookup+pdm, ray",
        "n=1 off, local, int8",
    }
    assert names <= {way.name for way in first}


def result(way: str, *ms_per_token: float, **cycle: float) -> Result:
    chats = [Chat([1, 2, 3], 0.1, 2 * ms / 1000, 2) for ms in ms_per_token]
    return Result(WAYS[way], chats, Figures(0.0, 0.0, cycle or None))


def test_ratios_are_of_the_same_prompt() -> None:
    assert ratios(
        result("n=2 lookup+pdm, local", 20, 50), result(BASELINE.name, 40, 40)
    ) == pytest.approx([2, 0.8])


def test_an_answer_of_one_token_says_nothing() -> None:
    plain, fast = result(BASELINE.name, 40, 40), result("n=2 lookup+pdm, local", 20, 50)
    fast.chats[1] = Chat([1], 0.1, 0.0, 0)
    assert ratios(fast, plain) == pytest.approx([2])


def test_tables_of_one_prompt() -> None:
    """The baseline stands in the first group alone."""
    groups_of_two = [
        [result(BASELINE.name, 40), result(name, 20)]
        for name in ("n=2 off, local", "transformers, 1 threads")
    ]
    rows = table(groups_of_two)[2:]
    assert [row.split("  ")[0] for row in rows] == [
        BASELINE.name,
        "n=2 off, local",
        "transformers, 1 threads",
    ]
    assert ["2.00 to 2.00" in row for row in rows] == [False, True, True]


def cycles(**figures: float) -> dict[str, float]:
    return {name.replace("_", " "): figure for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("cores", "most"),
    [
        (2, 0.75 * 60 / 33),  # 60 ms of stages and 6 of drafts on two cores
        (3, 0.75 * 60 / 30),  # the drafter has its own
    ],
)
def test_allowed(monkeypatch: pytest.MonkeyPatch, cores: int, most: float) -> None:
    """Two thirds accepted are 2 tokens behind each first one: 3 tokens in 4 cycles."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    plain = result(BASELINE.name, **cycles(cycle=60))
    fast = result("n=2 lookup+pdm, local", **cycles(cycle=40, drafter_mean=6, accepted=2 / 3))
    assert allowed(fast, plain) == pytest.approx(most)


@pytest.mark.parametrize(
    ("way", "baseline"),
    [
        ("n=2 off, local", BASELINE.name),
        ("n=2 lookup+pdm, local", "n=1 off, local, int8"),
        ("n=2 lookup+pdm, local", "n=2 off, local"),
        ("transformers, 1 threads", BASELINE.name),
        ("HTTP, n=2 lookup+pdm, local", BASELINE.name),
    ],
)
def test_nothing_is_allowed_without_a_plain_form(way: str, baseline: str) -> None:
    assert allowed(result(way), result(baseline)) is None


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.chat", "--rounds", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_a_run(tmp_path: Path, default_model: Path) -> None:
    toy = toy_chat_target(tmp_path / "toy", default_model, layers=2, max_position_embeddings=4096)
    file = tmp_path / "figures.json"
    options = ["--limit", "2", "--max-tokens", "6", "--only", "n=2 off, local", "--json", str(file)]
    done = run("--model", str(toy), *options)
    assert done.returncode == 0, done.stderr
    [[plain, split]] = json.loads(file.read_text())["found"]
    assert [chat["tokens"] for chat in plain["chats"]] == [
        chat["tokens"] for chat in split["chats"]
    ]
    assert [len(chat["tokens"]) for chat in plain["chats"]] == [6, 6]
    assert "2 of 2" in done.stdout
    assert "n=2 off, local" in done.stdout.split("\n\n")[2]


def test_a_way_that_fails_says_why(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path / "nothing"), "--only", "n=2 off, local")
    assert done.returncode == 1
    assert "bench: n=1 off, local failed:\n" in done.stderr
    assert "nothing" in done.stderr.strip().splitlines()[-1]
