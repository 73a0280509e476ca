"""Emulated devices: the acceptance and the cycles that were asked for, on every graph, and the
command that measures with them. Waits are short here: nothing is said about time."""

import json
from contextlib import closing

import pytest
import ray

from service.config import ConfigError, PipelineSettings, parse_settings
from service.emulation.cli import main, make_parser, make_setups
from service.emulation.measure import PROMPT, make_emulated
from service.emulation.results import Record, Run, Setup, theoretical_speed_up
from service.evaluation.counting import Counts
from service.evaluation.store import Store
from service.messages import (
    Admission,
    CyclePlan,
    DraftOrder,
    GenerateRequest,
    Rows,
    Sampling,
    Verify,
)
from service.pipeline.blueprint import make_blueprint
from service.pipeline.emulated import (
    EmulatedDrafter,
    EmulatedStage,
    draft_is_right,
    target_token,
)
from service.pipeline.local_graph import LocalGraph
from service.pipeline.ray_graph import RayGraph
from tests.test_evaluation import RECORD, SHARED
from tests.toys import Generated, generate

TOKENS = 60  # decoded by a request
VOCABULARY = 32_000


def setup(width: int, acceptance: float = 0.7, **changes) -> Setup:
    fields = {
        "graph": "local",
        "width": width,
        "stage_ms": 0.01,
        "draft_ms": 0.01,
        "link_ms": 0.0,
        "acceptance": acceptance,
        "layers": 32,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    return Setup(**{**fields, **changes})


def requests(count: int, tokens: int = TOKENS) -> list[GenerateRequest]:
    """Greedy ones, those with a seed and those whose drafts need q."""
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seeded=True, key=7),
        Sampling(temperature=1.0, key=2**63),
    ]
    return [GenerateRequest(str(i), PROMPT, tokens + 1, kinds[i % 3]) for i in range(count)]


def run(graph, width: int, count: int = 1, tokens: int = TOKENS) -> Generated:
    """One after another: all have slot 0."""
    made = [
        generate(graph, [r], stages=width, slots=1, max_len=4096, uses_pdm=True)
        for r in requests(count, tokens)
    ]
    return Generated(
        {k: v for m in made for k, v in m.tokens.items()},
        {k: v for m in made for k, v in m.stats.items()},
    )


def local(width: int, acceptance: float, **run_of) -> Generated:
    with closing(LocalGraph(make_emulated(setup(width, acceptance), 4096))) as graph:
        return run(graph, width, **run_of)


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_tokens_and_cycles_are_those_of_the_hash(width, acceptance) -> None:
    """Exactly: a rejection costs n - 1 cycles, as does the way of the last token."""
    made = local(width, acceptance, count=3)
    for request in requests(3):
        admission = Admission(0, len(PROMPT), request.sampling)
        first = len(PROMPT)
        tokens = [target_token(admission, first + i, VOCABULARY) for i in range(TOKENS + 1)]
        # The first token is no draft, and the last one need not enter.
        verified = range(first + 1, first + TOKENS)
        right = sum(draft_is_right(admission, p, acceptance) for p in verified)
        stats = made.stats[request.request_id]
        assert made.tokens[request.request_id] == tokens
        assert (stats.decoded, stats.drafted, stats.accepted) == (TOKENS, TOKENS - 1, right)
        assert stats.cycles == width - 1 + TOKENS + (width - 1) * (TOKENS - 1 - right)


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_the_rate_and_the_speed_up_are_the_theorys(acceptance) -> None:
    """Within four standard deviations of 3000 draws, carried over to the speed-up."""
    width, tokens = 4, 3000
    stats = local(width, acceptance, tokens=tokens).stats["0"]
    bound = 4 * (acceptance * (1 - acceptance) / tokens) ** 0.5
    assert stats.accepted / stats.decoded == pytest.approx(acceptance, abs=bound)
    k = acceptance / (1 - acceptance)
    assert theoretical_speed_up(width, acceptance) == pytest.approx(width * (k + 1) / (width + k))
    low, high = (theoretical_speed_up(width, acceptance + d) for d in (-bound, bound))
    ends = 2 * width / tokens  # the last token's way is not in the formula
    assert low * (1 - ends) < width * stats.decoded / stats.cycles < high * (1 + ends)


