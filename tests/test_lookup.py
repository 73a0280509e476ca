"""Prompt lookup against its definition."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.lookup import LONGEST_MATCH, MOST_MATCHES, Lookup
from tests.toys import lookup_proposer


def by_definition(tokens: Sequence[int], min_match: int) -> int | None:
    """The successor of the longest earlier match of the ending (lengths above LONGEST_MATCH count
    as LONGEST_MATCH) among the latest MOST_MATCHES ones of `min_match` tokens, the latest among
    equals; None where there is none."""
    found: list[tuple[int, int]] = []  # (length of the match, where it ends)
    for end in range(len(tokens) - 1):
        lengths = [
            length
            for length in range(1, min(end + 1, LONGEST_MATCH) + 1)
            if tokens[end + 1 - length : end + 1] == tokens[len(tokens) - length :]
        ]
        if lengths:
            found.append((max(lengths), end))
    good = [(length, end) for length, end in found if length >= min_match][-MOST_MATCHES:]
    return tokens[max(good)[1] + 1] if good else None


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda kinds: st.lists(st.integers(0, kinds - 1), min_size=1, max_size=60)
    ),
    st.integers(1, LONGEST_MATCH),
)
def test_it_does_what_it_says(tokens: list[int], min_match: int) -> None:
    before = list(tokens)
    assert lookup_proposer(min_match)(tokens) == by_definition(tokens, min_match)
    assert tokens == before


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.lists(st.integers(0, 2), max_size=14),
    st.integers(1, LONGEST_MATCH),
)
def test_texts_with_long_repeats(part: list[int], between: list[int], min_match: int) -> None:
    tokens = [*part, 9, *between, *part]
    assert lookup_proposer(min_match)(tokens) == by_definition(tokens, min_match)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=3)),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_a_text_that_grows(steps: list[tuple[list[int], list[int]]], min_match: int) -> None:
    """What is certain stays, the tokens in flight behind it do not."""
    lookup, certain = Lookup(min_match, unsettled=3), [0]
    for settled, in_flight in steps:
        certain += settled
        tokens = certain + in_flight
        assert lookup(tokens) == by_definition(tokens, min_match)


def test_only_the_latest_matches_count() -> None:
    """A longer match before them is not seen."""
    tokens = [1, 2, 3, 7, *[9, 2, 3, 8] * MOST_MATCHES, 1, 2, 3]
    for unsettled in (0, 50, 1000):
        assert Lookup(2, unsettled)(tokens) == by_definition(tokens, 2) == 8
    assert Lookup(2, 0)(tokens[4:]) == 8
    assert Lookup(2, 0)([*tokens[:4], *tokens[8:]]) == 7


@pytest.mark.parametrize(
    ("tokens", "min_match", "proposed"),
    [
        ([1], 1, None),
        ([1, 2, 3], 1, None),
        ([1, 1], 1, 1),
        ([1, 2, 1], 1, 2),
        ([1, 2, 1], 2, None),
        ([1, 2, 3, 1, 2], 2, 3),
        # The latest among equals.
        ([5, 7, 5, 8, 5], 1, 8),
        # The longest before the latest.
        ([1, 2, 3, 9, 2, 4, 1, 2], 1, 3),
        ([1, 2, 3, 9, 2, 4, 1, 2], 2, 3),
        # A match may overlap the ending.
        ([4, 4, 4], 2, 4),
        ([1, 2, 1, 2, 1], 3, 2),
        # The ending itself is no earlier match.
        ([6, 7, 8, 9], 2, None),
        # A match that begins with the text.
        ([3, 4, 5, 3, 4], 2, 5),
        # Just too short.
        ([3, 4, 5, 6, 4, 5], 3, None),
        ([3, 4, 5, 6, 3, 4, 5], 3, 6),
    ],
)
def test_examples(tokens: list[int], min_match: int, proposed: int | None) -> None:
    assert lookup_proposer(min_match)(tokens) == proposed


def test_beyond_the_longest_match_the_latest_wins() -> None:
    ending = list(range(10, 10 + LONGEST_MATCH))
    longer = [1, *ending, 50]
    as_long = [2, *ending, 60]
    assert lookup_proposer(2)([*longer, *as_long, 1, *ending]) == 60
    shorter = [*ending[1:], 60]
    assert lookup_proposer(2)([*longer, *shorter, 1, *ending]) == 50


def test_any_sequence_will_do() -> None:
    assert lookup_proposer(2)((1, 2, 3, 1, 2)) == 3
