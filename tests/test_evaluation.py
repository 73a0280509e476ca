"""`spd-eval` on toys: its counts against known formulas, its prompts, its files."""

import builtins
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from service.config import ConfigError
from service.engine.lookup import Proposer
from service.engine.scheduler import Scheduler
from service.evaluation import evaluate as evaluation
from service.evaluation.cli import main, make_parser
from service.evaluation.configuration import Configuration, Options, configurations
from service.evaluation.counting import Answer, Counts, count, total
from service.evaluation.prompts import (
    Prompt,
    encode,
    make_requests,
    messages_of,
    read_data_set,
    read_data_sets,
)
from service.evaluation.report import table
from service.evaluation.running import run
from service.evaluation.store import DataSet, Record, SharedSettings, Store, checkpoint_digest
from service.messages import DraftReport, GenerateRequest, Proposal, RequestStats, Sampling
from service.pipeline.graph import Graph, GraphError
from service.pipeline.local_graph import LocalGraph
from service.text.tokenizer import ChatTemplateError, NoChatTemplate
from tests.fake_pipeline import FakeTokenizer
from tests.toys import (
    NoText,
    blueprint,
    each,
    generate,
    joined,
    lookup_proposer,
    perfect_proposer,
    prompts_of,
    requests_of,
    texts_of,
    toy_chat_target,
    toy_target,
    wrong_proposer,
)

LAYERS = 4
COUNT = 20  # tokens of each text
PROMPTS = prompts_of([2, 5, 9])


# --- running ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target(tmp_path_factory.mktemp("toy"), layers=LAYERS)


@pytest.fixture(scope="module", params=[2, 4])
def graph(request: pytest.FixtureRequest, target: Path) -> Iterator[LocalGraph]:
    """With the untrained PDM, which drafts where it is asked."""
    with closing(LocalGraph(blueprint(target, request.param, pdm=True))) as graph:
        yield graph


def answers_of(
    graph: Graph,
    stages: int,
    requests: Sequence[GenerateRequest],
    proposer: Proposer | None = None,
    uses_pdm: bool = False,
) -> list[Answer]:
    """In the order of the requests."""
    scheduler = Scheduler(
        stages=stages,
        slots=2,
        max_len=64,
        chunk=8,
        eos_ids=frozenset(),
        new_text=lambda _: NoText(),
        new_proposer=each(proposer),
        uses_pdm=uses_pdm,
    )
    seen: list[tuple[int, int]] = []
    answers = run(scheduler, graph, requests, lambda *cycle: seen.append(cycle))
    assert sum(finished for finished, _ in seen) == len(requests)
    assert sum(tokens for _, tokens in seen) == sum(len(a.tokens) for a in answers.values())
    return [answers[r.request_id] for r in requests]


def known_texts(graph: LocalGraph) -> list[list[int]]:
    requests = requests_of(PROMPTS, COUNT, None)
    return texts_of(generate(graph, requests, stages=len(graph.stages)))


