"""The GPU path on one machine, in minutes: is it right, and what does a cycle take?
`python -m benchmarks.gpu_check --json out.json`.

Right: every step of a stage computes what its plain forward does; and the texts of `graph: local`
on the device, with and without CUDA graphs, are those on a CPU: greedy, with seeds and with
rejection sampling. Times: cycles of one chat and of several. Without
`--model` the targets are made here, with random weights: nothing is fetched. `--device cpu` runs
all of it with steps that are not captured, to try the script itself. A part that fails is told in
the result and does not end the others; the exit status is 1 then.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import about
from service.config import parse_settings
from service.emulation.measure import NoText
from service.engine.scheduler import Scheduler
from service.messages import CyclePlan, CycleResult, GenerateRequest, Rows, Sampling
from service.pipeline.blueprint import make_blueprint
from service.pipeline.cache import Batch
from service.pipeline.decode_step import SHORTEST_CONTEXT
from service.pipeline.local_graph import LocalGraph
from service.pipeline.stage import Stage

SLOTS, CHUNK = 4, 64
VOCABULARY = 512  # of the small target, from whose ids all prompts are made
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
         "num_key_value_heads": 1}  # fmt: skip
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_key_value_heads": 8}  # fmt: skip # 1.2 billion weights
WAYS = ("plain", "steps")  # without and with CUDA graphs
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=1.0, top_p=0.9, seeded=True, key=3),
    "unseeded": Sampling(temperature=0.8, top_k=40, key=4),
}


def random_llama(
    folder: Path, sizes: dict[str, int], vocabulary: int, dtype: torch.dtype, device: str
) -> Path:
    """A target with weights so large that the best two scores lie far apart."""
    config = LlamaConfig(
        **sizes,
        vocab_size=vocabulary,
        num_attention_heads=sizes["num_key_value_heads"] * 4,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):  # a CPU is slow at so many random numbers
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                is_table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
                weight.normal_(std=1.0 if is_table else 1.5 / weight.shape[1] ** 0.5)
        model.model.norm.weight.mul_(0.5)
    model.save_pretrained(folder)
    return folder


@dataclass
class Made:
    """What a run has put out, and of its cycles with drafts: ms in all, of the slowest stage, of
    the PDM."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    cycles: list[tuple[float, float, float]] = field(default_factory=list)
    draft_errors: set[str] = field(default_factory=set)


class Pipeline:
    """One target in one way."""

    def __init__(
        self, folder: Path, way: str, *, stages: int, max_len: int, device: str, dtype: str
    ) -> None:
        self.stages, self.max_len = stages, max_len
        pipeline = {"graph": "local", "stages": stages, "slots": SLOTS, "max_len": max_len,
                    "chunk": CHUNK, "cuda_graphs": way == "steps"}  # fmt: skip
        if device == "cuda":
            pipeline["gpus"] = min(torch.cuda.device_count(), stages)
        blueprint = make_blueprint(
            parse_settings(
                {
                    "model": str(folder),
                    "device": device,
                    "dtype": dtype,
                    "drafter": {"kind": "pdm"},
                    "pipeline": pipeline,
                }
            )
        )
        if way == "steps":  # on a CPU too
            blueprint = replace(blueprint, spec=replace(blueprint.spec, static_steps=True))
        self.graph = LocalGraph(blueprint)

    def run(self, prompts: Sequence[Sequence[int]], count: int, how: Sampling) -> Made:
        """All prompts at once, `count` tokens each."""
        scheduler = Scheduler(
            stages=self.stages,
            slots=SLOTS,
            max_len=self.max_len,
            chunk=CHUNK,
            eos_ids=frozenset(),
            new_text=lambda _: NoText(),
            uses_pdm=self.stages > 1,
        )
        for k, prompt in enumerate(prompts):
            sampling = replace(how, key=how.key + k)
            scheduler.add(GenerateRequest(str(k), tuple(prompt), count, sampling), lambda _: None)
        made = Made({str(k): [] for k in range(len(prompts))})
        while (plan := scheduler.plan()) is not None:
            result = self.graph.run(plan)
            _note(made, plan, result)
            for sequence, event in scheduler.apply(result):
                made.texts[sequence.request.request_id].append(event.token_id)  # type: ignore[union-attr]
        return made

    def close(self) -> None:
        self.graph.close()


def _note(made: Made, plan: CyclePlan, result: CycleResult) -> None:
    drafter = result.drafter
    if drafter is not None and drafter.error is not None:
        made.draft_errors.add(drafter.error)
    is_prompt = any(r.count > 1 for rows in plan.stages for r in rows)
    if drafter is not None and drafter.drafts and not is_prompt:
        slowest = max(stage.seconds for stage in result.stages)
        made.cycles.append((1000 * result.seconds, 1000 * slowest, 1000 * drafter.seconds))


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=source).tolist() for n in lengths]


