"""A PDM on disk: `pdm.json` (what it was made for) and `pdm.safetensors` (its weights).

Tensors: `aggregation.by_type.<k>.weight`, `previous.by_distance.<j - 1>.weight`, `layers.<i>.*`
(named as in the target's decoder layers), `norm.weight`, `head.weight` [D, H] and `draft_ids` [D]
int32.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from service.config import ConfigError
from service.pdm.features import reachable_types
from service.pdm.module import PDM, Aggregation, PreviousRows
from service.pipeline.layers import NORM, WeightReader, fill
from service.pipeline.skeleton import Rotation, target_layer, target_norm
from service.pipeline.spec import ActorSpec
from service.target_config import TargetConfig

CONFIG_FILE, WEIGHTS_FILE = "pdm.json", "pdm.safetensors"
UNTRAINED_DRAFT_VOCABULARY = 8192


class BrokenPdmError(ConfigError):
    """A PDM's files are missing or damaged. The target can be served without it."""


class PdmConfig(BaseModel):
    """What a PDM was made for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(1, ge=1, le=1)
    target_fingerprint: str
    hidden_size: int = Field(ge=1)
    widths: tuple[int, ...] = Field(min_length=1, description="pipeline widths n it serves")
    anchors: tuple[int, ...] = Field(min_length=1)
    types: tuple[int, ...] = Field(min_length=1, description="types k that have an FC_k")
    layers: int = Field(1, ge=1)
    previous: int = Field(
        0, ge=0, description="how many rows before the newest one it sees directly; the paper's: 0"
    )
    draft_vocabulary: int = Field(ge=1, description="number of tokens it can draft, D")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises BrokenPdmError for a missing or broken file."""
        file = folder / CONFIG_FILE
        try:
            return cls.model_validate_json(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise BrokenPdmError(
                f"drafter.checkpoint is {str(folder)!r}, but there is no {CONFIG_FILE} in it"
            ) from None
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, e["loc"])) for e in error.errors())
            raise BrokenPdmError(f"{file} is not a PDM's configuration; wrong: {fields}") from None
        except OSError as error:
            raise BrokenPdmError(f"{file} can't be read: {error}") from None


