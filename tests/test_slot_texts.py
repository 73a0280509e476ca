"""What last stage and drafter know of the texts in the slots: bias, penalties, ends, grammars."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from service.messages import Admission, Copy, CyclePlan, Grammar, Rows, Sampling
from service.pdm.drafter import Drafter
from service.pipeline.texts import SlotTexts
from service.text.grammar import GrammarTokens
from service.text.tokenizer import Tokenizer

V = 12
INF = float("inf")


def plan(
    *rows: tuple[int, int, tuple[int, ...]],
    admitted: tuple[Admission, ...] = (),
    copies: tuple[Copy, ...] = (),
) -> CyclePlan:
    """`rows`: slot, start, and the tokens that enter."""
    entering = tuple(Rows(slot, start, len(ids)) for slot, start, ids in rows)
    tokens = tuple(ids for _, _, ids in rows)
    return CyclePlan(1, (entering,), tokens, (), (), admitted, copies)


def texts(draft_ids: list[int] | None = None) -> SlotTexts:
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    return SlotTexts(None, V, 3, 32, torch.device("cpu"), ids)


def scores(of: SlotTexts, position: int, slot: int = 0, width: int = V) -> list[float]:
    return of.scores(torch.ones(width), slot, position).tolist()


def test_nothing_to_do_costs_nothing() -> None:
    of = texts()
    of.take(plan((0, 0, (1, 2)), admitted=(Admission(0, 2, Sampling()),)))
    logits = torch.ones(V)
    assert of.scores(logits, 0, 2) is logits


def test_penalties_count_the_text_before_the_position() -> None:
    """The prompt's tokens for repetition alone; a token that was rejected no more."""
    sampling = Sampling(presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=2.0)
    of = texts()
    of.take(plan((0, 0, (1, 2)), admitted=(Admission(0, 2, sampling),)))
    of.take(plan((0, 2, (3,))))
    of.take(plan((0, 3, (4,))))  # proposed, and rejected:
    of.take(plan((0, 3, (3,))))
    of.take(plan((0, 4, (5,))))  # in flight
    expected = [1, 0.5, 0.5, 0.5 - 2 * 0.5 - 0.25, *[1] * 8]
    assert scores(of, 4) == expected


def test_the_drafts_own_vocabulary() -> None:
    sampling = Sampling(presence_penalty=1.0, logit_bias=((9, 5.0), (3, -2.0)))
    of = texts([2, 3, 9])
    of.take(plan((0, 0, (1,)), admitted=(Admission(0, 1, sampling),)))
    of.take(plan((0, 1, (9,))))
    assert scores(of, 2, width=3) == [1, -1, 5]


def test_a_slot_has_the_rules_of_its_last_request() -> None:
    of = texts()
    first = Admission(0, 1, Sampling(logit_bias=((0, 3.0),)))
    of.take(plan((0, 0, (1,)), admitted=(first,)))
    of.take(plan((0, 0, (1,)), admitted=(Admission(0, 1, Sampling()),)))
    assert scores(of, 1) == [1] * V


def test_copied_prefixes_count() -> None:
    of = texts()
    of.take(plan((0, 0, (1, 2, 3)), admitted=(Admission(0, 3, Sampling()),)))
    penalty = Sampling(repetition_penalty=2.0)
    copied = Admission(2, 3, penalty)
    of.take(plan((2, 2, (7,)), admitted=(copied,), copies=(Copy(0, 2, 2),)))
    assert scores(of, 3, slot=2) == [1, 0.5, 0.5, 1, 1, 1, 1, 0.5, 1, 1, 1, 1]


def test_no_end_before_its_time() -> None:
    of = texts()
    of.take(plan((0, 0, (1,)), admitted=(Admission(0, 1, Sampling(), end_ids=(4, 6), min_end=3),)))
    assert [scores(of, p)[4] for p in (1, 2, 3)] == [-INF, -INF, 1]
    assert scores(of, 1) == [1, 1, 1, 1, -INF, 1, -INF, 1, 1, 1, 1, 1]


# --- grammars, with the default model's tokenizer -------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="module")
def grammar_tokens(default_model: Path, tokenizer: Tokenizer) -> GrammarTokens:
    return GrammarTokens.of(default_model, tokenizer, 49_152)


def test_a_grammar_leaves_what_fits(grammar_tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    """Along the answer, and nothing is forbidden behind a proposal that does not fit."""
    width = 49_152
    of = SlotTexts(grammar_tokens, width, 1, 32, torch.device("cpu"))
    admission = Admission(0, 1, Sampling(), Grammar("regex", "(yes|no) sir"))
    of.take(plan((0, 0, (5,)), admitted=(admission,)))

    def allowed(position: int) -> set[str]:
        row = of.scores(torch.zeros(width), 0, position)
        return {tokenizer.decode([i]) for i in torch.nonzero(row > -INF).flatten().tolist()}

    assert {"yes", "no", "y", "n"} <= allowed(1)
    assert "sir" not in allowed(1)
    (yes,) = tokenizer.encode("yes")
    of.take(plan((0, 1, (yes,))))
    assert allowed(2) <= {" ", " s", " si", " sir"}
    of.take(plan((0, 2, (yes,))))  # a lookup's proposal
    assert len(allowed(3)) > 40_000
    (sir,) = tokenizer.encode(" sir")
    of.take(plan((0, 2, (sir,))))
    assert allowed(3) == {""}, "the end alone"


def test_a_grammar_that_has_ended_beats_min_tokens(
    grammar_tokens: GrammarTokens, tokenizer: Tokenizer
) -> None:
    of = SlotTexts(grammar_tokens, 49_152, 1, 32, torch.device("cpu"))
    end = tokenizer.eos_token_id
    assert end is not None
    admission = Admission(0, 1, Sampling(), Grammar("regex", "no"), end_ids=(end,), min_end=9)
    of.take(plan((0, 0, (5,)), admitted=(admission,)))
    (no,) = tokenizer.encode("no")
    of.take(plan((0, 1, (no,))))
    row: Tensor = of.scores(torch.zeros(49_152), 0, 2)
    assert torch.nonzero(row > -INF).flatten().tolist() == [end]


def test_what_the_draft_vocabulary_lacks_is_proposed_all_the_same(
    grammar_tokens: GrammarTokens, tokenizer: Tokenizer
) -> None:
    """Where the grammar allows no token of the draft's words, one that it allows is a proposal."""
    drafter = Drafter.__new__(Drafter)
    ids = torch.tensor(tokenizer.encode("no"))
    drafter._texts = SlotTexts(grammar_tokens, 49_152, 1, 32, torch.device("cpu"), ids)
    drafter.pdm = type("Words", (), {"draft_ids": ids})()
    admission = Admission(0, 1, Sampling(temperature=1.0), Grammar("regex", "[x]"))
    drafter._texts.take(plan((0, 0, (5,)), admitted=(admission,)))
    order = type("Order", (), {"slot": 0, "position": 1})()
    for draft_all in (drafter._draft_each, drafter._draft_at_once):
        ((proposal, q),) = draft_all((order,), torch.zeros(1, len(ids)))
        assert (tokenizer.decode([proposal.token]), proposal.kind, q) == ("x", "point", None)
