"""What samples say: percentiles, goodput, counts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.sample import Outcome, Sample
from loadtest.scenario import Goal

PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of `count` values, in ms; NaN where there are none."""

    count: int
    ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """One variant of a scenario, all its rounds together. Rates are None where nothing counts."""

    variant: str
    outcomes: dict[Outcome, int]
    first_token: Spread
    gap: Spread
    per_token: Spread
    whole: Spread
    lag: Spread
    tokens_per_s: float  # of all chats together
    good_share: float | None  # of the requests that were not aborted
    good_per_s: float
    acceptance: float | None
    cached_share: float | None  # of the prompts' tokens
    prompt_tokens: float | None  # mean


def figures(variant: str, samples: Sequence[Sample], goal: Goal) -> Figures:
    """`samples`: those of one variant."""
    seconds = duration_s(samples)
    kept = [s for s in samples if s.outcome != "aborted"]
    good = sum(is_good(s, goal) for s in kept)
    accepted, rejected = _total(s.accepted for s in samples), _total(s.rejected for s in samples)
    prompts = [s.prompt_tokens for s in samples if s.prompt_tokens]
    cached = _total(s.cached_tokens for s in samples)
    outcomes: tuple[Outcome, ...] = ("whole", "aborted", "refused", "failed")
    return Figures(
        variant=variant,
        outcomes={o: sum(s.outcome == o for s in samples) for o in outcomes},
        first_token=spread(s.first_token_s for s in samples),
        gap=spread(gap for s in samples for gap in s.gaps_s),
        per_token=spread(s.per_token_s for s in samples),
        whole=spread(s.whole_s for s in samples),
        lag=spread(s.lag_s for s in samples),
        tokens_per_s=_total(s.tokens for s in samples) / seconds,
        good_share=good / len(kept) if kept else None,
        good_per_s=good / seconds,
        acceptance=accepted / (accepted + rejected) if accepted + rejected else None,
        cached_share=cached / sum(prompts) if prompts else None,
        prompt_tokens=sum(prompts) / len(prompts) if prompts else None,
    )


def is_good(sample: Sample, goal: Goal) -> bool:
    """Whole, and in time. A single token has no further ones that could be late."""
    if sample.outcome != "whole" or sample.first_token_s is None:
        return False
    per_token_s = sample.per_token_s or 0.0
    return (
        sample.first_token_s * 1000 <= goal.first_token_ms
        and per_token_s * 1000 <= goal.per_token_ms
    )


def spread(seconds: Iterable[float | None]) -> Spread:
    values = [1000 * value for value in seconds if value is not None]
    if not values:
        return Spread(0, (float("nan"),) * len(PERCENTS))
    return Spread(len(values), tuple(float(p) for p in np.percentile(values, PERCENTS)))


def duration_s(samples: Sequence[Sample]) -> float:
    """All blocks together, each from its beginning to its last end."""
    ends: dict[int, float] = {}
    for sample in samples:
        ends[sample.round] = max(ends.get(sample.round, 0.0), sample.ended_s)
    return sum(ends.values())


def _total(counts: Iterable[int | None]) -> int:
    return sum(count or 0 for count in counts)