def test_an_end_token_is_never_drawn() -> None:
    ends = (3, 4, 5)
    admission = Admission(0, 1, Sampling(), end_ids=ends)
    drawn = {target_token(admission, position, 8) for position in range(300)}
    assert drawn == {0, 1, 2, 6, 7}


def test_what_travels_has_the_real_size() -> None:
    """[1 + taps, R, H] of each stage, and q [drafts, D]. All anchors but 0 are somebody's taps."""
    made = make_emulated(setup(4, hidden_size=96), 64)
    plan = CyclePlan(
        cycle=1,
        stages=((Rows(0, 4),), (Rows(0, 3),), (Rows(0, 1, 2),), (Rows(0, 0),)),
        tokens=((5,),),
        verify=(Verify(0, 1, None),),
        drafts=(DraftOrder(0, 5),),
        admitted=(Admission(0, 1, Sampling(temperature=1.0, key=5)),),
    )
    taps, before = 0, None
    for k in range(4):
        stage = EmulatedStage(made.spec, k)
        stage.accept(plan, before)
        before = stage.forward(plan)
        taps += len(before) - 1
        assert before.shape[1:] == (2 if k == 2 else 1, 96)
        assert str(before.dtype) == "torch.bfloat16"
        assert bool(stage.report().verdicts) == (k == 3)
    assert taps == len(made.spec.anchors) - 1
    assert EmulatedDrafter(made.spec, None).draft(plan).shape == (1, made.draft_vocabulary)


EMULATED = {"stage_ms": 1, "draft_ms": 1, "acceptance": 0.5}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"device": "emulated"}, ["device is 'emulated'", "section `emulated` is missing"]),
        ({"emulated": EMULATED}, ["device is 'cpu'", "section `emulated` is there"]),
        (
            {"device": "emulated", "emulated": {**EMULATED, "acceptance": 1.5}},
            ["emulated.acceptance", "less than or equal to 1", "got 1.5"],
        ),
        (
            {"device": "emulated", "emulated": {**EMULATED, "stage_ms": 0}},
            ["emulated.stage_ms", "greater than 0"],
        ),
        (
            {"device": "emulated", "emulated": {"stage_ms": 1, "link_ms": -1}},
            ["emulated.draft_ms", "emulated.acceptance", "required", "emulated.link_ms"],
        ),
    ],
)
def test_wrong_settings_are_named(args, words) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(args)
    for word in words:
        assert word in str(caught.value)


