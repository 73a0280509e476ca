"""Tiny targets with random weights, and a driver without the engine's thread.

A toy is a Hugging Face folder (config.json, model.safetensors) of a supported architecture. Its
weights are large enough that greedy text wanders and that the best two scores lie far apart, so
that texts can be compared token for token.
"""

import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from service.emulation.measure import NoText
from service.engine.lookup import Lookup, Proposer
from service.engine.scheduler import Scheduler
from service.messages import (
    CyclePlan,
    CycleResult,
    DraftReport,
    GenerateRequest,
    Logprobs,
    PromptScored,
    RequestStats,
    Sampling,
)
from service.pdm.checkpoint import PdmConfig, load_draft_ids, save_pdm, untrained_draft_ids
from service.pdm.checkpoint import target_fingerprint as fingerprint_of
from service.pdm.features import default_anchors, reachable_types
from service.pipeline.blueprint import Blueprint
from service.pipeline.graph import Graph
from service.pipeline.partition import balanced_layers, stage_bounds
from service.pipeline.spec import ActorSpec
from service.target import load_target_config

VOCABULARY = 97

# What a toy of each architecture has beside the common sizes: every switch that changes the layers.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"hidden_size": 40, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"head_dim": 16, "tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": None, "num_key_value_heads": 1},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 3, "tie_word_embeddings": True},
}


# --- targets ------------------------------------------------------------------------------------


