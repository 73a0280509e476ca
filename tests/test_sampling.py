"""Noise, shaping, drafting and verification: known answers, definitions and distributions.

All keys are fixed, so every statistical test gives the same p-value each time. The bound for a
chi-square or Kolmogorov-Smirnov test is P_VALUE; a wrong distribution falls under it by far.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from service.engine.lookup import Proposer
from service.messages import Proposal, Sampling
from service.pipeline.local_graph import LocalGraph
from service.sampling import (
    GREEDY_BELOW,
    DraftDistribution,
    Stream,
    _mix_int,
    _mix_tensor,
    draft,
    gumbel,
    is_greedy,
    logprobs,
    penalise,
    shape,
    uniform,
    uses_q,
    verify,
)
from tests.toys import blueprint, generate, reference, requests_of, toy_pdm, toy_target

P_VALUE = 1e-3
MASK = (1 << 64) - 1


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def chi_square(counts: Sequence[float], probs: Sequence[float]) -> float:
    """The p-value of counts under exact probabilities; cells that expect less than 5 are merged."""
    total = sum(counts)
    pairs = sorted(zip(probs, counts, strict=True), reverse=True)
    assert all(c == 0 for p, c in pairs if p == 0), "an impossible token was drawn"
    expected, observed = [0.0], [0.0]
    for p, c in pairs:
        if expected[-1] >= 5:
            expected.append(0.0)
            observed.append(0.0)
        expected[-1] += p * total
        observed[-1] += c
    if expected[-1] < 5 and len(expected) > 1:
        expected[-2:] = [sum(expected[-2:])]
        observed[-2:] = [sum(observed[-2:])]
    if len(expected) == 1:
        return 1.0
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue)


# --- noise: the hash ----------------------------------------------------------------------------


def split_mix(state: int) -> int:
    """The output function of SplitMix64, from its paper."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_mixer_is_that_of_split_mix_64() -> None:
    """The first outputs of the published generator with seed 1234567."""
    golden = 0x9E3779B97F4A7C15
    outputs = [_mix_int((1234567 + k * golden) & MASK) for k in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(derandomize=True, max_examples=500)
@given(st.lists(st.integers(0, MASK), min_size=1, max_size=20))
def test_the_mixer_is_the_same_on_tensors(numbers: list[int]) -> None:
    signed = [x - (1 << 64) if x >> 63 else x for x in numbers]
    mixed = _mix_tensor(torch.tensor(signed, dtype=torch.int64)).tolist()
    assert [x & MASK for x in mixed] == [_mix_int(x) for x in numbers]
    assert [_mix_int(x) for x in numbers] == [split_mix(x) for x in numbers]


def test_the_mixer_at_the_edges() -> None:
    numbers = [0, 1, MASK, 1 << 63, (1 << 63) - 1, *(1 << k for k in range(64))]
    signed = [x - (1 << 64) if x >> 63 else x for x in numbers]
    mixed = _mix_tensor(torch.tensor(signed, dtype=torch.int64)).tolist()
    assert [x & MASK for x in mixed] == [_mix_int(x) for x in numbers]


# A seeded text must survive a new version: these numbers may never change.
@pytest.mark.parametrize(
    ("key", "stream", "position", "value"),
    [
        (0, Stream.ACCEPT, 0, 0.14563735892139051),
        (0, Stream.ACCEPT, 1, 0.3784320956512296),
        (42, Stream.ACCEPT, 7, 0.6419870194579981),
        (2**64 - 1, Stream.ACCEPT, 2047, 0.11224581678683376),
        (2**63, Stream.RESIDUAL, 100, 0.7056205761761326),
    ],
)
def test_known_uniforms(key: int, stream: Stream, position: int, value: float) -> None:
    assert uniform(key, stream, position) == value


@pytest.mark.parametrize(
    ("key", "stream", "position", "values"),
    [
        (
            0,
            Stream.GUMBEL,
            0,
            [
                -0.3097074924693,
                -0.8865508641733,
                2.0445716157857,
                0.8641774567107,
                -0.3154230762297,
            ],
        ),
        (
            42,
            Stream.GUMBEL,
            7,
            [0.893681451641, -0.209087693875, -0.7350429788074, 0.3824625920245, 0.2022785302591],
        ),
        (
            42,
            Stream.DRAFT,
            7,
            [0.1398449797559, 1.361992381034, 1.510359014267, 1.5758289691242, -0.1034216826936],
        ),
        (
            2**64 - 1,
            Stream.RESIDUAL,
            2047,
            [-0.5110954286738, 0.8988673220078, 1.2137367476511, 0.011192970946, 0.9543258537266],
        ),
    ],
)
def test_known_gumbels(key: int, stream: Stream, position: int, values: list[float]) -> None:
    noise = gumbel(key, stream, position, torch.tensor([0, 1, 96, 49151, 151935]))
    assert noise.dtype == torch.float64
    assert noise.tolist() == pytest.approx(values, abs=1e-12)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, MASK), st.sampled_from(list(Stream)), st.integers(0, 1 << 20))
