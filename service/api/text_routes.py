"""Texts to token ids and back, as vLLM's routes of these names do, and the server's version."""

import asyncio
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from service.api.errors import ApiError, documented
from service.api.fields import Text
from service.api.prompts import check_token_ids, template_messages
from service.api.protocol import ChatMessage
from service.api.requests import Served

PACKAGE = "spd-serve"


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt or a conversation, each with a flag of its own."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize"""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: Text | None = None
    tokens: list[int]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


def text_routes(served: Served) -> APIRouter:
    """/tokenize, /detokenize and /version. Long texts take their time: hence the threads."""
    router = APIRouter(responses=documented(401))
    server = version(PACKAGE)

    @router.post("/tokenize", responses=documented(400, 404, 413))
    async def tokenize(body: TokenizeBody) -> Tokens:
        """The token ids of a prompt (`add_special_tokens`: with the model's first token), or of a
        conversation (`add_generation_prompt`: up to where the answer begins). Both are on if
        left out."""
        ids = await asyncio.to_thread(_tokens, served, body)
        return {"tokens": ids, "count": len(ids), "max_model_len": served.max_len}

    @router.post("/detokenize", responses=documented(400, 404, 413))
    async def detokenize(body: DetokenizeBody) -> Prompt:
        """The text of token ids."""
        return {"prompt": await asyncio.to_thread(_text, served, body)}

    @router.get("/version")
    async def get_version() -> Version:
        return {"version": server}

    return router


def _tokens(served: Served, body: TokenizeBody) -> list[int]:
    if body.model is not None:
        served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either a prompt or messages.", param="prompt")
    if body.prompt is not None:
        _refuse(body, "add_generation_prompt", goes_with="messages")
        special = body.add_special_tokens is not False
        return served.tokenizer.encode(body.prompt, add_special_tokens=special)
    _refuse(body, "add_special_tokens", goes_with="prompt")
    return _chat_tokens(served, body.messages or [], body.add_generation_prompt is not False)


def _refuse(body: TokenizeBody, field: str, *, goes_with: str) -> None:
    """A flag that would do nothing."""
    if getattr(body, field) is not None:
        raise ApiError(400, f"{field} goes with {goes_with} alone.", param=field)


def _chat_tokens(
    served: Served, messages: list[ChatMessage], add_generation_prompt: bool
) -> list[int]:
    try:
        return served.tokenizer.render_chat(
            template_messages(messages, served.tool_format),
            add_generation_prompt=add_generation_prompt,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _text(served: Served, body: DetokenizeBody) -> str:
    if body.model is not None:
        served.check_model(body.model)
    check_token_ids(body.tokens, served.tokenizer, "tokens")
    return served.tokenizer.decode(body.tokens)
