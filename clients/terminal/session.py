"""A conversation with the server, whatever shows it."""

import json
from collections.abc import Generator
from pathlib import Path

from clients.client import Client
from clients.requests import ChatOptions, Message, Streaming
from clients.terminal.tally import Tally


class Session:
    """The messages so far, and the answer to the next one."""

    def __init__(self, client: Client, options: ChatOptions, system: str | None = None) -> None:
        self.client = client
        self.options = options
        self.system = system
        self.turns: list[Message] = []
        self.tallies: list[Tally] = []

    @property
    def messages(self) -> list[Message]:
        """All turns, behind the system message if there is one."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def answer(self, said: str) -> Generator[str, None, None]:
        """The pieces of the answer. What has come of it is kept when it is closed or fails; if
        nothing has, neither is what was said. Raises ClientError."""
        self.turns.append({"role": "user", "content": said})
        pieces: list[str] = []
        is_whole = False
        tally = Tally()
        self.tallies.append(tally)
        try:
            with self.client.stream_chat(
                self.messages, Streaming(pipeline=True), **self.options
            ) as stream:
                for chunk in stream:
                    tally.take(chunk)
                    if chunk.text:
                        pieces.append(chunk.text)
                        yield chunk.text
            is_whole = True
        finally:
            if pieces or is_whole:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.turns.pop()
                self.tallies.pop()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.turns.clear()
        self.tallies.clear()

    def save(self, file: Path) -> None:
        """Writes the conversation: as JSON to *.json, else as Markdown. Raises OSError, also for
        a file that is there."""
        if file.suffix == ".json":
            text = json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"**{m['role']}**\n\n{m.get('content')}\n" for m in self.messages)
        with file.open("x") as out:
            out.write(text)
