"""What a client is told of its request's cycles: from it alone, the text and the counts follow."""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.config import ApiSettings
from service.messages import (
    CycleView,
    Delta,
    PipelineView,
    RowView,
    Sampling,
    Stopping,
    VerdictView,
)
from tests.api_server import CHAT, TEXT, WAIT_S, make_api, post, serving
from tests.fake_pipeline import STATS, FakePipeline
from tests.test_scheduler import NOTHING, RIGHT, WRONG, Run
from tests.token_pipeline import continuation


@dataclass
class Replay:
    """Takes the cycles of one request, and checks each against those before."""

    stages: int
    prompt: int  # tokens
    text: list[int] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    decode_cycles: int = 0
    _rows: tuple[RowView | None, ...] = ()
    _last: int | None = None  # number of the last cycle
    _entered: int | None = None  # the position after the last row that entered and is not void

    def take(self, view: CycleView, *, is_end: bool) -> None:
        assert self._last in (None, view.cycle - 1), "each cycle once, in order"
        self._last = view.cycle
        moved = self._rows[:-1] if self._rows else (None,) * (self.stages - 1)
        assert view.rows == (view.rows[0], *moved), "rows move down one stage a cycle"
        if view.rows[0] is not None:
            self._enter(view.rows[0])
        begun = self._entered is not None and self._entered > self.prompt
        self.decode_cycles += begun or bool(self.decode_cycles)
        self._rows = view.rows
        void: tuple[int, ...] = ()
        if view.verdict is not None:
            void = self._decide(view.verdict, is_end=is_end)
        assert view.void == void

    def _enter(self, row: RowView) -> None:
        assert row.position == self._entered or self._entered is None, "no position is left out"
        self._entered = row.position + row.count
        if row.position < self.prompt:
            assert (row.source, row.token) == ("prompt", None)
            assert self._entered <= self.prompt
            return
        place = row.position - self.prompt
        assert row.count == 1
        assert (row.source == "target") == (place < len(self.text))
        if row.source == "target":
            assert row.token == self.text[place]

    def _decide(self, verdict: VerdictView, *, is_end: bool) -> tuple[int, ...]:
        oldest = self._rows[-1]
        assert oldest is not None
        assert oldest.position + oldest.count == verdict.position
        assert verdict.position == self.prompt + len(self.text)
        flying = {r.position: r.token for r in self._rows[:-1] if r is not None}
        token = flying.get(verdict.position)
        if verdict.position not in flying:
            assert verdict.outcome == "undrafted"
        else:
            assert verdict.outcome == ("accepted" if token == verdict.token else "rejected")
        self.text.append(verdict.token)
        self.outcomes.append(verdict.outcome)
        kept = verdict.position + (verdict.outcome != "rejected")
        void = tuple(sorted(position for position in flying if position >= kept))
        if verdict.outcome == "rejected":
            self._rows = (*(None,) * (self.stages - 1), self._rows[-1])
            self._entered = verdict.position
            return void
        return void if is_end else ()


