"""What begins with a slash."""

from collections.abc import Callable
from pathlib import Path

from clients.terminal.session import Session


def run(session: Session, line: str) -> str:
    """Does what a command says; what to show for it. Raises EOFError to end the program, and
    ClientError."""
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        return f"There is no command {name}; /help lists them."
    return COMMANDS[name](session, argument.strip())


def _help(_: Session, __: str) -> str:
    return "\n".join(
        [
            "/system TEXT  say who the model should be (alone: shows it; `/system -`: none)",
            "/model NAME   talk to another model (alone: lists them)",
            "/reset        begin anew",
            "/save FILE    keep the conversation, as JSON if it ends in .json, else as Markdown",
            "/stats        how quick the answers were",
            "/help         this",
            "/quit         end (also Ctrl-D)",
            "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer.",
        ]
    )


def _system(session: Session, text: str) -> str:
    if text:
        session.system = None if text == "-" else text
    return f"System: {session.system}" if session.system else "There is no system message."


def _model(session: Session, name: str) -> str:
    models = [card.id for card in session.client.models()]
    if name in models:
        session.client.use_model(name)
    current = session.client.model()
    listed = "\n".join(f"{'*' if model == current else ' '} {model}" for model in models)
    return listed if not name or name in models else f"There is no model {name}:\n{listed}"


def _reset(session: Session, _: str) -> str:
    session.reset()
    return "A new conversation."


def _save(session: Session, name: str) -> str:
    if not name:
        return "Where to? /save FILE"
    try:
        session.save(Path(name).expanduser())
    except OSError as error:
        return f"Not saved: {error.strerror}: {name}"
    return f"Saved to {name}."


def _stats(session: Session, _: str) -> str:
    lines = [f"{number}. {tally.line()}" for number, tally in enumerate(session.tallies, 1)]
    return "\n".join(lines) or "There are no answers yet."


def _quit(_: Session, __: str) -> str:
    raise EOFError


COMMANDS: dict[str, Callable[[Session, str], str]] = {
    "/help": _help,
    "/system": _system,
    "/model": _model,
    "/reset": _reset,
    "/save": _save,
    "/stats": _stats,
    "/quit": _quit,
}
