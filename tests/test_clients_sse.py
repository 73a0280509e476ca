"""The decoder of event streams: whatever the bytes, and wherever they are cut."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.sse import Event, EventDecoder

# What an event stream is made of, and what decoders get wrong: all ends of lines, characters of
# several bytes (some look like ends of lines to `str.splitlines`), marks of byte order, half
# characters, fields without a value, with two colons, with leading spaces.
PIECES = [
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\r\r", b"data", b"data:", b"data: x"),
    *(b"data:  y", b"event: kind", b"event:", b": comment", b"id: 1", b"retry: 9", b"other: z"),
    *(b":", b" ", b"a", b"a:b", b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\x00"),
    *("é", "漢", "😀", "\u2028", "\u0085"),
]
STREAMS = st.lists(st.sampled_from(PIECES), max_size=30).map(
    lambda pieces: b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces)
)


def oracle(stream: bytes) -> list[Event]:
    """The standard's grammar, on a whole stream."""
    text = stream.decode(errors="replace").removeprefix("\ufeff")
    *blocks, _ = re.split("(?<=\n)\n|^\n", re.sub("\r\n|\r", "\n", text))
    events = []
    for block in blocks:
        data, kind = [], ""
        for line in block.split("\n"):
            match = re.fullmatch("(data|event)(?:: ?(.*))?", line, re.DOTALL)
            if match and match[1] == "data":
                data.append(match[2] or "")
            elif match:
                kind = match[2] or ""
        if data:
            events.append(Event("\n".join(data), kind or "message"))
    return events


def decoded(*chunks: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@settings(max_examples=300, deadline=None)
@given(STREAMS)
def test_every_split_gives_the_same_events(stream: bytes) -> None:
    expected = oracle(stream)
    assert decoded(stream) == expected
    for at in range(len(stream) + 1):
        assert decoded(stream[:at], stream[at:]) == expected
    assert decoded(*(stream[at : at + 1] for at in range(len(stream)))) == expected


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.data())
def test_any_bytes(stream: bytes, data: st.DataObject) -> None:
    at = data.draw(st.lists(st.integers(0, len(stream)), max_size=5).map(sorted))
    cuts = [0, *at, len(stream)]
    chunks = [stream[a:b] for a, b in pairwise(cuts)]
    assert decoded(*chunks) == decoded(stream) == oracle(stream)


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [Event("a")]),
        (b"data:a\r\rdata:b\r\n\r\n", [Event("a"), Event("b")]),
        (b"data: a\ndata\ndata: b\n\n", [Event("a\n\nb")]),
        (b"data\n\n", [Event("")]),
        (b"event: x\n\ndata: a\n\n", [Event("a")]),
        (b"event: x\ndata: a\n\ndata: b\n\n", [Event("a", "x"), Event("b")]),
        (b": keep-alive\n\ndata: a\n\n", [Event("a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
        (b"\n\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\n", []),
        (b"Data: a\n\n", []),
        ("data: \u2028\u0085\n\n".encode(), [Event("\u2028\u0085")]),
    ],
)
def test_by_hand(stream: bytes, expected: list[Event]) -> None:
    assert decoded(stream) == oracle(stream) == expected


def test_an_event_does_not_wait_for_the_next_byte() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [Event("a")]
    assert decoder.feed(b"\ndata: b\r\r") == [Event("b")]
