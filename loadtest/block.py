"""One block of a scenario, as a file: what the senders are told."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.scenario import Planned


@dataclass(frozen=True, slots=True)
class Block:
    """Requests to send to `url`, by so many `chats` at once (closed) or by their times (open)."""

    url: str
    model: str
    variant: str
    round: int
    requests: Sequence[Planned]
    chats: int | None = None

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> "Block":
        fields = json.loads(file.read_text())
        return cls(**{**fields, "requests": [Planned(**each) for each in fields["requests"]]})
