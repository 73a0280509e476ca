"""The PDM that comes with the project: it fits the default model, and it drafts well."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from service.config import parse_settings
from service.pdm.corpus import read_documents
from service.pipeline.blueprint import SHIPPED, make_blueprint
from service.pipeline.local_graph import LocalGraph
from service.text.tokenizer import Tokenizer
from tests.toys import generate, requests_of, toy_target

FOLDER = SHIPPED / "pdm-smollm2-135m-instruct"
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a Python function that counts the vowels of a text.",
    "Tom has 12 apples and gives a third of them to Ann. How many are left?",
)


def chosen(model: str, stages: int) -> str | None:
    settings = {"model": model, "pipeline": {"stages": stages, "max_len": 256}}
    return make_blueprint(parse_settings(settings)).checkpoint


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_it_is_used_where_it_fits(default_model: Path, stages: int) -> None:
    assert chosen("smollm2-135m-instruct", stages) == str(FOLDER)
    assert chosen(str(default_model), stages) == str(FOLDER), "told by its weights, not its name"


def test_it_is_not_used_where_it_does_not_fit(default_model: Path, tmp_path: Path) -> None:
    assert chosen(str(default_model), 4) is None
    assert chosen(str(toy_target(tmp_path)), 2) is None


def test_it_is_small() -> None:
    tensors = load_file(FOLDER / "pdm.safetensors")
    assert {t.dtype for n, t in tensors.items() if n != "draft_ids"} == {torch.bfloat16}
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 50e6
    assert len(read_documents(FOLDER / "texts.safetensors")) > 1000


def test_it_drafts_well(default_model: Path) -> None:
    """No measurement, but a damaged checkpoint would be far below."""
    tokenizer = Tokenizer.load(default_model)
    prompts = [tokenizer.render_chat([{"role": "user", "content": q}]) for q in QUESTIONS]
    settings = {"pipeline": {"graph": "local", "max_len": 128}}
    graph = LocalGraph(make_blueprint(parse_settings(settings)))
    made = generate(
        graph, requests_of(prompts, 40, None), stages=2, max_len=128, chunk=64, uses_pdm=True
    )
    graph.close()
    assert not any(report.error for report in made.reports)
    accepted = sum(s.accepted for s in made.stats.values())
    assert accepted >= 0.25 * sum(s.decoded for s in made.stats.values())
