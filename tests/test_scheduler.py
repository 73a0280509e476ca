"""The scheduler against a pipeline of tokens: every accept/reject pattern, every way to end."""

import itertools
from collections import defaultdict
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.scheduler import Scheduler
from service.messages import Delta, GenerateRequest, Grammar, PromptScored, Sampling, Stopping
from tests.token_pipeline import TokenPipeline, continuation
from tests.toys import each

MAX_LEN = 64
PLAIN = Stopping()
RIGHT, WRONG, NOTHING = "right", "wrong", "nothing"


class PlainText:
    """Text for scheduler tests: a token is its number and a space; stop strings are numbers."""

    def __init__(self, stop: Seq[str] = ()) -> None:
        self.stop = stop

    def push(self, token_id: int) -> tuple[str, bool]:
        found = str(token_id) in self.stop
        return ("" if found else f"{token_id} "), found

    def finish(self) -> str:
        return "."


class Run:
    """A scheduler and a token pipeline, with drafts right, wrong or missing as a script says."""

    def __init__(
        self, n: int, *, slots: int = 3, chunk: int = 8, eos: Seq[int] = (), proposer=None
    ):
        self.n = n
        self.scripts: dict[str, dict[int, str]] = {}
        self.texts: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.deltas: dict[str, list[Delta]] = {}
        self.scores: dict[str, list[PromptScored]] = defaultdict(list)
        self.scheduler = Scheduler(
            stages=n,
            slots=slots,
            max_len=MAX_LEN,
            chunk=chunk,
            eos_ids=frozenset(eos),
            new_text=lambda request: PlainText(request.stop.strings),
            new_proposer=each(proposer),
            uses_pdm=True,
        )
        self.pipeline = TokenPipeline(n, slots, MAX_LEN, self._draft)
        self.slots = slots

    def add(
        self,
        name: str,
        prompt: Seq[int],
        max_tokens: int,
        script: Seq[str] = (),
        stop: Stopping = PLAIN,
        **more: Any,
    ) -> None:
        """`script`: what the PDM drafts for the second, third, ... generated token."""
        first = len(prompt) + 1
        self.prompts[name] = len(prompt)
        self.scripts[name] = {first + i: how for i, how in enumerate(script)}
        self.texts[name] = [*prompt, *continuation(prompt, max_tokens)]
        self.deltas[name] = []
        request = GenerateRequest(name, tuple(prompt), max_tokens, stop=stop, **more)
        self.scheduler.add(request, lambda _: None)

    def _draft(self, slot: int, position: int) -> int | None:
        (name,) = [s.request.request_id for s in self.scheduler._running.values() if s.slot == slot]
        how = self.scripts[name].get(position, RIGHT)
        right = self.texts[name][position]
        return {RIGHT: right, WRONG: right + 1, NOTHING: None}[how]

    def cycle(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        for sequence, delta in self.scheduler.apply(self.pipeline.run(plan)):
            name = sequence.request.request_id
            (self.deltas if isinstance(delta, Delta) else self.scores)[name].append(delta)
        self.check()
        return True

    def check(self) -> None:
        """What must hold after every cycle."""
        running = self.scheduler._running.values()
        held = [s.slot for s in running]
        assert sorted(held + self.scheduler._slots.free) == list(range(self.slots)), (
            "a slot was lost"
        )
        for name, deltas in self.deltas.items():
            tokens = [d.token_id for d in deltas]
            start = self.prompts[name]
            assert tokens == self.texts[name][start : start + len(tokens)], "not once, in order"
            assert all(d.finish_reason is None for d in deltas[:-1])
        for s in running:
            assert s.entered <= s.end
            assert s.tokens == self.texts[s.request.request_id][: len(s.tokens)]

    def finish(self, most: int = 400) -> None:
        for _ in range(most):
            if not self.cycle():
                return
        raise AssertionError("the pipeline does not come to an end")


def expected_cycles(n: int, script: Seq[str]) -> int:
    """Cycles from the entry of the first generated token until one more token than `script` has
    drafts is out: a token comes one cycle after its predecessor if its draft was right, else n."""
    return n + sum(1 if how == RIGHT else n for how in script)


SCRIPTS = list(itertools.product([RIGHT, WRONG, NOTHING], repeat=5))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_pattern_of_one_sequence(n: int) -> None:
    """Text, cycle count and statistics, for all right/wrong/missing drafts."""
    for script in SCRIPTS:
        run = Run(n)
        # Verdicts for the tokens 2..6 meet drafts; the last token never needs to enter.
        run.add("a", [1, 2, 3], 6, script)
        run.finish()
        tokens = [d.token_id for d in run.deltas["a"]]
        assert tokens == continuation([1, 2, 3], 6)
        stats = run.deltas["a"][-1].stats
        assert stats is not None
        assert run.deltas["a"][-1].finish_reason == "length"
        # The draft of token 6, the last, is not ordered: it would not enter.
        assert stats.drafted == sum(how != NOTHING for how in script[:-1])
        assert stats.accepted == sum(how == RIGHT for how in script[:-1])
        assert stats.decoded == 5
        assert stats.cycles == expected_cycles(n, script[:-1])


def test_one_stage_never_speculates() -> None:
    run = Run(1, proposer=lambda _: 5)
    run.add("a", [1, 2, 3], 6, [WRONG] * 5)
    run.finish()
    stats = run.deltas["a"][-1].stats
    assert stats is not None
    assert (stats.drafted, stats.cycles, stats.decoded) == (0, 5, 5)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_three_sequences_share_the_cycles(n: int) -> None:
    """All patterns of three sequences with three drafts each; each costs what it costs alone."""
    scripts = list(itertools.product([RIGHT, WRONG], repeat=3))
    for trio in itertools.product(scripts, repeat=3):
        run = Run(n)
        for name, prompt, script in zip("abc", ([1], [2, 3], [4, 5, 6]), trio, strict=True):
            run.add(name, prompt, 4, script)
        run.finish()
        for name, script in zip("abc", trio, strict=True):
            stats = run.deltas[name][-1].stats
            assert stats is not None
            assert stats.cycles == expected_cycles(n, script[:-1])
            assert stats.generated_tokens == 4


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["eos", "stop", "length"])
def test_an_end_at_every_point(n: int, how: str) -> None:
    """EOS, a stop string and the length limit at each token, with other tokens in flight."""
    prompt = [7, 8, 9]
    truth = continuation(prompt, 8)
    for end, script in itertools.product(range(1, 8), itertools.product([RIGHT, WRONG], repeat=6)):
        last = truth[end - 1]
        if last in truth[: end - 1]:
            continue
        run = Run(n, eos=[last] if how == "eos" else [])
        length = end if how == "length" else 8
        stop = Stopping(strings=(str(last),) if how == "stop" else ())
        run.add("a", prompt, length, script, stop)
        run.add("b", [5], 8, script)  # its neighbour is not disturbed
        run.finish()
        deltas = run.deltas["a"]
        assert [d.token_id for d in deltas] == truth[:end]
        assert deltas[-1].finish_reason == ("length" if how == "length" else "stop")
        text = "".join(d.text for d in deltas)
        shown = truth[: end - 1] if how != "length" else truth[:end]
        assert text == "".join(f"{t} " for t in shown) + ("" if how == "stop" else ".")
        if how != "eos" or last not in continuation([5], 8):
            assert len(run.deltas["b"]) == 8


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_an_abort_at_every_cycle(n: int) -> None:
    """The slot is free at once, and the sequence that gets it is not disturbed by void rows."""
    for script in itertools.product([RIGHT, WRONG], repeat=4):
        for cycles in range(25):
            run = Run(n, slots=1, chunk=2)
            run.add("a", [1, 2, 3, 4, 5], 6, script)
            for _ in range(cycles):
                run.cycle()
            known = run.scheduler.abort("a")
            assert known == (not run.deltas["a"] or run.deltas["a"][-1].finish_reason is None)
            assert run.scheduler._slots.free == [0]
            before = len(run.deltas["a"])
            run.add("b", [3, 2], 6, script)
            run.finish()
            assert [d.token_id for d in run.deltas["b"]] == continuation([3, 2], 6)
            assert len(run.deltas["a"]) == before