def test_noise_by_its_definition(key: int, stream: Stream, position: int) -> None:
    """In plain integers: a hash of (key, stream), of the position, of the token id."""
    golden = 0x9E3779B97F4A7C15
    base = _mix_int((_mix_int(key * 4 + stream + 1) + position * golden) & MASK)
    ids = [0, 3, 151935]
    bits = [split_mix(base + (i + 1) * golden) >> 12 for i in ids]
    expected = [-math.log(-math.log((b + 0.5) / 2**52)) for b in bits]
    noise = gumbel(key, stream, position, torch.tensor(ids)).tolist()
    assert noise == pytest.approx(expected, abs=1e-9)


@settings(derandomize=True, deadline=None)
@given(
    st.integers(0, MASK),
    st.integers(0, 4096),
    st.lists(st.integers(0, 150_000), min_size=1, max_size=50, unique=True),
)
def test_an_id_has_the_same_noise_in_every_vocabulary(
    key: int, position: int, ids: list[int]
) -> None:
    whole = gumbel(key, Stream.GUMBEL, position, torch.arange(150_001))
    part = gumbel(key, Stream.GUMBEL, position, torch.tensor(ids))
    assert torch.equal(part, whole[ids])


# --- noise: its distribution --------------------------------------------------------------------


@pytest.mark.parametrize("stream", list(Stream))
def test_uniforms_are_uniform(stream: Stream) -> None:
    over_positions = [uniform(7, stream, position) for position in range(20_000)]
    over_keys = [uniform(key, stream, 5) for key in range(20_000)]
    for sample in (over_positions, over_keys):
        assert min(sample) > 0
        assert max(sample) < 1
        assert stats.kstest(sample, "uniform").pvalue > P_VALUE


@pytest.mark.parametrize("stream", list(Stream))
def test_gumbels_are_gumbel(stream: Stream) -> None:
    over_ids = gumbel(7, stream, 3, torch.arange(100_000)).numpy()
    one = torch.tensor([17])
    over_positions = [float(gumbel(7, stream, p, one)) for p in range(10_000)]
    over_keys = [float(gumbel(key, stream, 3, one)) for key in range(10_000)]
    for sample in (over_ids, over_positions, over_keys):
        assert np.isfinite(sample).all()
        assert stats.kstest(sample, "gumbel_r").pvalue > P_VALUE


def test_streams_positions_and_keys_are_independent() -> None:
    """No pair of noises over 20 000 ids correlates by more than 4.5 standard errors (of 465 pairs
    the largest is expected near 3)."""
    size = 20_000
    ids = torch.arange(size)
    noises = [gumbel(key, Stream.GUMBEL, 3, ids) for key in (0, 1, 2, 3, 4, 8, 2**62, 2**63)]
    noises += [gumbel(0, stream, 3, ids) for stream in Stream if stream != Stream.GUMBEL]
    noises += [gumbel(0, Stream.GUMBEL, position, ids) for position in range(20) if position != 3]
    noises += [gumbel(0, Stream.GUMBEL, 3, ids + 1)]
    together = torch.corrcoef(torch.stack(noises)).numpy()
    off = np.abs(together[np.triu_indices(len(noises), 1)])
    assert len(off) == 465
    assert off.max() < 4.5 / math.sqrt(size)


