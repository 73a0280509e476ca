"""Targets: where they come from, and which are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from transformers import LlamaConfig

from service import target
from service.config import DEFAULT_MODEL, ConfigError, PipelineSettings, Settings
from service.pipeline.blueprint import make_blueprint
from service.text.tokenizer import Tokenizer
from tests.toys import toy_target

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama folder; nothing here reads its weights."""
    path = tmp_path / "tiny"
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=8, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=16, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(path)
    (path / "model.safetensors").touch()
    return path


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | values))


def test_default_model_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "prepare_default_model", lambda: Path("/made"))
    assert target.resolve_target(DEFAULT_MODEL) == Path("/made")


def test_local_folder(folder: Path) -> None:
    assert target.resolve_target(str(folder)) == folder
    config = target.load_target_config(folder)
    assert config.architecture == "LlamaForCausalLM"
    assert config.num_hidden_layers == 2


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has only pytorch_model\.bin.*pickles can run code"):
        target.resolve_target(str(folder))


def test_folder_without_weights_or_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        target.resolve_target(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        target.resolve_target(str(folder))


@pytest.mark.parametrize(
    ("name", "said"),
    [("m.gguf", "is a GGUF file.*Hugging Face folder"), ("model.safetensors", "is a file. Give")],
)
def test_files_are_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=said):
        target.resolve_target(str(tmp_path / name))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c"])
def test_missing_folder_does_not_ask_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no folder '{model}'"):
        target.resolve_target(model)


def test_hub_id_takes_no_pickle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **patterns: Any) -> str:
        asked.update(patterns, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert target.resolve_target("org/tiny") == folder
    assert asked.pop("repo_id") == "org/tiny"
    wanted = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
        "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
    ]  # fmt: skip
    unwanted = [
        "pytorch_model.bin", "model.pt", "consolidated.safetensors", "onnx/config.json",
        "modeling_tiny.py", "README.md", "tiny.gguf",
    ]  # fmt: skip
    assert list(filter_repo_objects([*wanted, *unwanted], **asked)) == wanted


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("no network"), HFValidationError("no such name")]
)
def test_hub_failure_names_the_alternatives(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def snapshot_download(_repo_id: str, **_patterns: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError) as caught:
        target.resolve_target("org/none")
    for part in ("'org/none'", str(error), "local Hugging Face folder", DEFAULT_MODEL):
        assert part in str(caught.value)


@pytest.mark.parametrize("architecture", target.SUPPORTED_ARCHITECTURES)
def test_supported_architectures(tmp_path: Path, architecture: str) -> None:
    model_type = MODEL_TYPES[architecture]
    change(tmp_path, architectures=[architecture], model_type=model_type)
    assert target.load_target_config(tmp_path).architecture == architecture


def test_what_layers_can_not_do_is_refused(folder: Path) -> None:
    change(folder, hidden_act="quick_gelu")
    with pytest.raises(ConfigError, match=r"activation 'quick_gelu'.*Supported are: silu, swish"):
        target.load_target_config(folder)
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    scaled = {"rope_type": "longrope", "rope_theta": 500.0, "factor": 2.0, **factors}
    scaled["original_max_position_embeddings"] = 32
    change(folder, hidden_act="silu", rope_parameters=scaled)
    with pytest.raises(ConfigError, match="rope_type longrope"):
        target.load_target_config(folder)
    change(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 500.0})
    with pytest.raises(ConfigError, match="rope_type 'spiral' is not known"):
        target.load_target_config(folder)
    partial = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    change(folder, rope_parameters=partial | {"partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match="turn 2 of the 4 numbers"):
        target.load_target_config(folder)


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], None])
def test_unsupported_architecture(folder: Path, architectures: list[str] | None) -> None:
    change(folder, architectures=architectures)
    with pytest.raises(ConfigError) as caught:
        target.load_target_config(folder)
    name = architectures[0] if architectures else "none"
    assert f"the architecture {name} of {folder} is not supported" in str(caught.value)
    assert all(supported in str(caught.value) for supported in target.SUPPORTED_ARCHITECTURES)


def test_quantized_and_broken_configs(folder: Path) -> None:
    change(folder, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match=r"is quantized \(gptq\)"):
        target.load_target_config(folder)
    change(folder, quantization_config=None, model_type="no_such_type")
    with pytest.raises(ConfigError, match=r"the config of .* can't be used: .*no_such_type"):
        target.load_target_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json can't be read: Expecting"):
        target.load_target_config(folder)


def test_eos_tokens_come_from_three_places(default_model: Path, folder: Path) -> None:
    assert target.eos_token_ids(default_model, Tokenizer.load(default_model)) == {2}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, folder)
    change(folder, eos_token_id=5)
    change(folder, "generation_config.json", eos_token_id=[7, 2])
    assert target.eos_token_ids(folder, Tokenizer.load(folder)) == {2, 5, 7}
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=None)
    assert target.eos_token_ids(folder, Tokenizer.load(folder)) == {2}


def test_context(folder: Path) -> None:
    config = target.load_target_config(folder)
    target.check_context(config, 64)
    with pytest.raises(ConfigError, match=r"pipeline\.max_len: 65 is more than the 64 positions"):
        target.check_context(config, 65)


# --- weights ------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return toy_target(tmp_path / "toy", layers=2)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        make_blueprint(Settings(model=str(folder), pipeline=PipelineSettings(max_len=64)))
    return str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 400, -1])
def test_truncated_weights(weights: Path, size: int) -> None:
    """Found at the start, whatever stage would have read what is missing."""
    file = weights / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert f"{file} can't be read" in refused(weights)


def test_weights_that_are_something_else(weights: Path) -> None:
    (weights / "model.safetensors").write_bytes(b"PK\x03\x04" * 100)
    assert "can't be read" in refused(weights)


def test_weights_of_another_model(weights: Path, tmp_path: Path) -> None:
    other = toy_target(tmp_path / "other", layers=2, hidden_size=64)
    shutil.copy(other / "model.safetensors", weights)
    message = refused(weights)
    assert "by config.json it should be" in message
    assert "Are these files of one model?" in message
    fewer = toy_target(tmp_path / "fewer", layers=1)
    shutil.copy(fewer / "model.safetensors", weights)
    assert "no tensor 'model.layers.1." in refused(weights)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"model.norm.weight": "x"}}'])
def test_a_broken_index(weights: Path, index: str) -> None:
    (weights / "model.safetensors.index.json").write_text(index)
    message = refused(weights)
    assert "can't be" in message


def test_a_folder_that_may_not_be_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("service.target._check_folder", forbidden)
    assert "can't be read: [Errno 13] Permission denied" in refused(weights)
