"""All drafts of a drafter over known texts, computed at once instead of cycle by cycle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from service.evaluation.gold import Gold
from service.evaluation.replay_graph import Table
from service.pdm.checkpoint import load_pdm
from service.pdm.features import depth_types
from service.pdm.layout import Packed, newest_hidden
from service.pdm.teacher import Teacher
from service.pipeline.blueprint import Blueprint


class Source(Protocol):
    """Drafts from the hidden states at its anchors."""

    anchors: tuple[int, ...]
    note: str  # for the reader of the results

    def __call__(self, states: Tensor, first: int) -> Table:
        """The drafts behind the tokens from position `first` on, of a text's states
        [S, anchors, H]."""


class PdmSource:
    """The PDM of a blueprint, with every fill that its pipeline can have."""

    note = ""

    def __init__(self, blueprint: Blueprint) -> None:
        spec = blueprint.spec
        self.anchors = spec.anchors
        self._types = depth_types(spec.anchors, spec.bounds)
        _, self._pdm = load_pdm(spec, blueprint.checkpoint)

    def __call__(self, states: Tensor, first: int) -> Table:
        positions = torch.arange(len(states))[None]
        packed = Packed(states[None], positions, torch.zeros_like(positions), positions >= first)
        table = []
        for fill in range(1, len(self._types)):
            logits = self._pdm.logits(newest_hidden(self._pdm, packed, self._types, fill))
            table.append(self._pdm.draft_ids[logits.argmax(-1)].tolist())
        return table


@torch.inference_mode()
def make_tables(
    folder: Path, golds: Sequence[Gold], sources: Sequence[Source]
) -> list[list[Table]]:
    """For each source its tables of all texts. The target reads each text once, in float32."""
    longest = max(len(gold.text) for gold in golds)
    anchors = {a for source in sources for a in source.anchors if a > 0}
    teacher = Teacher(folder, sorted(anchors), 1, longest, one_row_each=False, dtype=torch.float32)
    known = (0, *teacher.anchors)
    tables: list[list[Table]] = [[] for _ in sources]
    for gold in golds:
        states = teacher.target.embed(torch.tensor(gold.text))[:, None]
        if anchors:
            states = torch.cat([states, teacher.read([gold.text])[0]], dim=1)  # [S, known, H]
        for made, source in zip(tables, sources, strict=True):
            picked = states[:, [known.index(a) for a in source.anchors]]
            made.append(source(picked, len(gold.prompt)))
    return tables
