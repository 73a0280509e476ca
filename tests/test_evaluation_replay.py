"""Replays of `spd-eval` on toys: cycle by cycle beside the real graph, and by the command."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from service.config import ConfigError, parse_settings
from service.engine.lookup import Proposer
from service.engine.scheduler import Scheduler
from service.evaluation import evaluate as evaluation
from service.evaluation import replay as replaying
from service.evaluation.cli import main
from service.evaluation.counting import Answer, count, total
from service.evaluation.early_exit import train_early_exit
from service.evaluation.gold import Gold, GoldFile
from service.evaluation.replay_graph import ReplayGraph
from service.evaluation.report import table
from service.evaluation.running import run
from service.evaluation.store import checkpoint_digest
from service.evaluation.tables import PdmSource, make_tables
from service.messages import CyclePlan, CycleResult, GenerateRequest
from service.pdm.checkpoint import target_fingerprint
from service.pdm.corpus import CorpusInfo, Document, write_shard
from service.pdm.teacher import Teacher
from service.pipeline import blueprint as blueprints
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.graph import Graph, Meanwhile, nothing
from service.pipeline.local_graph import LocalGraph
from service.target import load_target_config
from tests.test_evaluation import RECORD, answers_of, command
from tests.toys import (
    NoText,
    blueprint,
    each,
    generate,
    joined,
    lookup_proposer,
    prompts_of,
    random_proposer,
    reference,
    requests_of,
    texts_of,
    toy_chat_target,
    toy_pdm,
    toy_target,
)

VOCABULARY = 7  # so few that even a random PDM is right now and then
COUNT = 30
PROMPTS = prompts_of([2, 5, 9, 19], vocabulary=VOCABULARY)
CUTS = [(3, 3), (1, 2, 3), (2, 1, 1, 1, 1)]

# What a PDM is made of; None is the untrained one.
FORMS: dict[str, dict[str, Any] | None] = {
    "untrained": None,
    "random": {},
    "small vocabulary": {"draft_ids": (1, 2, 3, 5)},
    "previous rows": {"previous": 7},
    "two layers": {"layers": 2, "previous": 2},
    "other anchors": {"anchors": (0, 2, 5, 6)},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    return toy_target(folder, vocab_size=VOCABULARY, sharpness=1.5)


@pytest.fixture(scope="module")
def golds(target: Path) -> list[Gold]:
    with closing(LocalGraph(blueprint(target, 1))) as graph:
        texts = texts_of(generate(graph, requests_of(PROMPTS, COUNT, None), stages=1))
    return [Gold(tuple(p), tuple(t)) for p, t in zip(PROMPTS, texts, strict=True)]


def made_blueprint(target: Path, cut: Sequence[int], form: str, folder: Path) -> Blueprint:
    how = FORMS[form]
    if how is None:
        return blueprint(target, cut, pdm=True)
    bounds = [sum(cut[:k]) for k in range(len(cut) + 1)]
    return blueprint(target, cut, pdm=toy_pdm(folder, target, bounds=bounds, **how))


def replay_of(target: Path, made: Blueprint, golds: list[Gold]) -> ReplayGraph:
    (tables,) = make_tables(target, golds, [PdmSource(made)])
    return ReplayGraph(made.spec.stages, golds, tables)


class Both:
    """The real graph; each result is compared with the replay's: all verdicts, and the drafts
    behind tokens that are right."""

    def __init__(self, real: LocalGraph, replay: ReplayGraph, golds: list[Gold]) -> None:
        self._real, self._replay = real, replay
        self._texts = [list(gold.text) for gold in golds]
        self._entered: dict[int, list[int]] = {}
        self.compared: dict[int, int] = {}  # drafts by fill

    def run(self, plan: CyclePlan, _meanwhile: Meanwhile = nothing) -> CycleResult:
        real, replay = self._real.run(plan), self._replay.run(plan)
        assert [s.verdicts for s in real.stages] == [s.verdicts for s in replay.stages]
        for rows, tokens in zip(plan.stages[0], plan.tokens, strict=True):
            self._entered.setdefault(rows.slot, [])[rows.start :] = tokens
        assert (real.drafter is None) == (replay.drafter is None)
        if real.drafter is None or replay.drafter is None:
            return real
        assert len(real.drafter.drafts) == len(replay.drafter.drafts) == len(plan.drafts)
        for mine, other in zip(real.drafter.drafts, replay.drafter.drafts, strict=True):
            assert (mine.slot, mine.position) == (other.slot, other.position)
            text = self._entered[mine.slot]
            if any(known[: len(text)] == text for known in self._texts):
                assert mine.proposal == other.proposal
                fill = sum(r.slot == mine.slot for rows in plan.stages for r in rows)
                self.compared[fill] = self.compared.get(fill, 0) + 1
        return real

    def close(self) -> None:
        self._real.close()


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_drafts_are_those_of_the_pipeline(
    target: Path, golds: list[Gold], tmp_path: Path, cut: Sequence[int], form: str
) -> None:
    """With a proposer that is right, wrong or silent, so that every fill occurs."""
    made, n = made_blueprint(target, cut, form, tmp_path), len(cut)
    replay = replay_of(target, made, golds)
    known = joined(PROMPTS, [gold.answer for gold in golds])
    proposer = random_proposer(2, known, VOCABULARY)
    with closing(Both(LocalGraph(made), replay, golds)) as graph:
        requests = requests_of(PROMPTS, COUNT, None)
        how: dict[str, Any] = {"stages": n, "uses_pdm": True, "slots": 2, "chunk": 4}
        generate(graph, requests, proposer=proposer, **how)
        generate(graph, requests, proposer=proposer, together=False, **how)
    assert set(graph.compared) == set(range(1, n + 1))


@pytest.mark.parametrize(
    ("cut", "form"),
    [
        ((3, 3), "untrained"),
        ((1, 2, 3), "small vocabulary"),
        ((1, 2, 3), "two layers"),
        ((2, 1, 1, 1, 1), "previous rows"),
    ],
    ids=str,
)
def test_counts_are_those_of_the_real_run(
    target: Path, golds: list[Gold], tmp_path: Path, cut: Sequence[int], form: str
) -> None:
    made, n = made_blueprint(target, cut, form, tmp_path), len(cut)
    replay = replay_of(target, made, golds)
    requests = requests_of(PROMPTS, COUNT, None)
    drafters: dict[str, tuple[Proposer | None, bool]] = {
        "pdm": (None, True),
        "lookup": (lookup_proposer(2), False),
        "lookup+pdm": (lookup_proposer(4), True),
    }
    with closing(LocalGraph(made)) as real:
        for name, (proposer, uses_pdm) in drafters.items():
            expected = answers_of(real, n, requests, proposer, uses_pdm)
            answers = answers_of(replay, n, requests, proposer, uses_pdm)
            assert answers == expected, name  # tokens, accepted or not, flushes, statistics
            counts = total(map(count, answers))
            assert 0 < counts.accepted < counts.drafted, name


def test_an_end_in_flight(target: Path, golds: list[Gold]) -> None:
    """Drafts behind the last token of a text are asked for, and void."""
    end = golds[0].answer[7]
    cut = [g.answer.index(end) + 1 if end in g.answer else COUNT for g in golds]
    short = [Gold(g.prompt, g.answer[:length]) for g, length in zip(golds, cut, strict=True)]
    made = blueprint(target, 3, pdm=True)
    known = joined(PROMPTS, [gold.answer for gold in golds])

    def answers(graph: Graph) -> dict[str, Answer]:
        scheduler = Scheduler(
            stages=3,
            slots=2,
            max_len=64,
            chunk=8,
            eos_ids=frozenset([end]),
            new_text=lambda _: NoText(),
            new_proposer=each(random_proposer(2, known, VOCABULARY)),
            uses_pdm=True,
        )
        return run(scheduler, graph, requests_of(PROMPTS, COUNT, None), lambda *_: None)

    with closing(LocalGraph(made)) as real:
        expected = answers(real)
    assert answers(replay_of(target, made, short)) == expected
    assert [len(a.tokens) for a in expected.values()] == cut


# --- gold texts ---------------------------------------------------------------------------------

END = 99


def request(name: str, max_tokens: int, *prompt: int) -> GenerateRequest:
    return GenerateRequest(name, prompt, max_tokens)


def test_a_file_of_gold_texts(tmp_path: Path) -> None:
    path = tmp_path / "made" / "gold.json"
    file = GoldFile(path, "f", frozenset([END]))
    ends, goes_on, other = request("a", 4, 1, 2), request("b", 4, 1, 3), request("c", 4, 2)
    assert file.missing([ends, goes_on]) == [ends, goes_on]
    file.add([ends, goes_on], {"a": [5, END], "b": [5, 6, 7, 8]})
    file = GoldFile(path, "f", frozenset([END]))
    assert file.missing([goes_on, other, ends]) == [other]
    assert file[ends] == Gold((1, 2), (5, END))
    assert file[goes_on].text == (1, 3, 5, 6, 7, 8)
    # Of a longer answer a part; of one that goes on, not more than there is.
    longer = request("a", 5, 1, 2), request("b", 5, 1, 3)
    assert file.missing(longer) == [longer[1]]
    assert file[request("x", 3, 1, 3)] == Gold((1, 3), (5, 6, 7))

    with pytest.raises(ConfigError, match=r"gold\.json has texts of the target f, and this"):
        GoldFile(path, "g", frozenset())
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"gold\.json is no file of gold texts"):
        GoldFile(path, "f", frozenset())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--replay: .* can't be written"):
        GoldFile(tmp_path / "file" / "gold.json", "f", frozenset()).add([other], {"c": [1]})


# --- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> tuple[Path, list[str]]:
    """A toy that chats, and data sets."""
    folder = tmp_path_factory.mktemp("chat")
    toy_chat_target(folder, default_model, layers=4, tie_word_embeddings=True)
    files = {"chat": ["Hi there", "Name a fruit"], "code": ["def f(x): def f(x): def"]}
    for name, texts in files.items():
        lines = [json.dumps({"turns": [text]}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder, [str(folder / f"{name}.jsonl") for name in files]


def counts_of(out: Path) -> dict[tuple[int, str], Any]:
    stored = json.loads((out / "results.json").read_text())["configurations"]
    return {(c["width"], c["drafter"]): c["data_sets"] for c in stored}


def test_a_replay_by_command(
    chat: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = command(*chat, "--widths", "2,4", "--temperatures", "0")
    drafters = ["--drafters", "pdm,lookup,lookup+pdm,off"]
    real, out, gold = tmp_path / "real", tmp_path / "replayed", tmp_path / "gold.json"
    replay = [*args, "--replay", str(gold)]
    assert main([*args, *drafters, "--out", str(real)]) == 0
    capsys.readouterr()

    assert main([*replay, "--drafters", "lookup", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "gold.json lacks 3 of 3 texts: generating" in printed.err
    monkeypatch.setattr(replaying, "LocalGraph", None)  # from here on nothing is run
    monkeypatch.setattr(evaluation, "LocalGraph", None)
    assert main([*replay, *drafters, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"n=4 lookup T=0 replayed (4 of 7): in {out} already" in printed.err
    assert "drafts over 3 texts: computing" in printed.err
    assert "lookup+pdm (replayed)" in printed.out
    assert "the pipeline did not run" in printed.out
    assert (out / "acceptance.png").exists()
    expected = counts_of(real)
    assert len(expected) == 7
    assert counts_of(out) == expected
    assert sum(c["flushes"] for c in expected[4, "pdm"].values()) > 0
    stored = json.loads((out / "results.json").read_text())
    assert all(c["replayed"] for c in stored["configurations"])

    fewer = ["--limit", "1", "--max-tokens", "8", "--drafters", "off"]
    assert main([*replay, *fewer]) == 0  # these texts are known
    assert "n=1 off T=0 replayed (1 of 1): 2 of 2 prompts, 16 tokens" in capsys.readouterr().err


def test_a_pdm_that_comes_with_the_project(
    chat: tuple[Path, list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is named in the results, and the widths that it does not serve on the way."""
    made = parse_settings({"model": str(chat[0]), "pipeline": {"stages": 2, "max_len": 100}})
    bounds = make_blueprint(made).spec.bounds
    pdm = toy_pdm(tmp_path / "pdm-toy", chat[0], bounds=bounds)
    monkeypatch.setattr(blueprints, "SHIPPED", tmp_path)
    args = command(*chat, "--widths", "2,3", "--temperatures", "0", "--drafters", "pdm")
    replay = ["--replay", str(tmp_path / "gold.json"), "--out", str(tmp_path)]
    assert main([*args, *replay]) == 0
    assert "there is no --checkpoint for n = 3: the PDM is untrained" in capsys.readouterr().err
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert settings["checkpoint"] == str(pdm)
    assert settings["checkpoint_sha256"] == checkpoint_digest([str(pdm)])