def test_an_abort_in_the_queue() -> None:
    run = Run(2, slots=1)
    run.add("a", [1], 4, [])
    run.add("b", [2], 4, [])
    run.cycle()
    assert run.scheduler.waiting == 1
    assert run.scheduler.abort("b")
    assert not run.scheduler.abort("b")
    run.finish()
    assert run.deltas["b"] == []
    assert len(run.deltas["a"]) == 4


def test_the_proposer_overrides_the_pdm() -> None:
    """Lookup first; where it has nothing, the PDM's draft enters."""
    truth = [1, 2, 3, *continuation([1, 2, 3], 8)]

    def proposer(tokens: Seq[int]) -> int | None:
        assert list(tokens) == truth[: len(tokens)]
        return truth[len(tokens)] if len(tokens) % 2 else None

    run = Run(3, proposer=proposer)
    run.add("a", [1, 2, 3], 8, [])  # the PDM is always right too
    run.finish()
    stats = run.deltas["a"][-1].stats
    assert stats is not None
    assert stats.accepted == stats.drafted == 6


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 0.7, 1.0])
def test_at_high_temperatures_the_pdm_goes_first(temperature: float, seeded: bool) -> None:
    """Then the proposer is asked only where the PDM has nothing; with a seed it is asked always."""
    for script, needed in (([RIGHT] * 6, False), ([RIGHT, NOTHING, RIGHT], True)):
        asked: list[int] = []
        run = Run(3, proposer=lambda tokens, asked=asked: asked.append(len(tokens)))
        run.add("a", [1, 2, 3], 8, script, sampling=Sampling(temperature, seeded=seeded))
        run.finish()
        assert [d.token_id for d in run.deltas["a"]] == continuation([1, 2, 3], 8)
        assert bool(asked) == (needed or seeded or temperature <= 0.5)


