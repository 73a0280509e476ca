"""What the running pipeline feeds the PDM, and what the PDM makes of it, against transformers.

An observer follows the plans alone and knows so which token stands at which position and depth. It
recomputes the PDM's rows from a full forward of the reference model over the text of the moment
(proposals in flight included), and the PDM's logits from scratch in the form that training uses:
all rows of all depths at once, under a mask (DESIGN.md, section 1, "Training rows").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from service.engine.lookup import Proposer
from service.messages import CyclePlan, CycleResult, Rows, Sampling
from service.pdm.checkpoint import load_tensors
from service.pdm.drafter import MOST_UNREAD, Drafter
from service.pipeline.local_graph import LocalGraph
from tests.toys import (
    Generated,
    blueprint,
    generate,
    greedy_text,
    hidden_states,
    joined,
    prompts_of,
    random_proposer,
    reference,
    requests_of,
    texts_of,
    toy_pdm,
    toy_target,
    wrong_proposer,
)

LAYERS, COUNT = 6, 12
PROMPTS = prompts_of([1, 5, 13], seed=2)
# The longest way between both computations is six layers in float32.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

Cut = tuple[int, ...]
CUTS: list[Cut] = [(3, 3), (5, 1), (1, 5), (2, 2, 2), (1, 2, 3), (4, 1, 1), (2, 1, 1, 1, 1)]
FEW = [(5, 1), (1, 2, 3), (2, 1, 1, 1, 1)]  # the rest is for test-full
# Default anchors, every hidden state, and one that leaves gaps (a type for several depths, and
# types that no depth reaches).
ANCHORS: dict[str, tuple[int, ...] | None] = {
    "default": None,
    "all": tuple(range(LAYERS + 1)),
    "few": (0, 3, 4),
    "embedding": (0,),
}


@dataclass
class Target:
    folder: Path
    model: Any
    texts: list[list[int]]

    @classmethod
    def make(cls, folder: Path, architecture: str, **config: Any) -> "Target":
        toy_target(folder, architecture, LAYERS, **config)
        model = reference(folder)
        return cls(folder, model, [greedy_text(model, p, COUNT) for p in PROMPTS])

    @property
    def known(self) -> list[list[int]]:
        return joined(PROMPTS, self.texts)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return Target.make(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module", params=["Qwen2", "Qwen3", "Mistral", "SmolLM3"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("other")
    return Target.make(folder, f"{request.param}ForCausalLM")


@dataclass
class Row:
    """A row that the PDM should compute in a cycle."""

    position: int
    depth: int


class Observer:
    """Watches a local graph: checks every row and every draft, and counts what it has seen."""

    def __init__(self, target: Target, pdm: Path, cut: Cut, anchors: Sequence[int]) -> None:
        self.target, self.cut = target, cut
        self.n = len(cut)
        self.anchors = anchors
        self.bounds = [sum(cut[:k]) for k in range(self.n + 1)]
        self.tensors = load_tensors(pdm)
        self.previous = len([k for k in self.tensors if k.startswith("previous.")])
        self.pdm_layers = len({k.split(".")[1] for k in self.tensors if k.startswith("layers.")})
        self.graph = LocalGraph(blueprint(target.folder, cut, pdm=pdm))
        assert self.graph.drafter is not None
        self.drafter: Drafter = self.graph.drafter
        self.text: dict[int, list[int]] = {}  # slot -> tokens that have entered
        self.leaving: tuple[Rows, ...] = ()  # rows in the last stage in the cycle before
        self.unread: dict[int, list[Rows]] = {}  # by slot: those that left before and wait
        self.fed: list[tuple[Rows, Tensor]] = []
        self.logits: Tensor | None = None
        self.depths_seen: set[int] = set()
        self.fills_seen: set[int] = set()
        self.drafts_seen = 0
        self.on_rows: Callable[[int, Row], object] = lambda _slot, _row: None
        self._states: dict[tuple[int, ...], Tensor] = {}
        self._layers = plain_layers(target.folder, self.tensors, self.pdm_layers)
        self._wrap()

    def _wrap(self) -> None:
        rows, logits = self.drafter.rows, self.drafter._logits

        def keep_rows(plan: CyclePlan) -> list[tuple[Rows, Tensor]]:
            self.fed = rows(plan)
            return self.fed

        def keep_logits(plan: CyclePlan) -> Tensor:
            self.logits = logits(plan)
            return self.logits

        self.drafter.rows = keep_rows  # type: ignore[method-assign]
        self.drafter._logits = keep_logits  # type: ignore[method-assign]

    def run(self, proposer: Proposer | None = None, **how: Any) -> Generated:
        requests = requests_of(PROMPTS, COUNT, how.pop("sampling", None))
        made = generate(
            self.graph,
            requests,
            stages=self.n,
            uses_pdm=True,
            proposer=proposer,
            watch=self.watch,
            **how,
        )
        assert not any(r.error for r in made.reports)
        self.graph.close()
        return made

    # --- what the plan says -------------------------------------------------------------------

    def watch(self, plan: CyclePlan, _result: CycleResult) -> None:
        for rows, tokens in zip(plan.stages[0], plan.tokens, strict=True):
            text = self.text.setdefault(rows.slot, [])
            text[rows.start :] = tokens
        expected = self._expected(plan)
        self.check_rows(expected)
        self.check_logits(plan, expected)
        self.leaving = plan.stages[-1]

    def _expected(self, plan: CyclePlan) -> dict[int, list[Row]]:
        """For each slot the rows that the PDM has to compute, oldest first. Those that have left
        wait for a draft, but not for long, and not where a new request builds on them."""
        drafting = {order.slot for order in plan.drafts}
        found: dict[int, list[Row]] = {}

        def add(rows: Rows, depth: int) -> None:
            for position in range(rows.start, rows.start + rows.count):
                found.setdefault(rows.slot, []).append(Row(position, depth))

        for rows in self.leaving:
            self.unread.setdefault(rows.slot, []).append(rows)
        due = drafting | {a.slot for a in plan.admitted} | {c.source for c in plan.copies}
        for slot, unread in list(self.unread.items()):
            if slot in due or sum(rows.count for rows in unread) >= MOST_UNREAD:
                for rows in self.unread.pop(slot):
                    add(rows, self.n)
        for depth in range(self.n - 1, -1, -1):
            for rows in plan.stages[depth]:
                if rows.slot in drafting:
                    add(rows, depth)
        return found

    # --- the rows -----------------------------------------------------------------------------

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[L + 1, S, H]"""
        key = tuple(tokens)
        if key not in self._states:
            self._states[key] = hidden_states(self.target.model, key)
        return self._states[key]

    def feature(self, states: Tensor, depth: int) -> Tensor:
        """Hidden states [L + 1, S, H] -> aggregated features [S, H], as the paper writes it."""
        deep = [a for a in self.anchors if a <= self.bounds[depth]]
        together = torch.cat([states[a] for a in deep], dim=-1)
        return together @ self.tensors[f"aggregation.by_type.{len(deep) - 1}.weight"].T

    def check_rows(self, expected: dict[int, list[Row]]) -> None:
        assert {r.slot for r, _ in self.fed} == expected.keys()
        for first, features in self.fed:
            rows = expected[first.slot]
            assert [r.position for r in rows] == list(
                range(first.start, first.start + len(features))
            ), "gaps or doubles"
            states = self.states(self.text[first.slot][: rows[-1].position + 1])
            for row, feature in zip(rows, features, strict=True):
                mine = self.row_feature(states, row, rows)
                torch.testing.assert_close(feature, mine, **CLOSE)
                self.depths_seen.add(row.depth)
                self.on_rows(first.slot, row)

    def row_feature(self, states: Tensor, row: Row, rows: list[Row]) -> Tensor:
        """The feature [H] of one row, the newest one's extra input included."""

        def alone(position: int, depth: int) -> Tensor:
            return self.feature(states[:, position : position + 1], depth)[0]

        feature = alone(row.position, row.depth)
        if row.depth == 0:
            depths = {r.position: r.depth for r in rows}
            for j in range(1, min(self.previous, self.n, row.position) + 1):
                before = alone(row.position - j, depths.get(row.position - j, self.n))
                feature = feature + self.tensors[f"previous.by_distance.{j - 1}.weight"] @ before
        return feature

    # --- the logits ---------------------------------------------------------------------------

    def check_logits(self, plan: CyclePlan, expected: dict[int, list[Row]]) -> None:
        assert self.logits is not None
        assert len(self.logits) == len(plan.drafts)
        for order, logits in zip(plan.drafts, self.logits, strict=True):
            t = order.position - 1
            text = self.text[order.slot][: t + 1]
            assert len(text) == t + 1
            in_flight = [r for r in expected[order.slot] if r.depth < self.n]
            fill = len(in_flight)  # without bubbles: no draft is missing in these tests
            assert [(r.position, r.depth) for r in in_flight] == [
                (t - age, age) for age in range(fill - 1, -1, -1)
            ]
            mine = self.from_scratch(text, fill)
            torch.testing.assert_close(logits, mine, **CLOSE)
            self.fills_seen.add(fill)
            self.drafts_seen += 1

    @torch.no_grad()
    def from_scratch(self, text: Sequence[int], fill: int) -> Tensor:
        """The draft's logits [D] behind a text, by one block of rows for each depth 0..n."""
        size, n = len(text), self.n
        states = self.states(text)
        blocks = [self.feature(states, depth) for depth in range(n + 1)]  # each [S, H]
        newest = blocks[0].clone()
        for j in range(1, min(self.previous, n) + 1):
            before = blocks[j if j < min(fill, n) else n]
            newest[j:] += before[:-j] @ self.tensors[f"previous.by_distance.{j - 1}.weight"].T
        rows = torch.cat([newest, *blocks[1:]])  # [(n+1)S, H]
        depth = torch.arange(n + 1).repeat_interleave(size)
        position = torch.arange(size).repeat(n + 1)
        wanted = depth[:, None] + (position[:, None] - position[None])
        wanted = torch.where(wanted >= min(fill, n), torch.tensor(n), wanted)
        seen = (position[None] <= position[:, None]) & (depth[None] == wanted)
        # A row of depth 0 is its own newest; the others see themselves, or their kept form.
        assert bool((seen.sum(1) == position + 1).all())
        hidden = self._layers(rows, position, seen)
        newest = hidden[size - 1]  # depth 0, position t
        norm = self.target.model.model.norm
        scale = torch.rsqrt(newest.pow(2).mean() + norm.variance_epsilon)
        return self.tensors["head.weight"] @ (newest * scale * self.tensors["norm.weight"])