def target_fingerprint(folder: Path, config: TargetConfig) -> str:
    """Tells targets apart whose hidden states differ: sizes, and the bytes of the final norm (which
    every fine-tuning moves), in bfloat16 so that it is the same in every precision."""
    sizes = [
        [config.architecture],
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.vocab_size,
    ]
    norm = WeightReader(folder)(NORM, torch.bfloat16, torch.device("cpu"))
    digest = hashlib.sha256(json.dumps(sizes).encode())
    digest.update(norm.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_fits(
    pdm: PdmConfig, fingerprint: str, config: TargetConfig, bounds: tuple[int, ...]
) -> None:
    """Refuses a PDM that was made for another target or other stages."""
    problems = []
    if pdm.target_fingerprint != fingerprint:
        problems.append(
            f"it was made for the target {pdm.target_fingerprint}, and this one is {fingerprint}"
        )
    if pdm.hidden_size != config.hidden_size:
        problems.append(f"its hidden size is {pdm.hidden_size}, the target's {config.hidden_size}")
    if len(bounds) - 1 not in pdm.widths:
        problems.append(
            f"it was made for the pipeline widths {list(pdm.widths)}, and this one has "
            f"{len(bounds) - 1} stages"
        )
    if pdm.layers > config.num_hidden_layers:
        problems.append(f"it has {pdm.layers} layers, the target {config.num_hidden_layers}")
    anchors = pdm.anchors
    ascending = all(a < b for a, b in pairwise(anchors))
    if anchors[0] != 0 or not ascending or anchors[-1] > config.num_hidden_layers:
        problems.append(
            f"its anchors {list(anchors)} are not ascending from 0 to at most "
            f"{config.num_hidden_layers}"
        )
    elif missing := sorted(set(reachable_types(anchors, bounds)) - set(pdm.types)):
        problems.append(
            f"stages of bounds {list(bounds)} need features of the types {missing}, which it lacks"
        )
    if problems:
        raise ConfigError("drafter.checkpoint does not fit: " + "; ".join(problems))


def save_pdm(folder: Path, config: PdmConfig, tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint; integers are kept as they are, whatever the weights' precision."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n")


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint. Raises BrokenPdmError for a missing or broken file."""
    with _open(folder) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def _open(folder: Path) -> Iterator[Any]:
    """A checkpoint's tensors, to be read one by one."""
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise BrokenPdmError(f"{file} can't be read: {error}") from None


def check_tensors(folder: Path, pdm: PdmConfig, config: TargetConfig) -> None:
    """Raises BrokenPdmError unless a checkpoint has all tensors of the network, in their shapes.
    Only the file's header is read."""
    wanted = {name: list(p.shape) for name, p in _empty_pdm(pdm, config).named_parameters()}
    with _open(folder) as file:
        there = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, shape in wanted.items():
        if there.get(name) != shape:
            found = there.get(name, "nothing")
            raise BrokenPdmError(
                f"{folder / WEIGHTS_FILE}: the tensor {name!r} should be {shape}, not {found}"
            )


def load_draft_ids(folder: Path, pdm: PdmConfig, config: TargetConfig) -> Tensor:
    """The draft vocabulary [D] int64 of a checkpoint. Raises BrokenPdmError unless it is a set of
    the target's token ids: any other id would fail, or falsify the text, in mid-stream."""
    with _open(folder) as file:
        ids = file.get_tensor("draft_ids") if "draft_ids" in file.keys() else None  # noqa: SIM118
    if ids is None or ids.is_floating_point() or ids.shape != (pdm.draft_vocabulary,):
        found = "nothing" if ids is None else f"{ids.dtype} {list(ids.shape)}"
        raise BrokenPdmError(
            f"drafter.checkpoint: `draft_ids` should be {pdm.draft_vocabulary} integers, "
            f"not {found}"
        )
    ids = torch.as_tensor(ids, dtype=torch.int64)
    if len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise BrokenPdmError(
            "drafter.checkpoint: `draft_ids` should be different token ids in "
            f"[0, {config.vocab_size})"
        )
    return ids


def untrained_draft_ids(config: TargetConfig) -> Tensor:
    """The first tokens [D] int64: a BPE's most frequent ones come first."""
    return torch.arange(min(UNTRAINED_DRAFT_VOCABULARY, config.vocab_size))


def tensors_of_target(
    folder: Path, config: TargetConfig, layers: int, draft_ids: Tensor
) -> dict[str, Tensor]:
    """What a PDM takes over from the target, float32: its last decoder layers, its final norm, the
    head's rows of a draft vocabulary [D]."""
    read, cpu = WeightReader(folder), torch.device("cpu")
    first = config.num_hidden_layers - layers
    tensors = {
        f"layers.{i}.{name}": read(f"model.layers.{first + i}.{name}", torch.float32, cpu)
        for i in range(layers)
        for name, _ in target_layer(config, first + i).named_parameters()
    }
    tensors["norm.weight"] = read(NORM, torch.float32, cpu)
    tensors["head.weight"] = read(read.head_name(config), torch.float32, cpu)[draft_ids]
    tensors["draft_ids"] = draft_ids.int()
    return tensors


def untrained_pdm(
    folder: Path, config: TargetConfig, bounds: tuple[int, ...], anchors: tuple[int, ...]
) -> tuple[PdmConfig, dict[str, Tensor]]:
    """A PDM made from the target alone: its last decoder layer, norm and the head's rows of a plain
    draft vocabulary; each FC passes its deepest anchor on."""
    width = config.hidden_size
    types = reachable_types(anchors, bounds)
    tensors: dict[str, Tensor] = {}
    for k in types:
        weight = torch.zeros(width, (k + 1) * width)
        weight[:, k * width :] = torch.eye(width)
        tensors[f"aggregation.by_type.{k}.weight"] = weight
    draft_ids = untrained_draft_ids(config)
    tensors |= tensors_of_target(folder, config, 1, draft_ids)
    made_for = PdmConfig(
        format=1,
        target_fingerprint=target_fingerprint(folder, config),
        hidden_size=width,
        widths=(len(bounds) - 1,),
        anchors=anchors,
        types=types,
        layers=1,
        draft_vocabulary=len(draft_ids),
    )
    return made_for, tensors


def load_pdm(spec: ActorSpec, checkpoint: str | None) -> tuple[PdmConfig, PDM]:
    """The PDM of a pipeline: that of a checkpoint, or the untrained one."""
    if checkpoint is None:
        made_for, tensors = untrained_pdm(Path(spec.folder), spec.target, spec.bounds, spec.anchors)
    else:
        made_for, tensors = PdmConfig.read(Path(checkpoint)), load_tensors(Path(checkpoint))
    device = spec.device_of(spec.stages)
    return made_for, build_pdm(made_for, tensors, spec.target, spec.torch_dtype, device)


def build_pdm(
    pdm: PdmConfig,
    tensors: Mapping[str, Tensor],
    config: TargetConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PDM:
    """The network with its weights, which are frozen. Raises ConfigError for a tensor that is
    missing or of a wrong shape."""

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise ConfigError(f"the PDM checkpoint has no tensor {name!r}")
        return tensors[name].to(device, dtype)

    network = _empty_pdm(pdm, config, device)
    network.draft_ids = tensors["draft_ids"].to(device, torch.int64)
    fill(network, "", tensor)
    return network


def _empty_pdm(pdm: PdmConfig, config: TargetConfig, device: torch.device | None = None) -> PDM:
    """The network on the meta device; its position embedding is for `device`."""
    with torch.device("meta"):
        return PDM(
            Aggregation(pdm.hidden_size, pdm.types),
            PreviousRows(pdm.hidden_size, pdm.previous),
            nn.ModuleList(target_layer(config, i) for i in range(pdm.layers)),
            target_norm(config),
            nn.Linear(pdm.hidden_size, pdm.draft_vocabulary, bias=False),
            Rotation(config, device or torch.device("cpu")),
            torch.empty(0),
        )
