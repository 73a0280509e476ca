"""Constrained decoding: which tokens may follow a text, by llguidance."""

import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from service.config import ConfigError
from service.messages import Grammar
from service.target import eos_token_ids
from service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Mask = NDArray[np.bool_]
T = TypeVar("T")

# How JSON is written, for the top level of a schema: with at most one space, behind "," and ":".
# Models write it so by themselves, and dense JSON is allowed too. With llguidance's default (any
# white space everywhere) a small model may go on with blanks and newlines until its length limit,
# and indentation costs tokens.
JSON_STYLE: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
}

# Where a grammar leaves no choice of text, llguidance would leave none of tokens: it tokenizes what
# has to come. That can be wrong at the end (other tokens, depending on what follows), and for the
# written form of a special token it demands the special token, which it then refuses. So the target
# chooses the tokens, and a mask depends on the text alone.
_NO_FORCING = '%llguidance {"no_forcing": true}'

_NAMES = {"json_schema": "JSON schema", "lark": "Lark grammar", "regex": "regular expression"}
_LONGEST = 100_000  # characters of a grammar
_STACK = 256 << 20  # bytes; grammars of that length were seen to take 64 MiB
_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # of 1 to 2 kB each, per running text
    verbose_errors=False,  # they would repeat the whole grammar
)
_SAMPLE = 'Grüße, "日本": {"a b": [1, -2.5e3]}\n\t  🚀'


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """What grammars know of a target's tokens. It is sent to the actors, which so need neither the
    tokenizer nor the seconds that the import of transformers takes."""

    tokenizer_json: str = field(repr=False)
    end_ids: tuple[int, ...]
    named: int  # ids from here on have no text: the head is wider than the vocabulary
    width: int  # of the target's head

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer, width: int) -> Self:
        """Raises ConfigError where answers of the target in `folder` can't be constrained."""
        end_ids = tuple(sorted(eos_token_ids(folder, tokenizer)))
        if not end_ids:
            raise _unusable(folder, "it names no end token")
        text = tokenizer.to_json()
        if text is None:
            raise _unusable(folder, "its tokenizer has no tokenizer.json and can't be converted")
        return cls(text, end_ids, tokenizer.vocab_size, width)


