"""The texts in the slots, as the last stage and the drafter know them: each token, and how the next
one is drawn.

Like keys and values, a token is written at its (slot, position) when its row enters stage 0, and
again after a rejection. So what stands before a position is always the text that it continues.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from service.messages import Admission, CyclePlan, Sampling
from service.sampling import penalise
from service.text.grammar import Follower, Grammars, GrammarTokens


@dataclass(slots=True)
class _Rules:
    """What an admission says, made ready."""

    admission: Admission
    bias: Tensor | None  # [V]
    follower: Follower | None


@lru_cache(maxsize=1)
def _grammars(tokens: GrammarTokens) -> Grammars | None:
    """None for a target whose answers can't be constrained: no grammar passes the door."""
    with suppress(ValueError):
        return Grammars(tokens)
    return None


class SlotTexts:
    """Tokens [slots, max_len] and the rules for the next one."""

    def __init__(
        self,
        tokens: GrammarTokens | None,
        vocabulary: int,
        slots: int,
        max_len: int,
        device: torch.device,
        draft_ids: Tensor | None = None,
    ) -> None:
        """`tokens`: None where no answer is constrained. `vocabulary`: the width V of the target's
        head. `draft_ids` [D]: where scores are of these tokens alone."""
        self._vocabulary, self._device = vocabulary, device
        self._draft_ids = draft_ids
        self._tokens = torch.zeros(slots, max_len, dtype=torch.int64)
        self._rules: dict[int, _Rules] = {}
        self._grammars = None if tokens is None else _grammars(tokens)

    def take(self, plan: CyclePlan) -> None:
        """What a plan tells: copied prefixes, new requests, tokens that enter. Before anything
        else in a cycle."""
        for copy in plan.copies:
            self._tokens[copy.target, : copy.length] = self._tokens[copy.source, : copy.length]
        for admission in plan.admitted:
            self._rules[admission.slot] = self._ready(admission)
        for rows, ids in zip(plan.stages[0], plan.tokens, strict=True):
            self._tokens[rows.slot, rows.start : rows.end] = torch.tensor(ids)

    def differing(self, texts: Mapping[int, Sequence[int]]) -> list[int]:
        """The slots whose first tokens are not these."""
        return [
            slot
            for slot, tokens in texts.items()
            if self._tokens[slot, : len(tokens)].tolist() != list(tokens)
        ]

    def admission(self, slot: int) -> Admission:
        return self._rules[slot].admission

    def sampling(self, slot: int) -> Sampling:
        return self._rules[slot].admission.sampling

    def scores(self, logits: Tensor, slot: int, position: int) -> Tensor:
        """Logits [V] (or [D]) at a position, biased, penalised and without what must not follow:
        that is -inf. The same tensor where nothing is to be done."""
        rules = self._rules[slot]
        admission = rules.admission
        if rules.bias is not None:
            logits = logits + self._own(rules.bias)
        if admission.sampling.counts_tokens:
            start, text = admission.prompt_length, self._tokens[slot, :position]
            seen, generated = self._counts(text), self._counts(text[start:])
            logits = penalise(logits, admission.sampling, seen, generated)
        allowed = self.allowed(slot, position)
        if allowed is not None:
            logits = logits.masked_fill(~self._own(allowed), -math.inf)
        return logits

    def allowed(self, slot: int, position: int) -> Tensor | None:
        """Which tokens [V] bool may stand at a position; None: all. There is always one."""
        rules = self._rules[slot]
        admission, allowed = rules.admission, None
        if rules.follower is not None:
            answer = self._tokens[slot, admission.prompt_length : position].tolist()
            mask = rules.follower.allowed(answer)
            allowed = None if mask is None else torch.from_numpy(mask).to(self._device)
        if position < admission.min_end and admission.end_ids:
            ends = torch.tensor(admission.end_ids, device=self._device)
            everything = torch.ones(self._vocabulary, dtype=torch.bool, device=self._device)
            longer = (everything if allowed is None else allowed).index_fill(0, ends, False)
            if bool(longer.any()):  # else the grammar has come to its end
                allowed = longer
        return allowed

    def _ready(self, admission: Admission) -> _Rules:
        bias = None
        if admission.sampling.logit_bias:
            ids, added = zip(*admission.sampling.logit_bias, strict=True)
            bias = torch.zeros(self._vocabulary, device=self._device)
            bias[torch.tensor(ids, device=self._device)] = torch.tensor(added, device=self._device)
        follower = None
        if admission.grammar is not None:
            assert self._grammars is not None, "the door lets no grammar pass"
            follower = self._grammars.follow(admission.grammar)
        return _Rules(admission, bias, follower)

    def _counts(self, text: Tensor) -> Tensor:
        """How often each token stands in a text [S] -> [V] or [D]."""
        return self._own(torch.bincount(text, minlength=self._vocabulary).to(self._device))

    def _own(self, by_token: Tensor) -> Tensor:
        """Of numbers [V] those of the tokens that scores are of."""
        return by_token if self._draft_ids is None else by_token[self._draft_ids]
