"""From logits to tokens: shaping, noise, drafting, verification. Free functions on tensors.

*Scores* are logits after bias, penalties and bans (`service.pipeline.texts`). What temperature and
cuts make of them is the distribution that tokens are drawn from.

All randomness is a counter-based hash of (key, stream, position, token id). So a token depends on
its request alone: not on its neighbours in a batch, on speculation, or on a restart.
"""

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from service.messages import Logprobs, Proposal, Sampling

# Below this temperature logits / temperature may overflow, and the best token always wins.
GREEDY_BELOW = 1e-5

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_STEP = 2.0**-52  # of 52 bits, so that (bits + 0.5) * _STEP is exact and never 0 or 1


class Stream(IntEnum):
    """Independent sources of noise of one request."""

    GUMBEL = 0  # seeded: shared by target and draft, which is why they agree
    DRAFT = 1  # unseeded: the draft's draw from q
    ACCEPT = 2  # unseeded: the uniform number that accepts or rejects
    RESIDUAL = 3  # unseeded: the target's own draw


class DraftDistribution(NamedTuple):
    """The shaped distribution q that a draft was drawn from."""

    ids: Tensor  # [D] int64: token ids of the draft vocabulary
    probs: Tensor  # [D] float32, sums to 1


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def uses_q(sampling: Sampling) -> bool:
    """Whether verification of a PDM draft needs the distribution that it was drawn from."""
    return not is_greedy(sampling) and not sampling.seeded


# --- noise --------------------------------------------------------------------------------------


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(x: int) -> int:
    """The finaliser of SplitMix64 (Steele et al. 2014), on a Python integer."""
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """The same on int64, whose products wrap around and whose shifts keep the sign."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _base(key: int, stream: Stream, position: int) -> int:
    return _mix_int((_mix_int(key * 4 + stream + 1) + position * _GOLDEN) & _MASK)


def uniform(key: int, stream: Stream, position: int) -> float:
    """One number in (0, 1)."""
    bits = _mix_int((_base(key, stream, position) + _GOLDEN) & _MASK) >> 12
    return (bits + 0.5) * _STEP


def gumbel(key: int, stream: Stream, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise for the token ids [V] int64 -> [V] float64. The same id has the same
    noise in every vocabulary that holds it."""
    counter = ids * _signed(_GOLDEN) + _signed(_base(key, stream, position) + _GOLDEN)
    bits = (_mix_tensor(counter) >> 12) & ((1 << 52) - 1)
    u = (bits.to(torch.float64) + 0.5) * _STEP
    return -torch.log(-torch.log(u))


# --- shaping ------------------------------------------------------------------------------------


def penalise(scores: Tensor, sampling: Sampling, seen: Tensor, generated: Tensor) -> Tensor:
    """Penalties for tokens that stand in the text already. Scores [N]; `seen` [N] counts each in
    the whole text, `generated` [N] in the answer. -> [N]

    Repetition as in CTRL (Keskar et al. 2019), presence and frequency as in OpenAI's API.
    """
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen > 0, lowered, scores)
    scores = scores - sampling.frequency_penalty * generated
    return scores - sampling.presence_penalty * (generated > 0)