@torch.inference_mode()
def numbers(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of the last stage in float32, the hidden states of each step against the plain forward's:
    the largest difference, and the largest number."""
    max_len = 4 * SHORTEST_CONTEXT
    made_for = {"stages": options.stages, "max_len": max_len, "dtype": "float32"}
    with closing(Pipeline(folder, "steps", device=options.device, **made_for)) as pipeline:
        stage = pipeline.graph.stages[-1]
        assert isinstance(stage, Stage)
        device, step = stage._device, stage._step
        assert step is not None
        differences, largest = {}, 0.0
        for held in (stage._cache._keys, stage._cache._values):
            held.normal_()
        for groups, context in step._replays:
            rows = [Rows(slot, context - 1 - 3 * slot) for slot in range(groups)]
            hidden = torch.randn(groups, step._inputs.shape[1], device=device)
            plain, _ = stage.layers(hidden, Batch(rows, device))  # what it writes is written again
            found = step.run(rows, hidden, range(groups))[0][:groups]
            differences[f"{groups} rows, {context} positions"] = float((found - plain).abs().max())
            largest = max(largest, float(plain.abs().max()))
    worst = max(differences.values())
    return {"ok": worst < 1e-3 * largest, "largest number": largest, "differences": differences}


def texts(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The texts of each way on the device against those of the plain way on a CPU, in float32."""
    prompts = prompts_of([5, 40, 17, SHORTEST_CONTEXT - 8])  # one goes on in the next bucket
    max_len = 2 * SHORTEST_CONTEXT + options.tokens
    places = [("cpu", "plain"), *((options.device, way) for way in WAYS)]
    made: dict[tuple[str, str], dict[str, Made]] = {}
    for device, way in dict.fromkeys(places):
        made_for = {"stages": options.stages, "max_len": max_len, "dtype": "float32"}
        with closing(Pipeline(folder, way, device=device, **made_for)) as pipeline:
            made[device, way] = {
                name: pipeline.run(prompts, options.tokens, how) for name, how in SAMPLINGS.items()
            }
    right = made["cpu", "plain"]
    found: dict[str, Any] = {}
    for (device, way), by_sampling in made.items():
        found[f"{device}, {way}"] = {
            name: {
                "same as on a CPU": run.texts == right[name].texts,
                "tokens up to the first other one": _common(run, right[name]),
                "draft errors": sorted(run.draft_errors),
            }
            for name, run in by_sampling.items()
        }
    runs = [run for way in found.values() for run in way.values()]
    found["ok"] = all(run["same as on a CPU"] and not run["draft errors"] for run in runs)
    return found


def _common(a: Made, b: Made) -> int:
    """Of all texts, how many tokens are the same at their beginnings."""
    count = 0
    for mine, other in zip(a.texts.values(), b.texts.values(), strict=True):
        differs = [k for k, (x, y) in enumerate(zip(mine, other, strict=True)) if x != y]
        count += differs[0] if differs else len(mine)
    return count


def times(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians of cycles, in ms, with one chat and with all slots taken; and what a start costs."""
    found: dict[str, Any] = {}
    for way in WAYS:
        before, began = _memory(options.device), time.perf_counter()
        made_for = {"stages": options.stages, "max_len": options.context + options.tokens + 1}
        where = {"device": options.device, "dtype": options.dtype}
        with closing(Pipeline(folder, way, **made_for, **where)) as pipeline:
            found[way] = {
                "start s": time.perf_counter() - began,
                "memory MiB": (_memory(options.device) - before) / 2**20,
            }
            pipeline.run(prompts_of([options.context] * SLOTS), 16, Sampling())  # finds all cold
            for chats in (1, SLOTS):
                prompts = prompts_of([options.context] * chats)
                made = pipeline.run(prompts, options.tokens, Sampling())
                columns = zip(*made.cycles, strict=True)
                cycle, slowest, pdm = (statistics.median(column) for column in columns)
                found[way][f"{chats} chats, ms"] = {
                    "cycle": cycle,
                    "slowest stage": slowest,
                    "PDM": pdm,
                    "rest": cycle - max(slowest, pdm),
                    "cycles": len(made.cycles),
                    "PDM is hidden": pdm <= slowest,
                }
            if options.device == "cuda":
                found[way]["waits for the device a cycle, beside the last"] = _waits(pipeline)
    return found


def _memory(device: str) -> int:
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def _waits(pipeline: Pipeline) -> float:
    """How often Python has waited for the GPU within operations, by torch's own account."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = pipeline.run(prompts_of([8]), 32, Sampling())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronising = [w for w in told if "synchroni" in str(w.message)]
    return len(synchronising) / max(1, len(made.cycles))


def guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began = time.perf_counter()
    try:
        found = part()
    except Exception:
        found = {"ok": False, "error": traceback.format_exc()}
    return {**found, "seconds": time.perf_counter() - began}


def check(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    head: dict[str, Any] = {**about(), "settings": vars(options) | {"json": str(options.json)}}
    if on_gpu:
        head["gpu"] = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} in all"
    with tempfile.TemporaryDirectory() as scratch:
        small = large = Path(options.model) if options.model else Path(scratch) / "small"
        if not options.model:
            random_llama(small, SMALL, VOCABULARY, torch.float32, "cpu")
            if on_gpu:
                dtype = getattr(torch, options.dtype)
                large = random_llama(Path(scratch) / "large", LARGE, 32_000, dtype, "cuda")
        return {
            "about": head,
            "numbers": guarded(lambda: numbers(options, small)),
            "texts": guarded(lambda: texts(options, small)),
            "times": guarded(lambda: times(options, large)),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", help="folder of a target; unset: random ones")
    parser.add_argument("--stages", type=int, default=4, help="they share the GPU, if there is one")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--context", type=int, default=256, help="of the prompts that are timed")
    parser.add_argument("--dtype", default="bfloat16", help="of what is timed")
    parser.add_argument("--json", type=Path, help="writes all figures to this file")
    options = parser.parse_args(argv)
    found = check(options)
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if all(found[part].get("ok", True) for part in ("numbers", "texts", "times")) else 1


if __name__ == "__main__":
    sys.exit(main())