def test_real_and_replayed_results_in_one_folder(
    chat: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Each is run for itself."""
    args = command(*chat, "--temperatures", "0", "--drafters", "off", "--out", str(tmp_path))
    assert main([*args, "--replay", str(tmp_path / "gold.json")]) == 0
    assert main(args) == 0
    stored = json.loads((tmp_path / "results.json").read_text())["configurations"]
    assert [c["replayed"] for c in stored] == [True, False]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ([], "--replay: the text is known beforehand at temperature 0 alone"),
        (["--temperatures", "0", "--dtype", "bfloat16"], "--replay: works in float32"),
        (["--temperatures", "0", "--drafters", "early-exit"], "early-exit needs a --corpus"),
        (
            ["--temperatures", "0", "--drafters", "early-exit", "--corpus", "nowhere"],
            "--corpus: there are no shards in nowhere",
        ),
        (["--temperatures", "0", "--drafters", "exit"], "drafter.kind: Input should be"),
    ],
)
def test_what_cannot_be_replayed(
    chat: tuple[Path, list[str]],
    tmp_path: Path,
    more: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gold = str(tmp_path / "gold.json")
    assert main([*command(*chat, "--widths", "2"), "--replay", gold, *more]) == 1
    assert problem in capsys.readouterr().err


def test_an_early_exit_is_not_served(
    chat: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*chat, "--drafters", "lookup+early-exit")) == 1
    assert "--drafters: early-exit can't be served; it needs --replay" in capsys.readouterr().err


# --- early exit ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(chat: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random texts that the toy has read."""
    folder = tmp_path_factory.mktemp("corpus")
    info = CorpusInfo(target_fingerprint(chat[0], load_target_config(chat[0])), (1, 3, 4))
    source = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 8192, (80, 50), generator=source).tolist()
    teacher = Teacher(chat[0], info.anchors, 80, 50, one_row_each=False, dtype=torch.float32)
    documents = [Document(tuple(text), 10, 1.0) for text in texts]
    write_shard(folder / "a.safetensors", info, documents, teacher.read(texts))
    return folder


