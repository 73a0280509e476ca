"""Requests that go on in another pipeline: token for token, text for text, whatever depends on the
text so far, and wherever the first one was lost."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.engine.lookup import Lookup
from service.engine.scheduler import Scheduler
from service.messages import (
    Delta,
    GenerateRequest,
    Grammar,
    Logprobs,
    PromptScored,
    Sampling,
    Stopping,
)
from service.pipeline.graph import Graph
from service.pipeline.local_graph import LocalGraph
from service.text.grammar import GrammarTokens
from service.text.stream import TextStream
from service.text.tokenizer import Tokenizer
from tests.test_scheduler import PlainText
from tests.token_pipeline import TokenPipeline, continuation
from tests.toys import VOCABULARY, blueprint, toy_chat_target, toy_pdm, toy_target

MAX_LEN = 64
Events = list[Delta | PromptScored]


class Pipeline:
    """Runs one request at a time, each with a scheduler of its own: nothing is remembered."""

    def __init__(self, graph: Graph, stages: int, decode, uses_pdm: bool, eos=frozenset()) -> None:
        self.graph, self.stages, self.decode = graph, stages, decode
        self.uses_pdm, self.eos_ids = uses_pdm, eos

    def run(self, request: GenerateRequest, most: int | None = None) -> Events:
        """The events, or the first few: then the pipeline is lost."""
        scheduler = Scheduler(
            stages=self.stages,
            slots=2,
            max_len=MAX_LEN,
            chunk=8,
            eos_ids=self.eos_ids,
            new_text=lambda request: TextStream(self.decode, request.stop),
            new_proposer=lambda: Lookup(1, unsettled=self.stages),
            uses_pdm=self.uses_pdm,
        )
        scheduler.add(request, lambda _: None)
        events: Events = []
        while (plan := scheduler.plan()) is not None:
            events += [event for _, event in scheduler.apply(self.graph.run(plan))]
            if most is not None and len(events) >= most:
                return events[:most]
        return events


def resumed(pipelines: Sequence[Pipeline], request: GenerateRequest, cuts: Sequence[int]) -> Events:
    """The events of a request that loses its pipeline after so many events, again and again."""
    done: Events = []
    for number, cut in enumerate([*cuts, None]):
        rest = replace(
            request,
            generated_ids=tuple(e.token_id for e in done if isinstance(e, Delta)),
            prompt_logprobs=request.prompt_logprobs and not done,
        )
        done += pipelines[number % len(pipelines)].run(rest, cut)
        if done and isinstance(done[-1], Delta) and done[-1].finish_reason is not None:
            break
    return done


def assert_same(found: Events, wanted: Events) -> None:
    assert [_plain(e) for e in found] == [_plain(e) for e in wanted]
    for a, b in zip(_logprobs(found), _logprobs(wanted), strict=True):
        assert a.chosen == pytest.approx(b.chosen, abs=1e-3)
        assert [t for t, _ in a.top] == [t for t, _ in b.top]
    last, reference = found[-1], wanted[-1]
    assert isinstance(last, Delta)
    assert isinstance(reference, Delta)
    assert last.stats is not None
    assert reference.stats is not None
    for name in ("prompt_tokens", "generated_tokens"):
        assert getattr(last.stats, name) == getattr(reference.stats, name)
    assert last.stats.cached <= last.stats.prompt_tokens


def _plain(event: Delta | PromptScored) -> tuple:
    if isinstance(event, PromptScored):
        return ("scored", len(event.logprobs))
    return event.token_id, event.text, event.finish_reason


def _logprobs(events: Events) -> Iterator[Logprobs]:
    for event in events:
        if isinstance(event, PromptScored):
            yield from event.logprobs
        elif event.logprobs is not None:
            yield event.logprobs


# --- over toys ----------------------------------------------------------------------------------

PIECES = [*(f"{c}".encode() for c in "abcdefgh .,\n"), b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80"]


def decode(ids: Sequence[int]) -> str:
    """Texts in which characters span tokens."""
    return b"".join(PIECES[i % len(PIECES)] for i in ids).decode(errors="replace")


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> list[Pipeline]:
    """Two pipelines of one target: another number of stages, with and without a PDM."""
    base = tmp_path_factory.mktemp("toys")
    folder = toy_target(base / "target")
    pdm = toy_pdm(base / "pdm", folder, bounds=(0, 2, 4, 6))
    three = LocalGraph(blueprint(folder, (2, 2, 2), pdm=pdm, slots=2, max_len=MAX_LEN))
    two = LocalGraph(blueprint(folder, 2, slots=2, max_len=MAX_LEN))
    return [Pipeline(three, 3, decode, uses_pdm=True), Pipeline(two, 2, decode, uses_pdm=False)]


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 20]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (5, -100.0))]),
    seeded=st.just(True),
    key=st.integers(0, 2),
)
stoppings = st.builds(
    Stopping,
    strings=st.sampled_from([(), ("ab",), ("é", "b.", "ha")]),
    token_ids=st.sampled_from([(), (7,)]),
    include_in_text=st.booleans(),
    min_tokens=st.sampled_from([0, 6]),
)
requests = st.builds(
    GenerateRequest,
    request_id=st.just("r"),
    prompt_ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20).map(tuple),
    max_tokens=st.integers(1, 30),
    sampling=samplings,
    stop=stoppings,
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=requests, cuts=st.lists(st.integers(0, 12), max_size=3))
def test_any_request_lost_anywhere(toys, request: GenerateRequest, cuts: list[int]) -> None:
    """Cut after no event, after the prompt's scores, or after any token; once or three times."""
    if request.logprobs is None:
        request = replace(request, prompt_logprobs=False)
    assert_same(resumed(toys, request, cuts), toys[0].run(request))


