"""A pipeline that follows a script, and a tokenizer of code points: all that the API needs."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from service.api.client import PipelineStatus
from service.messages import (
    CycleView,
    Delta,
    Event,
    FinishReason,
    GenerateRequest,
    Grammar,
    Logprobs,
    PipelineView,
    PromptScored,
    RequestStats,
    RowView,
    VerdictView,
)

STATS = RequestStats(
    prompt_tokens=5, generated_tokens=3, decoded=2, cycles=4, drafted=2, accepted=1, cached=4
)


class Hang:
    """A step of a script that never ends by itself."""


class Gate:
    """A step that lasts until a test's thread opens it."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.open = self._opened.set

    async def wait(self) -> None:
        while not self._opened.is_set():
            await asyncio.sleep(0.001)


Step = Event | Exception | Hang | Gate
Script = Sequence[Step] | Callable[[GenerateRequest], Sequence[Step]]


def text(*pieces: str, reason: FinishReason = "stop") -> list[Step]:
    """A script: one token for each piece, the last with the finish."""
    *most, last = pieces
    return [
        *(Delta(token, piece) for token, piece in enumerate(most)),
        Delta(len(most), last, reason, STATS),
    ]


def obliging(request: GenerateRequest) -> list[Step]:
    """A script: one token, with all that was asked for."""
    logprobs = Logprobs(-1.0, ((65, -0.5),) * (request.logprobs or 0))
    scored = PromptScored((logprobs,) * (len(request.prompt_ids) - 1))
    last = Delta(66, "B", "stop", STATS, logprobs=None if request.logprobs is None else logprobs)
    if request.shows_pipeline:
        verdict = VerdictView(len(request.prompt_ids), 66, "undrafted")
        rows = (RowView(0, len(request.prompt_ids), None, "prompt"),)
        last = replace(last, pipeline=PipelineView("off", (CycleView(1, 0.5, rows, verdict),)))
    return [scored, last] if request.prompt_logprobs else [last]


class FakePipeline:
    """Yields a script for any request: of several, each new request takes the next one. The events
    tell a test's thread that as many requests as scripts have started, and that they have ended."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.play(text("ok"))

    def play(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.requests.clear()
        self.current: PipelineStatus | Exception = PipelineStatus(True, "serving", "lookup+pdm")
        self.running = 0
        self.started = threading.Event()
        self.ended = threading.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        script = self.scripts[len(self.requests) % len(self.scripts)]
        steps = script(request) if callable(script) else script
        self.requests.append(request)
        self.running += 1
        if len(self.requests) == len(self.scripts):
            self.started.set()
        try:
            for step in steps:
                await asyncio.sleep(0)  # the other requests have their turn
                if isinstance(step, Hang):
                    await asyncio.Event().wait()
                elif isinstance(step, Gate):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self.running -= 1
            if not self.running and self.started.is_set():
                self.ended.set()

    async def status(self) -> PipelineStatus:
        if isinstance(self.current, Exception):
            raise self.current
        return self.current


class FakeTokenizer:
    """A token for each code point; the private ones are special: no text is made of them. Its
    template refuses conversations that start with an answer."""

    vocab_size = 0x110000
    chat_template: str | None = "{{ tools }}{{ messages }}"
    added_tokens: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if not 0xE000 <= token < 0xF900)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        self.rendered = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "template_kwargs": template_kwargs,
        }
        if messages[0]["role"] == "assistant":
            raise ValueError("The template refuses this.")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


class FakeGrammars:
    """Knows no grammar that has "bad" in it. A token's bytes are those of its code point, and
    beyond 0x10FF00 single bytes: parts of characters."""

    def __init__(self) -> None:
        self.checked: list[Grammar] = []

    def check(self, grammar: Grammar) -> None:
        self.checked.append(grammar)
        if "bad" in grammar.text:
            raise ValueError("This grammar is bad.")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id > 0x10FF00:
            return bytes([token_id - 0x10FF00])
        return chr(token_id).encode(errors="replace")
