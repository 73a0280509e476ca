"""Toy targets of every architecture through the local graph, against transformers' own `generate`.

All in float32. A text is compared token for token; `Case.texts` asserts that the best two scores
lie further apart than rounding could bridge.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from service.config import Settings
from service.engine.lookup import Proposer
from service.messages import CyclePlan, CycleResult, GenerateRequest, Sampling
from service.pipeline.blueprint import make_blueprint
from service.pipeline.graph import GraphError
from service.pipeline.local_graph import LocalGraph
from service.pipeline.partition import balanced_layers
from tests.toys import (
    ARCHITECTURES,
    VOCABULARY,
    Generated,
    blueprint,
    generate,
    greedy_text,
    joined,
    lookup_proposer,
    perfect_proposer,
    prompts_of,
    random_proposer,
    reference,
    requests_of,
    smallest_gap,
    texts_of,
    toy_pdm,
    toy_target,
    wrong_proposer,
)

LAYERS = 6
COUNT = 14  # tokens of each text
GAP = 1e-3  # float32 moves these scores by some 1e-5
PROMPTS = prompts_of([1, 2, 7, 19])
CUTS: list[tuple[int, ...]] = [(6,), (3, 3), (2, 2, 2), (2, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)]
UNEVEN: list[tuple[int, ...]] = [(1, 5), (4, 1, 1), (1, 2, 3)]
DRAFTERS = ["off", "perfect", "wrong", "random", "pdm", "lookup", "lookup+pdm"]


@dataclass
class Case:
    """A toy with the texts that transformers generates."""

    folder: Path
    model: Any
    texts: list[list[int]]

    @classmethod
    def make(cls, folder: Path, architecture: str, **config: Any) -> "Case":
        toy_target(folder, architecture, LAYERS, **config)
        model = reference(folder)
        texts = [greedy_text(model, prompt, COUNT) for prompt in PROMPTS]
        for prompt, text in zip(PROMPTS, texts, strict=True):
            assert smallest_gap(model, prompt, text) > GAP
        assert len({t for text in texts for t in text}) > 10, "the texts of this toy are dull"
        return cls(folder, model, texts)

    def proposer(self, drafter: str) -> Proposer | None:
        known = joined(PROMPTS, self.texts)
        if drafter == "perfect":
            return perfect_proposer(known)
        if drafter == "wrong":
            return wrong_proposer(known)
        if drafter == "random":
            return random_proposer(7, known)
        return lookup_proposer(1) if "lookup" in drafter else None


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{a}-untied": (a, {"tie_word_embeddings": False}) for a in ARCHITECTURES},
    **{f"{a}-tied": (a, {"tie_word_embeddings": True}) for a in ARCHITECTURES},
    # Windows shorter than the texts.
    "Mistral-window": ("MistralForCausalLM", {"sliding_window": 6}),
    "Qwen3-window": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "Llama-biases": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "seed": 3},
    ),
    "Llama-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(VARIANTS))
def any_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, config = VARIANTS[request.param]
    return Case.make(tmp_path_factory.mktemp("toy"), architecture, **config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


class Bench:
    """A graph that is used again and again, so that its slots never are fresh."""

    def __init__(self, folder: Path, cut: Sequence[int], pdm: Path | bool = True) -> None:
        self.stages = len(cut)
        self.with_pdm = bool(pdm) and self.stages > 1
        self.graph = LocalGraph(blueprint(folder, cut, pdm=pdm if self.with_pdm else False))

    def run(self, prompts: Sequence[Sequence[int]], count: int = COUNT, **how: Any) -> Generated:
        sampling = how.pop("sampling", None)
        requests = requests_of(prompts, count, sampling)
        if not self.with_pdm:
            how["uses_pdm"] = False
        return generate(self.graph, requests, stages=self.stages, **how)


@pytest.fixture(scope="module", params=CUTS + UNEVEN, ids=str)
def bench(request: pytest.FixtureRequest, llama: Case) -> Iterator[Bench]:
    made = Bench(llama.folder, request.param)
    yield made
    made.graph.close()


# --- greedy text --------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "chunk"), [((6,), 64), ((1, 2, 3), 1), ((4, 2), 5)], ids=str)
def test_greedy_text_is_that_of_transformers(any_case: Case, cut: Sequence[int], chunk: int):
    bench = Bench(any_case.folder, cut)
    assert texts_of(bench.run(PROMPTS, chunk=chunk, uses_pdm=True)) == any_case.texts
    bench.graph.close()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_changes_the_text(bench: Bench, llama: Case, drafter: str) -> None:
    made = bench.run(PROMPTS, proposer=llama.proposer(drafter), uses_pdm="pdm" in drafter, chunk=5)
    assert texts_of(made) == llama.texts
    assert not any(report.error for report in made.reports)
    n, decoded = bench.stages, COUNT - 1
    for stats in made.stats.values():
        assert stats.generated_tokens == COUNT
        assert stats.decoded == decoded
        if n == 1:
            assert (stats.cycles, stats.drafted) == (decoded, 0)
        elif drafter == "off":
            assert (stats.cycles, stats.drafted) == (n * decoded, 0)
        elif drafter == "perfect":
            assert (stats.drafted, stats.accepted) == (decoded - 1, decoded - 1)
            assert stats.cycles == n - 1 + decoded
        elif drafter == "wrong":
            assert (stats.drafted, stats.accepted) == (decoded - 1, 0)
            assert stats.cycles == n * decoded
        elif "pdm" in drafter:  # it always proposes
            assert stats.drafted == decoded - 1
            assert stats.cycles == n + stats.accepted + n * (decoded - 1 - stats.accepted)


def test_the_other_drafters_have_an_effect(llama: Case) -> None:
    """Else the texts above would be equal for lack of speculation."""
    bench = Bench(llama.folder, (2, 2, 2))
    for drafter in ["random", "pdm", "lookup", "lookup+pdm"]:
        how = {"proposer": llama.proposer(drafter), "uses_pdm": "pdm" in drafter}
        made = bench.run(PROMPTS, 30, **how)
        drafted = sum(s.drafted for s in made.stats.values())
        accepted = sum(s.accepted for s in made.stats.values())
        assert 0 < accepted < drafted
    bench.graph.close()


@pytest.mark.parametrize("chunk", [1, 3, 19])
@pytest.mark.parametrize("slots", [1, 3])
def test_any_chunk_and_any_neighbours(llama: Case, chunk: int, slots: int) -> None:
    """One after another, two at a time, all in one batch, or coming while others are decoded."""
    bench = Bench(llama.folder, (4, 1, 1))
    for together in (True, False):
        made = bench.run(
            PROMPTS,
            chunk=chunk,
            slots=slots,
            together=together,
            proposer=llama.proposer("random"),
            uses_pdm=True,
        )
        assert texts_of(made) == llama.texts
    bench.graph.close()


@pytest.mark.parametrize("drafter", ["off", "wrong", "pdm"])
def test_a_used_slot_is_as_good_as_a_fresh_one(llama: Case, drafter: str) -> None:
    """Slots full of void rows and of longer texts of others."""
    bench = Bench(llama.folder, (2, 2, 2))
    how = {"proposer": llama.proposer(drafter), "uses_pdm": drafter == "pdm", "slots": 1}
    fresh = bench.run([PROMPTS[1]], **how)
    bench.run([PROMPTS[3]], count=40, **how)
    used = bench.run([PROMPTS[1]], **how)
    assert texts_of(fresh) == texts_of(used) == [llama.texts[1]]
    assert fresh.stats == used.stats  # so the PDM's rows are as good, too
    bench.graph.close()


# --- prefixes that are there already -------------------------------------------------------------


@pytest.mark.parametrize(
    ("together", "slots", "chunk"), [(False, 1, 64), (False, 2, 3), (True, 4, 64), (True, 2, 3)]
)
@pytest.mark.parametrize("drafter", ["off", "pdm", "paper's pdm"])
def test_what_is_reused_changes_nothing(
    llama: Case, tmp_path: Path, drafter: str, together: bool, slots: int, chunk: int
) -> None:
    """A conversation that goes on, branches of it, the same prompt again: texts and drafts are
    those of requests that begin in an empty pipeline."""
    pdm = drafter == "pdm"
    if pdm:
        pdm = toy_pdm(tmp_path, llama.folder, bounds=(0, 2, 4, 6), layers=2, previous=3)
    bench = Bench(llama.folder, (2, 2, 2), pdm=pdm or drafter != "off")
    first = [*PROMPTS[3], *llama.texts[3]]
    prompts = [
        PROMPTS[3],
        [*first, 5, 6, 7],
        [*PROMPTS[3], 8],
        PROMPTS[3],
        [*first[:11], 30, 31],
        [*first[:25], 9],
        PROMPTS[1],
        first,
    ]
    how = {"uses_pdm": drafter != "off", "slots": slots, "chunk": chunk}
    alone = [bench.run([prompt], 12, **how) for prompt in prompts]
    reused = bench.run(prompts, 12, together=together, **how)
    assert texts_of(reused) == [text for run in alone for text in texts_of(run)]
    before = [run.stats["0"] for run in alone]
    after = [reused.stats[str(i)] for i in range(len(prompts))]
    assert [replace(s, cached=0) for s in after] == before
    assert all(s.cached == 0 for s in before)
    assert sum(s.cached for s in after) > 40
    bench.graph.close()


def test_text_up_to_the_end_of_the_slot(llama: Case) -> None:
    """The last position of a slot is generated but never entered."""
    longest = greedy_text(llama.model, PROMPTS[3], 64 - 19)
    assert smallest_gap(llama.model, PROMPTS[3], longest) > GAP
    bench = Bench(llama.folder, (3, 3))
    made = bench.run([PROMPTS[3]], count=1000, uses_pdm=True)
    assert texts_of(made) == [longest]
    bench.graph.close()


# --- seeded sampling ----------------------------------------------------------------------------

SHAPES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 12},
    {"temperature": 3.0, "top_p": 0.8, "top_k": 40},
]


KEYS = (0, 1, 2**63 + 11, 2**64 - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_seed_means_the_same_text(llama: Case, shape: dict[str, Any]) -> None:
    """Speculation on and off, alone and in a batch of four with other seeds and settings."""
    prompt, count = PROMPTS[2], 10
    plain = Bench(llama.folder, (6,), pdm=False)
    piped = Bench(llama.folder, (1, 2, 3))
    samplings = [Sampling(**shape, seeded=True, key=key) for key in KEYS]
    truth = [texts_of(plain.run([prompt], count, sampling=s))[0] for s in samplings]
    known = joined([prompt] * 4, truth)
    proposers: list[Proposer | None] = [
        None,
        perfect_proposer(known),
        wrong_proposer(known),
        random_proposer(1, known),
        lookup_proposer(1),
    ]
    for uses_pdm in (False, True):
        for proposer in proposers:
            how = {"uses_pdm": uses_pdm, "proposer": proposer, "chunk": 4}
            assert texts_of(piped.run([prompt] * 4, count, sampling=samplings, **how)) == truth
    mixed = [Sampling(), *(Sampling(**other, seeded=True, key=5) for other in SHAPES[1:3])]
    for place, sampling in enumerate(samplings):
        how = {"uses_pdm": True, "proposer": lookup_proposer(1) if place % 2 else None}
        alone = piped.run([prompt], count, sampling=sampling, **how)
        assert texts_of(alone) == [truth[place]]
        prompts = [*PROMPTS[:2], PROMPTS[3]]
        prompts.insert(place, prompt)
        neighbours = [*mixed[:place], sampling, *mixed[place:]]
        made = piped.run(prompts, count, sampling=neighbours, chunk=6, **how)
        assert texts_of(made)[place] == truth[place]
    plain.graph.close()
    piped.graph.close()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seeded=True, key=3)], ids=str)
def test_a_request_without_speculation_has_the_same_text(llama: Case, sampling: Sampling) -> None:
    """Each in turn does without, beside others that speculate."""
    bench = Bench(llama.folder, (1, 2, 3))
    how = {"stages": 3, "proposer": lookup_proposer(1), "uses_pdm": True}
    requests = requests_of(PROMPTS, COUNT, sampling)
    truth = texts_of(generate(bench.graph, requests, **how))
    for place in range(len(PROMPTS)):
        some = [replace(r, speculates=i != place) for i, r in enumerate(requests)]
        made = generate(bench.graph, some, **how)
        assert texts_of(made) == truth
        assert all((made.stats[r.request_id].drafted > 0) == r.speculates for r in some)
    bench.graph.close()


PENALTIES = {
    "presence_penalty": 0.6,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.3,
    "logit_bias": ((3, 2.0), (40, -100.0)),
}


def test_penalties_under_speculation(llama: Case) -> None:
    """Greedy and seeded: what is proposed changes nothing, also where penalties count tokens that
    are rejected later."""
    piped, plain = Bench(llama.folder, (1, 2, 3)), Bench(llama.folder, (6,), pdm=False)
    sampling = [
        Sampling(**PENALTIES),
        Sampling(**PENALTIES, temperature=1.2, min_p=0.02, seeded=True, key=4),
        Sampling(**PENALTIES, temperature=0.8, top_p=0.9, seeded=True, key=5),
        Sampling(),
    ]
    truth = texts_of(plain.run(PROMPTS, sampling=sampling))
    assert truth[3] == llama.texts[3]
    assert truth[0] != llama.texts[0]
    known = joined(PROMPTS, truth)
    for proposer in (None, perfect_proposer(known), random_proposer(3, known), lookup_proposer(1)):
        made = piped.run(PROMPTS, sampling=sampling, uses_pdm=True, proposer=proposer)
        assert texts_of(made) == truth
    piped.graph.close()
    plain.graph.close()


def test_greedy_penalties_are_those_of_transformers(llama: Case) -> None:
    """Repetition penalty and bias; presence and frequency, which it lacks, from their formula."""
    bench = Bench(llama.folder, (3, 3))
    made = bench.run(PROMPTS, 20, sampling=Sampling(**PENALTIES), uses_pdm=True)
    for prompt, text in zip(PROMPTS, texts_of(made), strict=True):
        generated = list(prompt)
        for token in text:
            with torch.no_grad():
                scores = llama.model(torch.tensor([generated])).logits[:, -1]
            scores = SequenceBiasLogitsProcessor({(3,): 2.0, (40,): -100.0})(None, scores)
            ids = torch.tensor([generated])
            scores = RepetitionPenaltyLogitsProcessor(1.3)(ids, scores)[0]
            for i, count in Counter(generated[len(prompt) :]).items():
                scores[i] -= 0.3 * count + 0.6
            assert int(scores.argmax()) == token
            generated.append(token)
    bench.graph.close()


def test_log_probabilities_of_prompt_and_text(llama: Case) -> None:
    """Those of transformers, whatever the penalties; the same with speculation on and off."""
    request = GenerateRequest(
        "0",
        tuple(PROMPTS[3]),
        8,
        Sampling(**PENALTIES),
        logprobs=3,
        prompt_logprobs=True,
    )
    for cut, uses_pdm in (((6,), False), ((1, 2, 3), True)):
        bench = Bench(llama.folder, cut)
        made = generate(
            bench.graph, [request], stages=len(cut), chunk=7, uses_pdm=uses_pdm, slots=2
        )
        text = [*PROMPTS[3], *texts_of(made)[0]]
        with torch.no_grad():
            exact = torch.log_softmax(llama.model(torch.tensor([text])).logits[0], -1)
        told = [*made.prompt_logprobs["0"], *made.logprobs["0"]]
        assert len(told) == len(text) - 1
        for position, one in enumerate(told, start=1):
            row = exact[position - 1]
            assert one.chosen == pytest.approx(float(row[text[position]]), abs=1e-4)
            best = torch.topk(row, 3)
            assert [i for i, _ in one.top] == best.indices.tolist()
            assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        bench.graph.close()


def test_seeds_differ(llama: Case) -> None:
    bench = Bench(llama.folder, (3, 3))
    sampling = [Sampling(temperature=2.0, seeded=True, key=key) for key in range(4)]
    texts = texts_of(bench.run([PROMPTS[1]] * 4, sampling=sampling))
    assert len({tuple(t) for t in texts}) == 4
    bench.graph.close()


def test_an_unseeded_text_depends_on_its_request_alone(llama: Case) -> None:
    """Rejection sampling with the same drafter: alone, in a batch, or again."""
    bench = Bench(llama.folder, (1, 2, 3))
    sampling = [Sampling(temperature=1.5, top_p=0.95, key=key) for key in range(4)]
    for uses_pdm, proposer in [(True, None), (True, lookup_proposer(1)), (False, None)]:
        how = {"uses_pdm": uses_pdm, "proposer": proposer}
        batch = texts_of(bench.run(PROMPTS, 10, sampling=sampling, **how))
        alone = [
            texts_of(bench.run([prompt], 10, sampling=s, **how))[0]
            for prompt, s in zip(PROMPTS, sampling, strict=True)
        ]
        assert batch == alone == texts_of(bench.run(PROMPTS, 10, sampling=sampling, **how))
    bench.graph.close()


# --- what a stage holds -------------------------------------------------------------------------


def _layer_sizes(folder: Path) -> list[int]:
    """From the config: numbers held by each decoder layer of a toy."""
    config = blueprint(folder, 1).spec.target
    h, mlp = config.hidden_size, config.intermediate_size
    head_dim = config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    size = h * q + 2 * h * kv + q * h + 3 * h * mlp + 2 * h
    if config.architecture == "Qwen2ForCausalLM":
        size += q + 2 * kv
    if config.architecture == "Qwen3ForCausalLM":
        size += 2 * head_dim
    if config.out_bias:
        size += q + 2 * kv + h
    if config.mlp_bias:
        size += 2 * mlp + h
    return [size] * config.num_hidden_layers


@pytest.mark.parametrize("cut", [(6,), (4, 1, 1), (1, 2, 3)], ids=str)
def test_a_stage_holds_its_own_layers_only(any_case: Case, cut: Sequence[int]) -> None:
    graph = LocalGraph(blueprint(any_case.folder, cut))
    config = blueprint(any_case.folder, 1).spec.target
    sizes, width = _layer_sizes(any_case.folder), config.hidden_size
    table = config.vocab_size * width
    bounds = [sum(cut[:k]) for k in range(len(cut) + 1)]
    expected = [sum(sizes[a:b]) for a, b in pairwise(bounds)]
    expected[0] += table
    expected[-1] += width + table  # the head is laid out anew, so it is no embedding any more
    assert [stage.parameter_count() for stage in graph.stages] == expected
    whole = sum(p.numel() for p in any_case.model.parameters())
    twice = table if config.tie_word_embeddings else 0
    assert sum(expected) - twice == whole
    for stage, (start, end) in zip(graph.stages, pairwise(bounds), strict=True):
        assert len(stage.layers.layers) == end - start
        assert hasattr(stage, "embedding") == stage.is_first
        assert hasattr(stage, "head") == hasattr(stage, "norm") == stage.is_last
        assert not any(p.is_meta for p in stage.layers.parameters())
    graph.close()


def test_the_blueprint_of_the_settings(llama: Case, tmp_path: Path) -> None:
    """`make_blueprint` comes to what the tests' own helper builds."""
    pipeline = {"stages": 3, "layers": [1, 2, 3], "slots": 4, "max_len": 64}
    settings = {"model": str(llama.folder), "pipeline": pipeline}
    bounds = (0, 1, 3, 6)
    checkpoint = toy_pdm(tmp_path, llama.folder, bounds=bounds)
    for drafter, pdm in [
        ({"kind": "off"}, False),
        ({"kind": "lookup"}, False),
        ({"kind": "pdm"}, True),
        ({"checkpoint": str(checkpoint)}, checkpoint),
    ]:
        made = make_blueprint(Settings.model_validate({**settings, "drafter": drafter}))
        mine = blueprint(llama.folder, (1, 2, 3), pdm=pdm)
        assert (made.spec, made.checkpoint) == (mine.spec, mine.checkpoint)
        assert made.with_drafter == bool(pdm)
        assert made.draft_vocabulary == (0 if not pdm else VOCABULARY if pdm is True else 49)
    del pipeline["layers"]
    balanced = make_blueprint(Settings.model_validate(settings))
    cost = (VOCABULARY * 32) / (_layer_sizes(llama.folder)[0] - 2 * 32)
    counts = balanced_layers(LAYERS, 3, cost)
    assert [b - a for a, b in pairwise(balanced.spec.bounds)] == list(counts)