PlainLayers = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_layers(folder: Path, tensors: dict[str, Tensor], count: int) -> PlainLayers:
    """A PDM's decoder layers as transformers runs them, with eager attention: rows [R, H] at
    positions [R], under a mask [R, R] that says which rows a row attends to."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for i, layer in enumerate(model.model.layers[:count]):
        own = {k.removeprefix(f"layers.{i}."): t for k, t in tensors.items()}
        layer.load_state_dict({k: own[k] for k in layer.state_dict()})

    def run(rows: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        hidden = rows[None]
        rotation = model.model.rotary_emb(hidden, position[None])
        for layer in model.model.layers[:count]:
            hidden = layer(
                hidden,
                attention_mask=bias[None, None],
                position_ids=position[None],
                position_embeddings=rotation,
            )
        return hidden[0]

    return run


def observe(
    target: Target, tmp_path: Path, cut: Cut, anchors: str = "default", **form: int
) -> Observer:
    bounds = [sum(cut[:k]) for k in range(len(cut) + 1)]
    pdm = toy_pdm(tmp_path, target.folder, bounds=bounds, anchors=ANCHORS[anchors], **form)
    known = blueprint(target.folder, cut, pdm=pdm).spec.anchors
    return Observer(target, pdm, cut, known)


# --- tests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [pytest.param(c, marks=[] if c in FEW else pytest.mark.full) for c in CUTS], ids=str
)
@pytest.mark.parametrize("drafter", ["pdm", "wrong", "random"])
def test_rows_and_logits(llama: Target, tmp_path: Path, cut: Cut, drafter: str) -> None:
    """Three sequences with prompts in chunks, and rejections in between. Drafts are asked for
    where the proposer has nothing."""
    observer = observe(llama, tmp_path, cut)
    proposer = {
        "pdm": None,
        "wrong": wrong_proposer(llama.known, every=2),
        "random": random_proposer(3, llama.known, silent=6),
    }[drafter]
    made = observer.run(proposer, chunk=4)
    assert texts_of(made) == llama.texts
    n = len(cut)
    assert observer.depths_seen == set(range(n + 1))
    accepted = sum(s.accepted for s in made.stats.values())
    assert accepted < sum(s.drafted for s in made.stats.values())
    assert accepted > 0 or drafter != "random"
    assert observer.fills_seen == set(range(1, n + 1))
    asked = len(PROMPTS) * (COUNT - 2)
    assert observer.drafts_seen >= (asked if drafter == "pdm" else asked // 6)


@pytest.mark.parametrize("anchors", list(ANCHORS))
@pytest.mark.parametrize("cut", [(5, 1), (2, 2, 2), (1, 2, 3), (2, 1, 1, 1, 1)], ids=str)
def test_any_anchors(llama: Target, tmp_path: Path, cut: Cut, anchors: str) -> None:
    observer = observe(llama, tmp_path, cut, anchors)
    assert texts_of(observer.run(random_proposer(4, llama.known, silent=6))) == llama.texts
    assert observer.depths_seen == set(range(len(cut) + 1))


@pytest.mark.parametrize("cut", [(3, 3), (1, 2, 3), (2, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("layers", [2, 3])
def test_deeper_pdms(llama: Target, tmp_path: Path, cut: Cut, layers: int) -> None:
    """With more than one layer, keys of the second depend on what the row has seen in the first."""
    observer = observe(llama, tmp_path, cut, layers=layers)
    assert observer.pdm_layers == layers
    made = observer.run(random_proposer(5, llama.known, silent=6), chunk=3, together=False)
    assert texts_of(made) == llama.texts
    assert observer.fills_seen == set(range(1, len(cut) + 1))


@pytest.mark.parametrize("cut", [(3, 3), (1, 2, 3), (2, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "previous", [1, 5, *(pytest.param(j, marks=pytest.mark.full) for j in (2, 7))]
)
@pytest.mark.parametrize("chunk", [2, 8])
def test_previous_rows(llama: Target, tmp_path: Path, cut: Cut, previous: int, chunk: int) -> None:
    """The newest row's extra input, from rows in flight and from those that have left."""
    observer = observe(llama, tmp_path, cut, previous=previous)
    made = observer.run(random_proposer(7, llama.known, silent=6), chunk=chunk, together=False)
    assert texts_of(made) == llama.texts
    assert observer.fills_seen == set(range(1, len(cut) + 1))


