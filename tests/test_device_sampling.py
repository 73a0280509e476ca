"""What never waits for the device finds what the plain functions find, number for number."""

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from service.device_sampling import drafted, fetched, verified
from service.messages import Proposal, Sampling
from service.sampling import DraftDistribution, draft, shape, uses_q, verify

VOCABULARY = 40
IDS = torch.arange(0, VOCABULARY, 3)  # a draft vocabulary

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 7]),
    min_p=st.sampled_from([0.0, 0.05]),
    seeded=st.booleans(),
    key=st.integers(0, 2**64 - 1),
)


@st.composite
def scores(draw: Any, size: int) -> Tensor:
    """With ties, bans, and now and then an overflow."""
    seed = draw(st.integers(0, 2**31))
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    kind = draw(st.sampled_from(["plain", "ties", "bans", "one", "nan"]))
    if kind == "ties":
        made = made.round()
    elif kind == "bans":
        made[:: draw(st.integers(2, 4))] = -math.inf
    elif kind == "one":
        made[1:] = -math.inf
    elif kind == "nan":
        made[:] = math.nan
    return made


@settings(max_examples=400, deadline=None)
@given(st.data(), samplings, st.integers(0, 5000))
def test_a_device_verifies_as_the_plain_function(
    data: st.DataObject, sampling: Sampling, position: int
) -> None:
    row = data.draw(scores(VOCABULARY))
    kind = data.draw(st.sampled_from(["pdm", "point", None]))
    proposal = q = None
    if kind is not None:
        token = int(data.draw(st.sampled_from(IDS.tolist())))
        proposal = Proposal(token, kind if uses_q(sampling) else "point")
    if proposal is not None and proposal.kind == "pdm":
        of_draft = data.draw(scores(len(IDS)))
        same = data.draw(st.booleans())  # then hardly anything is left of p - q
        log_q = shape(row[IDS] if same else of_draft, sampling)
        q = DraftDistribution(IDS, log_q.exp().nan_to_num(0.0))
    token, accepted = verify(row, sampling, position, proposal, q)
    found = verified(row, sampling, position, proposal, q)
    assert fetched([found]) == [[token, int(bool(accepted))]]


@settings(max_examples=300, deadline=None)
@given(st.data(), samplings, st.integers(0, 5000))
def test_a_device_drafts_as_the_plain_function(
    data: st.DataObject, sampling: Sampling, position: int
) -> None:
    row = data.draw(scores(len(IDS)))
    proposal, q = draft(row, IDS, sampling, position)
    found, found_q = drafted(row, IDS, sampling, position)
    assert fetched([found]) == [[proposal.token, int(proposal.kind == "pdm")]]
    if q is not None:
        assert found_q is not None
        assert torch.equal(found_q, q)


@settings(max_examples=100, deadline=None)
@given(samplings, st.sampled_from(["pdm", "point", None]))
def test_nothing_is_asked_of_the_device(sampling: Sampling, kind: Any) -> None:
    """On the meta device there are no numbers: whatever would wait for one raises."""
    row, ids = torch.randn(VOCABULARY, device="meta"), IDS.to("meta")
    proposal = None if kind is None else Proposal(3, kind if uses_q(sampling) else "point")
    q = DraftDistribution(ids, torch.rand(len(ids), device="meta"))
    assert verified(row, sampling, 7, proposal, q).shape == (2,)
    found, probs = drafted(row[: len(ids)], ids, sampling, 7)
    assert found.shape == (2,)
    assert (probs is not None) == uses_q(sampling)


def test_rows_come_back_together() -> None:
    rows = [torch.tensor([0.0, 2.0, 1.0]), torch.tensor([3.0, 2.0, 1.0])]
    found = [verified(row, Sampling(), 4, Proposal(1, "point")) for row in rows]
    assert fetched(found) == [[1, 1], [0, 0]]
    assert fetched([]) == []