def test_uniforms_are_independent() -> None:
    """Of neighbouring positions, of streams, and of neighbouring keys: 4 standard errors."""
    size = 20_000
    u = np.array([[uniform(key, Stream.ACCEPT, p) for p in range(size + 2)] for key in range(3)])
    other = np.array([uniform(0, Stream.RESIDUAL, p) for p in range(size)])
    pairs = [
        (u[0, :size], u[0, 1 : size + 1]),
        (u[0, :size], u[0, 2 : size + 2]),
        (u[0, :size], u[1, :size]),
        (u[0, :size], u[1, 1 : size + 1]),
        (u[0, :size], u[2, :size]),
        (u[0, :size], other),
    ]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(size)


# --- shaping ------------------------------------------------------------------------------------


def by_definition(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """Probabilities after temperature, top-k (ties with the k-th stay) and top-p (the fewest best
    tokens whose mass reaches top-p; of equal ones the lower ids), in plain Python."""
    exact = [float(x) / sampling.temperature for x in logits]
    kept = set(range(len(exact)))
    if 0 < sampling.top_k < len(exact):
        kth = sorted(exact, reverse=True)[sampling.top_k - 1]
        kept = {i for i in kept if exact[i] >= kth}
    top = max(exact)
    weights = {i: math.exp(exact[i] - top) for i in kept}
    total = sum(weights.values())
    if sampling.top_p < 1:
        chosen, mass = set(), 0.0
        for i in sorted(kept, key=lambda i: (-exact[i], i)):
            if chosen and mass >= sampling.top_p * total:
                break
            chosen.add(i)
            mass += weights[i]
        kept = chosen
    kept = {i for i in kept if weights[i] >= sampling.min_p * max(weights.values())}
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(exact))]


def close_to_the_edge(logits: Sequence[float], sampling: Sampling) -> bool:
    """Whether rounding decides which tokens top-p or min-p keeps."""
    without = Sampling(temperature=sampling.temperature, top_k=sampling.top_k)
    probs = sorted(by_definition(logits, without), reverse=True)
    if any(abs(p / probs[0] - sampling.min_p) < 1e-4 for p in probs):
        return True
    return any(abs(sum(probs[:k]) - sampling.top_p) < 1e-4 for k in range(1, len(probs)))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.1, 0.5, 1.0, 1.3, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
)


def penalised(
    logits: Sequence[float], prompt: Sequence[int], text: Sequence[int], sampling: Sampling
) -> list[float]:
    """Bias and penalties by their definition, in plain Python."""
    bias = dict(sampling.logit_bias)
    scores = []
    for i, logit in enumerate(logits):
        score = logit + bias.get(i, 0.0)
        if i in (*prompt, *text):
            penalty = sampling.repetition_penalty
            score = score * penalty if score < 0 else score / penalty
        score -= sampling.frequency_penalty * text.count(i)
        scores.append(score - sampling.presence_penalty * (i in text))
    return scores


# Small multiples of 1/4, so that ties are frequent and exact.
LOGITS = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=1, max_size=12)


@settings(derandomize=True, max_examples=1000, deadline=None)
@given(LOGITS, SAMPLINGS)
def test_shape_by_its_definition(logits: list[float], sampling: Sampling) -> None:
    assume(not close_to_the_edge(logits, sampling))
    log_probs = shape(torch.tensor(logits), sampling)
    assert log_probs.dtype == torch.float32
    expected = by_definition(logits, sampling)
    assert [p == 0 for p in expected] == torch.isinf(log_probs).tolist()
    assert log_probs.exp().tolist() == pytest.approx(expected, abs=1e-5)
    assert float(log_probs.exp().sum()) == pytest.approx(1, abs=1e-5)


def probs_of(logits: Sequence[float], **sampling: Any) -> list[float]:
    return shape(torch.tensor(logits), Sampling(temperature=1.0, **sampling)).exp().tolist()


def test_a_tiny_top_p_keeps_the_best_token() -> None:
    assert probs_of([0.0, 2.0, 1.0], top_p=1e-30) == [0, 1, 0]
    assert probs_of([0.0, 0.0, 0.0], top_p=1e-30) == [1, 0, 0]
    big = torch.zeros(150_000)
    big[77] = 1e-3
    kept = torch.isfinite(shape(big, Sampling(temperature=1.0, top_p=1e-7)))
    assert torch.nonzero(kept).flatten().tolist() == [77]


