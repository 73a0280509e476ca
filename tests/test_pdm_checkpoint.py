"""A PDM on disk: round trip, and every way in which a checkpoint does not fit or can't be read."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.config import ConfigError, Settings
from service.pdm.checkpoint import (
    CONFIG_FILE,
    UNTRAINED_DRAFT_VOCABULARY,
    WEIGHTS_FILE,
    PdmConfig,
    build_pdm,
    check_fits,
    load_draft_ids,
    load_tensors,
    save_pdm,
    target_fingerprint,
    untrained_draft_ids,
    untrained_pdm,
)
from service.pdm.drafter import Drafter
from service.pipeline.blueprint import make_blueprint
from service.pipeline.local_graph import LocalGraph
from service.target import load_target_config
from tests.toys import ARCHITECTURES, blueprint, reference, toy_pdm, toy_target

BOUNDS = (0, 2, 4, 6)
ANCHORS = (0, 2, 5, 6)  # types 0, 1, 1, 3: type 2 is never reached


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return toy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def checkpoint(tmp_path: Path, target: Path) -> Path:
    return toy_pdm(tmp_path / "pdm", target, bounds=BOUNDS, anchors=ANCHORS)


def change(checkpoint: Path, **fields: Any) -> None:
    """Rewrites fields of pdm.json; None removes one."""
    file = checkpoint / CONFIG_FILE
    known = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in known.items() if v is not None}))


def made_for(**fields: Any) -> PdmConfig:
    given: dict[str, Any] = {
        "target_fingerprint": "0123456789abcdef",
        "hidden_size": 32,
        "widths": (3,),
        "anchors": ANCHORS,
        "types": (0, 1, 3),
        "draft_vocabulary": 10,
    }
    return PdmConfig(**{**given, **fields})


# --- round trip ---------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    config = made_for(layers=2, widths=(2, 3, 5))
    tensors = {
        "norm.weight": torch.randn(32, generator=torch.Generator().manual_seed(0)),
        "head.weight": torch.randn(10, 32, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "draft_ids": torch.tensor([*range(9), 49151], dtype=torch.int32),
    }
    folder = tmp_path / "not" / "there" / "yet"
    save_pdm(folder, config, tensors)
    assert sorted(f.name for f in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert PdmConfig.read(folder) == config
    loaded = load_tensors(folder)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    ids = load_draft_ids(folder, config, SimpleNamespace(vocab_size=49152))
    assert ids.tolist() == [*range(9), 49151]
    assert ids.dtype == torch.int64
    save_pdm(folder, made_for(), tensors)  # over an older one
    assert PdmConfig.read(folder) == made_for()


def test_what_the_file_says(tmp_path: Path) -> None:
    """The format is public: others may write it."""
    save_pdm(tmp_path, made_for(), {"norm.weight": torch.ones(32)})
    assert json.loads((tmp_path / CONFIG_FILE).read_text()) == {
        "format": 1,
        "target_fingerprint": "0123456789abcdef",
        "hidden_size": 32,
        "widths": [3],
        "anchors": [0, 2, 5, 6],
        "types": [0, 1, 3],
        "layers": 1,
        "previous": 0,
        "draft_vocabulary": 10,
    }


@pytest.mark.parametrize("layers", [1, 2])
def test_a_pdm_holds_the_tensors_of_its_checkpoint(
    tmp_path: Path, target: Path, layers: int
) -> None:
    folder = toy_pdm(
        tmp_path, target, bounds=BOUNDS, anchors=ANCHORS, layers=layers, previous=layers
    )
    plan = blueprint(target, (2, 2, 2), pdm=folder)
    tensors = load_tensors(folder)
    pdm = build_pdm(
        PdmConfig.read(folder), tensors, plan.spec.target, torch.float32, torch.device("cpu")
    )
    held = dict(pdm.named_parameters())
    assert torch.equal(pdm.draft_ids, tensors.pop("draft_ids").long())
    assert held.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(held[name], tensor)


# --- pdm.json that can't be read ----------------------------------------------------------------


def test_no_config(tmp_path: Path) -> None:
    message = f"drafter.checkpoint is '{tmp_path}', but there is no pdm.json in it"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        PdmConfig.read(tmp_path)
    with pytest.raises(ConfigError, match=r"/gone', but there is no pdm\.json in it$"):
        PdmConfig.read(tmp_path / "gone")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"format": 2}, "format"),
        ({"format": 0}, "format"),
        ({"target_fingerprint": None}, "target_fingerprint"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"widths": []}, "widths"),
        ({"anchors": []}, "anchors"),
        ({"anchors": [0, "x"]}, "anchors.1"),
        ({"types": []}, "types"),
        ({"layers": 0}, "layers"),
        ({"draft_vocabulary": 0}, "draft_vocabulary"),
        ({"extra": 1}, "extra"),
        ({"layers": 0, "widths": [2, "three"]}, "widths.1, layers"),
    ],
)
def test_a_broken_config(checkpoint: Path, fields: dict[str, Any], wrong: str) -> None:
    change(checkpoint, **fields)
    message = f"{checkpoint / CONFIG_FILE} is not a PDM's configuration; wrong: {wrong}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        PdmConfig.read(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_config_that_is_no_object(checkpoint: Path, text: str) -> None:
    (checkpoint / CONFIG_FILE).write_text(text)
    message = f"{checkpoint / CONFIG_FILE} is not a PDM's configuration; wrong: "
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        PdmConfig.read(checkpoint)


# --- a PDM for something else -------------------------------------------------------------------


def test_it_fits(target: Path, checkpoint: Path) -> None:
    config = load_target_config(target)
    check_fits(PdmConfig.read(checkpoint), target_fingerprint(target, config), config, BOUNDS)


@pytest.mark.parametrize(
    ("fields", "problems"),
    [
        (
            {"target_fingerprint": "f" * 16},
            ["it was made for the target ffffffffffffffff, and this one is 0123456789abcdef"],
        ),
        ({"hidden_size": 48}, ["its hidden size is 48, the target's 32"]),
        (
            {"anchors": (1, 2, 6)},
            ["its anchors [1, 2, 6] are not ascending from 0 to at most 6"],
        ),
        (
            {"anchors": (0, 3, 2)},
            ["its anchors [0, 3, 2] are not ascending from 0 to at most 6"],
        ),
        (
            {"anchors": (0, 2, 2)},
            ["its anchors [0, 2, 2] are not ascending from 0 to at most 6"],
        ),
        (
            {"anchors": (0, 2, 7)},
            ["its anchors [0, 2, 7] are not ascending from 0 to at most 6"],
        ),
        (
            {"anchors": (0, -2, 6)},
            ["its anchors [0, -2, 6] are not ascending from 0 to at most 6"],
        ),
        (
            {"types": (0, 3), "widths": (2, 6)},
            [
                "it was made for the pipeline widths [2, 6], and this one has 3 stages",
                "stages of bounds [0, 2, 4, 6] need features of the types [1], which it lacks",
            ],
        ),
        (
            {"types": (2,)},
            ["stages of bounds [0, 2, 4, 6] need features of the types [0, 1, 3], which it lacks"],
        ),
        (
            {"target_fingerprint": "f" * 16, "hidden_size": 48, "anchors": (2,)},
            [
                "it was made for the target ffffffffffffffff, and this one is 0123456789abcdef",
                "its hidden size is 48, the target's 32",
                "its anchors [2] are not ascending from 0 to at most 6",
            ],
        ),
    ],
)
def test_it_does_not_fit(target: Path, fields: dict[str, Any], problems: list[str]) -> None:
    message = "drafter.checkpoint does not fit: " + "; ".join(problems)
    config = load_target_config(target)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_fits(made_for(**fields), "0123456789abcdef", config, BOUNDS)


def test_more_types_than_needed_are_fine(target: Path) -> None:
    config = load_target_config(target)
    check_fits(made_for(types=(0, 1, 2, 3)), "0123456789abcdef", config, BOUNDS)
    check_fits(made_for(types=(0, 1, 2, 3)), "0123456789abcdef", config, (0, 1, 5, 6))


def test_the_blueprint_refuses_what_does_not_fit(target: Path, checkpoint: Path) -> None:
    settings = {
        "model": str(target),
        "pipeline": {"stages": 3, "layers": [2, 2, 2], "max_len": 64},
        "drafter": {"checkpoint": str(checkpoint)},
    }
    assert make_blueprint(Settings.model_validate(settings)).spec.anchors == ANCHORS
    settings["pipeline"] = {"stages": 2, "layers": [5, 1], "max_len": 64}
    with pytest.raises(ConfigError, match=r"need features of the types \[2\], which it lacks"):
        make_blueprint(Settings.model_validate(settings))
    # Nothing of it is looked at where no PDM runs.
    shutil.rmtree(checkpoint)
    for unused in ({"kind": "off"}, {"kind": "lookup"}):
        off = {**settings, "drafter": {"checkpoint": str(checkpoint), **unused}}
        assert not make_blueprint(Settings.model_validate(off)).with_drafter
    single = {**settings, "pipeline": {"stages": 1, "max_len": 64}}
    assert not make_blueprint(Settings.model_validate(single)).with_drafter


# --- weights that can't be read -----------------------------------------------------------------


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=re.escape(f"{checkpoint / WEIGHTS_FILE} can't be read:")):
        load_tensors(checkpoint)


@pytest.mark.parametrize("damage", ["cut", "empty", "pickle"])
def test_damaged_weights(target: Path, checkpoint: Path, damage: str) -> None:
    file = checkpoint / WEIGHTS_FILE
    if damage == "pickle":
        torch.save({"norm.weight": torch.ones(3)}, file)
    else:
        file.write_bytes(file.read_bytes()[: 0 if damage == "empty" else 1000])
    with pytest.raises(ConfigError, match=re.escape(f"{file} can't be read:")):
        load_draft_ids(checkpoint, made_for(), load_target_config(target))


@pytest.mark.parametrize(
    "name",
    ["aggregation.by_type.1.weight", "layers.0.mlp.up_proj.weight", "norm.weight", "head.weight"],
)
def test_a_missing_tensor(target: Path, checkpoint: Path, name: str) -> None:
    file = checkpoint / WEIGHTS_FILE
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    plan = blueprint(target, (2, 2, 2), pdm=checkpoint)
    message = f"the PDM checkpoint has no tensor {name!r}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Drafter(plan.spec, plan.checkpoint)


# --- the target's fingerprint -------------------------------------------------------------------


def test_the_fingerprint_tells_targets_apart(tmp_path: Path, target: Path) -> None:
    config = load_target_config(target)
    own = target_fingerprint(target, config)
    assert re.fullmatch("[0-9a-f]{16}", own)
    assert own == target_fingerprint(target, config)
    others = [
        toy_target(tmp_path / "seed", seed=1),
        toy_target(tmp_path / "layers", layers=5),
        toy_target(tmp_path / "heads", num_attention_heads=2),
        toy_target(tmp_path / "vocabulary", vocab_size=98),
        toy_target(tmp_path / "kind", "Qwen2ForCausalLM", hidden_size=32),
    ]
    found = {target_fingerprint(f, load_target_config(f)) for f in others}
    assert len(found | {own}) == 6


def test_the_fingerprint_is_the_same_in_every_precision(tmp_path: Path, target: Path) -> None:
    """Of a target in bfloat16, and of its copy in float32."""
    model = reference(target).bfloat16()
    model.save_pretrained(tmp_path / "half")
    model.float().save_pretrained(tmp_path / "whole")
    half, whole = (
        target_fingerprint(f, load_target_config(f))
        for f in (tmp_path / "half", tmp_path / "whole")
    )
    assert half == whole


# --- the untrained PDM --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_an_untrained_pdm_is_made_of_the_target(tmp_path: Path, architecture: str) -> None:
    folder = toy_target(tmp_path, architecture)
    model, config = reference(folder), load_target_config(folder)
    pdm, tensors = untrained_pdm(folder, config, BOUNDS, ANCHORS)
    check_fits(pdm, target_fingerprint(folder, config), config, BOUNDS)
    width = config.hidden_size
    assert (pdm.types, pdm.widths, pdm.layers) == ((0, 1, 3), (3,), 1)
    states = torch.randn(5, 4, width, generator=torch.Generator().manual_seed(0))
    for k in pdm.types:  # each FC passes its deepest anchor on
        weight = tensors[f"aggregation.by_type.{k}.weight"]
        assert torch.equal(states[:, : k + 1].flatten(1) @ weight.T, states[:, k])
    for name, parameter in model.model.layers[-1].named_parameters():
        assert torch.equal(tensors[f"layers.0.{name}"], parameter)
    assert torch.equal(tensors["norm.weight"], model.model.norm.weight)
    assert torch.equal(tensors["head.weight"], model.lm_head.weight)
    assert tensors["draft_ids"].tolist() == list(range(config.vocab_size))
    assert pdm.draft_vocabulary == config.vocab_size
    built = build_pdm(pdm, tensors, config, torch.float32, torch.device("cpu"))
    assert not any(p.is_meta for p in built.parameters())


def test_an_untrained_pdm_drafts_frequent_tokens(target: Path) -> None:
    config = replace(load_target_config(target), vocab_size=3 * UNTRAINED_DRAFT_VOCABULARY)
    assert torch.equal(untrained_draft_ids(config), torch.arange(UNTRAINED_DRAFT_VOCABULARY))


def test_a_pdm_in_half_precision(target: Path, checkpoint: Path) -> None:
    plan = blueprint(target, (2, 2, 2), pdm=checkpoint)
    drafter = Drafter(replace(plan.spec, dtype="bfloat16"), plan.checkpoint)
    held = [*drafter.pdm.parameters(), *drafter.pdm.aggregation.buffers()]
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    assert drafter.pdm.draft_ids.tolist() == list(range(0, 97, 2))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "beyond", "negative", "twice", "count", "head"])
def test_a_broken_draft_vocabulary(target: Path, checkpoint: Path, damage: str) -> None:
    """Ids that the target lacks end the whole pipeline (IndexError in stage 0 or in verification);
    ids that occur twice make the residual (p - q)+ wrong."""
    file = checkpoint / WEIGHTS_FILE
    tensors = load_file(file)
    ids = tensors["draft_ids"]
    match damage:
        case "missing":
            del tensors["draft_ids"]
        case "beyond":
            tensors["draft_ids"] = ids + 1  # the last is 97 of 97 tokens
        case "negative":
            tensors["draft_ids"] = ids - 1
        case "twice":
            tensors["draft_ids"] = torch.cat([ids[:-1], ids[:1]])
        case "count":
            change(checkpoint, draft_vocabulary=7)
        case "head":
            tensors["head.weight"] = tensors["head.weight"][:10]
    save_file({k: t.contiguous() for k, t in tensors.items()}, file)
    settings = {
        "model": str(target),
        "pipeline": {"stages": 3, "layers": [2, 2, 2], "max_len": 64},
        "drafter": {"checkpoint": str(checkpoint)},
    }
    blueprint = make_blueprint(Settings.model_validate(settings))
    assert not blueprint.with_drafter, "the target is served without it"
    wrong = "head.weight" if damage in ("head", "count") else "draft_ids"
    assert wrong in (blueprint.broken_pdm or "")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no folder", "there is no pdm.json in it"),
        ("no weights", "can't be read"),
        ("cut", "can't be read"),
        ("config", "is not a PDM's configuration"),
        ("no tensor", "'norm.weight' should be [32], not nothing"),
        ("shape", "'norm.weight' should be [32], not [31]"),
    ],
)
def test_a_broken_pdm_is_served_without(
    target: Path, checkpoint: Path, damage: str, said: str
) -> None:
    """And the reason is told; nothing but the drafts is missing."""
    file = checkpoint / WEIGHTS_FILE
    tensors = load_file(file)
    match damage:
        case "no folder":
            shutil.rmtree(checkpoint)
        case "no weights":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-8])
        case "config":
            (checkpoint / CONFIG_FILE).write_text("{")
        case "no tensor":
            save_file({k: t for k, t in tensors.items() if k != "norm.weight"}, file)
        case "shape":
            save_file({**tensors, "norm.weight": torch.ones(31)}, file)
    settings = {
        "model": str(target),
        "pipeline": {"stages": 3, "layers": [2, 2, 2], "max_len": 64},
        "drafter": {"checkpoint": str(checkpoint)},
    }
    blueprint = make_blueprint(Settings.model_validate(settings))
    assert said in (blueprint.broken_pdm or "")
    assert not blueprint.with_drafter
    assert blueprint.spec.anchors == ()
    graph = LocalGraph(blueprint)
    assert graph.drafter is None
    graph.close()


def test_a_tensor_of_the_wrong_shape(target: Path, checkpoint: Path) -> None:
    """Every draft fails, cycle after cycle, where the start could have said why."""
    file = checkpoint / WEIGHTS_FILE
    tensors = load_file(file)
    tensors["aggregation.by_type.0.weight"] = torch.zeros(32, 64)
    save_file(tensors, file)
    plan = blueprint(target, (2, 2, 2), pdm=checkpoint)
    with pytest.raises(ConfigError):
        Drafter(plan.spec, plan.checkpoint)


@pytest.mark.parametrize("damage", ["binary", "a file"])
def test_a_config_that_is_no_text(checkpoint: Path, damage: str) -> None:
    if damage == "binary":
        (checkpoint / CONFIG_FILE).write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError):
        PdmConfig.read(checkpoint if damage == "binary" else checkpoint / WEIGHTS_FILE)
