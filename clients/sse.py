"""Server-sent events from bytes, wherever the network has cut them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its `data` lines joined by newlines, and its type."""

    data: str
    kind: str = "message"


@dataclass(slots=True)
class EventDecoder:
    """Follows the standard's rules for an event stream. Lines end with LF, CR or CRLF; a CR ends
    its line at once, so that no event waits for the next one. What no blank line follows is no
    event. Comments, `id` and `retry` are skipped."""

    _line: bytes = b""  # has no end yet
    _after_cr: bool = False  # a LF that comes now belongs to the CR before it
    _first: bool = True  # no line has been read
    _data: list[str] = field(default_factory=list)
    _kind: str = ""

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        events = (self._take(line) for line in self._lines(data))
        return [event for event in events if event is not None]

    def _lines(self, data: bytes) -> Iterator[bytes]:
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        self._after_cr = data.endswith(b"\r") or (self._after_cr and not data)
        *lines, self._line = (
            (self._line + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        )
        for line in lines:
            # A character is never cut: no byte of a longer one is an end of line.
            yield line.removeprefix(_BOM) if self._first else line
            self._first = False

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event("\n".join(self._data), self._kind or "message") if self._data else None
        self._data, self._kind = [], ""
        return event