def test_ties_at_the_kth_score_all_stay() -> None:
    assert probs_of([3.0, 1.0, 1.0, 0.0], top_k=2)[3] == 0
    assert probs_of([1.0, 1.0, 1.0, 0.0], top_k=1) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_ties_at_the_edge_of_top_p() -> None:
    """Of equal tokens the lower ids stay."""
    assert probs_of([0.0] * 4, top_p=0.6) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert probs_of([0.0] * 4, top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])


def test_top_k_beyond_the_vocabulary_is_no_limit() -> None:
    plain = probs_of([1.0, 2.0, 3.0])
    assert probs_of([1.0, 2.0, 3.0], top_k=3) == probs_of([1.0, 2.0, 3.0], top_k=9) == plain


def test_top_p_counts_what_top_k_has_left() -> None:
    """Masses 0.4, 0.3, 0.2, 0.1: after top-k of 2 the best has 4/7."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert probs_of(logits, top_k=2, top_p=0.55) == pytest.approx([1, 0, 0, 0])
    assert probs_of(logits, top_p=0.55) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probs_of(logits, top_k=2, top_p=0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_min_p_is_a_share_of_the_best() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert probs_of(logits, min_p=0.29) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert probs_of(logits, min_p=1.0) == [1, 0, 0, 0]


# What a penalty does on its own, over the tokens 0..3 of which 1 is in the prompt, 2 was generated
# twice.
SCORES = [1.0, 1.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"presence_penalty": 0.5}, [1, 1, 0.5, -1]),
        ({"frequency_penalty": 0.5}, [1, 1, 0, -1]),
        ({"frequency_penalty": -0.5}, [1, 1, 2, -1]),
        ({"repetition_penalty": 2.0}, [1, 0.5, 0.5, -1]),
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, [1, 0.5, -0.5, -1]),
    ],
)
def test_penalties(penalty: dict[str, float], expected: list[float]) -> None:
    seen, generated = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 2, 0])
    scores = penalise(torch.tensor(SCORES), Sampling(**penalty), seen, generated)
    assert scores.tolist() == expected
    lower = penalise(
        torch.tensor([-1.0]), Sampling(repetition_penalty=2.0), torch.ones(1), torch.zeros(1)
    )
    assert lower.tolist() == [-2]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(0, 2**32), SAMPLINGS, st.sampled_from([0.5, 1.0, 1.3]))
def test_scores_are_those_of_transformers(seed: int, sampling: Sampling, repetition: float) -> None:
    """Processor by processor, on random logits and a random text."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, generator=generator) * 3
    text = torch.randint(0, 40, (12,), generator=generator)
    sampling = replace(sampling, repetition_penalty=repetition)
    processors = LogitsProcessorList()  # as transformers' `generate` chooses them
    if repetition != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    expected = torch.log_softmax(processors(text[None], logits[None])[0], -1)
    seen = torch.bincount(text, minlength=40)
    scores = penalise(logits, sampling, seen, torch.zeros(40))
    torch.testing.assert_close(shape(scores, sampling), expected, atol=1e-4, rtol=0)


def test_log_probabilities() -> None:
    logits = torch.tensor([math.log(p) for p in (0.1, 0.6, 0.3)])
    told = logprobs(logits, 0, 2)
    assert told.chosen == pytest.approx(math.log(0.1))
    assert [i for i, _ in told.top] == [1, 2]
    assert [p for _, p in told.top] == pytest.approx([math.log(0.6), math.log(0.3)])
    assert logprobs(logits, 2, 0).top == ()
    assert len(logprobs(logits, 2, 9).top) == 3


def test_shaping_leaves_the_logits_alone() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    shape(logits, Sampling(temperature=0.5, top_k=1, top_p=0.5))
    assert logits.tolist() == [1, 2, 3]