class Watched(Run):
    """All requests ask for their cycles."""

    def add(self, name: str, prompt: Seq[int], max_tokens: int, *more, **options) -> None:
        super().add(name, prompt, max_tokens, *more, **options, shows_pipeline=True)

    def replay(self, name: str) -> Replay:
        """Checks all that the request was told."""
        replay = Replay(self.n, self.prompts[name])
        for delta in self.deltas[name]:
            assert delta.pipeline is not None
            *before, last = delta.pipeline.cycles
            assert all(view.verdict is None for view in before)
            assert last.verdict is not None
            for view in delta.pipeline.cycles:
                replay.take(view, is_end=view is last and delta.finish_reason is not None)
        return replay

    def check_counts(self, name: str) -> Replay:
        replay = self.replay(name)
        assert replay.text == [d.token_id for d in self.deltas[name]]
        stats = self.deltas[name][-1].stats
        assert stats is not None
        assert replay.outcomes.count("accepted") == stats.accepted
        assert len(replay.outcomes) - replay.outcomes.count("undrafted") == stats.drafted
        assert replay.decode_cycles == stats.cycles
        assert len(replay.text) - 1 == stats.decoded
        return replay


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_pattern_of_drafts(n: int) -> None:
    for script in itertools.product([RIGHT, WRONG, NOTHING], repeat=5):
        run = Watched(n, chunk=2)
        run.add("a", [1, 2, 3], 6, script)
        run.finish()
        outcomes = {RIGHT: "accepted", WRONG: "rejected", NOTHING: "undrafted"}
        expected = ["undrafted"] * 6
        if n > 1:  # the last token never enters
            expected = ["undrafted", *(outcomes[how] for how in script[:-1]), "undrafted"]
        assert run.check_counts("a").outcomes == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_load(data: st.DataObject) -> None:
    """Requests and aborts at any time, some resumed, with ends at any token, and shared prompts."""
    n = data.draw(st.integers(1, 4))
    hints = data.draw(st.sampled_from([None, 2, 3]))
    run = Watched(
        n,
        slots=data.draw(st.integers(1, 3)),
        chunk=data.draw(st.integers(1, 9)),
        proposer=None if hints is None else (lambda t: 11 if len(t) % hints == 0 else None),
    )
    names = iter("abcdefgh")
    aborted = set()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "cycle", "cycle", "cycle", "abort"]))
        if action == "add" and (name := next(names, None)):
            prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
            script = data.draw(st.lists(st.sampled_from([RIGHT, WRONG, NOTHING]), max_size=6))
            count = data.draw(st.integers(1, 8))
            ends = data.draw(st.sets(st.sampled_from(continuation(prompt, count)), max_size=1))
            stop = Stopping(token_ids=tuple(ends))
            run.add(name, prompt, count, script or [RIGHT], stop)
        elif action == "cycle":
            run.cycle()
        elif action == "abort" and run.deltas:
            aborted.add(data.draw(st.sampled_from(sorted(run.deltas))))
            run.scheduler.abort(max(aborted))
    run.finish()
    for name in run.deltas:
        if name in aborted:
            run.replay(name)
        else:
            run.check_counts(name)


def test_who_proposed() -> None:
    run = Watched(2, proposer=lambda text: 11 if len(text) == 5 else None)
    run.add("a", [1, 2, 3], 5)
    run.finish()
    views = [view for delta in run.deltas["a"] for view in delta.pipeline.cycles]
    entered = [view.rows[0] for view in views if view.rows[0] is not None]
    text = continuation([1, 2, 3], 5)
    assert entered == [
        RowView(0, 3, None, "prompt"),
        RowView(3, 1, text[0], "target"),
        RowView(4, 1, text[1], "pdm"),
        RowView(5, 1, 11, "lookup"),  # rejected ..
        RowView(5, 1, text[2], "target"),  # .. so the target's enters
        RowView(6, 1, text[3], "pdm"),
    ]
    assert {delta.pipeline.drafter for delta in run.deltas["a"]} == {"lookup+pdm"}


def test_a_cycle_takes_its_time() -> None:
    run = Watched(2)
    run.add("a", [1], 1)
    plan = run.scheduler.plan()
    run.scheduler.apply(replace(run.pipeline.run(plan), seconds=0.5))
    plan = run.scheduler.plan()
    ((_, delta),) = run.scheduler.apply(replace(run.pipeline.run(plan), seconds=0.25))
    assert [view.seconds for view in delta.pipeline.cycles] == [0.5, 0.25]


def test_a_request_that_goes_on_reads_what_it_had() -> None:
    run = Watched(2)
    text = continuation([1, 2, 3], 6)
    run.add("a", [1, 2, 3], 6, generated_ids=tuple(text[:2]))
    run.prompts["a"] = 5
    run.finish()
    assert run.check_counts("a").text == text[2:]


def test_who_does_not_ask_is_told_nothing() -> None:
    run = Run(2)
    run.add("a", [1, 2, 3], 6)
    run.finish()
    assert [delta.pipeline for delta in run.deltas["a"]] == [None] * 6


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
def test_without_speculation(n: int, sampling: Sampling) -> None:
    """No proposal enters, the text is the same, and a neighbour's drafts go on."""
    run = Watched(n, proposer=lambda text: 11 if len(text) % 3 == 0 else None)
    run.add("a", [1, 2, 3], 6, speculates=False, sampling=sampling)
    run.add("b", [1, 2, 3], 6)
    run.finish()
    assert run.check_counts("a").outcomes == ["undrafted"] * 6
    assert "accepted" in run.check_counts("b").outcomes
    assert {delta.pipeline.drafter for delta in run.deltas["a"]} == {"off"}
    stats = run.deltas["a"][-1].stats
    assert (stats.drafted, stats.cycles) == (0, 5 * n)


# --- over HTTP ----------------------------------------------------------------------------------

