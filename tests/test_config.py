"""Settings: what is refused, and in which words."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.app import build, pipeline_options
from service.config import ConfigError, Settings, parse_settings
from service.pipeline.spec import ActorSpec
from service.preflight import check
from service.target import load_target_config

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pipeline": {"stages": 0}}, ["pipeline.stages", "greater than or equal to 1", "got 0"]),
        ({"pipeline": {"stage": 2}}, ["pipeline.stage", "Extra inputs", "got 2"]),
        (
            {"pipeline": {"stages": 3, "layers": [20, 10]}},
            ["layers has 2 entries for 3 stages", "one number of layers for each stage"],
        ),
        ({"device": "gpu"}, ["device", "'cpu', 'cuda' or 'emulated'", "got 'gpu'"]),
        ({"drafter": {"kind": "best"}}, ["drafter.kind", "lookup+pdm", "got 'best'"]),
        ({"dtype": "int8", "model": ""}, ["dtype", "float32", "model", "at least 1 character"]),
        (
            {"api": {"max_body_bytes": 1023}},
            ["api.max_body_bytes", "greater than or equal to 1024", "got 1023"],
        ),
        ({"api": {"keep_alive_s": 0}}, ["api.keep_alive_s", "greater than 0", "got 0"]),
        ({"api": {"keep_alive_s": float("inf")}}, ["api.keep_alive_s", "finite number"]),
        ({"api": {"keys_file": ""}}, ["api.keys_file", "at least 1 character"]),
        (
            {"api": {"cors_origins": ["*", "https://a.example.com/"]}},
            ["api.cors_origins.1", "without a path", "got 'https://a.example.com/'"],
        ),
    ],
)
def test_wrong_settings_are_named(args, words) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(args)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "api",
    [
        {"keys": ["sk-secret"]},
        {"keys_file": ["sk-secret"]},
        "sk-secret",
    ],
)
def test_a_key_in_the_wrong_place_is_not_shown(api) -> None:
    with pytest.raises(ConfigError, match=r"\n  api") as caught:
        parse_settings({"api": api})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "tauri://localhost"])
def test_origins(origin) -> None:
    assert parse_settings({"api": {"cors_origins": [origin]}}).api.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    ["", "null", "example.com", "https://", "https://A.example.com", "https://*", "https://a/b"],
)
def test_what_is_no_origin(origin) -> None:
    with pytest.raises(ConfigError, match=r"api\.cors_origins\.0"):
        parse_settings({"api": {"cors_origins": [origin]}})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"pipeline": {"stages": 40}},
            "pipeline.stages is 40, but the model has 30 decoder layers; a stage needs at least",
        ),
        (
            {"pipeline": {"stages": 2, "layers": [20, 11]}},
            "pipeline.layers is [20, 11], which is 31 layers; the model has 30",
        ),
        ({"pipeline": {"max_len": 9000}}, "pipeline.max_len: 9000 is more than the 8192 positions"),
        ({"model": "/nowhere"}, "there is no folder '/nowhere'"),
    ],
)
def test_what_can_not_work_is_refused_before_it_is_deployed(
    default_model,  # noqa: ARG001
    args,
    message,
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(args)
    assert message in str(caught.value)


def test_an_api_without_its_keys_is_not_deployed(tmp_path, monkeypatch) -> None:
    """An open server would be worse than none."""
    config = yaml.safe_load((ROOT / "deployments" / "spd.yaml").read_text())
    args = config["applications"][0]["args"]
    args["api"] = {"keys_file": "/nowhere"}
    file = tmp_path / "keyless.yaml"
    file.write_text(yaml.safe_dump(config))
    message = "api.keys_file is '/nowhere', which can't be read: No such file or directory"
    for deploy in (lambda: build(args), lambda: check(file)):
        with pytest.raises(ConfigError) as caught:
            deploy()
        assert str(caught.value) == message
    monkeypatch.setenv("SPD_API_KEYS", "")
    with pytest.raises(ConfigError, match="SPD_API_KEYS is set, but has no key in it"):
        build({})


def test_preflight_says_it_without_a_traceback(tmp_path, default_model) -> None:  # noqa: ARG001
    config = yaml.safe_load((ROOT / "deployments" / "spd.yaml").read_text())
    config["applications"][0]["args"]["pipeline"]["stages"] = 40
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "service.preflight", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"{file} can't be served.\n"
        "pipeline.stages is 40, but the model has 30 decoder layers; a stage needs at least one\n"
    )


def bundles(**args) -> list[dict[str, float]]:
    return pipeline_options(parse_settings(args))["placement_group_bundles"]


def test_a_pipeline_fits_two_cores() -> None:
    """Replica, stages and drafter; the ingress has 0.2 more."""
    for stages in (2, 3, 6):
        asked = bundles(pipeline={"stages": stages})
        assert len(asked) == 1 + stages + 1
        assert sum(b["CPU"] for b in asked) + 0.2 <= 2


def test_every_actor_has_a_gpu_of_its_own() -> None:
    asked = bundles(device="cuda", pipeline={"stages": 4, "cpus_per_actor": 1})
    assert asked == [{"CPU": 1}, *[{"CPU": 1, "GPU": 1}] * 5]
    off = bundles(device="cuda", pipeline={"stages": 4}, drafter={"kind": "lookup"})
    assert len(off) == 5


def test_a_local_graph_is_one_process() -> None:
    assert bundles(pipeline={"graph": "local", "stages": 4}) == [{"CPU": 0.2}]
    options = pipeline_options(parse_settings({"device": "cuda", "pipeline": {"graph": "local"}}))
    assert options["ray_actor_options"]["num_gpus"] == 1


def test_a_local_graph_can_have_several_gpus() -> None:
    local = {"device": "cuda", "pipeline": {"graph": "local", "stages": 4, "gpus": 5}}
    options = pipeline_options(parse_settings(local))
    assert options["placement_group_bundles"] == [{"CPU": 0.2, "GPU": 5}]
    assert options["ray_actor_options"]["num_gpus"] == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pipeline": {"graph": "local", "gpus": 2}}, "pipeline.gpus is 2: that is for `device"),
        ({"device": "cuda", "pipeline": {"gpus": 2}}, "pipeline.gpus is 2: that is for `device"),
        (
            {"device": "cuda", "pipeline": {"graph": "local", "gpus": 4}},
            "pipeline.gpus is 4, but stages and PDM can use 3 at most",
        ),
    ],
)
def test_gpus_that_nobody_would_use(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(args)


def test_who_sees_several_gpus_takes_turns(
    monkeypatch: pytest.MonkeyPatch, default_model: Path
) -> None:
    """Three stages and the PDM."""
    target = load_target_config(default_model)
    spec = ActorSpec("", target, (0, 1, 2, 3), (), 1, 8, "bfloat16", "cuda", 1)

    def devices(count: int) -> list[int | None]:
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        return [spec.device_of(actor).index for actor in range(4)]

    assert devices(4) == [0, 1, 2, 3]
    assert devices(2) == [0, 1, 0, 1]
    assert devices(1) == [0, 0, 0, 0]  # so does an actor of Ray's
    assert replace(spec, device="cpu").device_of(2).type == "cpu"


def test_one_stage_runs_no_pdm() -> None:
    assert not Settings(pipeline={"stages": 1}).runs_pdm
    assert Settings().runs_pdm


def test_off_may_stand_without_quotes() -> None:
    for written in ("off", "'off'"):
        args = yaml.safe_load(f"drafter: {{kind: {written}}}")
        assert parse_settings(args).drafter.kind == "off"
    with pytest.raises(ConfigError, match=r"drafter\.kind: .*got True"):
        parse_settings(yaml.safe_load("drafter: {kind: on}"))
