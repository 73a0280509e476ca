"""What the project's Markdown files hold: blocks of code, the commands in them, links, anchors."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
_FOLDERS = [d for d in ROOT.iterdir() if d.is_dir() and d.name[0] != "." and d.name != "build"]
PAGES = sorted(
    file.relative_to(ROOT)
    for file in [*ROOT.glob("*.md"), *(file for d in _FOLDERS for file in d.rglob("*.md"))]
    if "node_modules" not in file.parts
)
_FENCE = re.compile(r"( *)```(\w*)")
_NEEDS = re.compile(r"<!-- needs: (.+) -->")
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BETWEEN_COMMANDS = ("|", "&&", "||", ";")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `needs`: what the tests have not, by an HTML comment in the line before."""

    page: Path
    line: int
    language: str
    text: str
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def end(self) -> int:
        """The line of its closing fence."""
        return self.line + len(self.text.splitlines()) + 1


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, without their indentation."""
    found: list[Block] = []
    lines = (ROOT / page).read_text().splitlines()
    at = 0
    while at < len(lines):
        if (fence := _FENCE.fullmatch(lines[at])) is not None:
            end = lines.index(f"{fence[1]}```", at + 1)
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[at + 1 : end])
            mark = _NEEDS.fullmatch(lines[at - 1].strip()) if at else None
            found.append(Block(page, at + 1, fence[2], text, mark and mark[1]))
            at = end
        at += 1
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    kept, inside = [], False
    for line in (ROOT / page).read_text().splitlines():
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """Where its links and pictures lead; addresses in angle brackets are not among them."""
    return _LINK.findall(_CODE.sub("", prose(page)))


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in _CODE.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a `sh` block, and of the lines behind `$` of a `console` one."""
    waiting = ""
    for line in block.text.splitlines():
        if block.language == "console" and not waiting:
            if not line.startswith("$ "):
                continue  # output
            line = line.removeprefix("$ ")
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        try:
            found = list(simple_commands(waiting))
        except ValueError:  # a quotation goes on in the next line
            waiting += "\n"
            continue
        waiting = ""
        yield from found
    assert not waiting, f"{block}: a command has no end: {waiting}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """Their words: without assignments before them, redirections and comments. What is read by
    `<` is the last word. Raises ValueError where a quotation has no end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    for between, group in groupby(lexer, lambda word: word in _BETWEEN_COMMANDS):
        words = list(group)
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if ">" in words:
            at = words.index(">")
            words[at : at + 2] = []
        if words and not between:
            yield [word for word in words if word != "<"]
