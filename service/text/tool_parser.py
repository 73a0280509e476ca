"""Function calls in the text of an answer, read while it streams."""

import json
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: the JSON text of an object."""

    name: str
    arguments: str


class ToolParser(Protocol):
    """Takes the calls out of the text of one answer."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Takes the text's next piece. Returns the text that may go out now (what may begin a call
        is held back) and the calls that are complete now. How the text is cut into pieces changes
        neither all texts joined nor all calls."""
        ...

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What was held back, when no more text comes: an incomplete call is plain text, unless
        only its last brackets are missing."""
        ...


class CallForm(NamedTuple):
    """How a family of models writes a call."""

    opener: str
    closers: tuple[str, ...]  # what may stand behind a call
    arguments: str  # the name of that property


# Where an answer begins, or right behind a call, a call needs no opener. Special tokens are not in
# the text ("[TOOL_CALLS]"), and Llama has none. White space is left out.
_BARE = ('{"name"', '[{"name"')
_WHITE_SPACE = re.compile("[ \t\r\n]+")  # JSON's


class CallParser:
    """Reads character by character, so it can't matter how the text is cut into pieces."""

    def __init__(self, form: CallForm, names: AbstractSet[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""  # white space, and what may be the beginning of a call
        self._value: _Value | None = None  # behind an opener: the call itself
        self._at_start = True  # nothing but white space has come
        self._behind_call = False
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        for character in text:
            self._take(character)
        return self._give()

    def finish(self) -> tuple[str, list[ToolCall]]:
        if self._value is not None:
            self._end_value(self._value)
        unfinished = self._held.strip()
        if not _begins(unfinished, ("", *self._form.closers) if self._behind_call else ()):
            self._text.append(self._held)
        self._held = ""
        return self._give()

    def _give(self) -> tuple[str, list[ToolCall]]:
        result = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return result

    def _take(self, character: str) -> None:
        value = self._value
        if value is None:
            self._held += character
            self._settle()
        elif not value.push(character):
            self._end_value(value)
            self._take(character)
        elif value.whole:
            self._end_value(value)

    def _settle(self) -> None:
        """Lets out what can't begin a call."""
        while body := self._held.lstrip():
            closers = self._form.closers if self._behind_call else ()
            bare = _BARE if self._at_start or self._behind_call else ()
            dense = _WHITE_SPACE.sub("", body)
            if body == self._form.opener:
                self._begin_value(self._held, "")
            elif body in closers:
                self._held = ""
            elif dense.startswith(bare):
                self._begin_value(self._held[: -len(body)], body)
            elif _begins(body, (self._form.opener, *closers)) or _begins(dense, bare):
                return
            else:
                end = len(self._held) - len(body) + 1
                self._text.append(self._held[:end])
                self._held = self._held[end:]
                self._at_start = self._behind_call = False

    def _begin_value(self, before: str, beginning: str) -> None:
        self._held = ""
        self._value = _Value(before)
        for character in beginning:
            self._value.push(character)

    def _end_value(self, value: "_Value") -> None:
        """To calls, or back to text. White space before a call is no text."""
        self._value = None
        calls = _read(value.json(), self._names)
        self._at_start = False
        self._behind_call = bool(calls)
        if calls:
            self._calls += calls
        else:
            self._text.append(value.raw())


class _Value:
    """An object or a list, in JSON, character by character. Outside of strings it is only checked
    that brackets match and that each character occurs in JSON at all."""

    def __init__(self, before: str) -> None:
        self._before = before  # what goes out too if this is no call
        self._characters: list[str] = []
        self._open: list[str] = []  # the brackets that will close what is open
        self._in_string = False
        self._escaped = False
        self.whole = False

    def push(self, c: str) -> bool:
        """Takes a character. False: it can't belong to the value, and is not taken."""
        if self._in_string:
            self._in_string = self._escaped or c != '"'
            self._escaped = c == "\\" and not self._escaped
        elif c in "{[":
            self._open.append("}" if c == "{" else "]")
        elif not self._open:
            if not c.isspace():
                return False
        elif c in "}]":
            if c != self._open[-1]:
                return False
            self._open.pop()
            self.whole = not self._open
        elif c == '"':
            self._in_string = True
        elif c not in _OUTSIDE_STRINGS:
            return False
        self._characters.append(c)
        return True

    def raw(self) -> str:
        return self._before + "".join(self._characters)

    def json(self) -> str:
        """With the last brackets, should they alone be missing: the arguments must be closed."""
        text = "".join(self._characters)
        missing = "".join(reversed(self._open))
        closed = not self._in_string and text.rstrip().endswith("}")
        return text + missing if closed and missing in ("}", "]", "}]") else text


_OUTSIDE_STRINGS = frozenset(" \t\r\n,:" + "+-.0123456789E" + "true" + "false" + "null")


def _begins(text: str, marks: tuple[str, ...]) -> bool:
    """Whether one of the marks begins with the text."""
    return any(mark.startswith(text) for mark in marks)


def _read(text: str, names: AbstractSet[str]) -> list[ToolCall]:
    """The calls that a JSON text stands for; none if anything else is in it."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return []
    calls = [_call(item, names) for item in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if all(calls) else []


def _call(item: Any, names: AbstractSet[str]) -> ToolCall | None:
    match item:
        case {"name": str(name)} if name in names:
            arguments = item.get("arguments", item.get("parameters", {}))
        case _:
            return None
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    if not text.isprintable():  # half of a surrogate pair, perhaps, which has no UTF-8
        text = json.dumps(arguments)
    return ToolCall(name, text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
