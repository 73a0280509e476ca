"""Lossless on the real default model in float32: speculation does not change a token, and neither
does the pipeline."""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import ray
import torch

from service.config import parse_settings
from service.default_model import prepare_default_model
from service.messages import GenerateRequest, Grammar, Sampling
from service.pipeline.blueprint import make_blueprint
from service.pipeline.local_graph import LocalGraph
from service.pipeline.ray_graph import RayGraph
from service.sampling import Stream, gumbel, is_greedy, shape
from service.text.tokenizer import Tokenizer
from tests.real_prompts import CHATS, TEXTS
from tests.toys import (
    generate,
    greedy_text,
    lookup_proposer,
    perfect_proposer,
    random_proposer,
    reference,
    wrong_proposer,
)

TOKENS = 64
SEEDED_TOKENS = 32
SLOTS = 4
VOCABULARY = 49152

# Chunks and batches change the order of float additions. Scores are about 10 to 30, and float32
# sums of 576 products differ by some 1e-5 of that: below this gap, either token is right.
TIE = 2e-3


@pytest.fixture(scope="module")
def model(default_model) -> Any:
    torch.set_num_threads(os.cpu_count() or 1)
    return reference(default_model)


@pytest.fixture(scope="module")
def prompts(default_model) -> list[list[int]]:
    """The first five are of different kinds; `make test` uses these."""
    tokenizer = Tokenizer.load(default_model)
    texts = [tokenizer.encode(text) for text in TEXTS]
    return [*texts[:1], *(tokenizer.render_chat(messages) for messages in CHATS), *texts[1:]]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """transformers' own greedy text of a prompt."""
    return lru_cache(lambda i: tuple(greedy_text(model, prompts[i], TOKENS)))


@dataclass
class Pipelined:
    """A running graph and how to send a request through it."""

    n: int
    graph: Any

    def text(self, prompt, *, tokens=TOKENS, proposer=None, uses_pdm=False, sampling=None):
        request = GenerateRequest("0", tuple(prompt), tokens, sampling or Sampling())
        made = self.texts([request], proposer=proposer, uses_pdm=uses_pdm)
        return made.tokens["0"], made.stats["0"]

    def texts(self, requests, *, proposer=None, uses_pdm=False, **more):
        return generate(
            self.graph,
            requests,
            stages=self.n,
            slots=SLOTS,
            max_len=512,
            chunk=64,
            proposer=proposer,
            uses_pdm=uses_pdm,
            **more,
        )


def make_pipeline(n: int, kind: str) -> Pipelined:
    pipeline = {"stages": n, "graph": kind, "slots": SLOTS, "max_len": 512, "chunk": 64}
    settings = parse_settings({"pipeline": pipeline})
    blueprint = make_blueprint(settings)
    if kind == "local":
        return Pipelined(n, LocalGraph(blueprint))
    return Pipelined(n, RayGraph(blueprint, settings.pipeline))


class Running:
    """The pipeline that runs at present: tests that want the same one share it."""

    def __init__(self) -> None:
        self.key: tuple[int, str] | None = None
        self.pipelined: Pipelined | None = None

    def get(self, key: tuple[int, str]) -> Pipelined:
        if key != self.key:
            self.stop()
            if key[1] == "ray":
                ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
            torch.set_num_threads(1)
            self.pipelined, self.key = make_pipeline(*key), key
        return self.pipelined

    def stop(self) -> None:
        if self.pipelined is not None:
            self.pipelined.graph.close()
            ray.shutdown()
        self.key = self.pipelined = None


@pytest.fixture(scope="module")
def running(model):  # noqa: ARG001 (the model before the threads are set to one)
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def pipeline(request, running):
    return running.get(request.param)