def test_a_slot_has_an_end() -> None:
    """No row enters at a position >= max_len, and the last generated token does not enter."""
    run = Run(2)
    prompt = list(range(1, MAX_LEN - 3))
    run.add("a", prompt, 100, [])
    run.texts["a"] = [*prompt, *continuation(prompt, 100)]
    run.finish()
    assert len(run.deltas["a"]) == MAX_LEN - len(prompt)
    assert run.deltas["a"][-1].finish_reason == "length"
    assert run.pipeline.memory[0][0][MAX_LEN - 2] != -1
    assert run.pipeline.memory[0][0][MAX_LEN - 1] == -1


@pytest.mark.parametrize("length", [0, MAX_LEN, MAX_LEN + 5])
def test_a_prompt_that_does_not_fit_is_refused(length: int) -> None:
    run = Run(2)
    request = GenerateRequest("a", tuple(range(length)), 5)
    with pytest.raises(ValueError, match=f"{length} tokens does not fit a slot of {MAX_LEN}"):
        run.scheduler.add(request, lambda _: None)


def test_chunks_share_a_budget() -> None:
    """At most `chunk` prompt tokens enter in a cycle, the oldest request first."""
    run = Run(2, chunk=4)
    run.add("a", [1] * 6, 2, [])
    run.add("b", [2] * 3, 2, [])
    entered = []
    while (plan := run.scheduler.plan()) is not None:
        entered.append([(r.start, r.count) for r in plan.stages[0]])
        run.scheduler.apply(run.pipeline.run(plan))
    assert entered[:3] == [[(0, 4)], [(4, 2), (0, 2)], [(2, 1)]]


# --- ends that a request asks for ----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_token(n: int) -> None:
    """Its text is shown where that is asked for."""
    prompt, truth = [7, 8, 9], continuation([7, 8, 9], 8)
    for shown in (False, True):
        run = Run(n)
        run.add("a", prompt, 8, stop=Stopping(token_ids=(truth[3],), include_in_text=shown))
        run.finish()
        assert [d.token_id for d in run.deltas["a"]] == truth[:4]
        assert run.deltas["a"][-1].finish_reason == "stop"
        last = f"{truth[3]} ." if shown else "."
        assert run.deltas["a"][-1].text == last


def test_end_tokens_that_are_ignored() -> None:
    truth = continuation([7], 6)
    run = Run(2, eos=[truth[2]])
    run.add("a", [7], 6, stop=Stopping(ignore_eos=True))
    run.add("b", [7], 6)
    run.finish()
    assert [d.token_id for d in run.deltas["a"]] == truth
    assert [d.token_id for d in run.deltas["b"]] == truth[:3]


def test_what_the_stages_are_told_of_a_request() -> None:
    run = Run(2, eos=[3])
    run.add("a", [7, 8], 6, stop=Stopping(token_ids=(9, 5), min_tokens=4), logprobs=2)
    plan = run.scheduler.plan()
    assert plan is not None
    (told,) = plan.admitted
    assert (told.slot, told.prompt_length, told.end_ids, told.min_end) == (0, 2, (3, 5, 9), 6)
    assert told.logprobs == 2