class Grammars:
    """Compiles grammars for one target. May be used by several threads."""

    def __init__(self, tokens: GrammarTokens) -> None:
        """Raises ValueError with the reason if llguidance can't use a tokenizer."""
        self._tokenizer = LLTokenizer(
            tokens.tokenizer_json, n_vocab=tokens.width, eos_token=list(tokens.end_ids)
        )
        self._ends = np.zeros(tokens.width, dtype=np.bool_)
        self._ends[list(tokens.end_ids)] = True
        self._named = tokens.named

    @classmethod
    def load(cls, folder: Path, width: int) -> Self:
        """For the target in `folder`, whose head has `width` rows (the tokenizer's vocabulary may
        be smaller). Raises ConfigError if its answers can't be constrained."""
        tokenizer = Tokenizer.load(folder)
        tokens = GrammarTokens.of(folder, tokenizer, width)
        try:
            grammars = cls(tokens)
        except ValueError as error:
            raise _unusable(folder, str(error)) from error
        grammars._check_bytes(tokenizer, folder)
        return grammars

    def check(self, grammar: Grammar) -> None:
        """Raises ValueError, with words for the client, if a grammar can't be used: it is wrong or
        too large, asks for what is not supported, or no text can satisfy it."""
        matcher = self._compile(grammar)
        problem = matcher.get_error()
        if not matcher.is_error():
            matcher.compute_bitmask()
            problem = "no answer can satisfy it"
        if matcher.is_error():
            raise ValueError(_plain(problem, _NAMES[grammar.kind]))

    def follow(self, grammar: Grammar) -> "Follower":
        """A new text in a grammar that has passed `check`."""
        return Follower(self._ends, lambda: self._compile(grammar))

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token: part of a character, perhaps. Those of a special token are
        its written form; an id beyond the vocabulary has none."""
        return self._tokenizer.decode_bytes([token_id]) if token_id < self._named else b""

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning; it holds the error if llguidance refuses the grammar. Raises
        ValueError where llguidance is not even asked."""
        lark = _lark(grammar)
        return _deeply(lambda: LLMatcher(self._tokenizer, lark, log_level=0, limits=_LIMITS))

    def _check_bytes(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Raises ConfigError unless the tokens' bytes make the text that the server sends. A space
        before the first word (SentencePiece) is in the bytes alone."""
        ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
        known = (i for i in ids if not self._tokenizer.is_special_token(i))
        text = b"".join(map(self.token_bytes, known)).decode("utf-8", "replace")
        if text.lstrip(" ") != tokenizer.decode(ids).lstrip(" "):
            known_as = f"{text!r} for {tokenizer.decode(ids)!r}"
            raise _unusable(folder, f"the bytes of its tokens are not known ({known_as})")


class NoGrammars:
    """In their place for a target whose answers can't be constrained: it is served all the same."""

    def __init__(self, folder: Path, why: ConfigError) -> None:
        self._tokenizer, self._why = Tokenizer.load(folder), why

    def check(self, grammar: Grammar) -> None:
        """Raises ValueError."""
        log.warning("a %s was asked for: %s", _NAMES[grammar.kind], self._why)
        raise ValueError("This model's answers can't be constrained by a grammar.")

    def token_bytes(self, token_id: int) -> bytes:
        """Those of the token's text alone."""
        return self._tokenizer.decode([token_id]).encode()


class Follower:
    """Where a text stands in its grammar."""

    def __init__(self, ends: Mask, start: Callable[[], LLMatcher]) -> None:
        """`ends` [vocab_size]: the end tokens. `start` makes a matcher at the beginning."""
        self._ends = ends
        self._start = start
        self._matcher = start()
        self._ids: list[int] = []  # what the matcher has consumed; never an end token

    def allowed(self, generated: Sequence[int]) -> Mask | None:
        """The tokens that may follow `generated` (the ids of the answer so far): [vocab_size] bool,
        the caller's own. At least one is allowed.

        End tokens are allowed where the text may end, and alone once it must, which is also so when
        llguidance gives up (a limit, or no token can go on) and behind an end token. None if
        `generated` does not fit the grammar: its last ids are a proposal that will be rejected.
        Costs as many tokens as differ from the last call's.
        """
        ids = list(generated)
        common = _common(self._ids, ids)
        new = list(takewhile(lambda i: not self._ends[i], ids[common:]))
        tail = ids[common + len(new) :]
        fits = self._go(common, new)
        if self._matcher.is_error():
            mask = self._ends.copy()
        elif not fits:
            return None
        else:
            mask = self._mask()
        if not tail:
            return mask
        return self._ends.copy() if (mask & self._ends).any() and self._ends[tail].all() else None

    def _go(self, common: int, new: list[int]) -> bool:
        """To the first `common` consumed ids and `new` ones behind them. False: not all fit."""
        back = len(self._ids) - common
        # An error stays for good: it may be behind this text.
        if self._matcher.is_error() or (back and not self._matcher.rollback(back)):
            self._matcher = self._start()
            new = self._ids[:common] + new
            common = 0
        del self._ids[common:]
        done = self._matcher.try_consume_tokens(new) if new else 0
        self._ids += new[:done]
        return done == len(new)

    def _mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return self._ends.copy()
        return np.unpackbits(bits, count=len(self._ends), bitorder="little").view(np.bool_)


def _unusable(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"Answers of {folder} can't be constrained by a grammar: {why}")


def _lark(grammar: Grammar) -> str:
    """The grammar in llguidance's Lark. Raises ValueError if it can't be that."""
    name = _NAMES[grammar.kind]
    if len(grammar.text) > _LONGEST:
        raise ValueError(f"The {name} is longer than {_LONGEST} characters.")
    match grammar.kind:
        case "json_schema":
            text = f"start: %json {json.dumps(_schema(grammar.text) | JSON_STYLE)}"
        case "regex":  # llguidance knows how to quote it
            made = json.loads(LLMatcher.grammar_from_regex(grammar.text))
            text = made["grammars"][0]["lark_grammar"]
        case "lark":
            text = grammar.text
            if text.lstrip().startswith("{"):  # that would be llguidance's format in JSON
                raise ValueError(f"The {name} can't be used: it begins with a brace.")
    return f"{text}\n{_NO_FORCING}"


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The JSON schema can't be used: it is no JSON ({error}).") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("The JSON schema can't be used: it should be an object.")
    return schema


def _plain(problem: str, name: str) -> str:
    """llguidance's words for the client: without the lines that it cites (ours, perhaps), and
    without what helps only who calls its functions. A schema may be inside another grammar."""
    problem = re.split(r"\n +\d+ \| ", problem.replace("<non-verbose/>", ""))[0]
    before, is_schema, said = problem.partition("failed to compile JSON schema: ")
    name = _NAMES["json_schema"] if is_schema else name
    words = (said or before).split(" Enable '")[0].strip()
    return f"The {name} can't be used: {words}"


def _common(a: list[int], b: list[int]) -> int:
    """How many ids two texts have in common at their beginning."""
    if b[: len(a)] == a:  # the text has grown: no loop in Python
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


_stack_size = threading.Lock()


def _deeply(work: Callable[[], T]) -> T:
    """The result of `work`, which is done on a stack of its own. llguidance's compiler recurses as
    deep as rules and references are chained, and an overflow would end the process: a body of a few
    kB would be enough on the usual 8 MiB."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            usual = threading.stack_size(_STACK)
            try:
                result = pool.submit(work)  # starts the thread
            finally:
                threading.stack_size(usual)
        return result.result()