def test_temperatures() -> None:
    assert is_greedy(Sampling())
    assert is_greedy(Sampling(temperature=GREEDY_BELOW / 2))
    assert not is_greedy(Sampling(temperature=GREEDY_BELOW))
    assert not uses_q(Sampling())
    assert not uses_q(Sampling(temperature=1.0, seeded=True))
    assert uses_q(Sampling(temperature=1.0))
    coldest = shape(torch.tensor([30.0, 29.0, -30.0]), Sampling(temperature=GREEDY_BELOW))
    assert coldest.exp().tolist() == [1, 0, 0]


# --- verification: cases without chance ---------------------------------------------------------

TARGET = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, 1.5, -3.0, 0.7])
SIZE = len(TARGET)


@pytest.mark.parametrize("kind", ["pdm", "point"])
def test_greedy(kind: Any) -> None:
    sampling = Sampling()
    assert verify(TARGET, sampling, 3, None) == (1, None)
    assert verify(TARGET, sampling, 3, Proposal(1, kind)) == (1, True)
    assert verify(TARGET, sampling, 3, Proposal(5, kind)) == (1, False)
    ids = torch.tensor([4, 5, 6])
    assert draft(TARGET[ids], ids, sampling, 3) == (Proposal(5, "point"), None)
    assert verify(torch.zeros(4), sampling, 0, None) == (0, None)  # of equal ones the lowest id


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    st.integers(0, MASK),
    st.integers(0, 4096),
    st.sampled_from([(1.0, 1.0, 0), (0.7, 0.9, 0), (2.0, 1.0, 3), (1.5, 0.8, 6)]),
)
def test_seeded(key: int, position: int, how: tuple[float, float, int]) -> None:
    """The token is argmax(log p + G), whatever was proposed; accepted iff equal."""
    temperature, top_p, top_k = how
    sampling = Sampling(temperature, top_p, top_k, seeded=True, key=key)
    noise = gumbel(key, Stream.GUMBEL, position, torch.arange(SIZE))
    token = int(torch.argmax(shape(TARGET, sampling).double() + noise))
    assert verify(TARGET, sampling, position, None) == (token, None)
    for kind in ("pdm", "point"):
        for x in range(SIZE):
            proposal = Proposal(x, kind)  # type: ignore[arg-type]
            assert verify(TARGET, sampling, position, proposal) == (token, x == token)
    assert draft(TARGET, torch.arange(SIZE), sampling, position) == (Proposal(token, "point"), None)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(0, MASK), st.integers(0, 4096))
def test_a_seeded_draft_shares_the_noise_over_its_vocabulary(key: int, position: int) -> None:
    sampling = Sampling(temperature=1.0, seeded=True, key=key)
    ids = torch.tensor([7, 1, 5, 0])
    logits = torch.tensor([1.0, 0.5, 0.0, 0.2])
    noise = gumbel(key, Stream.GUMBEL, position, torch.arange(SIZE))[ids]
    best = int(ids[torch.argmax(torch.log_softmax(logits, 0).double() + noise)])
    assert draft(logits, ids, sampling, position) == (Proposal(best, "point"), None)


def test_drafts_come_with_their_shaped_distribution() -> None:
    ids, logits = torch.tensor([6, 2, 4]), torch.tensor([0.0, 3.0, 1.0])
    sampling = Sampling(temperature=0.8, top_k=2, key=11)
    proposal, q = draft(logits, ids, sampling, 9)
    assert proposal.kind == "pdm"
    assert proposal.token in (2, 4)
    assert q is not None
    assert q.tolist() == pytest.approx(by_definition(logits.tolist(), sampling), abs=1e-6)


def test_a_proposal_without_its_distribution_is_an_error() -> None:
    message = "the proposal at position 12 came without its distribution"
    with pytest.raises(ValueError, match=message):
        verify(TARGET, Sampling(temperature=1.0), 12, Proposal(1, "pdm"))


def test_an_equal_distribution_is_always_accepted() -> None:
    sampling = Sampling(temperature=1.0)
    q = DraftDistribution(torch.arange(SIZE), shape(TARGET, sampling).exp())
    for key in range(300):
        keyed = Sampling(temperature=1.0, key=key)
        for x in range(SIZE):
            assert verify(TARGET, keyed, 5, Proposal(x, "pdm"), q) == (x, True)


