"""The load test against a server whose delays are known, and its arithmetic."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

import pytest
import yaml

from loadtest.__main__ import main
from loadtest.block import Block
from loadtest.figures import figures, is_good, spread
from loadtest.memory import PARTS, by_time, watched_memory
from loadtest.report import latencies, memory, rates
from loadtest.running import run_scenario, send_block, turns
from loadtest.sample import Sample, read_samples, write_samples
from loadtest.scenario import Goal, Load, Scenario, ScenarioError, planned, read_scenario
from tests.api_server import serving
from tests.fake_sse import FakeServer

SCENARIOS = sorted(Path("loadtest/scenarios").glob("*.yaml"))
GOAL = Goal(first_token_ms=100, per_token_ms=10)
PROMPTS = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]


def scenario(loop: str = "closed", requests: int = 6, **fields) -> Scenario:
    load = {"loop": loop, "requests": requests}
    chats = fields.pop("chats", 2)
    load |= {"chats": chats} if loop == "closed" else {"per_second": 50.0}
    given = {"name": "x", "about": "x", "load": load, "prompts": "p", "max_tokens": 5}
    return Scenario.model_validate({**given, "goal": GOAL.model_dump(), **fields})


def blocks(url: str, made: Scenario) -> Block:
    variant = next(iter(made.variants))
    return Block(url, "fake", variant, 0, planned(made, PROMPTS, variant, 0), made.load.chats)


@contextmanager
def fake(**fields) -> Iterator[tuple[FakeServer, str]]:
    server = FakeServer(**fields)
    with serving(server.app()) as url:
        yield server, url


# --- the senders tell the truth ---------------------------------------------------------------


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_times_are_true(loop: str) -> None:
    """First tokens within 150 ms of the server's own, and gaps within 20 ms. A client that read in
    large pieces would see the first token with the last, and no gaps: 630 ms off. A machine that
    stops for a while is forgiven twice."""
    for tries_left in (2, 1, 0):
        late_s, gap_error_s = measured_errors(loop)
        if tries_left == 0 or (late_s < 0.15 and abs(gap_error_s) < 0.02):
            break
    assert late_s < 0.15
    assert abs(gap_error_s) < 0.02


def measured_errors(loop: str) -> tuple[float, float]:
    """How much later than the server's the first tokens are, and how much longer the gaps."""
    with fake(first_s=0.3, gap_s=0.07, tokens=10) as (server, url):
        samples = send_block(blocks(url, scenario(loop, chats=3)))
    assert [sample.outcome for sample in samples] == ["whole"] * 6
    true_first = [t[0] - came for came, t in zip(server.came, server.pieces, strict=True)]
    first = [s.first_token_s - s.lag_s for s in samples]
    assert min(first) >= min(true_first) - 0.001  # never before the server
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    assert len(gaps) == 54
    true_gaps = [b - a for times in server.pieces for a, b in pairwise(times)]
    per_token = [s.per_token_s for s in samples]
    slow = statistics.median(per_token) - statistics.median(true_gaps)
    gap_error = statistics.median(gaps) - statistics.median(true_gaps)
    late = statistics.median(first) - statistics.median(true_first)
    return late, max(slow, gap_error, key=abs)


def test_an_open_loop_waits_for_nobody() -> None:
    """All requests are there before the first one has ended, and what a full server adds to their
    times is counted from the plan on."""
    with fake(first_s=1.0, tokens=1) as (server, url):
        samples = send_block(blocks(url, scenario("open", requests=10)))
    assert server.peak == 10
    assert all(s.first_token_s >= 1.0 and s.sent_s >= s.planned_s for s in samples)


def test_a_closed_loop_has_so_many_chats() -> None:
    with fake(gap_s=0.01) as (server, url):
        samples = send_block(blocks(url, scenario(chats=2, requests=7)))
    assert server.peak == 2
    assert [s.index for s in samples] == list(range(7))
    assert [s.tokens for s in samples] == [5] * 7
    assert (samples[0].accepted, samples[0].rejected, samples[0].prompt_tokens) == (3, 1, 7)


@pytest.mark.parametrize("loop", ["open", "closed"])
def test_refusals_and_aborts(loop: str) -> None:
    aborts = {"share": 1, "after": 2}
    with fake(first_s=0.5, gap_s=0.2, tokens=30, most=1) as (server, url):
        samples = send_block(blocks(url, scenario(loop, requests=3, chats=3, aborts=aborts)))
    assert sorted(s.outcome for s in samples) == ["aborted", "refused", "refused"]
    (aborted,) = [s for s in samples if s.outcome == "aborted"]
    assert len(aborted.pieces_s) == 2
    assert len(server.pieces[0]) < 30
    assert "RateLimitError: 429: Full." in [s.error for s in samples]