def shape(scores: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k, top-p and min-p. Scores [V] -> log-probabilities [V] float32, -inf
    where a token is cut off."""
    scores = scores.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = torch.topk(scores, sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if sampling.top_p < 1.0:
        probs, order = torch.sort(torch.softmax(scores, -1), descending=True, stable=True)
        before = probs.cumsum(-1) - probs  # [V] mass of all better tokens; the best is kept
        cut = torch.zeros_like(before, dtype=torch.bool).scatter_(
            0, order, before >= sampling.top_p
        )
        scores = scores.masked_fill(cut, -math.inf)
    if sampling.min_p > 0:
        lowest = scores.max() + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < lowest, -math.inf)
    return torch.log_softmax(scores, -1)


def logprobs(logits: Tensor, token: int, count: int) -> Logprobs:
    """Of a token, and of the `count` likeliest, ln p in the distribution of the raw logits [V]."""
    log_p = torch.log_softmax(logits.float(), -1)
    top = torch.topk(log_p, min(count, log_p.shape[-1]))
    return Logprobs(
        float(log_p[token]),
        tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )


def _draw(log_probs: Tensor, ids: Tensor, key: int, stream: Stream, position: int) -> int:
    """Index of a draw from exp(log_probs) [V], unnormalised, by the Gumbel-max trick."""
    possible = torch.nonzero(log_probs > -math.inf).squeeze(-1)  # noise for these alone
    if len(possible) == 0:  # all NaN: the model has overflowed; its text is void, others go on
        return 0
    noise = gumbel(key, stream, position, ids[possible])
    return int(possible[torch.argmax(log_probs[possible].double() + noise)])


# --- drafting -----------------------------------------------------------------------------------


def draft(
    scores: Tensor, ids: Tensor, sampling: Sampling, position: int
) -> tuple[Proposal, Tensor | None]:
    """The PDM's token for `position`, from its scores [D] over the draft vocabulary ids [D] int64,
    and q [D] where verification needs it."""
    if is_greedy(sampling):
        return Proposal(int(ids[torch.argmax(scores)]), "point"), None
    log_q = shape(scores, sampling)
    if sampling.seeded:
        best = _draw(log_q, ids, sampling.key, Stream.GUMBEL, position)
        return Proposal(int(ids[best]), "point"), None
    drawn = _draw(log_q, ids, sampling.key, Stream.DRAFT, position)
    q = log_q.exp()
    if bool(q.isnan().any()):  # the PDM has overflowed; then `drawn` was certain
        return Proposal(int(ids[drawn]), "point"), None
    return Proposal(int(ids[drawn]), "pdm"), q


# --- verification -------------------------------------------------------------------------------


def verify(
    scores: Tensor,
    sampling: Sampling,
    position: int,
    proposal: Proposal | None,
    q: DraftDistribution | None = None,
) -> tuple[int, bool | None]:
    """The target's token at `position` from its scores [V], and whether the proposal is accepted
    (None without one). Accepted means: the token is the proposed one.

    Greedy and seeded: the token does not depend on the proposal at all. Unseeded: rejection
    sampling (Leviathan et al. 2023), whose token has the target's distribution.
    """
    if is_greedy(sampling):
        token = int(torch.argmax(scores))
        return token, None if proposal is None else token == proposal.token
    log_p = shape(scores, sampling)
    ids = torch.arange(log_p.shape[-1], device=log_p.device)
    if sampling.seeded:
        token = _draw(log_p, ids, sampling.key, Stream.GUMBEL, position)
        return token, None if proposal is None else token == proposal.token
    if proposal is None:
        return _draw(log_p, ids, sampling.key, Stream.RESIDUAL, position), None
    return _reject_or_accept(log_p, ids, sampling.key, position, proposal, q)


def beside(
    log_p: Tensor, ids: Tensor, position: int, proposal: Proposal, q: DraftDistribution | None
) -> tuple[Tensor, Tensor]:
    """What a proposal's q leaves of p [V]: q at the token, [] float64, and log (p - q)+ [V], not
    normalised. Waits for no device."""
    x = proposal.token
    if proposal.kind == "point":  # q is 1 at x, so (p - q)+ is p without x
        one = torch.ones((), dtype=torch.float64, device=log_p.device)
        return one, log_p.masked_fill(ids == x, -math.inf)
    if q is None:
        raise ValueError(f"the proposal at position {position} came without its distribution")
    q_x = q.probs.masked_fill(q.ids != x, 0.0).sum().double()
    residual = log_p.exp().index_add(0, q.ids, q.probs, alpha=-1)
    return q_x, residual.clamp_min(0).log()


def _reject_or_accept(
    log_p: Tensor,
    ids: Tensor,
    key: int,
    position: int,
    proposal: Proposal,
    q: DraftDistribution | None,
) -> tuple[int, bool]:
    """Accepts x with min(1, p(x) / q(x)), else draws from the normalised (p - q)+."""
    x = proposal.token
    q_x, log_residual = beside(log_p, ids, position, proposal, q)
    if uniform(key, Stream.ACCEPT, position) * float(q_x) < float(log_p[x].exp()):
        return x, True
    if not bool((log_residual > -math.inf).any()):  # p equals q but for rounding
        log_residual = log_p
    return _draw(log_residual, ids, key, Stream.RESIDUAL, position), False
