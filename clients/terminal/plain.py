"""The chat without a terminal: a message a line comes in, the answers' text goes out."""

from contextlib import closing
from typing import TextIO

from clients.errors import ClientError
from clients.terminal import commands
from clients.terminal.session import Session


def chat(session: Session, lines: TextIO, out: TextIO, errors: TextIO) -> int:
    """Until the lines end; the exit code: 1 if anything failed."""
    failures = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            _take(session, line.rstrip("\n"), out)
        except EOFError:
            break
        except ClientError as error:
            failures += 1
            errors.write(f"spd-chat: {error}\n")
    return 1 if failures else 0


def _take(session: Session, line: str, out: TextIO) -> None:
    if line.startswith("/"):
        out.write(commands.run(session, line) + "\n")
        return
    with closing(session.answer(line)) as pieces:
        for piece in pieces:
            out.write(piece)
            out.flush()
    out.write("\n")
    out.flush()
