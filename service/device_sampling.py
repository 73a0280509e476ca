"""Drafting and verification that never wait for the device: what they find stays there, as numbers,
until those of all rows come back in one copy. What is found is what `service.sampling` finds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from service.messages import Proposal, Sampling
from service.sampling import DraftDistribution, Stream, beside, gumbel, is_greedy, shape, uniform


def fetched(found: Sequence[Tensor]) -> list[list[int]]:
    """What was found for each row, in the one copy from the device: here all is waited for."""
    numbers: list[list[int]] = torch.stack(list(found)).tolist() if found else []
    return numbers


def verified(
    scores: Tensor,
    sampling: Sampling,
    position: int,
    proposal: Proposal | None,
    q: DraftDistribution | None = None,
) -> Tensor:
    """As `service.sampling.verify` -> [2] int64: the token, and 1 if the proposal is accepted."""
    key = sampling.key
    if is_greedy(sampling):
        token = scores.argmax()
    else:
        log_p = shape(scores, sampling)
        ids = torch.arange(log_p.shape[-1], device=log_p.device)
        if sampling.seeded:
            token = _drawn(log_p, ids, key, Stream.GUMBEL, position)
        elif proposal is None:
            token = _drawn(log_p, ids, key, Stream.RESIDUAL, position)
        else:
            return _reject_or_accept(log_p, ids, key, position, proposal, q)
    accepted = token == (-1 if proposal is None else proposal.token)
    return torch.stack([token, accepted.long()])


def drafted(
    scores: Tensor, ids: Tensor, sampling: Sampling, position: int
) -> tuple[Tensor, Tensor | None]:
    """As `service.sampling.draft` -> [2] int64: the token id, and 1 if it was drawn from a q; and
    that q [D], where verification may need it."""
    if is_greedy(sampling):
        best = scores.argmax()
        return torch.stack([ids.take(best), torch.zeros_like(best)]), None
    log_q = shape(scores, sampling)
    stream = Stream.GUMBEL if sampling.seeded else Stream.DRAFT
    token = ids.take(_drawn(log_q, ids, sampling.key, stream, position))  # ids[..] would wait
    if sampling.seeded:
        return torch.stack([token, torch.zeros_like(token)]), None
    q = log_q.exp()
    return torch.stack([token, (~q.isnan().any()).long()]), q


def _drawn(log_probs: Tensor, ids: Tensor, key: int, stream: Stream, position: int) -> Tensor:
    """Index [] of a draw from exp(log_probs) [V], by the Gumbel-max trick; 0 where nothing is
    possible."""
    possible = log_probs > -math.inf  # not where the model has overflowed
    noisy = log_probs.double() + gumbel(key, stream, position, ids)
    return noisy.masked_fill(~possible, -math.inf).argmax()


def _reject_or_accept(
    log_p: Tensor,
    ids: Tensor,
    key: int,
    position: int,
    proposal: Proposal,
    q: DraftDistribution | None,
) -> Tensor:
    """Accepts x with min(1, p(x) / q(x)), else draws from the normalised (p - q)+ -> [2]."""
    x = proposal.token
    q_x, log_residual = beside(log_p, ids, position, proposal, q)
    accepted = uniform(key, Stream.ACCEPT, position) * q_x < log_p[x].exp().double()
    anything = (log_residual > -math.inf).any()  # else p equals q but for rounding
    log_residual = torch.where(anything, log_residual, log_p)
    drawn = _drawn(log_residual, ids, key, Stream.RESIDUAL, position)
    return torch.stack([torch.where(accepted, x, drawn), accepted.long()])
