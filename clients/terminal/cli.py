"""The command `spd-chat`."""

import argparse
import os
import sys

from clients.client import Client
from clients.requests import KEY_VARIABLE, URL_VARIABLE, ChatOptions
from clients.retries import Retries
from clients.terminal import plain
from clients.terminal.session import Session

RETRIES = Retries(most=4)  # some 7 s: a server that is started anew is there again


def main() -> None:
    """Talks to a server, on a terminal or, where input or output is none, by plain lines."""
    given = _parsed()
    try:
        client = Client(given.url, model=given.model, retries=RETRIES)
    except ValueError as error:
        sys.exit(f"spd-chat: {error}")
    with client:
        session = Session(client, _options(given), given.system)
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                sys.exit(_on_terminal(session))
            sys.exit(plain.chat(session, sys.stdin, sys.stdout, sys.stderr))
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            # Else Python complains when it flushes its output at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)


def _on_terminal(session: Session) -> int:
    try:
        from clients.terminal import screen
    except ImportError as error:
        sys.exit(
            f"spd-chat: on a terminal it needs {error.name}: pip install 'spd-serve[chat]' "
            "(or pipe the messages in, one a line)"
        )
    return screen.chat(session)


def _options(given: argparse.Namespace) -> ChatOptions:
    options = ChatOptions()
    if given.temperature is not None:
        options["temperature"] = given.temperature
    if given.max_tokens is not None:
        options["max_tokens"] = given.max_tokens
    if given.seed is not None:
        options["seed"] = given.seed
    return options


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spd-chat",
        description="Chat with a server, in the terminal or, without one, a message a line.",
        epilog=f"An API key comes from the environment variable {KEY_VARIABLE}.",
    )
    parser.add_argument("--url", help=f"of the server; else {URL_VARIABLE}, else port 8000 here")
    parser.add_argument("--model", help="else the server's first")
    parser.add_argument("--system", help="who the model should be")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--seed", type=int, help="the same text each time")
    return parser.parse_args()
