"""Steps of fixed shapes, which GPUs replay, against the plain forward. All but the capture itself
runs here; the capture is told to a double of torch.cuda."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from service.config import parse_settings
from service.messages import CyclePlan, CycleResult, Proposal, Rows, Sampling
from service.pdm.drafter import Drafter
from service.pipeline import decode_step, linear, local_graph
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.cache import Batch
from service.pipeline.cuda import Capture
from service.pipeline.decode_step import DecodeStep, StepShape, buckets
from service.pipeline.local_graph import LocalGraph
from service.pipeline.padded import PaddedBatch
from service.pipeline.spec import ActorSpec
from service.pipeline.stage import Stage
from service.pipeline.texts import SlotTexts
from tests.toys import (
    blueprint,
    generate,
    lookup_proposer,
    prompts_of,
    random_proposer,
    requests_of,
    texts_of,
    toy_pdm,
    toy_target,
)

CPU = torch.device("cpu")
SLOTS, MAX_LEN, HIDDEN = 5, 40, 32
BOUND = 1e-4  # float32 adds up in another order; hidden states are of the size of 1 to 100


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that toys have several buckets: 8, 16, 32, 40."""
    monkeypatch.setattr(decode_step, "SHORTEST_CONTEXT", 8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target(tmp_path_factory.mktemp("llama"))


def static(made: Blueprint) -> Blueprint:
    return replace(made, spec=replace(made.spec, static_steps=True))


# --- one forward --------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "SmolLM3": ("SmolLM3ForCausalLM", {}),
    "Mistral-window": ("MistralForCausalLM", {"sliding_window": 6}),
}


class Bench:
    """A whole toy as one stage, and steps for one row and for three rows of a slot."""

    def __init__(self, folder: Path) -> None:
        spec = blueprint(folder, 1, slots=SLOTS, max_len=MAX_LEN).spec
        self.stage = Stage(replace(spec, static_steps=True), 0)
        self.steps = {
            width: DecodeStep(
                self.stage._decoded,
                StepShape(SLOTS, MAX_LEN, self.stage.embedding.shape[1], torch.float32, width),
                CPU,
            )
            for width in (1, 3)
        }

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, slots, kv_heads, max_len + 1, head_dim]."""
        return self.stage._cache._keys, self.stage._cache._values


@pytest.fixture(scope="module", params=list(VARIANTS))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    architecture, config = VARIANTS[request.param]
    before = decode_step.SHORTEST_CONTEXT
    decode_step.SHORTEST_CONTEXT = 8
    made = Bench(toy_target(tmp_path_factory.mktemp("toy"), architecture, **config))
    decode_step.SHORTEST_CONTEXT = before
    return made


@st.composite
def rows_of_slots(draw: Any, width: int) -> list[Rows]:
    """Up to `width` rows of each of some slots, anywhere, in any order."""
    rows = []
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        count = draw(st.integers(1, width))
        rows.append(Rows(slot, draw(st.integers(0, MAX_LEN - count)), count))
    return rows


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 3]), st.integers(0, 2**31))
def test_a_step_is_the_plain_forward(
    bench: Bench, data: st.DataObject, width: int, seed: int
) -> None:
    """Over random rows and random keys of other rows; and padding touches nobody's."""
    rows = data.draw(rows_of_slots(width))
    noise = torch.Generator().manual_seed(seed)
    before = [torch.randn(held.shape, generator=noise) for held in bench.held()]
    count = sum(r.count for r in rows)
    table = torch.randn(count + 3, bench.stage.embedding.shape[1], generator=noise)
    picks = torch.randperm(len(table), generator=noise)[:count].tolist()
    with torch.inference_mode():
        for held, was in zip(bench.held(), before, strict=True):
            held.copy_(was)
        hidden, _ = bench.stage.layers(table[picks], Batch(rows, CPU))
        expected = [hidden, bench.stage._logits(hidden)]
        plain = [held.clone() for held in bench.held()]
        for held, was in zip(bench.held(), before, strict=True):
            held.copy_(was)
        step = bench.steps[width]
        assert step.covers(rows)
        found = step.run(rows, table, picks)
    for output, right in zip(found, expected, strict=True):
        mine = output[step.places(rows)]
        torch.testing.assert_close(mine, right, atol=BOUND, rtol=BOUND)
    written = torch.zeros(SLOTS, MAX_LEN, dtype=torch.bool)
    for r in rows:
        written[r.slot, r.start : r.end] = True
    for tensors in zip(bench.held(), before, plain, strict=True):
        held, was, right = (t[:, :, :, :MAX_LEN].transpose(2, 3) for t in tensors)
        assert torch.equal(held[:, ~written], was[:, ~written])
        torch.testing.assert_close(held, right, atol=BOUND, rtol=BOUND)