def test_the_known_formulas(graph: LocalGraph) -> None:
    """Tokens, cycles and flushes of a drafter that is always right, always wrong or not there."""
    n, prompts, decoded = len(graph.stages), len(PROMPTS), COUNT - 1
    known = joined(PROMPTS, known_texts(graph))
    requests = requests_of(PROMPTS, COUNT, None)
    verified = decoded - 1  # the last token has no proposal, as it need not enter
    expected = {  # drafted, accepted, cycles of one answer
        "perfect": (verified, verified, n - 1 + decoded),
        "wrong": (verified, 0, n * decoded),
        "off": (0, 0, n * decoded),
    }
    proposers = {"perfect": perfect_proposer(known), "wrong": wrong_proposer(known), "off": None}
    for name, (drafted, accepted, cycles) in expected.items():
        answers = answers_of(graph, n, requests, proposers[name])
        assert [[*p, *a.tokens] for p, a in zip(PROMPTS, answers, strict=True)] == known
        counts = total(map(count, answers))
        assert counts == Counts(
            prompts=prompts,
            prompt_tokens=sum(map(len, PROMPTS)),
            generated_tokens=prompts * COUNT,
            decoded=prompts * decoded,
            cycles=prompts * cycles,
            drafted=prompts * drafted,
            accepted=prompts * accepted,
            flushes=prompts * (drafted - accepted),
            decoded_by_position=(prompts * 8, prompts * 8, prompts * 3),
            accepted_by_position=counts.accepted_by_position,
        )
        assert counts.acceptance == accepted / decoded
        assert counts.tokens_per_cycle == decoded / cycles
        assert counts.accept_length(n) == n * decoded / cycles
        right = {"perfect": (24, 24, 6)}.get(name, (0, 0, 0))
        assert counts.accepted_by_position == right


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["pdm", "lookup+pdm"])
def test_what_is_watched_is_what_the_engine_counts(
    graph: LocalGraph, drafter: str, temperature: float
) -> None:
    n = len(graph.stages)
    proposer = lookup_proposer(1) if drafter == "lookup+pdm" else None
    sampling = [Sampling(temperature, key=key) for key in range(len(PROMPTS))]
    requests = requests_of(PROMPTS, COUNT, sampling)
    answers = answers_of(graph, n, requests, proposer, uses_pdm=True)
    made = generate(graph, requests, stages=n, slots=2, proposer=proposer, uses_pdm=True)
    assert [a.tokens for a in answers] == texts_of(made)
    assert [a.stats for a in answers] == [made.stats[r.request_id] for r in requests]
    if temperature == 0:
        assert [a.tokens for a in answers] == known_texts(graph)
    for answer in answers:
        stats = answer.stats
        assert stats is not None
        assert len(answer.accepted) == stats.decoded == COUNT - 1
        assert sum(answer.accepted) == stats.accepted
        assert answer.flushes == stats.drafted - stats.accepted
        # Each decoded token comes one cycle after an accepted one, else n; but the last one's
        # predecessor pays for the whole pipeline.
        assert stats.cycles == n + sum(1 if right else n for right in answer.accepted[:-1])
    assert sum(a.stats.drafted for a in answers if a.stats) > 0


def test_a_failing_pdm_ends_the_evaluation(target: Path) -> None:
    """A deployment goes on without drafts; here the counts would be of nothing."""
    with closing(LocalGraph(blueprint(target, 2, pdm=True))) as graph:
        assert graph.drafter is not None
        graph.drafter.report = lambda: DraftReport(0.0, error="RuntimeError: broken")
        with pytest.raises(GraphError, match="the PDM failed: RuntimeError: broken"):
            answers_of(graph, 2, requests_of(PROMPTS, COUNT, None), uses_pdm=True)


# --- counting -----------------------------------------------------------------------------------


def test_an_answer_token_by_token() -> None:
    stats = RequestStats(
        prompt_tokens=3, generated_tokens=4, decoded=3, cycles=5, drafted=2, accepted=1
    )
    answer = Answer()
    answer.take(7, None, None)  # the first token: not decoded
    answer.take(8, Proposal(8, "pdm"), None)
    answer.take(9, Proposal(1, "point"), None)
    answer.take(10, None, stats)
    assert answer == Answer([7, 8, 9, 10], [True, False, False], 1, stats)
    assert count(answer) == Counts(
        prompts=1,
        prompt_tokens=3,
        generated_tokens=4,
        decoded=3,
        cycles=5,
        drafted=2,
        accepted=1,
        flushes=1,
        decoded_by_position=(3,),
        accepted_by_position=(1,),
    )


def test_totals() -> None:
    long = Counts(prompts=1, decoded=9, cycles=12, accepted=6, flushes=2)
    long = long.model_copy(update={"decoded_by_position": (8, 1), "accepted_by_position": (5, 1)})
    short = Counts(prompts=2, decoded=3, cycles=3, decoded_by_position=(3,))
    short = short.model_copy(update={"accepted_by_position": (0,)})
    both = total([short, long])
    assert (both.prompts, both.decoded, both.cycles, both.flushes) == (3, 12, 15, 2)
    assert both.decoded_by_position == (11, 1)
    assert both.accepted_by_position == (5, 1)
    assert both.acceptance_by_position == [5 / 11, 1.0]
    assert both.acceptance == 6 / 12  # of all tokens, not a mean of means
    assert both.accept_length(4) == 4 * 12 / 15


