"""Products and layers as stages run them, against torch's and transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from service.config import ConfigError, parse_settings
from service.messages import Rows
from service.pipeline.blueprint import make_blueprint
from service.pipeline.cache import Batch
from service.pipeline.layers import target_shapes
from service.pipeline.linear import (
    Int8Linear,
    PackedLinear,
    PlainLinear,
    check_int8,
    fused,
    make_linear,
    replace_linears,
)
from service.pipeline.local_graph import LocalGraph
from service.pipeline.skeleton import RMSNorm, Rotation, rotated
from service.pipeline.stage import Stage
from service.target import load_target_config
from service.text.tokenizer import Tokenizer
from tests.real_prompts import TEXTS
from tests.toys import (
    ARCHITECTURES,
    blueprint,
    generate,
    greedy_text,
    hidden_states,
    joined,
    lookup_proposer,
    perfect_proposer,
    prompts_of,
    random_proposer,
    reference,
    requests_of,
    smallest_gap,
    texts_of,
    toy_pdm,
    toy_target,
)

CPU = torch.device("cpu")
COUNT = 14
PROMPTS = prompts_of([1, 2, 7, 19])
ROWS = [1, 2, 3, 4, 5, 8, 16, 17, 33]


def has_int8() -> bool:
    try:
        check_int8()
    except ConfigError:
        return False
    return True


needs_int8 = pytest.mark.skipif(not has_int8(), reason="this CPU has no 8-bit products")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor) -> Tensor:
    """A weight [out, in] that 8 bits for each number and a scale for each output can hold."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round() * scale


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_product_is_the_plain_one(count: int, with_bias: bool) -> None:
    weight, x = noise(70, 36), noise(count, 36, seed=1)
    bias = noise(70, seed=2) if with_bias else None
    packed, plain = PackedLinear(weight, bias)(x), PlainLinear(weight, bias)(x)
    assert packed.shape == (count, 70)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


@needs_int8
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_product_is_that_with_rounded_weights(count: int, dtype: torch.dtype) -> None:
    """Each row by its own scale, 16 bits of it: large and small rows side by side."""
    weight, bias = noise(70, 36), noise(70, seed=2)
    sizes = torch.logspace(-6, 4, count)[:, None]
    x = (noise(count, 36, seed=1) * sizes).to(dtype)
    out = Int8Linear(weight, bias)(x)
    exact = F.linear(x.float(), rounded(weight), bias)
    assert out.dtype == dtype
    bound = 1.5e-3 * sizes + (0.0 if dtype == torch.float32 else exact.abs() / 200)
    assert bool(((out.float() - exact).abs() <= bound + 1e-6).all())


@needs_int8
def test_an_int8_row_does_not_depend_on_its_neighbours() -> None:
    """To the last bit, so a text is the same alone and in any batch."""
    linear, x = Int8Linear(noise(50, 24)), noise(40, 24, seed=1)
    together = linear(x)
    for first in (0, 7, 39):
        for count in (1, 2, 3, 9):
            part = x[first : first + count]
            assert torch.equal(linear(part), together[first : first + len(part)])