def test_buckets() -> None:
    assert buckets(1, 1) == (1,)
    assert buckets(1, 6) == (1, 2, 4, 6)
    assert buckets(256, 2048) == (256, 512, 1024, 2048)
    assert buckets(256, 100) == (100,)


def test_what_a_step_does_not_cover(bench: Bench) -> None:
    one, three = bench.steps[1], bench.steps[3]
    assert one.covers([Rows(k, 7) for k in range(SLOTS)])
    assert not one.covers([Rows(0, 0), Rows(1, 3, 2)])  # a chunk of a prompt
    assert three.covers([Rows(0, 0, 3), Rows(1, 3, 2)])
    assert not three.covers([Rows(0, 0, 4)])
    assert three.places([Rows(2, 5), Rows(0, 9, 3), Rows(1, 1, 2)]) == [0, 3, 4, 5, 6, 7]


def test_the_smallest_bucket_that_fits_is_run(llama: Path, monkeypatch: Any) -> None:
    """Each was captured once when the step was made, the largest first; nothing moves later."""
    captured: list[tuple[int, int]] = []
    replayed: list[tuple[int, int]] = []

    class Recording:
        def __init__(self, _device: torch.device) -> None: ...

        def __call__(self, work: Any) -> Any:
            captured.append(work.args)
            work()
            return lambda: (replayed.append(work.args), work())

    monkeypatch.setattr(decode_step, "Capture", Recording)
    stage = Stage(replace(blueprint(llama, 1, slots=3, max_len=20).spec, static_steps=True), 0)
    step = stage._step
    assert step is not None
    sizes = [(rows, context) for rows in (3, 2, 1) for context in (20, 16, 8)]
    assert captured == sizes
    addresses = [t.data_ptr() for t in (step._where, step._told, step._inputs, *step._outputs)]
    table = torch.randn(9, HIDDEN)
    with torch.inference_mode():
        for rows, bucket in [
            ([Rows(2, 0)], (1, 8)),
            ([Rows(2, 7)], (1, 8)),
            ([Rows(2, 8)], (1, 16)),
            ([Rows(0, 3), Rows(1, 16)], (2, 20)),
            ([Rows(0, 4), Rows(1, 2), Rows(2, 9)], (3, 16)),
        ]:
            step.run(rows, table, range(len(rows)))
            assert replayed.pop() == bucket
    assert captured == sizes
    assert not replayed
    kept = [t.data_ptr() for t in (step._where, step._told, step._inputs, *step._outputs)]
    assert kept == addresses


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_captured_asks_nothing_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """On the meta device there are no numbers: whatever would wait for one raises."""
    monkeypatch.setattr(linear, "_can_pack", lambda _: False)
    architecture, config = VARIANTS[variant]
    target = toy_target(tmp_path / "target", architecture, **config)
    pdm = toy_pdm(tmp_path / "pdm", target, bounds=(0, 6), layers=2, previous=2)
    made = static(blueprint(target, 1, pdm=pdm, slots=SLOTS, max_len=MAX_LEN))
    stage, drafter = Stage(made.spec, 0), Drafter(made.spec, made.checkpoint)
    for module in (stage.layers, stage.norm, stage.head, drafter.pdm, drafter._cached._layers):
        module.to("meta")
    for layers, cache in (
        (stage.layers, stage._cache),
        (drafter._cached._layers, drafter._cache),
    ):
        layers._cos, layers._sin = layers._cos.to("meta"), layers._sin.to("meta")
        cache._keys, cache._values = cache._keys.to("meta"), cache._values.to("meta")
    where = torch.zeros(2, 6, dtype=torch.int64, device="meta")
    hidden = torch.randn(6, made.hidden_size, device="meta")
    with torch.inference_mode():
        out, *taps, logits = stage._decoded(PaddedBatch(*where, 1, 16), hidden)
        (drafts,) = drafter._cached.decoded(PaddedBatch(*where, 3, 16), hidden)
    assert out.is_meta
    assert all(tap.is_meta for tap in taps)
    assert out.shape == hidden.shape
    assert logits.shape == (6, 97)
    assert drafts.shape == (6, made.draft_vocabulary)