def test_every_cut_of_one_text(toys) -> None:
    sampling = Sampling(temperature=0.8, frequency_penalty=0.5, seeded=True, key=3)
    stop = Stopping(strings=("never in it",), min_tokens=5)
    request = GenerateRequest("r", (5, 6, 7), 24, sampling, stop, logprobs=1)
    wanted = toys[0].run(request)
    assert len(wanted) == 24
    for cut in range(len(wanted)):
        assert_same(resumed([*reversed(toys)], request, [cut]), wanted)


def test_an_end_token_is_drawn_where_it_would_have_been(toys) -> None:
    request = GenerateRequest("r", (1, 2, 3), 40)
    plain = toys[0].run(request)
    end = plain[9].token_id
    first = next(i for i, e in enumerate(plain) if e.token_id == end)
    ending = [Pipeline(t.graph, t.stages, t.decode, t.uses_pdm, frozenset({end})) for t in toys]
    wanted = ending[0].run(request)
    assert len(wanted) == first + 1
    assert wanted[-1].finish_reason == "stop"
    for cut in range(len(wanted)):
        assert_same(resumed(ending, request, [cut]), wanted)


# --- grammars, over a toy with a real vocabulary ------------------------------------------------


@lru_cache(maxsize=1)
def _grammar() -> Grammar:
    return Grammar("regex", r"(?s)\{\"city\": \"[A-Za-z ]{3,12}\", \"n\": [0-9]{1,3}\}")


def test_a_grammar_is_followed_from_where_it_was(tmp_path: Path, default_model: Path) -> None:
    folder = toy_chat_target(tmp_path / "toy", default_model, layers=4)
    tokenizer = Tokenizer.load(folder)
    toy = blueprint(folder, 2, slots=2, max_len=MAX_LEN)
    tokens = GrammarTokens.of(folder, tokenizer, toy.spec.target.vocab_size)
    graph = LocalGraph(replace(toy, spec=replace(toy.spec, grammar_tokens=tokens)))
    pipeline = Pipeline(
        graph, 2, tokenizer.decode, uses_pdm=False, eos=frozenset({tokenizer.eos_token_id})
    )
    for sampling in (Sampling(), Sampling(temperature=1.0, seeded=True, key=5)):
        request = GenerateRequest("r", (10, 20, 30), 40, sampling, grammar=_grammar())
        wanted = pipeline.run(request)
        text = "".join(e.text for e in wanted if isinstance(e, Delta))
        assert text.startswith('{"city": "')
        assert wanted[-1].finish_reason == "stop"
        for cut in range(len(wanted)):
            assert_same(resumed([pipeline], request, [cut]), wanted)


# --- the scheduler ------------------------------------------------------------------------------


def _scheduler(**options) -> Scheduler:
    base = {
        "stages": 2,
        "slots": 1,
        "max_len": MAX_LEN,
        "chunk": 4,
        "eos_ids": frozenset(),
        "new_text": lambda _: PlainText(),
    }
    return Scheduler(**base | options)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GenerateRequest("r", (1,), 3, generated_ids=(5, 6, 7)), "at least 1 is generated"),
        (GenerateRequest("r", (1,), 99, generated_ids=(5,) * 63), "does not fit"),
        (GenerateRequest("r", (), 3, generated_ids=(5,)), "does not fit"),
        (
            GenerateRequest("r", (1, 2), 3, generated_ids=(5,), logprobs=1, prompt_logprobs=True),
            "have gone out",
        ),
    ],
)
def test_what_can_not_be_resumed(request_: GenerateRequest, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _scheduler().add(request_, lambda _: None)


def test_who_goes_on_goes_first() -> None:
    """Before those whose client has seen nothing yet."""
    pipeline, order = TokenPipeline(2, 1, MAX_LEN, lambda _s, _p: None), []
    scheduler = _scheduler()
    for name in "abc":
        scheduler.add(GenerateRequest(name, (1, 2), 3), lambda _: None)
    generated = tuple(continuation([3, 4], 6))
    scheduler.add(GenerateRequest("d", (3, 4), 9, generated_ids=generated), lambda _: None)
    tokens: dict[str, list[int]] = {}
    while (plan := scheduler.plan()) is not None:
        for sequence, delta in scheduler.apply(pipeline.run(plan)):
            name = sequence.request.request_id
            tokens.setdefault(name, []).append(delta.token_id)
            if delta.finish_reason is not None:
                order.append(name)
    assert order == ["d", "a", "b", "c"]
    assert tokens["d"] == continuation([3, 4], 9)[6:]
