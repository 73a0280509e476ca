"""Settings: what is refused, and in which words."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.app import build, pipeline_options
from service.config import ConfigError, Settings, parse_settings

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
        ({"device": "gpu"}, ["device", "'cpu' or 'cuda'", "got 'gpu'"]),
        ({"drafter": {"kind": "best"}}, ["drafter.kind", "lookup+pdm", "got 'best'"]),
        ({"dtype": "int8", "model": ""}, ["dtype", "float32", "model", "at least 1 character"]),
    ],
)
def test_wrong_settings_are_named(args, words) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(args)
    for word in words:
        assert word in str(caught.value)


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
        ({"drafter": {"checkpoint": "/nowhere"}}, "drafter.checkpoint is '/nowhere', but"),
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


@pytest.mark.parametrize(
    "file", sorted((ROOT / "deployments").glob("*.yaml")), ids=lambda f: f.name
)
def test_deployments_are_valid(file) -> None:
    for application in yaml.safe_load(file.read_text())["applications"]:
        parse_settings(application["args"])


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


def test_one_stage_runs_no_pdm() -> None:
    assert not Settings(pipeline={"stages": 1}).runs_pdm
    assert Settings().runs_pdm