def test_a_server_that_goes() -> None:
    with fake() as (_, url):
        pass
    (sample,) = send_block(blocks(url, scenario("open", requests=1)))
    assert sample.outcome == "failed"
    assert sample.error.startswith("TransportError: ")


# --- scenarios --------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_shipped_scenarios(file: Path) -> None:
    made, prompts = read_scenario(file)
    assert made.name == file.stem
    for variant in made.variants:
        assert len(planned(made, prompts, variant, 0)) == made.load.requests


def test_a_seed_makes_the_same_plan() -> None:
    made = scenario("open", variants={"a": {}, "b": {"top_k": 1}}, long_words=5)
    first = planned(made, PROMPTS, "a", 0)
    assert planned(made, PROMPTS, "a", 0) == first
    others = planned(made, PROMPTS, "b", 0)
    assert [(r.at_s, r.messages) for r in others] == [(r.at_s, r.messages) for r in first]
    assert others[0].fields == {"top_k": 1, "max_tokens": 5}
    assert planned(made, PROMPTS, "a", 1)[0].at_s != first[0].at_s
    reseeded = made.model_copy(update={"seed": 2})
    assert planned(reseeded, PROMPTS, "a", 0)[0].at_s != first[0].at_s


def test_arrivals_have_the_rate() -> None:
    made = scenario("open", requests=2000)
    assert planned(made, PROMPTS, "as served", 0)[-1].at_s == pytest.approx(40, rel=0.1)


def test_prompts_take_turns() -> None:
    made = scenario(requests=2)
    said = [
        r.messages[0]["content"] for n in (0, 1, 2) for r in planned(made, PROMPTS, "as served", n)
    ]
    assert said == ["a", "b", "c", "a", "b", "c"]


def test_long_prompts_differ() -> None:
    made = scenario(requests=6, long_words=50)
    texts = {r.messages[0]["content"] for r in planned(made, PROMPTS, "as served", 0)}
    assert len(texts) == 6
    assert all(len(text.split()) == 51 for text in texts)


def test_variants_take_turns() -> None:
    assert list(turns(["a", "b"], 3)) == [
        *[(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load": {"loop": "open", "requests": 1, "chats": 1}}, "needs `per_second`"),
        ({"load": {"loop": "closed", "requests": 1}}, "needs `chats`"),
        ({"load": {"loop": "closed", "requests": 0, "chats": 1}}, "load.requests"),
        ({"colour": "red"}, "colour"),
        ({"prompts": "none.jsonl"}, "none.jsonl"),
        ({"aborts": {"share": 2, "after": 1}}, "aborts.share"),
    ],
)
def test_bad_scenarios(tmp_path: Path, change: dict, message: str) -> None:
    given = yaml.safe_load(SCENARIOS[0].read_text())
    given["prompts"] = str(Path("benchmarks/prompts.jsonl").absolute())
    (file := tmp_path / "x.yaml").write_text(yaml.safe_dump({**given, **change}))
    with pytest.raises(ScenarioError, match=message):
        read_scenario(file)


def test_a_server_that_ignores_the_switch() -> None:
    """It would be compared with itself."""
    made = scenario("open", variants={"off": {"speculation": False}}, warm_up=0)
    with (
        fake() as (server, url),
        pytest.raises(ScenarioError, match="does not know this field"),
    ):
        run_scenario(made, PROMPTS, url, lambda _: None)
    assert server.bodies[0]["speculation"] is False


# --- arithmetic -------------------------------------------------------------------------------


def sample(**fields) -> Sample:
    given = {"variant": "v", "round": 0, "index": 0, "planned_s": 1.0, "sent_s": 1.25}
    whole = {"ended_s": 2.5, "outcome": "whole", "pieces_s": (1.5, 2.0, 2.5), "tokens": 5}
    return Sample(**{**given, **whole, **fields})


def test_one_sample() -> None:
    one = sample()
    assert (one.lag_s, one.first_token_s, one.whole_s) == (0.25, 0.5, 1.5)
    assert one.gaps_s == [0.5, 0.5]
    assert one.per_token_s == 0.25  # by tokens, of which a piece may hold several
    assert sample(tokens=1).per_token_s is None
    aborted = sample(outcome="aborted", tokens=None)
    assert (aborted.whole_s, aborted.per_token_s, aborted.first_token_s) == (None, None, 0.5)
    assert sample(pieces_s=(), outcome="refused").first_token_s is None


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"pieces_s": (1.09, 1.12), "ended_s": 1.12}, True),
        ({"pieces_s": (1.11, 1.14), "ended_s": 1.14}, False),  # the first one is late
        ({"pieces_s": (1.09, 1.15), "ended_s": 1.15}, False),  # the others are
        ({"pieces_s": (1.09,), "ended_s": 9, "tokens": 1}, True),
        ({"pieces_s": (1.09, 1.12), "outcome": "aborted"}, False),
        ({"pieces_s": (), "outcome": "failed"}, False),
    ],
)
def test_goodput(fields: dict, good: bool) -> None:
    assert is_good(sample(**{"planned_s": 1.0, "sent_s": 1.0, **fields}), GOAL) == good


