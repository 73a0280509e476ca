"""A pipeline that follows a script, and a tokenizer of code points: all that the API needs."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence

from service.api.client import PipelineStatus
from service.messages import Delta, Event, FinishReason, GenerateRequest, RequestStats

STATS = RequestStats(
    prompt_tokens=5, generated_tokens=3, decoded=2, cycles=4, drafted=2, accepted=1
)


class Hang:
    """A step of a script that never ends by itself."""


Step = Event | Exception | Hang


def text(*pieces: str, reason: FinishReason = "stop") -> list[Step]:
    """A script: one token for each piece, the last with the finish."""
    *most, last = pieces
    return [
        *(Delta(token, piece) for token, piece in enumerate(most)),
        Delta(len(most), last, reason, STATS),
    ]


class FakePipeline:
    """Yields `script` for any request. The events tell a test's thread how far it got."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.play(text("ok"))

    def play(self, script: Sequence[Step]) -> None:
        self.script = script
        self.requests.clear()
        self.current: PipelineStatus | Exception = PipelineStatus(True, "serving", "lookup+pdm")
        self.started = threading.Event()
        self.ended = threading.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.started.set()
        try:
            for step in self.script:
                if isinstance(step, Hang):
                    await asyncio.Event().wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.ended.set()

    async def status(self) -> PipelineStatus:
        if isinstance(self.current, Exception):
            raise self.current
        return self.current


class FakeTokenizer:
    """A token for each code point. Its template refuses conversations that start with an answer."""

    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ValueError("The template refuses this.")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))