def test_training_an_early_exit(chat: tuple[Path, list[str]], corpus: Path, tmp_path: Path) -> None:
    """Behind stage 0's 3 layers of 4, and behind 1 of 2, where it knows less."""
    losses = {}
    for layers, anchor in (((3, 1), 3), ((2, 2), 1)):
        made = blueprint(chat[0], layers, pdm=True)
        begun, trained = (train_early_exit(made, corpus, visits) for visits in (1, 20_000))
        assert trained.anchors == (anchor,)
        assert f"exit behind layer {anchor} of stage 0's {layers[0]}, trained" in trained.note
        losses[anchor] = [float(e.note.split("KL ")[1].split()[0]) for e in (begun, trained)]
        states = torch.randn(6, 1, 32)
        ((*drafts,),) = trained(states, 2)
        adapted = states[2:, 0] @ trained.adapter.T
        scale = torch.rsqrt(adapted.pow(2).mean(-1, keepdim=True) + 1e-6)
        model = reference(chat[0])
        logits = model.lm_head(adapted * scale * model.model.norm.weight)[:, :8192]
        assert drafts == logits.argmax(-1).tolist()
    assert losses[3][1] < losses[3][0]
    assert losses[3][1] < losses[1][1]

    info = CorpusInfo(target_fingerprint(chat[0], made.spec.target), (3, 4))
    document = Document(tuple(range(20)), 10, 1.0)
    write_shard(tmp_path / "a.safetensors", info, [document], [torch.zeros(20, 2, 32)])
    with pytest.raises(
        ConfigError, match=r"states at the layers \[3, 4\]; an early exit needs one up"
    ):
        train_early_exit(made, tmp_path, 1)


