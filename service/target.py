"""The target: where its folder comes from, and whether this server can run it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config import DEFAULT_MODEL, ConfigError
from service.default_model import prepare_default_model
from service.target_config import TargetConfig, target_config
from service.text.tokenizer import Tokenizer

# Dense decoders whose layers keep one key and value per position (service/pipeline/layers.py).
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "Llama, SmolLM2",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3 (dense)",
    "SmolLM3ForCausalLM": "SmolLM3",
}

_HUB_FILES = (
    "*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt",
)  # fmt: skip
_NOT_HUB_FILES = ("*/*", "consolidated*")  # other formats of the same weights
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_target(model: str) -> Path:
    """The folder of a model: the embedded default, a local folder, or a download from the hub.

    Raises ConfigError if there is none, or if its weights are not safetensors.
    """
    if model == DEFAULT_MODEL:
        return prepare_default_model()
    path = Path(model).expanduser()
    if path.is_file():
        raise ConfigError(_not_a_folder(path))
    if not path.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ConfigError(
                f"model: there is no folder {model!r}. Give a Hugging Face folder, a hub id, "
                f"or {DEFAULT_MODEL!r}."
            )
        path = _download(model)
    try:
        _check_folder(path)
    except OSError as error:
        raise ConfigError(f"model: {path} can't be read: {error}") from error
    return path


def load_target_config(folder: Path) -> TargetConfig:
    """The config of a target that this server can run; else raises ConfigError with the reason."""
    raw = _read_json(folder / "config.json")
    architectures = raw.get("architectures") or ["none"]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        supported = "".join(f"\n  {a} ({names})" for a, names in SUPPORTED_ARCHITECTURES.items())
        raise ConfigError(
            f"model: the architecture {architectures[0]} of {folder} is not supported. "
            f"Supported are:{supported}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"model: {folder} is quantized ({method}); only plain weights can be run. "
            "Give the folder or hub id of the unquantized model."
        )
    from transformers import AutoConfig

    try:
        read = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' loaders share no base class of errors
        raise ConfigError(f"model: the config of {folder} can't be used: {error}") from error
    return target_config(read)


def eos_token_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Every token that ends an answer: models name them in up to three places."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = _read_json(path).get("eos_token_id") if path.is_file() else None
        ids.update(eos if isinstance(eos, list) else [eos])
    return frozenset(i for i in ids if i is not None)


def check_context(config: TargetConfig, max_len: int) -> None:
    """Raises ConfigError if slots are longer than the target can look back."""
    limit = config.max_position_embeddings
    if max_len > limit:
        raise ConfigError(
            f"pipeline.max_len: {max_len} is more than the {limit} positions that the model was "
            f"made for. Set it to {limit} or less."
        )


def _download(hub_id: str) -> Path:
    """The folder of a hub model, in the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_NOT_HUB_FILES)
            )
        )
    except Exception as error:  # the hub's errors and those of its HTTP client share no base class
        raise ConfigError(
            f"model: {hub_id!r} is no local folder, and it could not be had from the Hugging Face "
            f"hub: {error}\nCheck the id and the network (HF_TOKEN, for a gated model), or give a "
            f"local Hugging Face folder, or {DEFAULT_MODEL!r}."
        ) from error


def _check_folder(folder: Path) -> None:
    """Raises ConfigError unless a folder has a config and weights that can't run code."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model: {folder} has no config.json, so it is no Hugging Face folder. "
            "Give the folder that holds config.json and *.safetensors."
        )
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    found = f"only {', '.join(pickles)}" if pickles else "no *.safetensors"
    raise ConfigError(
        f"model: {folder} has {found}. Weights are read from safetensors alone, because pickles "
        "can run code when they are opened. Give a model in safetensors."
    )


def _not_a_folder(path: Path) -> str:
    if path.suffix == ".gguf":
        return (
            f"model: {path} is a GGUF file, which this server can't run. Give the Hugging Face "
            "folder or hub id of the same model."
        )
    return f"model: {path} is a file. Give the folder that holds config.json and *.safetensors."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} should hold a JSON object, not {type(value).__name__}.")
    return value
