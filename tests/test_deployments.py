"""The deployments that come with the project, against the models that they are for."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from service import target
from service.config import Settings, parse_settings
from service.pdm.checkpoint import UNTRAINED_DRAFT_VOCABULARY
from service.pipeline.blueprint import Blueprint, make_blueprint
from service.pipeline.layers import WeightReader

DEPLOYMENTS = Path(__file__).parent.parent / "deployments"
FILES = sorted(f for f in DEPLOYMENTS.glob("*.yaml") if f.name != "kustomization.yaml")
LOCAL = ("emulated.yaml", "spd.yaml")

# Public facts: the fields of config.json that shape the model, and its number of parameters.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen/Qwen3-8B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": False,
        },
        8_190_735_360,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
        8_030_261_248,
    ),
}
GPU_BYTES = 16e9  # the smallest that the files name
USABLE = 0.8  # the rest is for activations, NCCL and the allocator


def settings_of(file: Path) -> Settings:
    (application,) = yaml.safe_load(file.read_text())["applications"]
    return parse_settings(application["args"])


FOR_GPUS = [file for file in FILES if settings_of(file).device == "cuda"]
for_gpus = pytest.mark.parametrize("file", FOR_GPUS, ids=lambda f: f.name)


def skeleton(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def sizes(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture
def blueprint_of(tmp_path, monkeypatch):
    """The blueprint of a deployment, with a hub that has its model but for the weights: of those
    only the final norm is looked at."""

    def download(hub_id: str) -> Path:
        config, _ = MODELS[hub_id]
        (tmp_path / "config.json").write_text(json.dumps(config))
        norm = {"model.norm.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16)}
        save_file(norm, tmp_path / "model.safetensors")
        return tmp_path

    monkeypatch.setattr(target, "_download", download)
    monkeypatch.setattr(WeightReader, "check", lambda *_: None)
    return lambda file: make_blueprint(settings_of(file))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_settings(file) -> None:
    config = yaml.safe_load(file.read_text())
    settings_of(file)
    # Other machines must be let in on purpose: there may be no keys.
    host = "127.0.0.1" if file.name in LOCAL else "0.0.0.0"
    assert config["http_options"] == {"host": host, "port": 8000}


def test_kustomize_has_all_of_the_cluster() -> None:
    (generator,) = yaml.safe_load((DEPLOYMENTS / "kustomization.yaml").read_text())[
        "configMapGenerator"
    ]
    assert sorted(generator["files"]) == [f.name for f in FILES if f.name not in LOCAL]


def test_the_cluster_serves_the_default_as_a_laptop_does() -> None:
    local, cluster = (
        settings_of(DEPLOYMENTS / name) for name in ("spd.yaml", "smollm2-135m-n2.yaml")
    )
    reserved = cluster.pipeline.model_copy(update={"cpus_per_actor": local.pipeline.cpus_per_actor})
    assert cluster.model_copy(update={"pipeline": reserved}) == local


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_described_as_they_are(name) -> None:
    fields, parameters = MODELS[name]
    model_type = fields["model_type"]
    assert sizes(skeleton(AutoConfig.for_model(**fields))) == parameters, model_type


@for_gpus
def test_a_deployment_fits_its_model(file, blueprint_of) -> None:
    blueprint: Blueprint = blueprint_of(file)
    settings = settings_of(file)
    assert file.stem == f"{settings.name}-n{settings.pipeline.stages}"
    assert len(blueprint.spec.bounds) == settings.pipeline.stages + 1
    assert blueprint.with_drafter


@for_gpus
def test_each_actor_fits_its_gpu(file, blueprint_of) -> None:
    """Weights, keys and values of each stage and of the PDM, in bytes."""
    settings = settings_of(file)
    assert settings.dtype == "bfloat16"
    blueprint: Blueprint = blueprint_of(file)
    config, bounds = blueprint.spec.target, blueprint.spec.bounds
    model = skeleton(AutoConfig.from_pretrained(blueprint.spec.folder))
    layer, embedding = sizes(model.model.layers[0]), sizes(model.model.embed_tokens)
    positions = settings.pipeline.slots * settings.pipeline.max_len
    kept = (
        2 * positions * config.num_key_value_heads * config.head_dim
    )  # keys and values of one layer
    stages = [(end - start) * (layer + kept) for start, end in pairwise(bounds)]
    stages[0] += embedding
    stages[-1] += sizes(model.lm_head)
    taps = sum(range(1, len(blueprint.spec.anchors) + 1)) * config.hidden_size**2
    drafter = layer + kept + embedding + taps + UNTRAINED_DRAFT_VOCABULARY * config.hidden_size
    needed = [2 * numbers for numbers in (*stages, drafter)]
    assert max(needed) < USABLE * GPU_BYTES, [f"{n / 1e9:.1f} GB" for n in needed]
