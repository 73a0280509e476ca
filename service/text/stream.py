"""Tokens to text while they come: whole characters only, and nothing of a stop string."""

from collections.abc import Callable, Sequence

from service.messages import Stopping

Decode = Callable[[Sequence[int]], str]

PLAIN = Stopping()

_BROKEN = "\ufffd"  # stands for bytes that are not (or not yet) a character
_MAX_BROKEN = 3  # an incomplete character has at most three bytes
_WINDOW = 16  # tokens of context; more than the bytes that three broken characters can span


class TextStream:
    """The text of one answer, token by token.

    All pushes joined, and `finish`, are the decoding of all ids at once, cut before (or behind) the
    stop string that was complete first (of those, the one that began first). So the cut depends on
    the text alone and not on how it is split into tokens; but what the first `min_tokens` let out
    is not looked at.

    `tokenizer_decode` must leave out special tokens. No stop string is empty.
    """

    def __init__(self, tokenizer_decode: Decode, stop: Stopping = PLAIN) -> None:
        self._characters = _Characters(tokenizer_decode)
        self._stop = stop.strings
        self._unstoppable, self._keeps_stop = stop.min_tokens, stop.include_in_text
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""  # the end of the text, as far as a stop string could begin there
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """Takes a token. Returns the text that may go out now, and whether a stop string was found:
        then that was the last of the text."""
        if self._stopped:
            return "", True
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return self._characters.push(token_id), False
        text = self._cut(self._held + self._characters.push(token_id))
        out = text[: len(text) - (0 if self._stopped else self._possible_stop(text))]
        self._held = text[len(out) :]
        return out, self._stopped

    def finish(self) -> str:
        """What was held back, when no more tokens come. An incomplete character is U+FFFD."""
        if self._stopped:
            return ""
        text = self._cut(self._held + self._characters.rest())
        self._held = ""
        return text

    def _cut(self, text: str) -> str:
        """The text up to a stop string, if one is in it."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        self._stopped = bool(found)
        return text[: min(found)[0 if self._keeps_stop else 1]] if found else text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class _Characters:
    """Tokens to whole characters. Decodes only the last few ids, so a token costs the same
    everywhere in a text. They can't be decoded alone: a character may span tokens, and
    SentencePiece strips a space where a text begins."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._text = ""  # decoding of _ids
        self._out = ""  # the beginning of _text that went out

    def push(self, token_id: int) -> str:
        """Takes a token and returns the characters that are certain now."""
        if not self._decode((token_id, token_id)):
            return ""  # a special token: even the second has no text, unlike SentencePiece's space
        self._ids.append(token_id)
        self._text = self._decode(self._ids)
        broken = len(self._text) - len(self._text.rstrip(_BROKEN))
        if broken and not self._text.startswith(self._out):
            return ""  # byte fallback breaks a whole run of characters until the last is complete
        certain = self._text[: len(self._text) - min(broken, _MAX_BROKEN)]
        new = certain[len(self._out) :]
        self._out = self._text[: len(self._out) + len(new)]
        if len(self._ids) >= 2 * _WINDOW:
            self._shorten()
        return new

    def rest(self) -> str:
        """The characters that were not certain, as they are."""
        rest = self._text[len(self._out) :]
        self._out = self._text
        return rest

    def _shorten(self) -> None:
        """Forgets old ids, unless that changes the text: then a later token will try again. Where
        the new first id begins inside a character, it decodes to a few U+FFFD that went out whole
        before; UTF-8 finds its feet after them."""
        ids = self._ids[-_WINDOW:]
        text = self._decode(ids)
        sound = text.lstrip(_BROKEN)
        if self._text.endswith(text) or (sound and self._text.endswith(sound)):
            waiting = len(self._text) - len(self._out)
            self._ids, self._text, self._out = ids, text, text[: len(text) - waiting]
