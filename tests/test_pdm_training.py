"""Training a PDM for a toy: the loss falls, resuming is exact, and what comes out serves."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from service.config import ConfigError
from service.pdm import train
from service.pdm.checkpoint import PdmConfig, check_fits, load_tensors, target_fingerprint
from service.pdm.corpus import Corpus, CorpusInfo, Document
from service.pdm.distributed import fit_distributed
from service.pdm.features import shared_anchors
from service.pdm.fit import Job, fit, likeliest_ids, make_trainer
from service.pdm.initial import Moments
from service.pdm.reading import read_texts
from service.pdm.state import STATE_FILE, State, scale_inputs
from service.pdm.trainer import TrainSettings, learning_rate
from service.pipeline.blueprint import balanced_bounds
from service.pipeline.local_graph import LocalGraph
from service.target import load_target_config
from tests.toys import (
    blueprint,
    generate,
    greedy_text,
    prompts_of,
    reference,
    requests_of,
    texts_of,
    toy_chat_target,
    toy_target,
)

LAYERS = 6
ANCHORS = (0, 2, 3, 5, 6)
SETTINGS = TrainSettings(
    widths=(2, 3),
    previous=3,
    draft_vocabulary=80,
    visits=6_000,
    rows=2,
    row_tokens=48,
    learning_rate=3e-3,
    warmup=200,
    dtype="float32",
    evaluate_every=2_000,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy whose layers say little beside the embedding: something that can be learnt."""
    torch.set_num_threads(1)
    folder = toy_target(tmp_path_factory.mktemp("target"), sharpness=0.3)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.15
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy texts of the toy behind random prompts."""
    folder = tmp_path_factory.mktemp("corpus")
    prompts = torch.tensor([p for seed in range(3) for p in prompts_of([6] * 60, seed=seed)])
    texts = reference(target).generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=24,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    documents = [Document(tuple(text), 6, 0.0) for text in texts.tolist()]
    read_texts(target, folder, "toy", info(target), documents)
    return folder


def info(target: Path) -> CorpusInfo:
    return CorpusInfo(target_fingerprint(target, load_target_config(target)), ANCHORS[1:])


@pytest.fixture
def job(target: Path, corpus: Path, tmp_path: Path) -> Job:
    return Job(target, corpus, tmp_path / "pdm", ANCHORS, SETTINGS)


def curve(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((job.out / "curve.json").read_text())
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# --- the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [{}, {"layers": 2, "previous": 0}, {"train_head": True, "answers_only": True}],
    ids=str,
)
def test_the_loss_falls_and_drafts_get_better(job: Job, form: dict[str, Any]) -> None:
    job = replace(job, settings=replace(SETTINGS, **form))
    fit(job)
    first, *_, last = curve(job)
    assert last["visited"] >= SETTINGS.visits
    assert last["loss"] < 0.9 * curve(job)[1]["loss"]
    for n in ("2", "3"):
        assert last["scores"][n]["greedy"] > first["scores"][n]["greedy"]
        assert last["scores"][n]["sampled"] > first["scores"][n]["sampled"] + 0.03
    made_for = PdmConfig.read(job.out)
    assert (made_for.widths, made_for.layers) == ((2, 3), job.settings.layers)
    assert made_for.previous == job.settings.previous
    tensors = load_tensors(job.out)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int32}
    head = reference(job.target).lm_head.weight[tensors["draft_ids"].long()].bfloat16()
    assert torch.equal(tensors["head.weight"], head) != job.settings.train_head


def test_resuming_is_exact(job: Job) -> None:
    """Interrupted in the middle of an epoch, and again in the next one."""
    whole = replace(job, out=job.out.with_name("whole"))
    fit(whole)
    trainer = make_trainer(job)
    steps = 0
    for batch in trainer.batches():
        if trainer.visited >= SETTINGS.visits:
            break
        trainer.step(batch)
        steps += 1
        if steps in (7, 50):
            trainer.save(job.out)
            break
    for _ in range(2):
        trainer = make_trainer(job)
        for batch in trainer.batches():
            if trainer.visited >= SETTINGS.visits:
                break
            trainer.step(batch)
            steps += 1
            if steps == 50:
                break
        trainer.save(job.out)
    a, b = (State.read(j.out / STATE_FILE) for j in (whole, job))
    assert a.progress == b.progress
    assert a.progress["epoch"] > 0
    assert same(a.masters, b.masters)
    assert same(a.averages, b.averages)
    assert same(a.optimizer, b.optimizer)


def test_a_corpus_that_has_grown_begins_a_new_epoch(
    job: Job, target: Path, corpus: Path, tmp_path: Path
) -> None:
    grown = tmp_path / "grown"
    grown.mkdir()
    for file in corpus.iterdir():
        (grown / file.name).hardlink_to(file)
    job = replace(job, corpus=grown)
    trainer = make_trainer(job)
    for batch, _ in zip(trainer.batches(), range(3), strict=False):
        trainer.step(batch)
    trainer.save(job.out)
    assert make_trainer(job).epoch == 0
    read_texts(target, grown, "more", info(target), [Document((1, 2, 3, 4, 5), 2, 0.0)])
    trainer = make_trainer(job)
    assert (trainer.epoch, trainer.index, trainer.visited > 0) == (1, 0, True)


def test_other_settings_are_not_mixed_in(job: Job) -> None:
    make_trainer(job).save(job.out)
    make_trainer(replace(job, settings=replace(SETTINGS, visits=9_000)))  # longer is fine
    other = replace(job, settings=replace(SETTINGS, widths=(2,), rows=3))
    with pytest.raises(ConfigError, match=r"with other settings: widths, rows\. Give the same"):
        make_trainer(other)


def test_going_on_from_a_checkpoint(job: Job, tmp_path: Path) -> None:
    fit(job)
    again = replace(job, out=tmp_path / "again", start=job.out)
    fit(again)
    assert (
        curve(again)[0]["scores"]["2"]["greedy"] >= curve(job)[-1]["scores"]["2"]["greedy"] - 0.02
    )
    assert torch.equal(load_tensors(again.out)["draft_ids"], load_tensors(job.out)["draft_ids"])


def test_a_pdm_that_goes_on_with_more_layers_drafts_the_same_at_first(
    job: Job, tmp_path: Path
) -> None:
    fit(job)
    deeper = replace(job, out=tmp_path / "deeper", start=job.out)
    deeper = replace(deeper, settings=replace(SETTINGS, layers=3))
    assert (
        make_trainer(deeper).scores() == make_trainer(replace(deeper, settings=SETTINGS)).scores()
    )
    fit(deeper)
    assert PdmConfig.read(deeper.out).layers == 3
    assert {"layers.1.mlp.down_proj.weight", "layers.2.self_attn.o_proj.weight"} <= set(
        load_tensors(deeper.out)
    )
    assert curve(deeper)[-1]["loss"] < curve(job)[-1]["loss"]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"widths": (2,)}, r"widths \(2, 3\), not \(2,\)"),
        ({"previous": 0}, "previous 3, not 0"),
        ({"layers": 1}, "layers 2, more than 1"),
    ],
)
def test_a_pdm_of_another_form_is_nothing_to_go_on_from(
    job: Job, tmp_path: Path, other: dict[str, Any], problem: str
) -> None:
    two = replace(job, settings=replace(SETTINGS, layers=2, visits=1))
    fit(two)
    wrong = replace(job, out=tmp_path / "wrong", start=job.out)
    wrong = replace(wrong, settings=replace(two.settings, **other))
    with pytest.raises(ConfigError, match=problem):
        fit(wrong)


def test_the_learning_rate() -> None:
    rates = [learning_rate(1.0, v, visits=1000, warmup=100) for v in (0, 49, 99, 500, 1000, 2000)]
    assert rates == pytest.approx([0.01, 0.497, 0.976, 0.5, 0.0, 0.0], abs=2e-3)


# --- what comes out -----------------------------------------------------------------------------


def test_one_checkpoint_serves_each_of_its_widths(job: Job) -> None:
    """Greedy text is the target's, and more drafts are right than an untrained PDM's."""
    fit(job)
    config = load_target_config(job.target)
    made_for = PdmConfig.read(job.out)
    fingerprint = target_fingerprint(job.target, config)
    model = reference(job.target)
    prompts = prompts_of([5, 9, 13], seed=11)
    texts = [greedy_text(model, p, 24) for p in prompts]
    for n in (2, 3):
        check_fits(made_for, fingerprint, config, balanced_bounds(config, n))
        accepted = []
        for pdm in (job.out, True):
            graph = LocalGraph(blueprint(job.target, n, pdm=pdm))
            made = generate(graph, requests_of(prompts, 24, None), stages=n, uses_pdm=True)
            graph.close()
            assert texts_of(made) == texts
            assert not any(report.error for report in made.reports)
            accepted.append(sum(s.accepted for s in made.stats.values()))
        assert accepted[0] > accepted[1] + 5
    with pytest.raises(ConfigError, match=r"made for the pipeline widths \[2, 3\]"):
        check_fits(made_for, fingerprint, config, balanced_bounds(config, 5))
    with pytest.raises(ConfigError, match="made for the target"):
        check_fits(made_for, "0" * 16, config, balanced_bounds(config, 2))


# --- the parts ----------------------------------------------------------------------------------


def test_ridge_finds_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 5, generator=generator)
    scales = torch.tensor([0.1, 1.0, 10.0, 30.0, 0.3])
    inputs = torch.randn(400, 5, generator=generator) * scales
    moments = Moments(5, 3)
    moments.add(inputs[:100], inputs[:100] @ weight.T)
    moments.add(inputs[100:], inputs[100:] @ weight.T)
    torch.testing.assert_close(moments.ridge(), weight, rtol=2e-2, atol=2e-2)
    first = Moments(2, 3)
    first.add(inputs[:, :2], inputs @ weight.T)
    torch.testing.assert_close(moments.ridge(2), first.ridge(), rtol=1e-3, atol=1e-3)


def test_scaled_inputs_are_the_same_map() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(3, 4, generator=generator) + 0.1
    states = torch.randn(7, 3, 4, generator=generator)
    tensors = {
        "aggregation.by_type.1.weight": torch.randn(4, 8, generator=generator),
        "norm.weight": torch.ones(4),
    }
    scaled = scale_inputs(tensors, scales)
    a = states[:, :2].flatten(1) @ tensors["aggregation.by_type.1.weight"].T
    b = (states / scales)[:, :2].flatten(1) @ scaled["aggregation.by_type.1.weight"].T
    torch.testing.assert_close(a, b)
    assert torch.equal(scaled["norm.weight"], torch.ones(4))


def test_the_draft_vocabulary(job: Job) -> None:
    """The most frequent tokens of answers; then the first ones."""
    corpus = make_trainer(job).corpus
    counts = corpus.token_counts(97)
    ids = likeliest_ids(corpus, 97, 10)
    assert ids.tolist() == sorted(ids.tolist())
    assert int(counts[ids].min()) >= int(counts[[i for i in range(97) if i not in ids]].max())
    absent = [i for i in range(500) if i >= 97 or counts[i] == 0]
    used = 97 - sum(i < 97 for i in absent)
    some = likeliest_ids(corpus, 500, used + 3)
    assert [i for i in some.tolist() if i in absent] == absent[:3]


def test_anchors_for_several_widths() -> None:
    widths = [(0, 19, 30), (0, 13, 26, 30), (0, 8, 15, 22, 29, 30)]
    assert shared_anchors(30, widths) == (0, 8, 13, 19, 26, 29, 30)
    assert shared_anchors(6, [(0, 3, 6)]) == (0, 3, 5, 6)
    assert shared_anchors(2, [(0, 1, 2)]) == (0, 1, 2)


# --- several processes, and the command ---------------------------------------------------------


@pytest.mark.full
def test_two_workers_train_one_pdm(job: Job) -> None:
    """By Ray Train: the same code, gradients shared. Each visit counts once."""
    fit_distributed(job, processes=2)
    first, *_, last = curve(job)
    assert last["visited"] >= SETTINGS.visits
    assert last["scores"]["3"]["sampled"] > first["scores"]["3"]["sampled"] + 0.03
    assert load_tensors(job.out)["draft_ids"].shape == (80,)


def test_the_command(target: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        str(out), "--model", str(target), "--corpus", str(corpus), "--tokens", "0",
        "--widths", "2,3", "--anchors", "0,2,3,5,6", "--draft-vocabulary", "50",
        "--visits", "300", "--dtype", "float32",
    ]  # fmt: skip
    assert train.main(command) == 0
    assert PdmConfig.read(out).draft_vocabulary == 50
    assert PdmConfig.read(out).previous == 3
    assert train.main(command) == 0  # nothing is left to do
    # The texts are kept without their states, and can be read again.
    again = tmp_path / "again"
    texts = ["--texts", str(out / "texts.safetensors"), "--corpus", str(again / "corpus")]
    assert train.main([str(again), *command[1:], *texts]) == 0
    kept, read = (Corpus(folder, info(target)).documents for folder in (corpus, again / "corpus"))
    assert kept == read


@pytest.mark.full
def test_the_command_from_nothing_but_the_target(tmp_path: Path, default_model: Path) -> None:
    """Texts by two writers, then training; and again, with nothing left to do."""
    target = toy_chat_target(tmp_path / "target", default_model, layers=3, eos_token_id=2)
    out = tmp_path / "out"
    command = [
        str(out), "--model", str(target), "--tokens", "1000", "--writers", "2", "--widths", "2",
        "--visits", "3000", "--dtype", "float32", "--seed", "5",
    ]  # fmt: skip
    for _ in range(2):
        assert train.main(command) == 0
        shards = sorted(f.name for f in (out / "corpus").iterdir())
        assert shards == ["5-0-00000.safetensors", "5-1-00000.safetensors"]
    assert PdmConfig.read(out).widths == (2,)
    assert State.read(out / STATE_FILE).progress["visited"] >= 3000


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--model", "/nowhere"], "there is no folder '/nowhere'"),
        (["--texts", "/nowhere.safetensors"], "there is no file /nowhere.safetensors"),
        (["--conversations", "/nowhere.jsonl"], "there is no file /nowhere.jsonl"),
        (["--widths", "9"], "pipeline.stages is 9, but the model has 6 decoder layers"),
        (["--widths", "1"], "--widths"),
        (["--anchors", "1,2"], "--anchors"),
        (["--anchors", "0,2,9"], "--anchors"),
        (["--layers", "7"], "--layers"),
        (["--start", "/nowhere"], "there is no pdm.json"),
    ],
)
def test_what_cannot_work_is_one_message(
    target: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    common = [
        "--model",
        str(target),
        "--corpus",
        str(corpus),
        "--tokens",
        "0",
        "--dtype",
        "float32",
    ]
    assert train.main([str(tmp_path / "out"), *common, "--anchors", "0,2,3,5,6", *arguments]) == 1
    message = capsys.readouterr().err
    assert "spd-train: " in message
    assert problem in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "arguments", [["--widths", "two"], ["--visits", "-1"], ["--writers", "0"], []], ids=str
)
def test_a_wrong_command_line(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main([str(tmp_path), *arguments] if arguments else [])
    assert ended.value.code == 2


logging.getLogger("ray").setLevel(logging.ERROR)
