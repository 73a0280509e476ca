"""A server whose streams have known delays, and which notes when each piece really went out."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

REFUSED = {"error": {"message": "Full.", "type": "rate_limit_error", "param": None, "code": None}}


@dataclass
class FakeServer:
    """Answers with `tokens` pieces, the first after `first_s`, the others `gap_s` apart. Refuses
    what comes while `most` streams run. Times are `time.monotonic()`'s."""

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 5
    most: int = 10**6
    came: list[float] = field(default_factory=list)
    pieces: list[list[float]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    peak: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "fake", "max_model_len": 9}]}

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": "0"}

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._answer(await request.json())

        return app

    async def _answer(self, body: dict[str, Any]) -> Response:
        if not body.get("stream"):  # the warm-up
            message = {"role": "assistant", "content": "x"}
            return JSONResponse({"id": "1", "model": "fake", "choices": [{"message": message}]})
        self.came.append(time.monotonic())
        self.bodies.append(body)
        if self.running >= self.most:
            return JSONResponse(REFUSED, 429)
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.pieces.append(times := [])
        return StreamingResponse(self._stream(times), media_type="text/event-stream")

    async def _stream(self, times: list[float]) -> AsyncIterator[bytes]:
        try:
            yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            for number in range(self.tokens):
                await asyncio.sleep(self.gap_s if number else self.first_s)
                times.append(time.monotonic())
                yield _event(choices=[{"index": 0, "delta": {"content": "x"}}])
            details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
            usage = {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 0}
            yield _event(choices=[], usage={**usage, "completion_tokens_details": details})
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "1", "model": "fake", **fields}).encode() + b"\n\n"