def toy_target(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    layers: int = 6,
    *,
    seed: int = 0,
    sharpness: float = 0.7,
    **config: Any,
) -> Path:
    """Makes a toy in `folder`. Scores have a standard deviation of about sqrt(H) * `sharpness`."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    made = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        **{**sizes, **ARCHITECTURES[architecture], **config}, architectures=[architecture]
    )
    model = getattr(transformers, architecture)(made).float().eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=source)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:  # a bias
                parameter.copy_(0.5 * noise)
            elif name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.copy_(noise)
            else:  # [out, in]
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
        model.model.norm.weight.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def toy_chat_target(folder: Path, default_model: Path, **config: Any) -> Path:
    """A toy with the default model's tokenizer and chat template."""
    toy_target(folder, vocab_size=49152, **config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(default_model / name, folder)
    return folder


def reference(folder: Path) -> Any:
    """The same target as transformers itself runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy_text(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own `generate` adds to a prompt."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def smallest_gap(model: Any, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Between the best two scores, at the positions of `text`."""
    logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    best = torch.topk(logits, 2).values
    return float((best[:, 0] - best[:, 1]).min())


def prompts_of(lengths: Sequence[int], seed: int = 1, vocabulary: int = VOCABULARY) -> list[list]:
    """Random prompts; no two have the same first token."""
    source = random.Random(seed)
    firsts = source.sample(range(vocabulary), len(lengths))
    return [
        [first, *(source.randrange(vocabulary) for _ in range(length - 1))]
        for first, length in zip(firsts, lengths, strict=True)
    ]


@torch.no_grad()
def hidden_states(model: Any, tokens: Sequence[int]) -> Tensor:
    """[L + 1, S, H]: the embedding's output, then the raw output of every decoder layer."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept.append((output if isinstance(output, Tensor) else output[0])[0].clone())

    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [module.register_forward_hook(keep) for module in modules]
    model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)


# --- blueprints ---------------------------------------------------------------------------------


def blueprint(
    folder: Path,
    layers: int | Sequence[int],
    *,
    pdm: Path | bool = False,
    slots: int = 4,
    max_len: int = 64,
    draft_ids: Tensor | None = None,
    weights: str | None = None,
) -> Blueprint:
    """A toy's blueprint for a number of stages or a list of layers, with a PDM checkpoint, the
    untrained PDM (True) or none (False)."""
    config = load_target_config(folder)
    counts = (
        balanced_layers(config.num_hidden_layers, layers) if isinstance(layers, int) else layers
    )
    bounds = stage_bounds(tuple(counts))
    anchors: tuple[int, ...] = ()
    checkpoint = None
    if pdm is True:
        anchors = default_anchors(config.num_hidden_layers, len(counts))
        draft_ids = untrained_draft_ids(config)
    elif pdm:
        checkpoint = str(pdm)
        made_for = PdmConfig.read(pdm)
        anchors = made_for.anchors
        draft_ids = load_draft_ids(pdm, made_for, config)
    spec = ActorSpec(
        folder=str(folder),
        target=config,
        bounds=bounds,
        anchors=anchors,
        slots=slots,
        max_len=max_len,
        dtype="float32",
        device="cpu",
        threads=1,
        weights=weights,
    )
    return Blueprint(spec, checkpoint, draft_ids)


def toy_pdm(
    folder: Path,
    target: Path,
    *,
    bounds: Sequence[int],
    anchors: Sequence[int] | None = None,
    layers: int = 1,
    previous: int = 0,
    draft_ids: Sequence[int] | None = None,
    seed: int = 0,
) -> Path:
    """Makes a PDM checkpoint with random weights: FC_k, layers, norm and head."""
    config = load_target_config(target)
    width, ids = config.hidden_size, list(draft_ids or range(0, config.vocab_size, 2))
    if anchors is None:
        anchors = default_anchors(config.num_hidden_layers, len(bounds) - 1)
    types = reachable_types(anchors, bounds)
    source = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    tensors = {
        f"aggregation.by_type.{k}.weight": noise(width, (k + 1) * width) / ((k + 1) * width) ** 0.5
        for k in types
    }
    for j in range(previous):
        tensors[f"previous.by_distance.{j}.weight"] = noise(width, width) / width**0.5
    model = reference(target)
    for i in range(layers):
        for name, parameter in model.model.layers[i].named_parameters():
            flat = parameter.dim() == 1
            scale = 0.3 if flat else parameter.shape[-1] ** -0.5
            tensors[f"layers.{i}.{name}"] = noise(*parameter.shape) * scale + (
                1.0 if name.endswith("norm.weight") else 0.0
            )
    tensors["norm.weight"] = 1 + 0.3 * noise(width)
    tensors["head.weight"] = noise(len(ids), width)
    tensors["draft_ids"] = torch.tensor(ids, dtype=torch.int32)
    made_for = PdmConfig(
        format=1,
        target_fingerprint=fingerprint_of(target, config),
        hidden_size=width,
        widths=(len(bounds) - 1,),
        anchors=tuple(anchors),
        types=types,
        layers=layers,
        previous=previous,
        draft_vocabulary=len(ids),
    )
    save_pdm(folder, made_for, tensors)
    return folder


# --- proposers ----------------------------------------------------------------------------------


def _next(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> int | None:
    """What follows in the text that begins with these tokens, if there is one."""
    for text in texts:
        if len(text) > len(tokens) and list(text[: len(tokens)]) == list(tokens):
            return text[len(tokens)]
    return None


def perfect_proposer(texts: Sequence[Sequence[int]]) -> Proposer:
    """Replays known texts (prompt and answer)."""
    return lambda tokens: _next(texts, tokens)


def wrong_proposer(
    texts: Sequence[Sequence[int]], vocabulary: int = VOCABULARY, every: int = 1
) -> Proposer:
    """Never the target's token (where the length is a multiple of `every`, else nothing); what
    follows a wrong token is void, so anything will do there."""

    def propose(tokens: Sequence[int]) -> int | None:
        if len(tokens) % every:
            return None
        right = _next(texts, tokens)
        return ((tokens[-1] if right is None else right) + 1) % vocabulary

    return propose


def lookup_proposer(min_match: int) -> Proposer:
    """Prompt lookup as a function of the text alone."""
    return lambda tokens: Lookup(min_match, unsettled=0)(tokens)


def each(proposer: Proposer | None) -> Callable[[], Proposer] | None:
    """One proposer for all requests of a scheduler."""
    return None if proposer is None else lambda: proposer


def random_proposer(
    seed: int, texts: Sequence[Sequence[int]], vocabulary: int = VOCABULARY, silent: int = 1
) -> Proposer:
    """Right (2 of `silent` + 3 times), wrong (1) or silent, by a draw that depends on the tokens
    alone."""

    def propose(tokens: Sequence[int]) -> int | None:
        source = random.Random(f"{seed} {list(tokens)}")
        kind = source.choice(["right", "right", "wrong", *["silent"] * silent])
        if kind == "silent":
            return None
        right = _next(texts, tokens)
        return right if kind == "right" and right is not None else source.randrange(vocabulary)

    return propose


# --- running ------------------------------------------------------------------------------------


@dataclass
class Generated:
    """What a run has made, by request id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    stats: dict[str, RequestStats] = field(default_factory=dict)
    logprobs: dict[str, list[Logprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: dict[str, tuple[Logprobs, ...]] = field(default_factory=dict)
    reports: list[DraftReport] = field(default_factory=list)


def requests_of(
    prompts: Sequence[Sequence[int]], count: int, sampling: Sequence[Sampling] | Sampling | None
) -> list[GenerateRequest]:
    """Requests "0", "1", ... of `count` tokens each."""
    if sampling is None or isinstance(sampling, Sampling):
        sampling = [sampling or Sampling()] * len(prompts)
    return [
        GenerateRequest(str(i), tuple(prompt), count, how)
        for i, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
    ]


Watch = Callable[[CyclePlan, CycleResult], None]


def generate(
    graph: Graph,
    requests: Sequence[GenerateRequest],
    *,
    stages: int,
    slots: int = 4,
    max_len: int = 64,
    chunk: int = 8,
    proposer: Proposer | None = None,
    uses_pdm: bool = False,
    watch: Watch | None = None,
    together: bool = True,
    eos_ids: Collection[int] = (),
) -> Generated:
    """Drives a scheduler and a graph until all requests are done. Not `together`: a request comes
    in each third cycle."""
    scheduler = Scheduler(
        stages=stages,
        slots=slots,
        max_len=max_len,
        chunk=chunk,
        eos_ids=frozenset(eos_ids),
        new_text=lambda _: NoText(),
        new_proposer=each(proposer),
        uses_pdm=uses_pdm,
    )
    made = Generated({r.request_id: [] for r in requests})
    coming = list(requests)
    for cycle in range(100_000):
        while coming and (together or cycle % 3 == 0):
            scheduler.add(coming.pop(0), lambda _: None)
            if not together:
                break
        plan = scheduler.plan()
        if plan is None:
            if coming:
                continue
            return made
        result = graph.run(plan)
        if watch is not None:
            watch(plan, result)
        if result.drafter is not None:
            made.reports.append(result.drafter)
        for sequence, delta in scheduler.apply(result):
            name = sequence.request.request_id
            if isinstance(delta, PromptScored):
                made.prompt_logprobs[name] = delta.logprobs
                continue
            made.tokens[name].append(delta.token_id)
            made.logprobs[name] += [] if delta.logprobs is None else [delta.logprobs]
            if delta.stats is not None:
                made.stats[name] = delta.stats
    raise AssertionError("the pipeline does not come to an end")


def texts_of(generated: Generated) -> list[list[int]]:
    """In the order of the requests."""
    return list(generated.tokens.values())


def joined(prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts with their answers."""
    return [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