def test_what_has_overflowed_does_not_reach_the_next_text(llama: Path) -> None:
    """It stays in the slot behind the positions that a later row may see, where a mask alone would
    not do: nothing times NaN is NaN."""
    spec = replace(blueprint(llama, 1, slots=2, max_len=MAX_LEN).spec, static_steps=True)
    used, fresh = Stage(spec, 0), Stage(spec, 0)
    prompt, token = torch.randn(4, HIDDEN), torch.randn(1, HIDDEN)
    found = []
    with torch.inference_mode():
        broken = torch.full((8, HIDDEN), torch.nan)
        used.layers(broken, Batch([Rows(0, 0, 8)], CPU))
        assert used._step is not None
        used._step.run([Rows(0, 8)], torch.full((1, HIDDEN), torch.inf), [0])
        for stage in (used, fresh):
            stage.layers(prompt, Batch([Rows(0, 0, 4)], CPU))
            assert stage._step is not None
            found.append([o[:1].clone() for o in stage._step.run([Rows(0, 4)], token, [0])])
    for after, right in zip(*found, strict=True):
        assert bool(right.isfinite().all())
        assert torch.equal(after, right)


# --- whole pipelines ----------------------------------------------------------------------------

PROMPTS = prompts_of([1, 2, 7, 19])
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seeded=True, key=3),
    Sampling(temperature=1.0, key=4),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, key=5),
]


@pytest.mark.parametrize("cut", [(6,), (3, 3), (1, 2, 1, 2)], ids=str)
def test_texts_are_those_of_the_plain_pipeline(
    llama: Path, tmp_path: Path, cut: tuple[int, ...]
) -> None:
    """And so are drafts: the same tokens are accepted in the same cycles."""
    several = len(cut) > 1
    bounds = [sum(cut[:k]) for k in range(len(cut) + 1)]
    pdm = several and toy_pdm(tmp_path, llama, bounds=bounds, layers=2, previous=2)
    made = blueprint(llama, cut, pdm=pdm)
    plain, stepped = LocalGraph(made), LocalGraph(static(made))
    proposers = [None, lookup_proposer(1), random_proposer(7, [])]
    for proposer in proposers[: None if several else 1]:
        for together in (True, False):
            how: dict[str, Any] = {"proposer": proposer, "together": together, "chunk": 5}
            runs = [
                generate(
                    graph,
                    requests_of(PROMPTS, 12, SAMPLINGS),
                    stages=len(cut),
                    uses_pdm=several,
                    **how,
                )
                for graph in (plain, stepped)
            ]
            assert texts_of(runs[0]) == texts_of(runs[1])
            assert runs[0].stats == runs[1].stats
            assert not any(report.error for report in runs[1].reports)
    plain.close()
    stepped.close()


def test_a_grammar_beyond_the_words_of_the_draft(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are then tokens that may follow, without any being drawn."""
    may_follow = torch.arange(97) % 2 == 1
    monkeypatch.setattr(SlotTexts, "allowed", lambda *_: may_follow)
    pdm = toy_pdm(tmp_path, llama, bounds=(0, 3, 6), draft_ids=range(0, 97, 2))
    made = blueprint(llama, (3, 3), pdm=pdm)
    runs, drafts = [], []
    for each in (made, static(made)):
        graph = LocalGraph(each)
        requests = requests_of(PROMPTS, 8, SAMPLINGS)
        runs.append(generate(graph, requests, stages=2, uses_pdm=True))
        drafts.append([d.proposal for report in runs[-1].reports for d in report.drafts])
        assert not any(report.error for report in runs[-1].reports)
        graph.close()
    assert texts_of(runs[0]) == texts_of(runs[1])
    assert all(token % 2 for text in texts_of(runs[1]) for token in text)
    assert drafts[0] == drafts[1]
    assert set(drafts[1]) == {Proposal(1, "point")}


def test_prompts_take_the_plain_forward_and_tokens_the_step(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = LocalGraph(static(blueprint(llama, (3, 3), pdm=True)))
    stage, drafter = graph.stages[1], graph.drafter
    assert isinstance(stage, Stage)
    assert drafter is not None
    assert stage._step is not None
    assert drafter._step is not None
    calls: list[str] = []
    for owner, name in ((stage, "_run"), (stage, "_run_step"), (drafter._step, "run")):
        real = getattr(owner, name)

        def noted(*args: Any, real: Any = real, name: str = name) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, noted)

    def watch(plan: CyclePlan, _result: CycleResult) -> None:
        rows = plan.stages[1]
        in_stage = [c for c in calls if c != "run"]
        if not rows:
            assert not in_stage
        elif any(r.count > 1 for r in rows):
            assert in_stage == ["_run"]
        else:
            assert in_stage == ["_run_step"]
        seen.update(calls)
        calls.clear()

    seen: set[str] = set()
    generate(graph, requests_of(PROMPTS, 6, None), stages=2, uses_pdm=True, watch=watch)
    assert seen == {"_run", "_run_step", "run"}
    graph.close()


def test_only_gpus_use_steps_and_only_they_need_a_scratch_position(llama: Path) -> None:
    def spec(**args: Any) -> ActorSpec:
        return make_blueprint(parse_settings({"model": str(llama), **args})).spec

    pipeline = {"max_len": 64}
    assert not spec(pipeline=pipeline).static_steps
    assert spec(device="cuda", pipeline=pipeline).static_steps
    assert not spec(device="cuda", pipeline={**pipeline, "cuda_graphs": False}).static_steps
    plain = Stage(spec(pipeline=pipeline), 0)
    assert plain._step is None
    stepped = Stage(replace(spec(pipeline=pipeline), static_steps=True), 0)
    assert [stage._cache._keys.shape[3] for stage in (plain, stepped)] == [64, 65]
    assert torch.equal(plain.layers._cos, stepped.layers._cos[:64])


# --- streams and captures, told to a double ------------------------------------------------------


class FakeCuda:
    """What `service.pipeline.cuda` asks of torch.cuda, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        fake = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.device = device

            def wait_stream(self, other: Any) -> None:
                fake.told.append(("waits for", other))

            def synchronize(self) -> None:
                fake.told.append("synchronize")

        class Graph:
            def replay(self) -> None:
                fake.told.append("replay")

        @contextmanager
        def within(name: str, *args: Any) -> Iterator[None]:
            fake.told.append((name, *args))
            yield
            fake.told.append(f"end of {name}")

        @contextmanager
        def capture(
            graph: Any, *, pool: Any, stream: Any, capture_error_mode: str
        ) -> Iterator[None]:
            assert isinstance(graph, Graph)
            assert isinstance(stream, Stream)
            with within("capture", stream.device, pool, capture_error_mode):
                yield

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: "the current one")
        monkeypatch.setattr(torch.cuda, "device", lambda device: within("device", device))
        monkeypatch.setattr(torch.cuda, "stream", lambda s: within("stream", s.device))


