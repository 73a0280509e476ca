"""An interrupted training on disk."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.files import whole_file
from service.pdm.checkpoint import PdmConfig

STATE_FILE = "state.safetensors"


@dataclass(frozen=True, slots=True)
class State:
    """An interrupted training, in one file. `masters`, `averages` and `optimizer` are of the
    parameters as they are trained, with the inputs of the FCs divided by `scales`."""

    settings: dict[str, Any]
    made_for: PdmConfig
    scales: Tensor
    masters: dict[str, Tensor]
    averages: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: dict[str, int]
    curve: list[dict[str, Any]]
    head: Tensor
    draft_ids: Tensor

    def write(self, file: Path) -> None:
        groups = {"masters": self.masters, "averages": self.averages, "optimizer": self.optimizer}
        tensors = {f"{g}.{name}": t for g, named in groups.items() for name, t in named.items()}
        tensors |= {"scales": self.scales, "head": self.head, "draft_ids": self.draft_ids}
        plain = {
            "settings": self.settings,
            "made_for": self.made_for.model_dump(),
            "progress": self.progress,
            "curve": self.curve,
        }
        with whole_file(file) as partial:
            save_file(tensors, partial, {"plain": json.dumps(plain)})

    @classmethod
    def read(cls, file: Path) -> "State":
        with safe_open(file, framework="pt") as opened:
            plain = json.loads(opened.metadata()["plain"])
            groups: dict[str, dict[str, Tensor]] = {"masters": {}, "averages": {}, "optimizer": {}}
            for name in opened.keys():  # noqa: SIM118
                group, _, rest = name.partition(".")
                if group in groups:
                    groups[group][rest] = opened.get_tensor(name)
            single = {name: opened.get_tensor(name) for name in ("scales", "head", "draft_ids")}
        return cls(
            settings=plain["settings"],
            made_for=PdmConfig.model_validate(plain["made_for"]),
            progress=plain["progress"],
            curve=plain["curve"],
            masters=groups["masters"],
            averages=groups["averages"],
            optimizer=groups["optimizer"],
            **single,
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The weights as in a checkpoint."""
        tensors = scale_inputs(self.masters, 1 / self.scales)
        return {"head.weight": self.head, **tensors, "draft_ids": self.draft_ids}


def scale_inputs(tensors: dict[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
    """The tensors with the FCs' columns multiplied by `scales` [A + 1, H]: the same map of hidden
    states that are divided by them."""
    return {
        name: tensor * scales.flatten()[: tensor.shape[1]]
        if name.startswith("aggregation.")
        else tensor
        for name, tensor in tensors.items()
    }