@pytest.mark.parametrize("layers", [1, 2])
def test_other_architectures(other: Target, tmp_path: Path, layers: int) -> None:
    observer = observe(other, tmp_path, (1, 2, 3), layers=layers)
    assert texts_of(observer.run(random_proposer(6, other.known, silent=6), chunk=5)) == other.texts


def test_the_untrained_pdm(llama: Target) -> None:
    """Its drafts come from the target's last layer, over the deepest anchors."""
    graph = LocalGraph(blueprint(llama.folder, (2, 2, 2), pdm=True))
    assert graph.drafter is not None
    rows, seen = graph.drafter.rows, 0
    text: dict[int, list[int]] = {}
    fed: list[tuple[Rows, Tensor]] = []

    def keep(plan: CyclePlan) -> list[tuple[Rows, Tensor]]:
        fed[:] = rows(plan)
        return fed

    def watch(plan: CyclePlan, _result: CycleResult) -> None:
        nonlocal seen
        for r, tokens in zip(plan.stages[0], plan.tokens, strict=True):
            text.setdefault(r.slot, [])[r.start :] = tokens
        for first, features in fed:
            states = hidden_states(llama.model, text[first.slot])
            newest = first.start + len(features) - 1
            if any(o.slot == first.slot for o in plan.drafts):
                # The newest token has its embedding alone.
                torch.testing.assert_close(features[-1], states[0, newest], **CLOSE)
                seen += 1
            else:
                # What has left the pipeline passes its deepest anchor on: 6, before the norm.
                expected = states[6, first.start : newest + 1]
                torch.testing.assert_close(features, expected, **CLOSE)
                seen += len(features)

    graph.drafter.rows = keep  # type: ignore[method-assign]
    made = generate(graph, requests_of(PROMPTS, COUNT, None), stages=3, uses_pdm=True, watch=watch)
    graph.close()
    assert texts_of(made) == llama.texts
    assert seen > 40


