"""What the pipeline did for a chunk: docs/pipeline-events.md. Sent where a stream asks for it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Row(_Part):
    """What one stage worked on: `count` tokens from `position` on; `token` is None for those of
    the prompt."""

    position: int
    count: int = 1
    token: int | None = None
    text: str = ""
    source: Literal["prompt", "target", "lookup", "pdm"]


class Verdict(_Part):
    """The target's token for a position, and whether the one in flight there was the same."""

    position: int
    token: int
    text: str
    outcome: Literal["accepted", "rejected", "undrafted"]


class Cycle(_Part):
    """One cycle of one choice. `rows` has an entry for each stage; None is a bubble. `void`: the
    positions in flight whose rows are dropped."""

    cycle: int
    milliseconds: float
    rows: list[Row | None]
    verdict: Verdict | None = None
    void: list[int] = []


class Pipeline(_Part):
    """The cycles since the choice's last chunk, oldest first."""

    stages: int
    drafter: str
    cycles: list[Cycle]