def test_an_early_exit_by_command(
    chat: tuple[Path, list[str]],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = command(*chat, "--widths", "2,3", "--temperatures", "0", "--out", str(tmp_path))
    args += ["--drafters", "early-exit,lookup+early-exit,pdm"]
    args += ["--corpus", str(corpus), "--early-exit-visits", "2000"]
    assert main([*args, "--replay", str(tmp_path / "gold.json")]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("training the early exit") == 2
    assert "n=3 lookup+early-exit T=0 replayed: exit behind layer 1 of" in printed.out
    assert "trained on 2,000 tokens of" in printed.out
    stored = json.loads((tmp_path / "results.json").read_text())
    notes = {(c["width"], c["drafter"]): c["note"] for c in stored["configurations"]}
    assert notes[2, "early-exit"] == notes[2, "lookup+early-exit"] != ""
    assert notes[2, "pdm"] == ""
    assert stored["settings"]["early_exit_visits"] == 2000


def test_notes_and_replays_in_the_table() -> None:
    assert "the pipeline did not run" not in table([RECORD])
    made = RECORD.model_copy(update={"replayed": True, "note": "an early exit"})
    printed = table([RECORD, made])
    assert "pdm (replayed)" in printed
    assert printed.endswith("\nn=2 pdm T=0.7 replayed: an early exit\n")