def test_nothing_left_but_rounding() -> None:
    """p and q differ by rounding alone, with p below q everywhere, and the proposal is rejected:
    the target's own distribution is drawn from."""
    sampling = Sampling(temperature=1.0)
    p = shape(TARGET, sampling).exp()
    q = DraftDistribution(torch.arange(SIZE), p * 2)  # p / q is 1/2
    drawn = Counter()
    for key in range(4000):
        token, accepted = verify(
            TARGET, Sampling(temperature=1.0, key=key), 5, Proposal(2, "pdm"), q
        )
        assert accepted == (uniform(key, Stream.ACCEPT, 5) < 0.5)
        drawn[token] += not accepted
    assert chi_square([drawn[i] for i in range(SIZE)], p.tolist()) > P_VALUE


@pytest.mark.parametrize("kind", ["pdm", "point"])
def test_an_impossible_proposal_is_never_accepted(kind: Any) -> None:
    """Cut off by top-k, or certain not to come: p is 0."""
    q = DraftDistribution(torch.tensor([6, 2]), torch.tensor([0.5, 0.5]))
    for key in range(500):
        sampling = Sampling(temperature=1.0, top_k=3, key=key)
        token, accepted = verify(TARGET, sampling, 1, Proposal(6, kind), q)
        assert not accepted
        assert token in (1, 3, 5)


@pytest.mark.parametrize("kind", ["pdm", "point"])
def test_a_certain_token_is_always_accepted(kind: Any) -> None:
    q = DraftDistribution(torch.tensor([1, 2]), torch.tensor([0.5, 0.5]))
    for key in range(200):
        sampling = Sampling(temperature=1.0, top_k=1, key=key)
        assert verify(TARGET, sampling, 1, Proposal(1, kind), q) == (1, True)
        assert verify(TARGET, sampling, 1, Proposal(2, kind), q) == (1, False)


# --- verification: distributions ----------------------------------------------------------------

SHAPINGS = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 2.0, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 4},
    "both": {"temperature": 1.4, "top_k": 6, "top_p": 0.8},
}
EVERY = list(range(SIZE))
# The PDM's logits over a draft vocabulary.
Q_CASES: dict[str, tuple[list[int], list[float]]] = {
    "good": (EVERY, (TARGET + torch.tensor([0.2, -0.2, 0.1, 0, -0.1, 0.3, 0, 0.1])).tolist()),
    "bad": (EVERY, (-TARGET).tolist()),
    "flat": (EVERY, [0.0] * SIZE),
    "almost disjoint": (EVERY, [-1.0, -6.0, 3.0, -5.0, 1.0, -6.0, 4.0, -4.0]),
    "subset": ([5, 3, 1, 0], [1.6, 0.9, 2.2, 0.4]),
    "bad subset": ([6, 2, 4], [2.0, 1.0, 0.0]),
    "single": ([3], [0.0]),
}
POINTS = {"likely": 1, "middling": 3, "unlikely": 2, "hopeless": 6}
DRAWS = 2000


def accept_bound(probability: float, draws: int) -> float:
    """Four standard errors of a share."""
    return 4 * math.sqrt(max(probability * (1 - probability), 1e-9) / draws) + 1e-6


@pytest.mark.parametrize(
    ("q_case", "how"),
    [
        *((q_case, "both") for q_case in Q_CASES),
        *zip(Q_CASES, itertools.cycle(["plain", "hot", "top-k"]), strict=False),
    ],
)
def test_pdm_proposals_leave_the_targets_distribution(q_case: str, how: str) -> None:
    """Drafted and verified as in a cycle; accepted with probability sum(min(p, q))."""
    check_pdm(q_case, how, DRAWS, position=40)


@pytest.mark.parametrize(("q_case", "how"), [("subset", "plain")])
def test_pdm_proposals_many_draws(q_case: str, how: str) -> None:
    check_pdm(q_case, how, 20_000, position=3)