@pytest.mark.parametrize("chunk", [1, 3, 13])
def test_a_prompt_is_of_the_deepest_type(llama: Target, tmp_path: Path, chunk: int) -> None:
    """Each prompt position is computed once, when its chunk has left the pipeline; a generated one
    at every depth where a draft is ordered, and at last as the deepest."""
    observer = observe(llama, tmp_path, (1, 2, 3))
    depths: dict[tuple[int, int], list[int]] = {}  # of each row, by slot and position
    observer.on_rows = lambda slot, row: depths.setdefault((slot, row.position), []).append(
        row.depth
    )
    observer.run(chunk=chunk)
    for slot, prompt in enumerate(PROMPTS):  # slots are given away in order
        for position in range(len(prompt)):
            assert depths.pop((slot, position)) == [3]
        # The token before the last is not drafted behind: it leaves while nothing else is due.
        for position in range(len(prompt), len(prompt) + COUNT - 3):
            found = depths.pop((slot, position))
            assert found[0] == 0
            assert found[-1] == 3
            assert found.count(3) == 1
    assert {position - len(PROMPTS[slot]) for slot, position in depths} <= {COUNT - 3, COUNT - 2}


def test_sampled_drafts_follow_from_the_same_rows(llama: Target, tmp_path: Path) -> None:
    """Rejection sampling with q of the PDM: other proposals in flight, the same features."""
    observer = observe(llama, tmp_path, (2, 2, 2))
    sampling = [Sampling(temperature=8.0, top_p=0.95, key=key) for key in range(len(PROMPTS))]
    made = observer.run(sampling=sampling, chunk=6)
    accepted = sum(s.accepted for s in made.stats.values())
    assert 0 < accepted < sum(s.drafted for s in made.stats.values())
    assert observer.fills_seen == {1, 2, 3}