@pytest.mark.parametrize("kind", [PackedLinear, pytest.param(Int8Linear, marks=needs_int8)])
def test_many_numbers_of_rows_are_few_products(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN keeps for each of them is much, so it must not grow with every prompt."""
    linear, met = kind(noise(50, 24)), set()
    product = linear._product

    def counting(x: Tensor, *others: Any) -> Tensor:
        met.add(len(x))
        return product(x, *others)

    monkeypatch.setattr(linear, "_product", counting)
    for count in range(1, 145):
        assert linear(noise(count, 24)).shape == (count, 50)
    assert len(met) <= 16 + 144 // 8


@needs_int8
def test_rows_and_weights_of_zeros() -> None:
    linear = Int8Linear(torch.zeros(8, 16), torch.ones(8))
    assert torch.equal(linear(noise(2, 16)), torch.ones(2, 8))
    assert torch.equal(Int8Linear(noise(8, 16))(torch.zeros(1, 16)), torch.zeros(1, 8))


def test_fused_products_lie_side_by_side() -> None:
    parts = [nn.Linear(12, size) for size in (8, 4, 6)]
    x = noise(5, 12)
    together = fused(parts, None)(x)
    torch.testing.assert_close(together, torch.cat([part(x) for part in parts], dim=1))


@pytest.mark.parametrize("weights", [None, pytest.param("int8", marks=needs_int8)])
def test_every_linear_of_a_module_is_replaced(weights: str | None) -> None:
    module = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.ModuleList([nn.Linear(6, 2), nn.ReLU()])})
    replace_linears(module, weights)
    kinds = {type(m) for m in module.modules()} - {nn.ModuleDict, nn.ModuleList, nn.ReLU}
    assert kinds == {Int8Linear if weights else PackedLinear}
    assert not list(module.parameters())


def test_half_precision_stays_plain() -> None:
    assert isinstance(make_linear(noise(4, 4).half()), PlainLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_gpus_is_that_of_cpus(dtype: torch.dtype) -> None:
    """Up to the rounding of the last product."""
    norm = RMSNorm(36, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(noise(36, seed=3))
    x = (noise(5, 4, 36) * torch.logspace(-3, 3, 5)[:, None, None]).to(dtype)
    mine = norm(x)
    fused_one = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    step = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(fused_one, mine, atol=step, rtol=step)


# --- layers -------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "Mistral-window": ("MistralForCausalLM", {"sliding_window": 6}),
    "Qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "Llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Qwen3-biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "SmolLM3-biases": ("SmolLM3ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    # What transformers' models of a kind don't read must not change ours.
    "Mistral-stray": ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Qwen2-stray": ("Qwen2ForCausalLM", {"attention_bias": True, "no_rope_layers": [0] * 6}),
    "Llama-stray": ("LlamaForCausalLM", {"sliding_window": 3, "no_rope_layers": [0] * 6}),
    "Llama-dynamic": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    """The raw output of every layer: a chunk in one piece, then single rows beside another slot."""
    architecture, config = VARIANTS[variant]
    toy_target(tmp_path, architecture, **config)
    tokens = prompts_of([14])[0]
    expected = hidden_states(reference(tmp_path), tokens)
    stage = Stage(blueprint(tmp_path, 1).spec, 0)
    hidden = F.embedding(torch.tensor(tokens), stage.embedding)
    found = []
    with torch.inference_mode():
        for rows in ([Rows(1, 0, 8)], *([Rows(0, i), Rows(1, i)] for i in range(8, 14))):
            own = hidden[rows[-1].start : rows[-1].end]
            both = torch.cat([own * -1, own]) if len(rows) > 1 else own
            _, taps = stage.layers(both, Batch(rows, CPU), range(1, 7))
            found.append(torch.stack(taps)[:, -len(own) :])
    torch.testing.assert_close(torch.cat(found, dim=1), expected[1:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    """What a folder should hold, by its config alone."""
    architecture, config = VARIANTS[variant]
    toy_target(tmp_path, architecture, **config)
    expected = {n: list(p.shape) for n, p in reference(tmp_path).state_dict().items()}
    assert target_shapes(load_target_config(tmp_path)) == expected


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rotations_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaled = {"rope_type": kind, "factor": 2.0, "rope_theta": 500.0} | more
    if kind in ("yarn", "llama3"):
        scaled["original_max_position_embeddings"] = 64
    toy_target(tmp_path, rope_parameters=scaled)
    positions = torch.arange(200)
    cos, sin = reference(tmp_path).model.rotary_emb(noise(1), positions[None])
    turn = Rotation(load_target_config(tmp_path), CPU)(positions, torch.float32)
    x = noise(200, 3, 8)
    first, second = x.chunk(2, dim=-1)
    expected = x * cos[0, :, None] + torch.cat([-second, first], dim=-1) * sin[0, :, None]
    torch.testing.assert_close(rotated(x, turn), expected, atol=1e-6, rtol=1e-6)


# --- weights of 8 bits --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def int8_texts(llama: Path) -> list[list[int]]:
    """transformers' own texts with the rounded weights."""
    model = reference(llama)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed_tokens" not in name:
            parameter.data = rounded(parameter.data)
    texts = [greedy_text(model, prompt, COUNT) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert smallest_gap(model, prompt, text) > 5e-3  # 16 bits of rows move scores by 1e-3
    return texts


@needs_int8
@pytest.mark.parametrize("cut", [(6,), (3, 3), (1, 2, 3)], ids=str)
def test_int8_text_is_that_of_the_rounded_weights(
    llama: Path, int8_texts: list[list[int]], tmp_path: Path, cut: tuple[int, ...]
) -> None:
    """With every drafter, together and one by one."""
    several = len(cut) > 1
    bounds = [sum(cut[:k]) for k in range(len(cut) + 1)]
    pdm = several and toy_pdm(tmp_path, llama, bounds=bounds, layers=2, previous=2)
    graph = LocalGraph(blueprint(llama, cut, pdm=pdm, weights="int8"))
    known = joined(PROMPTS, int8_texts)
    for proposer in (None, perfect_proposer(known), random_proposer(7, known), lookup_proposer(1)):
        for uses_pdm in {False, several}:
            for together in (True, False):
                made = generate(
                    graph,
                    requests_of(PROMPTS, COUNT, None),
                    stages=len(cut),
                    proposer=proposer,
                    uses_pdm=uses_pdm,
                    together=together,
                )
                assert texts_of(made) == int8_texts
                assert not any(report.error for report in made.reports)
    graph.close()


@needs_int8
def test_int8_takes_a_quarter_of_the_memory(llama: Path) -> None:
    stages = {w: Stage(blueprint(llama, (3, 3), weights=w).spec, 1) for w in (None, "int8")}
    h, pairs, mlp = 32, 16, 48  # sizes of a toy
    numbers = 3 * (2 * h * h + 2 * h * pairs + 3 * h * mlp) + 97 * h
    norms, outputs = 7 * h, 3 * (2 * h + 2 * pairs + 2 * mlp + h) + 97
    assert stages[None].weight_bytes() == 4 * (numbers + norms)
    assert stages["int8"].weight_bytes() == numbers + 4 * norms + 8 * outputs


def test_int8_is_refused_on_gpus() -> None:
    with pytest.raises(ConfigError, match="weights: int8 is for `device: cpu`, not cuda"):
        parse_settings({"device": "cuda", "weights": "int8"})
    assert parse_settings({"weights": "int8"}).weights == "int8"


def test_a_cpu_without_8_bit_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Linear, "forward", lambda _, x: x * 0)
    with pytest.raises(ConfigError, match="weights: int8 needs a CPU with"):
        make_blueprint(parse_settings({"weights": "int8"}))


@needs_int8
@pytest.mark.full
def test_int8_text_of_the_real_model(default_model: Path) -> None:
    """Speculation changes no token."""
    pipeline = {"stages": 2, "graph": "local", "max_len": 512}
    settings = parse_settings({"weights": "int8", "pipeline": pipeline})
    graph = LocalGraph(make_blueprint(settings))
    tokenizer = Tokenizer.load(default_model)
    requests = requests_of([tokenizer.encode(text) for text in TEXTS[:3]], 24, None)
    texts = []
    for uses_pdm, proposer in ((False, None), (True, None), (True, lookup_proposer(2))):
        how = {"uses_pdm": uses_pdm, "proposer": proposer, "max_len": 512, "chunk": 64}
        together = generate(graph, requests, stages=2, **how)
        alone = [generate(graph, [request], stages=2, **how) for request in requests]
        texts += [together.tokens, {k: v for run in alone for k, v in run.tokens.items()}]
        drafted = sum(stats.drafted for stats in together.stats.values())
        assert drafted == (3 * 22 if uses_pdm else 0)
    assert all(made == texts[0] for made in texts)
    graph.close()