def scores(model, tokens, sampling: Sampling) -> torch.Tensor:
    """What the next token is the argmax of: logits, or seeded log-probabilities and noise."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)])).logits[0, -1]
    if is_greedy(sampling):
        return logits.double()
    noise = gumbel(sampling.key, Stream.GUMBEL, len(tokens), torch.arange(VOCABULARY))
    return shape(logits, sampling).double() + noise


def assert_same(model, prompt, wanted, got, sampling=None) -> None:
    """Equal token for token, up to a float tie, which is shown."""
    wanted, got = list(wanted), list(got)
    if wanted == got:
        return
    at = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
    both = scores(model, [*prompt, *wanted[:at]], sampling or Sampling())
    gap = float((both[wanted[at]] - both[got[at]]).abs())
    print(f"token {at}: {wanted[at]} or {got[at]}, scores {gap:.2e} apart")
    assert gap < TIE, f"token {at} is {got[at]}, not {wanted[at]}; scores are {gap:.2e} apart"
    assert both.argmax() in (wanted[at], got[at])


PIPELINES = [(2, "ray"), (3, "local"), (2, "local"), (3, "ray")]
EVERY_DAY = (2, "local")


def cases(count: int, every_day: int = 1):
    """Each pipeline with `count` things; all but the first few of one are for test-full."""
    values = [
        pytest.param(
            pipeline,
            i,
            marks=() if pipeline == EVERY_DAY and i < every_day else pytest.mark.full,
            id=f"n{pipeline[0]}-{pipeline[1]}-{i}",
        )
        for pipeline in PIPELINES
        for i in range(count)
    ]
    return pytest.mark.parametrize(("pipeline", "i"), values, indirect=["pipeline"])


@cases(len(CHATS) + len(TEXTS))
def test_greedy_text_is_plain_greedy_text(model, prompts, expected, pipeline, i) -> None:
    """With every drafter the same text, and the cycles that theory says."""
    prompt, n, decoded = prompts[i], pipeline.n, TOKENS - 1
    off, stats = pipeline.text(prompt)
    assert_same(model, prompt, expected(i), off)
    assert (stats.decoded, stats.cycles, stats.drafted) == (decoded, n * decoded, 0)
    known = [[*prompt, *off]]

    text, stats = pipeline.text(prompt, proposer=perfect_proposer(known))
    assert text == off
    # The last token has no draft: nothing would be generated behind it.
    assert (stats.accepted, stats.drafted) == (decoded - 1, decoded - 1)
    assert stats.cycles == n - 1 + decoded

    text, stats = pipeline.text(prompt, proposer=wrong_proposer(known, VOCABULARY))
    assert text == off
    assert (stats.accepted, stats.drafted) == (0, decoded - 1)
    assert stats.cycles == n * decoded

    text, stats = pipeline.text(prompt, proposer=random_proposer(i, known, VOCABULARY))
    assert text == off
    assert 0 < stats.accepted < stats.drafted

    text, stats = pipeline.text(prompt, uses_pdm=True)
    assert text == off
    assert stats.drafted == decoded - 1


SETTINGS = [
    Sampling(temperature=1.0, seeded=True, key=11),
    Sampling(temperature=0.7, top_p=0.9, seeded=True, key=2**63 + 5),
    Sampling(temperature=1.3, top_k=50, seeded=True, key=7),
    Sampling(temperature=1.0, top_k=40, top_p=0.95, seeded=True, key=123456789),
]


@cases(3, every_day=0)
def test_a_seed_means_the_same_text(model, prompts, pipeline, i) -> None:
    """Speculation on or off, alone or in a batch of four."""
    chosen = prompts[4 * i : 4 * i + 4]
    alone = []
    for prompt, sampling in zip(chosen, SETTINGS, strict=True):
        off, _ = pipeline.text(prompt, tokens=SEEDED_TOKENS, sampling=sampling)
        on, stats = pipeline.text(prompt, tokens=SEEDED_TOKENS, sampling=sampling, uses_pdm=True)
        assert on == off
        assert stats.drafted > 0
        alone.append(off)
    requests = [
        GenerateRequest(str(k), tuple(prompt), SEEDED_TOKENS, sampling)
        for k, (prompt, sampling) in enumerate(zip(chosen, SETTINGS, strict=True))
    ]
    together = pipeline.texts(requests, uses_pdm=True).tokens
    for k, (prompt, sampling) in enumerate(zip(chosen, SETTINGS, strict=True)):
        assert_same(model, prompt, alone[k], together[str(k)], sampling)


@cases(1, every_day=0)
def test_penalties_and_bias_are_those_of_transformers(model, prompts, pipeline, i) -> None:
    """`generate` with its processors, greedy, token for token; speculation on and off."""
    space, the = 216, 260
    sampling = Sampling(repetition_penalty=1.2, logit_bias=((space, -100.0), (the, 1.5)))
    for prompt in prompts[i : i + 3]:
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            repetition_penalty=1.2,
            sequence_bias=[[[space], -100.0], [[the], 1.5]],
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        off, _ = pipeline.text(prompt, tokens=32, sampling=sampling)
        on, stats = pipeline.text(prompt, tokens=32, sampling=sampling, uses_pdm=True)
        assert on == off == wanted
        assert stats.drafted > 0


@cases(1)
def test_log_probabilities_are_those_of_transformers(model, prompts, pipeline, i) -> None:
    """Of a prompt and its answer, drawn with a temperature that they do not know of."""
    prompt = prompts[i]
    request = GenerateRequest(
        "0",
        tuple(prompt),
        24,
        Sampling(temperature=0.7, seeded=True, key=8),
        logprobs=5,
        prompt_logprobs=True,
    )
    for uses_pdm in (False, True):
        made = pipeline.texts([request], uses_pdm=uses_pdm)
        text = [*prompt, *made.tokens["0"]]
        with torch.inference_mode():
            exact = torch.log_softmax(model(torch.tensor([text])).logits[0], -1)
        told = [*made.prompt_logprobs["0"], *made.logprobs["0"]]
        assert len(told) == len(text) - 1
        for position, one in enumerate(told, start=1):
            row = exact[position - 1]
            assert one.chosen == pytest.approx(float(row[text[position]]), abs=2e-3)
            assert [p for _, p in one.top] == pytest.approx(
                torch.topk(row, 5).values.tolist(), abs=2e-3
            )
            assert [float(row[t]) for t, _ in one.top] == pytest.approx(
                [p for _, p in one.top], abs=2e-3
            )


@cases(1)
def test_a_conversation_goes_on_where_it_ended(model, prompts, pipeline, i) -> None:
    """Its second turn is what it would be in an empty pipeline; so is a branch of the first."""
    prompt = prompts[i + 1]
    first, _ = pipeline.text(prompt, tokens=24)
    turns = [prompt, [*prompt, *first, *prompts[i + 2][-9:]], [*prompt, *first[:9], 260, 216]]
    alone = [pipeline.text(turn, tokens=24, uses_pdm=True)[0] for turn in turns]
    requests = [GenerateRequest(str(k), tuple(turn), 24) for k, turn in enumerate(turns)]
    made = pipeline.texts(requests, uses_pdm=True, together=False)
    for k, turn in enumerate(turns):
        assert_same(model, turn, alone[k], made.tokens[str(k)])
    assert made.stats["1"].cached + made.stats["2"].cached > len(prompt)


@cases(1)
def test_a_grammar_under_speculation(model, prompts, pipeline, i) -> None:  # noqa: ARG001
    """Constrained text is valid, the same with every drafter, and drafted well."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    tokenizer = Tokenizer.load(prepare_default_model())
    prompt = tokenizer.render_chat([{"role": "user", "content": "Paris as JSON: city, people."}])
    texts = []
    for uses_pdm, proposer in ((False, None), (True, None), (True, lookup_proposer(2))):
        request = GenerateRequest(
            "0", tuple(prompt), 60, grammar=Grammar("json_schema", json.dumps(schema))
        )
        made = pipeline.texts(
            [request], uses_pdm=uses_pdm, proposer=proposer, eos_ids={tokenizer.eos_token_id}
        )
        texts.append(made.tokens["0"])
        stats = made.stats["0"]
    answer = json.loads(tokenizer.decode(texts[0]))
    assert set(answer) == {"city", "people"}
    assert isinstance(answer["people"], int)
    assert texts[0] == texts[1] == texts[2]
    assert stats.accepted / stats.decoded > 0.5


@cases(1)
def test_stages_hold_their_own_layers_alone(pipeline, i) -> None:  # noqa: ARG001
    """By number of parameters: nothing of another stage is in an actor's memory."""
    layer, head, norm = 3_540_096, VOCABULARY * 576, 576
    graph = pipeline.graph
    if isinstance(graph, RayGraph):
        counts = graph.call("parameter_count")
    else:
        counts = [stage.parameter_count() for stage in graph.stages]
    layers = {2: (18, 12), 3: (12, 12, 6)}[pipeline.n]
    wanted = [layer * count for count in layers]
    wanted[0] += head  # the embedding, which the head shares
    wanted[-1] += head + norm
    assert list(counts) == wanted