def test_a_capture_is_warmed_up_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = FakeCuda(monkeypatch), torch.device("cuda", 1)
    capture = Capture(device)
    replays = [capture(lambda k=k: cuda.told.append(f"work {k}")) for k in range(2)]
    for k in range(2):
        assert cuda.told[: len(cuda.told) // (2 - k)] == [
            ("device", device),
            ("waits for", "the current one"),
            ("stream", device),
            f"work {k}",
            f"work {k}",
            "end of stream",
            "synchronize",
            ("capture", device, "pool", "thread_local"),
            f"work {k}",
            "end of capture",
            "end of device",
        ]
        del cuda.told[: len(cuda.told) // (2 - k)]
    for replay in (replays[1], replays[0], replays[1]):
        replay()
    assert cuda.told == ["replay"] * 3  # and Python does nothing of the work any more


def test_a_capture_on_a_cpu_is_the_work_itself() -> None:
    done: list[int] = []
    replay = Capture(CPU)(lambda: done.append(1))
    replay()
    assert done == [1, 1]


def test_each_actor_of_a_local_graph_has_its_own_stream(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards and take-overs alike, whatever thread they run in; and what has been put out lives
    until the forwards of the next cycle are over."""
    graph = LocalGraph(blueprint(llama, (2, 2, 2), pdm=True))
    graph._streams = ["first", "second", "third", "drafter"]  # type: ignore[list-item]
    current = threading.local()
    seen: set[tuple[str, str, str]] = set()
    outputs: list[Any] = []

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        current.stream = stream
        yield
        current.stream = None

    monkeypatch.setattr(local_graph, "on", on)
    actors = {"first": graph.stages[0], "second": graph.stages[1], "third": graph.stages[2]}
    for owner, actor in [*actors.items(), ("drafter", graph.drafter)]:
        for name in ("forward", "draft", "accept", "accept_q"):
            real = getattr(actor, name, None)
            if real is None:
                continue

            def noted(*args: Any, real: Any = real, owner: str = owner, name: str = name) -> Any:
                seen.add((owner, name, current.stream))
                if name == "forward" and owner == "first":
                    outputs.append(graph._outputs)
                return real(*args)

            monkeypatch.setattr(actor, name, noted)
    kept: list[Any] = []
    generate(
        graph,
        requests_of(PROMPTS, 5, None),
        stages=3,
        uses_pdm=True,
        watch=lambda *_: kept.append(graph._outputs),
    )
    assert all(owner == stream for owner, _, stream in seen)
    assert {(owner, name) for owner, name, _ in seen} == {
        ("first", "forward"),
        *((owner, name) for owner in ("second", "third") for name in ("forward", "accept")),
        ("third", "accept_q"),
        *(("drafter", name) for name in ("draft", "accept")),
    }
    assert all(mine is theirs for mine, theirs in zip(outputs[1:], kept, strict=False))
    graph.close()