def test_figures() -> None:
    quick = {"pieces_s": (1.05, 1.08), "ended_s": 1.08}
    found = figures(
        "v",
        [
            sample(**quick, accepted=3, rejected=1, prompt_tokens=10, cached_tokens=5),
            sample(outcome="refused", pieces_s=(), tokens=None, ended_s=1.3),
            sample(outcome="aborted", tokens=None, ended_s=1.4),
            sample(**quick, round=1),
        ],
        GOAL,
    )
    assert found.outcomes == {"whole": 2, "aborted": 1, "refused": 1, "failed": 0}
    assert found.tokens_per_s == pytest.approx(10 / (1.4 + 1.08))
    assert found.good_share == pytest.approx(2 / 3)
    assert (found.acceptance, found.cached_share) == (0.75, 0.5)
    assert found.first_token.count == 3
    assert spread([0.0, 0.1, None]).ms == pytest.approx((50, 95, 99))
    empty = figures("v", [sample(outcome="failed", pieces_s=(), tokens=None)], GOAL)
    assert rates([empty]).rows[0][5:] == ["0.0", "0.0%", "0.00", "-", "-", "-"]
    assert latencies([empty]).rows[0][2:] == ["0", "-", "-", "-"]


def test_samples_as_lines(tmp_path: Path) -> None:
    samples = [sample(), sample(outcome="failed", pieces_s=(), error="no", tokens=None)]
    write_samples(samples[:1], tmp_path / "x")
    write_samples(samples[1:], tmp_path / "x")
    assert read_samples(tmp_path / "x") == samples


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["loadtest", *arguments])
        main()

    return run


def test_a_report(tmp_path: Path, command: Callable[..., None]) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": PROMPTS[0]}) + "\n")
    made = scenario("open", variants={"on & on": {}, "other": {}}, rounds=2, prompts="p.jsonl")
    text = yaml.safe_dump(made.model_dump(exclude_none=True))
    (tmp_path / "x.yaml").write_text(text)
    with fake(gap_s=0.001) as (server, url):
        command(str(tmp_path / "x.yaml"), "--url", url, "--out", str(tmp_path / "out"))
    assert len(server.bodies) == 24
    report = (tmp_path / "out" / "README.md").read_text()
    assert "| on & on | 12 | 0 | 0 | 0 |" in report
    assert "* commit: " in report
    assert text.strip() in report
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>on &amp; on</td>" in page
    assert "data:image/png;base64," in page
    assert (tmp_path / "out" / "x.png").stat().st_size > 5000
    assert len(read_samples(tmp_path / "out" / "x.jsonl")) == 24


def test_no_server(tmp_path: Path, command: Callable[..., None]) -> None:
    with fake() as (_, url):
        pass
    with pytest.raises(SystemExit, match=r"^loadtest: .* can't be reached"):
        command("--url", url, "--out", str(tmp_path))


@pytest.mark.full
def test_it_starts_a_server(
    tmp_path: Path,
    command: Callable[..., None],
    default_model: Path,  # noqa: ARG001 (made before the clock starts)
) -> None:
    command("--out", str(tmp_path))
    assert "| as served | 4 | 0 | 0 | 0 |" in (tmp_path / "README.md").read_text()


def test_memory_by_time() -> None:
    """Medians of equal parts; a process that comes later held nothing before."""
    readings = [{"a": 10.0} for _ in range(PARTS)] + [{"a": 30.0, "b": 5.0} for _ in range(PARTS)]
    early, late = PARTS // 2, PARTS - PARTS // 2
    assert by_time(readings) == [
        ("a", [10.0] * early + [30.0] * late),
        ("b", [0.0] * early + [5.0] * late),
        ("all", [10.0] * early + [35.0] * late),
    ]
    assert by_time(readings[: PARTS - 1]) == []
    assert memory(by_time(readings)).rows[-1] == ["all", *["10"] * early, *["35"] * late]


def test_memory_of_a_process() -> None:
    """What it has started counts with it."""
    code = "import subprocess, sys; print(1); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = "held = b'1' * 60_000_000; print(2, flush=True); input()"
    command = [sys.executable, "-uc", code, child]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert [process.stdout.readline(), process.stdout.readline()] == ["1\n", "2\n"]
        with watched_memory(process.pid, period_s=60) as readings:
            pass
        process.communicate("\n")
    ((name, held),) = readings[0].items()
    assert name.startswith("python")
    assert 60 < held < 200
    with watched_memory(None) as readings:
        assert readings == []


def test_load_of_no_loop() -> None:
    with pytest.raises(ValueError, match="loop"):
        Load(loop="other", requests=1)