def test_nothing_decoded_has_no_rates() -> None:
    """An answer of one token: end of turn at once, or --max-tokens 1."""
    answer = Answer()
    answer.take(2, None, RequestStats(5, 1, decoded=0, cycles=0, drafted=0, accepted=0))
    counts = total([count(answer)])
    assert counts.generated_tokens == 1
    assert counts.acceptance is counts.tokens_per_cycle is counts.accept_length(2) is None
    assert total([]) == Counts()


# --- prompts ------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ({"turns": ["Hi", "And then?"], "category": "math"}, HI),
        ({"prompt": "Hi"}, HI),
        ({"messages": HI}, HI),
        (
            {"messages": [{"role": "system", "content": "Be brief.", "name": "x"}, *HI]},
            [{"role": "system", "content": "Be brief."}, *HI],
        ),
        ({"turns": ["Hi"], "prompt": "not this"}, HI),
    ],
)
def test_formats(line: Any, messages: Any) -> None:
    assert messages_of(line) == messages


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ([], "should be a JSON object, not list"),
        ({"text": "Hi"}, "has none of `turns`, `messages` and `prompt`"),
        ({"turns": []}, "`turns` should be a list of texts"),
        ({"turns": "Hi"}, "`turns` should be a list of texts"),
        ({"turns": [3]}, r"`turns\[0\]` should be a text"),
        ({"prompt": ""}, "`prompt` should be a text that is not empty"),
        ({"messages": []}, "`messages` should be a list of objects"),
        ({"messages": ["Hi"]}, r"`messages\[0\]` should be an object"),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\]\.content` should be a text"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        messages_of(line)
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "Hi"}\n\n' + json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 3: {problem}"):
        read_data_set(file)
    assert len(read_data_set(file, limit=1)) == 1


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    lines = [{"prompt": f"{i}\u2028"} for i in range(3)]  # a line separator within a text
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    other = tmp_path / "other.jsonl"
    other.write_text('\n{"turns": ["Hi"]}\n')
    prompts = read_data_sets([file, other], limit=2)
    assert [p.name for p in prompts] == ["chats:1", "chats:2", "other:2"]
    assert prompts[1].messages == [{"role": "user", "content": "1\u2028"}]

    with pytest.raises(ConfigError, match=r"nowhere\.jsonl can't be read"):
        read_data_set(tmp_path / "nowhere.jsonl")
    other.write_text("{")
    with pytest.raises(ConfigError, match=r"other\.jsonl, line 1: is no JSON"):
        read_data_set(other)
    other.write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_data_set(other)
    other.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"other\.jsonl can't be read"):
        read_data_set(other)
    (tmp_path / "more").mkdir()
    twin = Path(shutil.copy(file, tmp_path / "more"))
    with pytest.raises(ConfigError, match="data set 'chats', which is another's name"):
        read_data_sets([file, twin])


def test_prompts_are_rendered_and_must_fit() -> None:
    tokenizer: Any = FakeTokenizer()
    prompts = [Prompt("a", 1, HI), Prompt("a", 2, [{"role": "user", "content": "Hello"}])]
    encoded = encode(prompts, tokenizer, max_len=21, max_tokens=10)
    assert [len(ids) for ids in encoded] == [8, 11]
    with pytest.raises(ConfigError, match="prompt a:2 has 11 tokens; with an answer of 10 it does"):
        encode(prompts, tokenizer, max_len=20, max_tokens=10)
    assistant = [Prompt("a", 3, [{"role": "assistant", "content": "Hi"}])]
    with pytest.raises(ConfigError, match="a:3: The template refuses this"):
        encode(assistant, tokenizer, 20, 10)
    for error in (ChatTemplateError("no"), NoChatTemplate("Send it to /v1/completions")):

        def refuse(_messages: Any, error: Exception = error) -> list[int]:
            raise error

        tokenizer.render_chat = refuse
        with pytest.raises(ConfigError, match=r"a:1: no|The model has no chat template"):
            encode(prompts, tokenizer, 20, 10)


def test_requests_repeat() -> None:
    prompts = [Prompt("a", 1, HI), Prompt("a", 2, HI), Prompt("b", 1, HI)]
    encoded = [(1,), (2,), (3,)]
    made = make_requests(prompts, encoded, 5, 1.0, seed=0)
    assert [r.request_id for r in made] == ["a:1", "a:2", "b:1"]
    assert made == make_requests(prompts, encoded, 5, 1.0, seed=0)
    assert all(not r.sampling.seeded and 0 <= r.sampling.key < 2**64 for r in made)
    made += make_requests(prompts, encoded, 5, 1.0, seed=1)
    assert len({r.sampling.key for r in made}) == 6


# --- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return toy_chat_target(tmp_path_factory.mktemp("chat"), default_model, layers=LAYERS)


@pytest.fixture
def data_sets(tmp_path: Path) -> list[str]:
    files = {"chat": ["Hi there", "Name a fruit"], "code": ["def f(x): def f(x): def"]}
    for name, texts in files.items():
        lines = [json.dumps({"turns": [text]}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / f"{name}.jsonl") for name in files]


def command(target: Path, data_sets: list[str], *more: str) -> list[str]:
    sizes = ["--max-tokens", "10", "--max-len", "100", "--slots", "2"]
    return ["--model", str(target), "--prompts", *data_sets, *sizes, *more]


def test_an_evaluation_and_its_resumption(
    chat_target: Path,
    data_sets: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "made" / "here"
    args = command(chat_target, data_sets, "--drafters", "lookup+pdm,off", "--out", str(out))
    ran: list[str] = []
    original = evaluation.run_configuration

    def watched(configuration: Configuration, *rest: Any) -> Record:
        ran.append(str(configuration))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return original(configuration, *rest)

    monkeypatch.setattr(evaluation, "run_configuration", watched)
    assert main([*args, "--widths", "2"]) == 130
    stored = json.loads((out / "results.json").read_text())
    assert [c["drafter"] for c in stored["configurations"]] == ["lookup+pdm"]

    assert main([*args, "--widths", "2"]) == 0
    printed = capsys.readouterr()
    first, *others = ["n=2 lookup+pdm T=0", "n=1 off T=0", "n=2 lookup+pdm T=1", "n=1 off T=1"]
    assert ran == [first, others[0], *others]
    assert f"{first} (1 of 4): in {out} already" in printed.err
    assert "n=1 off T=0 (2 of 4): 3 of 3 prompts, 30 tokens, " in printed.err
    assert "the PDM is untrained" in printed.err
    rows = [line.split() for line in printed.out.splitlines()]
    for name in ("chat", "code", "overall"):
        assert sum(name in row for row in rows) == 4
    assert ["0", "1", "off", "overall", "3", "27", "0", "0", "27", "0.0%", "1.000", "1.00"] in rows
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")

    check_file(json.loads((out / "results.json").read_text()))
    assert main([*args, "--widths", "2,3", "--temperatures", "0"]) == 0  # a larger evaluation
    assert ran[5:] == ["n=3 lookup+pdm T=0"]


def check_file(stored: Any) -> None:
    """The fields of results.json."""
    assert stored["format"] == 1
    settings = stored["settings"]
    assert settings["checkpoint"] is None
    assert (settings["max_tokens"], settings["slots"], settings["dtype"]) == (10, 2, "float32")
    assert {k: v["prompts"] for k, v in settings["data_sets"].items()} == {"chat": 2, "code": 1}
    assert len(stored["configurations"]) == 4
    for made in stored["configurations"]:
        assert set(made["versions"]) == {"python", "spd-serve", "torch", "transformers"}
        assert "cores" in made["machine"]
        assert made["date"].endswith("+00:00")
        assert made["seconds"] > 0
        assert (len(made["layers"]), sum(made["layers"])) == (made["width"], LAYERS)
        chat, overall = made["data_sets"]["chat"], made["rates"]["overall"]
        assert set(chat) == set(Counts.model_fields)
        assert chat["decoded"] == 18
        assert chat["flushes"] == chat["drafted"] - chat["accepted"]
        cycles = sum(counts["cycles"] for counts in made["data_sets"].values())
        assert overall["equivalent_accept_length"] == made["width"] * 27 / cycles
        assert overall["tokens_per_cycle"] == 27 / cycles
        assert tuple(made["rates"]) == ("chat", "code", "overall")


RECORD = Record(
    width=2,
    layers=(2, 2),
    drafter="pdm",
    temperature=0.7,
    date="",
    seconds=1,
    machine="",
    versions={},
    data_sets={"one": Counts(prompts=1)},
)
SHARED = SharedSettings(
    model="m",
    target_fingerprint="f",
    checkpoint=None,
    checkpoint_sha256=None,
    dtype="float32",
    max_tokens=10,
    max_len=100,
    slots=2,
    threads=1,
    seed=0,
    lookup_min_match=2,
    data_sets={"a": DataSet(prompts=1, prompt_tokens=3, sha256="0")},
)


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    Store(tmp_path, SHARED).add(RECORD)
    assert Store(tmp_path, SHARED).records == (RECORD,)
    assert Store(None, SHARED).records == ()
    with pytest.raises(ConfigError, match=r"other settings.*\n  max_tokens: 10 there, 11 now$"):
        Store(tmp_path, SHARED.model_copy(update={"max_tokens": 11}))
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"results\.json is not of spd-eval; wrong: settings"):
        Store(tmp_path, SHARED)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out: .* can't be written"):
        Store(tmp_path / "file" / "folder", SHARED)


def test_a_checkpoint_is_told_by_its_files(tmp_path: Path) -> None:
    assert checkpoint_digest([]) is None
    with pytest.raises(ConfigError, match=r"--checkpoint: .*pdm\.json"):
        checkpoint_digest([str(tmp_path)])
    (tmp_path / "pdm.json").touch()
    (tmp_path / "pdm.safetensors").touch()
    before = checkpoint_digest([str(tmp_path)])
    (tmp_path / "pdm.safetensors").write_text("trained further")
    assert checkpoint_digest([str(tmp_path)]) != before


def test_without_matplotlib_the_numbers_are_there(
    chat_target: Path,
    data_sets: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    more = ["--drafters", "off", "--temperatures", "0", "--limit", "1", "--out", str(tmp_path)]
    assert main(command(chat_target, data_sets, *more)) == 0
    printed = capsys.readouterr()
    assert "matplotlib is missing. `pip install 'spd-serve[eval]'`" in printed.err
    assert "overall" in printed.out
    assert (tmp_path / "results.json").exists()
    assert not (tmp_path / "acceptance.png").exists()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--drafters", "eagle"], "drafter.kind: Input should be 'lookup+pdm'"),
        (["--widths", "1,2"], "--widths: at n = 1 nothing is in flight"),
        (["--widths", "2,9"], "pipeline.stages is 9, but the model has 4 decoder layers"),
        (["--max-len", "300"], "pipeline.max_len: 300 is more than the 256 positions"),
        (["--max-tokens", "90"], "The prompt chat:1 has "),
        (["--slots", "999"], "pipeline.slots: "),
        (["--dtype", "int8"], "dtype: "),
        (["--model", "./nowhere"], "there is no folder './nowhere'"),
        (["--checkpoint", "nowhere"], "nowhere', but there is no pdm.json"),
        (["--checkpoint", "nowhere", "--drafters", "off"], "--checkpoint: "),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl can't be read"),
    ],
)
def test_what_cannot_work_is_said_before_it_runs(
    chat_target: Path,
    data_sets: list[str],
    more: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(chat_target, data_sets, "--widths", "2", *more)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("spd-eval: ")
    assert problem in printed.err
    assert "starting" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--widths", "2,x"], "'2,x' should be like 2,3,5"),
        (["--temperatures", "warm"], "'warm' should be like 0,0.7,1"),
        (["--temperatures", "-1"], "should be 0 (greedy) or more"),
        (["--temperatures", "nan"], "should be 0 (greedy) or more"),
        (["--limit", "0"], "'0' should be a whole number of at least 1"),
        ([], "--prompts"),
    ],
)
def test_a_wrong_command_line(
    more: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(more)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_configurations() -> None:
    args = ["--prompts", "a.jsonl", "--widths", "2,3,2", "--drafters", "pdm, off"]
    options = Options(**vars(make_parser().parse_args(args)))
    assert options.temperatures == (0.0, 1.0)
    assert [str(c) for c in configurations(options)] == [
        "n=2 pdm T=0", "n=3 pdm T=0", "n=1 off T=0",
        "n=2 pdm T=1", "n=3 pdm T=1", "n=1 off T=1",
    ]  # fmt: skip


def test_the_table_where_nothing_was_decoded() -> None:
    line = ["0.7", "2", "pdm", "one", "1", "0", "0", "0", "0", "-", "-", "-"]
    assert line in [row.split() for row in table([RECORD]).splitlines()]