# --- the scores of a prompt ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_every_token_of_a_prompt_but_the_first_is_scored(n: int, chunk: int) -> None:
    """Also where the same prompt is there already."""
    prompt = list(range(50, 57))
    run = Run(n, chunk=chunk)
    run.add("before", prompt, 3)
    run.finish()
    run.add("a", prompt, 3, prompt_logprobs=True)
    run.finish()
    ((scored,),) = (run.scores["a"],)
    assert [int(s.chosen) for s in scored.logprobs] == [1, 2, 3, 4, 5, 6]
    assert [s.top[0][0] for s in scored.logprobs] == prompt[1:]
    assert run.scores["before"] == []


# --- prefixes that are there already -------------------------------------------------------------


def cached(run: Run, name: str) -> int:
    stats = run.deltas[name][-1].stats
    assert stats is not None
    return stats.cached


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_conversation_goes_on_where_it_ended(n: int) -> None:
    run = Run(n, slots=2)
    first = [1, 2, 3, *continuation([1, 2, 3], 5)]
    run.add("a", [1, 2, 3], 5)
    run.finish()
    run.add("b", [*first, 30, 31], 5)
    run.finish()
    assert cached(run, "b") == len(first) - 1  # the last token of an answer never enters
    assert run.scheduler._slots.free[0] == 1, "the same slot went on"


def test_a_branch_of_a_conversation_leaves_the_other_one_there() -> None:
    run = Run(3, slots=2)
    prompt = [1, 2, 3, 4, 5, 6]
    first = [*prompt, *continuation(prompt, 20)]
    run.add("a", prompt, 20)
    run.finish()
    run.add("b", [*prompt, 99], 4)
    run.finish()
    assert cached(run, "b") == 6
    run.add("c", [*first, 40], 4)
    run.finish()
    assert cached(run, "c") == len(first) - 1


def test_the_whole_prompt_again_but_for_its_last_token() -> None:
    run = Run(2, slots=1)
    for name in "ab":
        run.add(name, [1, 2, 3, 4], 5)
        run.finish()
    assert cached(run, "b") == 3


def test_a_prefix_of_a_running_request_is_copied() -> None:
    run = Run(2, chunk=2)
    prompt = [1, 2, 3, 4, 5, 6]
    run.add("a", prompt, 20)
    for _ in range(8):
        run.cycle()
    run.add("b", [*prompt, 9], 5)
    run.finish()
    assert cached(run, "b") == 6


def test_answers_to_the_same_prompt_wait_for_it_to_be_read_once() -> None:
    run = Run(2, slots=3, chunk=2)
    prompt = [*range(10, 30)]
    for name in "abc":
        run.add(name, prompt, 3)
    run.finish()
    assert [cached(run, name) for name in "abc"] == [0, 18, 18]  # one more is not worth a wait
    assert run.pipeline.rows_run < 2 * (20 + 3 * 5)


def test_a_request_with_a_grammar_is_admitted_alone() -> None:
    """It may be long, and the size of a message is bounded."""
    run = Run(2)
    for name in "ab":
        run.add(name, [ord(name)], 3, grammar=Grammar("regex", "a*"))
    plan = run.scheduler.plan()
    assert plan is not None
    assert len(plan.admitted) == 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_load(data: st.DataObject) -> None:
    """Requests and aborts at any time, any slots, chunks, drafts and proposals."""
    n = data.draw(st.integers(1, 5))
    hints = data.draw(st.sampled_from([None, 2, 3]))
    run = Run(
        n,
        slots=data.draw(st.integers(1, 3)),
        chunk=data.draw(st.integers(1, 9)),
        proposer=None if hints is None else (lambda t: 11 if len(t) % hints == 0 else None),
    )
    names = iter("abcdefgh")
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "cycle", "cycle", "cycle", "abort"]))
        if action == "add" and (name := next(names, None)):
            known = data.draw(st.sampled_from([[], *run.texts.values()]))
            begun = known[: data.draw(st.integers(0, min(len(known), 30)))]
            rest = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
            prompt = [*begun, *rest]
            script = data.draw(st.lists(st.sampled_from([RIGHT, WRONG, NOTHING]), max_size=6))
            run.add(name, prompt, data.draw(st.integers(1, 8)), script or [RIGHT])
        elif action == "cycle":
            run.cycle()
        elif action == "abort" and run.deltas:
            run.scheduler.abort(data.draw(st.sampled_from(sorted(run.deltas))))
    run.finish()
    assert run.scheduler.running == run.scheduler.waiting == 0