def check_pdm(q_case: str, how: str, draws: int, position: int) -> None:
    ids, logits = Q_CASES[q_case]
    vocabulary, scores = torch.tensor(ids), torch.tensor(logits)
    p = by_definition(TARGET.tolist(), Sampling(**SHAPINGS[how]))
    q = by_definition(logits, Sampling(**SHAPINGS[how]))
    drawn: Counter[int] = Counter()
    drafted: Counter[int] = Counter()
    accepted = 0
    for key in range(draws):
        sampling = Sampling(**SHAPINGS[how], key=key)
        proposal, probs = draft(scores, vocabulary, sampling, position)
        assert probs is not None
        token, verdict = verify(
            TARGET, sampling, position, proposal, DraftDistribution(vocabulary, probs)
        )
        assert verdict is not None
        assert token == proposal.token or not verdict
        drafted[proposal.token] += 1
        drawn[token] += 1
        accepted += verdict
    assert chi_square([drawn[i] for i in EVERY], p) > P_VALUE
    assert chi_square([drafted[i] for i in ids], q) > P_VALUE
    expected = sum(min(p[i], q_i) for i, q_i in zip(ids, q, strict=True))
    assert abs(accepted / draws - expected) < accept_bound(expected, draws)


@pytest.mark.parametrize("how", list(SHAPINGS))
@pytest.mark.parametrize("point", list(POINTS))
def test_point_proposals_leave_the_targets_distribution(point: str, how: str) -> None:
    """Accepted with probability p(x)."""
    x = POINTS[point]
    p = by_definition(TARGET.tolist(), Sampling(**SHAPINGS[how]))
    drawn: Counter[int] = Counter()
    accepted = 0
    for key in range(DRAWS):
        sampling = Sampling(**SHAPINGS[how], key=key)
        token, verdict = verify(TARGET, sampling, 8, Proposal(x, "point"))
        assert verdict is (token == x)  # p without x holds no x
        drawn[token] += 1
        accepted += bool(verdict)
    assert chi_square([drawn[i] for i in EVERY], p) > P_VALUE
    assert abs(accepted / DRAWS - p[x]) < accept_bound(p[x], DRAWS)


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("how", list(SHAPINGS))
def test_no_proposal(how: str, seeded: bool) -> None:
    p = by_definition(TARGET.tolist(), Sampling(**SHAPINGS[how]))
    drawn: Counter[int] = Counter()
    for key in range(DRAWS):
        sampling = Sampling(**SHAPINGS[how], seeded=seeded, key=key)
        token, verdict = verify(TARGET, sampling, 8, None)
        assert verdict is None
        drawn[token] += 1
    assert chi_square([drawn[i] for i in EVERY], p) > P_VALUE


def test_positions_of_one_key_are_as_good_as_keys() -> None:
    """One request that draws from the same distribution at 4000 positions."""
    p = by_definition(TARGET.tolist(), Sampling(temperature=1.0))
    ids, logits = Q_CASES["flat"]
    sampling = Sampling(temperature=1.0, key=123456789)
    drawn: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    before = None
    for position in range(4000):
        proposal, probs = draft(torch.tensor(logits), torch.tensor(ids), sampling, position)
        assert probs is not None
        q = DraftDistribution(torch.tensor(ids), probs)
        token, _ = verify(TARGET, sampling, position, proposal, q)
        drawn[token] += 1
        if before is not None:
            pairs[before, token] += 1
        before = token
    assert chi_square([drawn[i] for i in EVERY], p) > P_VALUE
    cells = [(a, b) for a in EVERY for b in EVERY]
    assert chi_square([pairs[c] for c in cells], [p[a] * p[b] for a, b in cells]) > P_VALUE


# --- the whole engine ---------------------------------------------------------------------------

