"""Which slot a request gets, and how much of its prompt is there already."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Place:
    """A free slot, and the first `reused` positions of `source`, which may be the slot itself."""

    slot: int
    source: int
    reused: int


class Slots:
    """The free slots, longest free first, and the tokens that each still holds: their keys and
    values are in all stages, and in the PDM."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held: dict[int, list[int]] = {slot: [] for slot in range(count)}

    @property
    def held(self) -> dict[int, list[int]]:
        """The tokens of each free slot."""
        return dict(self._held)

    @property
    def free(self) -> list[int]:
        """Longest free first."""
        return list(self._held)

    def place(self, request: GenerateRequest, running: Mapping[int, Sequence[int]]) -> Place:
        """The best place for a request; `running` are the tokens that can be copied from slots in
        use. Nothing is reserved yet."""
        oldest = next(iter(self._held))
        lengths = {
            slot: reusable(request, tokens) for slot, tokens in {**self._held, **running}.items()
        }
        source = max(lengths, key=lambda slot: lengths[slot])
        reused = lengths[source]
        if reused == 0:
            return Place(oldest, oldest, 0)
        # A conversation goes on in its slot; where it branches off, the other one is kept.
        goes_on = source in self._held and 2 * reused >= len(self._held[source])
        return Place(source if goes_on else oldest, source, reused)

    def take(self, place: Place) -> None:
        del self._held[place.slot]

    def release(self, slot: int, tokens: list[int]) -> None:
        """Frees a slot that holds `tokens`."""
        self._held[slot] = tokens


def reusable(request: GenerateRequest, tokens: Sequence[int]) -> int:
    """How many positions of a slot with `tokens` a request can start from. The last known token
    must go through the pipeline, and all of a prompt whose log-probabilities are wanted."""
    if request.prompt_logprobs:
        return 0
    known = request.known_ids
    limit = min(len(known) - 1, len(tokens))
    return next((i for i in range(limit) if known[i] != tokens[i]), limit)
