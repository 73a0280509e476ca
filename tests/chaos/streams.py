"""Streams of every kind, and whether they are what they should be."""

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "toy"
LOGPROB_NOISE = 1e-3
# One for all, without certificates: to read those takes a busy machine seconds for each client.
HTTP = httpx.Client(verify=False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
WORDS = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 400}
FORMAT = {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}}


def bodies(tokens: int) -> list[dict[str, Any]]:
    """What depends on the text so far in every way: greedy and seeded, penalised, biased, with a
    grammar, with log-probabilities, with a stop string that may begin anywhere."""
    common = {"model": MODEL, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.3, "min_tokens": 20},
        {"temperature": 0, "logprobs": 3, "logit_bias": {"504": 5.0}},
        {"temperature": 0.9, "seed": 3, "stop": ["<never>", "zzzz"], "top_p": 0.9},
        {"temperature": 0.8, "seed": 4, "response_format": FORMAT},
        {"temperature": 0, "ignore_eos": True},
    ]
    return [
        {**common, "prompt": f"{number}: once upon a time", **kind}
        for number, kind in enumerate(kinds)
    ]


@dataclass
class Stream:
    """One request over HTTP, and what came of it."""

    url: str
    body: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    error: Any = None
    comments: int = 0
    last: float = 0.0
    pause: float = 0.0  # the longest between two tokens, in seconds
    begun: threading.Event = field(default_factory=threading.Event)
    after: int = 1  # so many events, and `begun` is set

    def run(self) -> None:
        events = 0
        self.last = time.monotonic()
        try:
            with HTTP.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
                if response.status_code != 200:
                    self.error = (response.status_code, response.read().decode())
                    return
                for line in response.iter_lines():
                    if line.startswith(":"):
                        self.comments += 1
                    elif line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
                        events += 1
                        if events == self.after:
                            self.begun.set()
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.begun.set()

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        now = time.monotonic()
        self.pause, self.last = max(self.pause, now - self.last), now
        (choice,) = chunk["choices"]
        self.text += choice["text"]
        self.token_ids += choice.get("token_ids") or []
        if choice.get("logprobs"):
            self.logprobs += choice["logprobs"]["token_logprobs"]
        self.reason = choice["finish_reason"] or self.reason

    def mark(self) -> bool:
        """From now on the pauses count. Says whether it still runs."""
        self.pause = 0.0
        return self.reason is None and self.error is None

    def difference(self, other: "Stream") -> str | None:
        """In what two streams of one request differ, None where in nothing: log-probabilities may
        by the noise of floats."""
        for name in ("error", "reason", "token_ids", "text"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                at = (
                    next(
                        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                        "end",
                    )
                    if isinstance(mine, list | str) and isinstance(theirs, list | str)
                    else ""
                )
                return f"{name} at {at}: {mine!s:.60} instead of {theirs!s:.60}"
        if len(self.logprobs) != len(other.logprobs) or any(
            abs(a - b) > LOGPROB_NOISE for a, b in zip(self.logprobs, other.logprobs, strict=True)
        ):
            return "log-probabilities"
        return None


def start(streams: list[Stream]) -> list[threading.Thread]:
    threads = [threading.Thread(target=stream.run, daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    return threads


def undisturbed(url: str, tokens: int) -> list[Stream]:
    """All kinds at once, when nothing happens."""
    streams = [Stream(url, body) for body in bodies(tokens)]
    for thread in start(streams):
        thread.join(300)
    for stream in streams:
        assert stream.error is None, stream.error
        assert stream.reason == "length", stream.text
    return streams
