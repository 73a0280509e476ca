"""Prompt lookup: propose what followed the last time that the text ended like this."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

# From all tokens of one text, those in flight included, to a proposal for the next one.
Proposer = Callable[[Sequence[int]], int | None]

# The temperature up to which lookup goes before a PDM that has a draft, with rejection sampling.
# Measured for the default model: at 0 it lifts acceptance by far; at 1, where text repeats itself
# less and a draft from q is accepted more easily, it costs two points (with a seed it gains three).
FIRST_UP_TO = 0.5
LONGEST_MATCH = 8  # beyond this a longer match tells nothing more
MOST_MATCHES = 64  # that are looked at, so that a long text costs no more than a short one


class Lookup:
    """The proposer of one text that grows, and whose last `unsettled` tokens may still change.

    Proposes the successor of the longest of the latest MOST_MATCHES earlier matches of the ending,
    the latest among equals; nothing where no match has `min_match` tokens. What is settled is
    indexed once, so a call costs the same in a text of any length.
    """

    def __init__(self, min_match: int, unsettled: int) -> None:
        self._min_match, self._unsettled = min_match, unsettled
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._next_end = min_match - 1  # the first place that is not indexed

    def __call__(self, tokens: Sequence[int]) -> int | None:
        for end in range(self._next_end, len(tokens) - self._unsettled - 1):
            self._ends[self._run(tokens, end)].append(end)
            self._next_end = end + 1
        best_length, best = 0, None
        for end in islice(self._matches(tokens), MOST_MATCHES):
            length = self._min_match
            while (
                length < LONGEST_MATCH
                and length <= end
                and tokens[end - length] == tokens[-1 - length]
            ):
                length += 1
            if length > best_length:
                best_length, best = length, tokens[end + 1]
                if length == LONGEST_MATCH:
                    break
        return best

    def _matches(self, tokens: Sequence[int]) -> Iterator[int]:
        """Where else the last `min_match` tokens stand, by their last one; the latest first."""
        ending = self._run(tokens, len(tokens) - 1)
        recent = range(len(tokens) - 2, self._next_end - 1, -1)
        return chain(
            (end for end in recent if self._run(tokens, end) == ending),
            reversed(self._ends.get(ending, ())),
        )

    def _run(self, tokens: Sequence[int], end: int) -> tuple[int, ...]:
        """The `min_match` tokens up to `end`."""
        return tuple(tokens[end - self._min_match + 1 : end + 1])
