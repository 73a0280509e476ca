"""Log-probabilities in the two shapes that OpenAI has for them."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.api.answers import ChatLogprobs, ChosenLogprob, TextLogprobs, TokenLogprob
from service.api.client import AnswerGrammars, ChatTokenizer
from service.messages import Logprobs

LEAST = -9999.0  # JSON has no -Infinity; OpenAI and vLLM send this


@dataclass(frozen=True, slots=True)
class Token:
    """A prompt's first token has no log-probability."""

    id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called. A token may be part of a character: then only its bytes tell it."""

    tokenizer: ChatTokenizer
    grammars: AnswerGrammars

    def bytes(self, token_id: int) -> bytes:
        return self.grammars.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        return self.bytes(token_id).decode(errors="replace")

    def characters(self, token_id: int) -> int:
        """How many characters of the text begin in it."""
        if not self.tokenizer.decode((token_id, token_id)):
            return 0  # a special token: even the second has no text, unlike SentencePiece's space
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token_id))


def chat_logprobs(tokens: Sequence[Token], names: TokenNames) -> ChatLogprobs | None:
    """As in chats; None for no tokens."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return {
            "token": names.text(token_id),
            "logprob": finite(logprob),
            "bytes": list(names.bytes(token_id)),
        }

    content: list[ChosenLogprob] = [
        {
            **entry(token.id, token.logprobs.chosen),
            "top_logprobs": [entry(*alternative) for alternative in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None} if content else None


def text_logprobs(
    tokens: Sequence[Token], names: TokenNames, offset: int
) -> tuple[TextLogprobs | None, int]:
    """As in completions, and the offset of the next token; None for no tokens."""
    shape: TextLogprobs = {
        "tokens": [names.text(token.id) for token in tokens],
        "token_logprobs": [
            None if token.logprobs is None else finite(token.logprobs.chosen) for token in tokens
        ],
        "top_logprobs": [
            None if token.logprobs is None else _by_name(token.id, token.logprobs, names)
            for token in tokens
        ],
        "text_offset": [],
    }
    for token in tokens:
        shape["text_offset"].append(offset)
        offset += names.characters(token.id)
    return (shape if tokens else None), offset


def _by_name(token_id: int, logprobs: Logprobs, names: TokenNames) -> dict[str, float]:
    """The alternatives and the token itself. Of tokens with one name the likeliest counts, so that
    the largest value is that of the likeliest token, whatever they are called."""
    named: dict[str, float] = {}
    for other, logprob in (*logprobs.top, (token_id, logprobs.chosen)):
        name = names.text(other)
        named[name] = max(named.get(name, LEAST), finite(logprob))
    return named


def finite(logprob: float) -> float:
    return max(LEAST, logprob)
