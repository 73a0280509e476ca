"""One choice of an answer, put together from the events of its request."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from service.api.logprobs import Token
from service.messages import (
    CycleView,
    Delta,
    FinishReason,
    GenerateRequest,
    PipelineView,
    PromptScored,
    RequestStats,
)
from service.text.tools import ToolCall, ToolParser

Reason = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with its place among those of the choice."""

    index: int
    id: str
    function: ToolCall


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes out at once, in one chunk of a stream: text or a call, and all tokens up to there
    that have not gone out before. The last piece has the reason."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    token_ids: tuple[int, ...] = ()  # generated ones
    scored: tuple[Token, ...] = ()  # those of an echoed prompt too
    is_first: bool = False
    reason: Reason | None = None
    pipeline: PipelineView | None = None  # what it has done since the last piece


@dataclass(slots=True)
class Choice:
    """Events in, pieces out."""

    index: int
    request: GenerateRequest
    leads: bool = True  # it is the first one of its prompt
    opening: str | None = None  # goes out with the first event, before its text
    mute: bool = False  # nothing that is generated goes out
    parser: ToolParser | None = None
    one_call: bool = False
    generated: int = 0
    stats: RequestStats | None = None
    _has_begun: bool = False
    _is_first: bool = True
    _calls: int = 0
    _token_ids: list[int] = field(default_factory=list)
    _scored: list[Token] = field(default_factory=list)
    _cycles: list[CycleView] = field(default_factory=list)
    _drafter: str = ""

    def take(self, event: PromptScored | Delta) -> Iterator[Piece]:
        if not self._has_begun:
            self._has_begun = True
            if self.request.prompt_logprobs:
                self._score_prompt(event)
            if self.opening is not None:
                yield self._piece(self.opening)
        if isinstance(event, Delta):
            self.stats = event.stats
            if event.pipeline is not None:
                self._drafter = event.pipeline.drafter
                self._cycles += event.pipeline.cycles
            if not self.mute:
                yield from self._take_token(event)
            elif event.finish_reason is not None:
                yield self._piece(reason="length")

    def _take_token(self, delta: Delta) -> Iterator[Piece]:
        self.generated += 1
        self._token_ids.append(delta.token_id)
        if delta.logprobs is not None:
            self._scored.append(Token(delta.token_id, delta.logprobs))
        text, calls = self._parse(delta)
        if text:
            yield self._piece(text)
        for call in calls:
            yield self._piece(calls=(call,))
        if delta.finish_reason is not None:
            asks = self._calls > 0 and delta.finish_reason == "stop"
            yield self._piece(reason="tool_calls" if asks else delta.finish_reason)

    def _parse(self, delta: Delta) -> tuple[str, list[Call]]:
        """The text that is for the user, and the tool calls that are complete now."""
        if self.parser is None:
            return delta.text, []
        text, found = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            rest, more = self.parser.finish()
            text, found = text + rest, [*found, *more]
        if self.one_call:
            found = found[: 1 - self._calls]
        calls = [
            Call(index, f"call_{uuid.uuid4().hex}", function)
            for index, function in enumerate(found, self._calls)
        ]
        self._calls += len(calls)
        return text, calls

    def _score_prompt(self, event: PromptScored | Delta) -> None:
        """Nothing comes for a prompt of one token: the first one has no log-probability."""
        first, *rest = self.request.prompt_ids
        scores = event.logprobs if isinstance(event, PromptScored) else ()
        self._scored.append(Token(first, None))
        self._scored += [Token(*scored) for scored in zip(rest, scores, strict=True)]

    def _piece(
        self, text: str = "", *, calls: tuple[Call, ...] = (), reason: Reason | None = None
    ) -> Piece:
        piece = Piece(
            text,
            calls,
            tuple(self._token_ids),
            tuple(self._scored),
            self._is_first,
            reason,
            PipelineView(self._drafter, tuple(self._cycles)) if self._cycles else None,
        )
        self._is_first = False
        self._token_ids.clear()
        self._scored.clear()
        self._cycles.clear()
        return piece


def joined(pieces: Iterable[Piece]) -> Piece:
    """The whole choice."""
    pieces = list(pieces)
    return Piece(
        text="".join(piece.text for piece in pieces),
        calls=tuple(call for piece in pieces for call in piece.calls),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        scored=tuple(token for piece in pieces for token in piece.scored),
        is_first=True,
        reason=pieces[-1].reason,
    )
