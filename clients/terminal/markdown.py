"""Markdown that grows: what is finished is printed once, the rest is drawn again and again."""

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown
from rich.segment import Segment

# All but tab and newline: a text could move the cursor or write to the clipboard.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FENCE = re.compile(" {0,3}(`{3,}|~{3,})(.*)")
BELOW = 2  # lines of the terminal that are left to the status


def harmless(text: str) -> str:
    """The text without what a terminal would obey."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def settled(text: str) -> int:
    """Up to where nothing that follows can change how the text looks: behind the last blank line
    that is outside of a fenced block, and that no indented line or list item follows."""
    found, at, fence = 0, 0, ""
    after_blank = False
    for line in text.splitlines(keepends=True):
        if after_blank and not fence and re.match(r"[^\s\-*+\d>]", line):
            found = at
        if match := _FENCE.match(line):
            if not fence:
                fence = match[1]
            elif match[1].startswith(fence) and not match[2].strip():
                fence = ""
        after_blank = not line.strip()
        at += len(line)
    return found


class Tail:
    """The end of a Markdown text, as much of it as the terminal has room for."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self.text), options, pad=False)
        for line in lines[-max(1, console.height - BELOW) :]:
            yield from line
            yield Segment.line()