def test_a_deployment_reads_no_weights(default_model, tmp_path) -> None:
    """Stages, PDM and scheduler of `device: emulated`, from a folder whose weights are empty."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((default_model / name).read_bytes())
    (tmp_path / "model.safetensors").touch()
    settings = parse_settings(
        {
            "model": str(tmp_path),
            "device": "emulated",
            "emulated": {**EMULATED, "stage_ms": 0.01, "draft_ms": 0.01},
            "pipeline": {"stages": 3},
        }
    )
    made = make_blueprint(settings)
    assert made.spec.emulation.hidden_size == made.spec.target.hidden_size
    with closing(LocalGraph(made)) as graph:
        stats = run(graph, 3, count=1, tokens=20).stats["0"]
    assert 0 < stats.accepted < stats.drafted == 19


def test_both_graphs_count_the_same() -> None:
    width = 4
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        made = make_emulated(setup(width), 4096)
        with closing(RayGraph(made, PipelineSettings(stages=width, chunk=8))) as graph:
            remote = run(graph, width, count=3)
    finally:
        ray.shutdown()
    assert remote == local(width, 0.7, count=3)


def test_the_command(tmp_path, capsys) -> None:
    options = "--widths 2,4 --stage-ms 0.02,0.02 --tokens 20 --runs 2 --acceptance 0.5,1"
    assert main([*options.split(), "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "emulation.json").read_text())
    assert all(word in written["measured_on"] for word in ("cores", "load", "Python", "torch"))
    records = written["records"]
    assert [(r["setup"]["width"], r["setup"]["acceptance"]) for r in records] == [
        (2, 0.5), (4, 0.5), (2, 1.0), (4, 1.0),
    ]  # fmt: skip
    for record in records:
        runs, width = record["runs"], record["setup"]["width"]
        assert len(runs) == 2
        assert record["setup"]["draft_ms"] == 0.018
        assert record["theory"] == theoretical_speed_up(width, record["setup"]["acceptance"])
        assert record["share_worst"] <= record["share"] <= record["share_best"]
        if record["setup"]["acceptance"] == 1.0:
            assert all(run["cycles"] == width - 1 + 20 for run in runs)
    assert (tmp_path / "emulation.png").stat().st_size > 10_000
    assert "speed-up" in capsys.readouterr().out


def test_rates_that_were_recorded(tmp_path, capsys) -> None:
    """Each width has its own, that of the default drafter at temperature 0."""
    store = Store(tmp_path, SHARED)
    counted = {(2, "lookup+pdm", 0.0): 6, (4, "lookup+pdm", 0.0): 5,
               (2, "pdm", 0.0): 1, (2, "lookup+pdm", 1.0): 2}  # fmt: skip
    for (width, drafter, temperature), accepted in counted.items():
        counts = Counts(decoded=10, accepted=accepted, cycles=20)
        run_of = {"width": width, "drafter": drafter, "temperature": temperature}
        store.add(RECORD.model_copy(update={**run_of, "data_sets": {"a": counts}}))
    options = f"--recorded {tmp_path / 'results.json'} --stage-ms 0.02,0.02 --widths"
    made = make_setups(make_parser().parse_args([*options.split(), "2,4"]))
    assert [(s.width, s.acceptance) for s in made] == [(2, 0.6), (4, 0.5)]
    with pytest.raises(SystemExit):
        main([*options.split(), "2,8"])
    assert "no lookup+pdm at temperature 0 for n = 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--recorded nowhere.json", "--recorded: nowhere.json can't be read"),
        ("--widths 2,4 --stage-ms 1", "--stage-ms has 1 numbers for 2 --widths"),
        ("--widths 40 --stage-ms 1", "one of the 32 layers"),
        ("--acceptance 1.2", "--acceptance"),
        ("--widths two", "'two' should be like"),
        ("--graphs nccl", "'nccl' is neither local nor ray"),
        ("--dtype int8", "invalid choice: 'int8'"),
    ],
)
def test_wrong_options_are_named(capsys, options, words) -> None:
    with pytest.raises(SystemExit):
        main(options.split())
    assert words in capsys.readouterr().err


def test_figures() -> None:
    """Of two runs with cycles of 2 and 4 ms where a stage takes 1 ms."""
    runs = [
        Run(decoded=9, cycles=18, accepted=3, cycle_ms=ms, median_cycle_ms=2, slowest_stage_ms=1)
        for ms in (2, 4)
    ]
    record = Record(setup=setup(3, 0.5, stage_ms=1.0), runs=tuple(runs))
    figures = record.figures()
    assert (figures["share"], figures["share_best"], figures["share_typical"]) == (0.375, 0.5, 0.5)
    assert figures["theory"] == 1.5
    assert figures["speed_up"] == 0.5625
    assert figures["ms_per_token"] == pytest.approx(3 / 0.5625)
    assert figures["accept_length"] == 1.5
    assert figures["acceptance"] == pytest.approx(1 / 3)
