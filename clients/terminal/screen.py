"""The chat on a terminal, by prompt_toolkit and rich."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console, Group
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from clients.errors import ClientError
from clients.terminal import commands
from clients.terminal.markdown import Tail, harmless, settled
from clients.terminal.session import Session

PAUSE_S = 0.08  # between two drawings


def chat(session: Session) -> int:
    """Until the user ends it; the exit code."""
    console = Console(highlight=False)
    prompt: PromptSession[str] = PromptSession(multiline=True, key_bindings=_keys())
    console.print(Text(harmless(_greeting(session)), style="dim"))
    with typing_ahead():
        return _turns(session, prompt, console)


def _turns(session: Session, prompt: PromptSession[str], console: Console) -> int:
    while True:
        try:
            said = prompt.prompt("> ", bottom_toolbar=lambda: _status(session))
            if said.strip():
                _take(session, said, console)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return 0
        except ClientError as error:
            console.print(Text(harmless(str(error)), style="red"))


@contextmanager
def typing_ahead() -> Iterator[None]:
    """What is typed while an answer comes waits for the next prompt as it was typed.

    Between prompts a terminal would make Ctrl-J of Enter, which begins a new line here, an end of
    the input of Ctrl-D, which nobody reads, and write the keys into the answer.
    """
    if sys.platform == "win32":
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[0] &= ~termios.ICRNL
    changed[3] &= ~(termios.ECHO | termios.ICANON)  # but Ctrl-C stays a signal
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _take(session: Session, said: str, console: Console) -> None:
    if said.startswith("/"):
        console.print(Text(harmless(commands.run(session, said)), style="cyan"))
        return
    answers = len(session.tallies)
    try:
        with closing(session.answer(said)) as pieces:
            show(pieces, session, console)
    except KeyboardInterrupt:
        console.print(Text("stopped", style="yellow"))
    if len(session.tallies) > answers:
        console.print(_line(session))


def show(pieces: Iterable[str], session: Session, console: Console) -> None:
    """Draws the answer while it comes. Finished parts are printed, and stay when it is stopped."""
    text, printed, drawn_s = "", 0, 0.0
    # No thread draws beside this one: what two of them print can get mixed up.
    with Live(Text("…", style="dim"), console=console, transient=True, auto_refresh=False) as live:
        try:
            for piece in pieces:
                text += harmless(piece)
                if (end := settled(text)) > printed:
                    live.console.print(Markdown(text[printed:end]), "")
                    printed = end
                live.update(Group(Tail(text[printed:]), _line(session)))
                if (now := time.monotonic()) - drawn_s >= PAUSE_S:
                    live.refresh()
                    drawn_s = now
        finally:
            live.update(Text(""), refresh=True)
            if text[printed:].strip():
                live.console.print(Markdown(text[printed:]))


def _line(session: Session) -> Text:
    return Text(session.tallies[-1].line(), style="dim")


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, and Ctrl-J where a terminal has no Alt, begin a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _greeting(session: Session) -> str:
    try:
        model = session.client.model()
    except ClientError as error:
        return f"{error} It may come later; /help lists the commands."
    return f"{model} at {session.client.base_url}; /help lists the commands"


def _status(session: Session) -> str:
    last = session.tallies[-1].line() if session.tallies else "no answers yet"
    turns = sum(turn["role"] == "user" for turn in session.turns)
    return f"turn {turns + 1} | {last}"