PROMPT_ROW = RowView(0, 4, None, "prompt")
FIRST = PipelineView(
    "lookup+pdm",
    (
        CycleView(7, 0.0271, (PROMPT_ROW, None)),
        CycleView(8, 0.02, (None, PROMPT_ROW), VerdictView(4, 72, "undrafted")),
    ),
)
SECOND = PipelineView(
    "lookup+pdm",
    (
        CycleView(9, 0.02, (RowView(4, 1, 72, "target"), None)),
        CycleView(
            10,
            0.02,
            (RowView(5, 1, 105, "lookup"), RowView(4, 1, 72, "target")),
            VerdictView(5, 33, "rejected"),
            (5,),
        ),
    ),
)
SCRIPT = [Delta(72, "H", pipeline=FIRST), Delta(33, "!", "stop", STATS, pipeline=SECOND)]
ASK = {"stream": True, "stream_options": {"include_pipeline": True}}


def test_a_stream_with_cycles(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(SCRIPT)
    chunks = list(client.chat.completions.create(**CHAT, **ASK))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "H!"
    assert pipeline.requests[0].shows_pipeline
    first, *others = [chunk.pipeline for chunk in chunks if chunk.model_extra.get("pipeline")]
    assert first == {
        "stages": 2,
        "drafter": "lookup+pdm",
        "cycles": [
            {
                "cycle": 7,
                "milliseconds": 27.1,
                "rows": [
                    {"position": 0, "count": 4, "token": None, "text": "", "source": "prompt"},
                    None,
                ],
                "verdict": None,
                "void": [],
            },
            {
                "cycle": 8,
                "milliseconds": 20.0,
                "rows": [
                    None,
                    {"position": 0, "count": 4, "token": None, "text": "", "source": "prompt"},
                ],
                "verdict": {"position": 4, "token": 72, "text": "H", "outcome": "undrafted"},
                "void": [],
            },
        ],
    }
    (second,) = others
    assert second["cycles"][1] == {
        "cycle": 10,
        "milliseconds": 20.0,
        "rows": [
            {"position": 5, "count": 1, "token": 105, "text": "i", "source": "lookup"},
            {"position": 4, "count": 1, "token": 72, "text": "H", "source": "target"},
        ],
        "verdict": {"position": 5, "token": 33, "text": "!", "outcome": "rejected"},
        "void": [5],
    }


def test_cycles_wait_for_the_next_chunk(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    """No chunk is sent for them alone, and none is lost while text is held back."""
    held = Delta(72, "", pipeline=FIRST)
    pipeline.play([held, Delta(33, "H!", "stop", STATS, pipeline=SECOND)])
    chunks = list(client.completions.create(**TEXT, **ASK))
    assert [chunk.choices[0].text for chunk in chunks] == ["H!", ""]
    assert [c["cycle"] for c in chunks[0].pipeline["cycles"]] == [7, 8, 9, 10]
    assert "pipeline" not in chunks[1].model_extra


def test_each_choice_has_its_own(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(SCRIPT, [Delta(33, "!", "stop", STATS, pipeline=SECOND)])
    cycles: dict[int, list[int]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**CHAT, **ASK, n=2):
        told = (chunk.model_extra or {}).get("pipeline", {"cycles": []})
        cycles[chunk.choices[0].index] += [cycle["cycle"] for cycle in told["cycles"]]
    assert cycles == {0: [7, 8, 9, 10], 1: [9, 10]}


@pytest.mark.parametrize("options", [None, {}, {"include_pipeline": False}])
def test_off_by_default(
    client: openai.OpenAI, pipeline: FakePipeline, options: dict[str, bool] | None
) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    assert not pipeline.requests[0].shows_pipeline
    assert all("pipeline" not in (chunk.model_extra or {}) for chunk in chunks)


@pytest.mark.parametrize(("value", "speculates"), [(None, True), (True, True), (False, False)])
def test_the_switch(
    client: openai.OpenAI, pipeline: FakePipeline, value: bool | None, speculates: bool
) -> None:
    client.chat.completions.create(**CHAT, extra_body={"speculation": value})
    assert pipeline.requests[0].speculates is speculates


@pytest.mark.parametrize(("value", "status"), [(None, 200), (True, 200), (False, 400)])
def test_an_operator_may_take_the_switch_away(value: bool | None, status: int) -> None:
    pipeline = FakePipeline()
    with (
        serving(make_api(pipeline, settings=ApiSettings(speculation_switch=False))) as url,
        httpx.Client(base_url=url, timeout=WAIT_S) as http,
    ):
        response = post(http, TEXT | {"speculation": value})
        assert response.status_code == status
        if status == 400:
            assert response.json()["error"]["param"] == "speculation"
            assert not pipeline.requests