FEW = 7  # tokens of the vocabulary
TOKENS = 3  # generated tokens whose joint distribution is checked
REQUESTS, SLOTS = 1920, 64
PROMPT = [3, 0]
ENGINE_SHAPINGS = {
    "plain": {"temperature": 1.0},
    "shaped": {"temperature": 1.5, "top_p": 0.85, "top_k": 5},
    "penalised": {
        "temperature": 1.3,
        "min_p": 0.1,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.4,
        "logit_bias": ((3, -0.8), (5, 1.1)),
    },
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target(
        tmp_path_factory.mktemp("small"),
        layers=2,
        vocab_size=FEW,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        sharpness=0.3,
        seed=4,
    )


def exact_distribution(folder: Path, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of every text of TOKENS tokens, from the reference model."""
    model = reference(folder)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, mass in known.items():
            with torch.no_grad():
                logits: Tensor = model(torch.tensor([[*PROMPT, *text]])).logits[0, -1]
            scores = penalised(logits.tolist(), PROMPT, text, sampling)
            for token, p in enumerate(by_definition(scores, sampling)):
                if p:
                    longer[*text, token] = mass * p
        known = longer
    return known


def echo(tokens: Sequence[int]) -> int | None:
    """Proposes by the text alone, and often nothing."""
    return (tokens[-1] + tokens[-2]) % FEW if tokens[-1] != 2 else None


@pytest.mark.parametrize(
    ("drafter", "how"),
    [
        ("point", "plain"),
        ("pdm", "plain"),
        ("point and pdm", "shaped"),
        ("point and pdm", "penalised"),
        pytest.param("off", "shaped", marks=pytest.mark.full),
        pytest.param("off", "penalised", marks=pytest.mark.full),
        pytest.param("untrained pdm", "plain", marks=pytest.mark.full),
        pytest.param("pdm", "shaped", marks=pytest.mark.full),
    ],
)
def test_the_engines_distribution(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, how: str
) -> None:
    """Of the joint first three generated tokens over many keys, and of each alone."""
    monkeypatch.setattr("service.engine.sequence.FIRST_UP_TO", 9.0)  # `point` before `pdm`
    sampling = ENGINE_SHAPINGS[how]
    pdm: Path | bool = "pdm" in drafter
    proposer: Proposer | None = echo if "point" in drafter else None
    if drafter in ("pdm", "point and pdm"):  # over a subset of the vocabulary
        pdm = toy_pdm(tmp_path, small, bounds=(0, 1, 2), draft_ids=[6, 1, 3, 4])
    graph = LocalGraph(blueprint(small, (1, 1), pdm=pdm, slots=SLOTS, max_len=8))
    requests = requests_of(
        [PROMPT] * REQUESTS,
        TOKENS + 1,  # the last one is never proposed
        [Sampling(**sampling, key=key) for key in range(REQUESTS)],
    )
    made = generate(
        graph,
        requests,
        stages=2,
        slots=SLOTS,
        max_len=8,
        chunk=2 * SLOTS,
        proposer=proposer,
        uses_pdm=bool(pdm),
    )
    graph.close()
    texts = Counter(tuple(text[:TOKENS]) for text in made.tokens.values())
    exact = exact_distribution(small, Sampling(**sampling))
    assert set(texts) <= set(exact)
    cells = list(exact)
    assert chi_square([texts[c] for c in cells], [exact[c] for c in cells]) > P_VALUE
    for k in range(TOKENS):
        single: Counter[int] = Counter()
        expected: Counter[int] = Counter()
        for cell in cells:
            single[cell[k]] += texts[cell]
            expected[cell[k]] += exact[cell]  # type: ignore[assignment]
        assert (
            chi_square([single[i] for i in range(FEW)], [expected[i] for i in range(FEW)]) > P_VALUE
        )
    drafted = sum(s.drafted for s in made.stats.values())
    accepted = sum(s.accepted for s in made.stats.values())
    if drafter == "off":
        assert drafted == 0
    else:
        assert 0.02 < accepted / drafted < 0.9


def test_an_overflown_pdm_does_not_falsify_the_text() -> None:
    """A draft that NaN made certain is a `point` proposal: had it come with q, all tokens of the
    draft vocabulary would be lost from the residual."""
    logits = torch.zeros(8)
    logits[3] = math.nan
    proposal, q = draft(logits, torch.arange(8), Sampling(temperature=1.0, key=1), 5)
    assert (proposal.kind, q) == ("point", None)
    drawn = {
        verify(torch.zeros(16), Sampling(temperature=1.0, key=key), 5, proposal)[0]
        for key in range(500)
    }
    assert drawn == set(range(16))


def test_an_overflown_target_gives_a_token() -> None:
    """A void text, but no exception that would end the pipeline for all."""
    logits = torch.full((16,), math.nan)
    assert verify(logits, Sampling(temperature=1.0, key=1), 5, None) == (0, None)
