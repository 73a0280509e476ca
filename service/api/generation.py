"""The routes that write text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from service.api.access import note_choices
from service.api.answers import ChatCompletion, TextCompletion
from service.api.choices import Choice, Piece, joined
from service.api.client import PipelineClient, merged, sound
from service.api.door import Door
from service.api.errors import documented
from service.api.protocol import ChatBody, CompletionBody, StreamOptions
from service.api.replies import ChatReply, Reply, TextReply, usage
from service.api.requests import Served
from service.api.sse import EventStream, events, following, paced, until_disconnect

CHAT_CHUNK = (
    'data: {"id":"chatcmpl-..","object":"chat.completion.chunk","created":1,"model":"..","choices":'
    '[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}'
)
TEXT_CHUNK = (
    'data: {"id":"cmpl-..","object":"text_completion","created":1,"model":"..","choices":'
    '[{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}]}'
)


@dataclass(frozen=True, slots=True)
class Generating:
    """The way to the pipeline, through the door."""

    pipeline: PipelineClient
    door: Door
    timeout_s: float | None

    async def pieces(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """The pieces of all choices, as they come. Closing it aborts what has not ended."""
        with self.door.entered(len(choices)):
            streams = [sound(self.pipeline.generate(choice.request)) for choice in choices]
            async with aclosing(merged(streams, self.timeout_s)) as found:
                async for number, event in found:
                    for piece in choices[number].take(event):
                        yield choices[number], piece


def generation_routes(generating: Generating, served: Served, *, keep_alive_s: float) -> APIRouter:
    router = APIRouter(responses=documented(400, 401, 404, 413, 429, 500, 503, 504))

    async def answer(
        request: Request, body: ChatBody | CompletionBody, kind: type[Reply]
    ) -> Response:
        generating.door.check()
        reply = kind(served.model, served.names, token_ids=body.return_token_ids is True)
        # The client's id alone may come twice.
        request_id = f"{reply.id}-{request.state.request_id}"
        # In a thread: a long prompt takes its time, and other streams go through this loop.
        choices = await asyncio.to_thread(served.choices, body, request_id)
        note_choices(request, choices)
        if not body.stream:
            return await until_disconnect(request.receive, _whole(generating, reply, choices))
        options = body.stream_options or StreamOptions()
        chunks = paced(_chunks(generating, reply, choices, options), keep_alive_s)
        # The first token decides the status, so it is awaited before any of the response is sent;
        # but not for longer than a connection may be silent.
        first = await until_disconnect(request.receive, following(chunks))
        return EventStream(events(reply.id, first, chunks), source=chunks)

    @router.post("/v1/chat/completions", responses={200: _answers(ChatCompletion, CHAT_CHUNK)})
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """The assistant's answer to a conversation."""
        return await answer(request, body, ChatReply)

    @router.post("/v1/completions", responses={200: _answers(TextCompletion, TEXT_CHUNK)})
    async def completions(request: Request, body: CompletionBody) -> Response:
        """How a text, or each of several, goes on."""
        return await answer(request, body, TextReply)

    return router


def _answers(whole: type, chunk: str) -> dict[str, Any]:
    """What /openapi.json says of answers. OpenAPI has no words for the events of a stream."""
    return {
        "model": whole,
        "description": "The whole answer. With `stream`, server-sent events: chunks (the first of "
        "a chat's choice has the role, the last of a choice its finish_reason), with "
        "`stream_options.include_usage` one more with `usage` and no choices, then `data: [DONE]`. "
        "After an error in mid-stream, an error object takes the place of all chunks that were to "
        "come. With `stream_options.include_pipeline`, chunks have `pipeline`, the cycles of their "
        "choice since the chunk before. Lines that begin with a colon say that the connection "
        "lives.",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": chunk}},
    }


async def _whole(generating: Generating, reply: Reply, choices: Sequence[Choice]) -> Response:
    parts: list[list[Piece]] = [[] for _ in choices]
    async with aclosing(generating.pieces(choices)) as pieces:
        async for choice, piece in pieces:
            parts[choice.index].append(piece)
    return JSONResponse(reply.whole(choices, [joined(pieces) for pieces in parts]))


async def _chunks(
    generating: Generating, reply: Reply, choices: Sequence[Choice], options: StreamOptions
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(generating.pieces(choices)) as pieces:
        async for choice, piece in pieces:
            chunk = reply.chunk(choice, piece)
            if options.continuous_usage_stats:
                chunk["usage"] = usage(choices)
            elif options.include_usage:  # OpenAI: every chunk has it, null in all but the last
                chunk["usage"] = None
            yield chunk
    if options.include_usage:
        yield reply.last_chunk(choices)