# --- a drafter that fails -----------------------------------------------------------------------


def test_a_drafter_that_fails_costs_speculation_only(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(llama.folder, (2, 2, 2))
    truth = bench.run(PROMPTS, uses_pdm=True)
    drafter = bench.graph.drafter
    assert drafter is not None
    healthy, calls = drafter._cached, 0

    def failing(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls in (2, 5, 6, 7, 15):
            raise RuntimeError(f"call {calls}")
        return healthy(*args)

    monkeypatch.setattr(drafter, "_cached", failing)
    seen: list[tuple[int, str | None, int]] = []

    def watch(plan: CyclePlan, result: CycleResult) -> None:
        assert result.drafter is not None
        assert all(stage.seconds > 0 for stage in result.stages if plan.stages[0])
        seen.append((calls, result.drafter.error, len(result.drafter.drafts)))
        assert len(result.drafter.drafts) == (0 if result.drafter.error else len(plan.drafts))

    made = bench.run(PROMPTS, uses_pdm=True, watch=watch)
    assert texts_of(made) == texts_of(truth) == llama.texts
    errors = [(call, error) for call, error, _ in seen if error]
    assert errors == [(k, f"RuntimeError: call {k}") for k in (2, 5, 6, 7, 15)]
    assert sum(drafts for call, _, drafts in seen if call > 15) > 12
    for name, stats in made.stats.items():
        assert 0 < stats.drafted <= truth.stats[name].drafted
    assert sum(s.drafted for s in made.stats.values()) < sum(
        s.drafted for s in truth.stats.values()
    )
    bench.graph.close()


def test_a_drafter_that_always_fails(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama.folder, (3, 3))
    drafter = bench.graph.drafter
    assert drafter is not None

    def failing(*_: Any) -> torch.Tensor:
        raise ValueError("no memory")

    monkeypatch.setattr(drafter, "_cached", failing)
    made = bench.run(PROMPTS, uses_pdm=True)
    assert texts_of(made) == llama.texts
    assert {r.error for r in made.reports} <= {None, "ValueError: no memory"}
    assert all((s.drafted, s.cycles) == (0, 2 * (COUNT - 1)) for s in made.stats.values())
    bench.graph.close()


def test_a_stage_that_fails_fails_the_cycle(llama: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama.folder, (2, 2, 2))

    def failing(*_: Any) -> torch.Tensor:
        raise ValueError("no memory")

    monkeypatch.setattr(bench.graph.stages[1].layers, "forward", failing)
    with pytest.raises(GraphError, match="a stage failed: ValueError: no memory"):
        bench.run(PROMPTS, uses_pdm=True)
    bench.graph.close()
