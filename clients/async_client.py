"""The client for asyncio; its methods are those of `Client`."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Self, Unpack

import httpx2

from clients import requests
from clients.answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    ModelCard,
    ModelList,
    Tokens,
    Version,
)
from clients.client import CONNECT_S, DEFAULT_TIMEOUT_S
from clients.errors import ClientError, from_response, transport_errors
from clients.reading import AnswerT, ChunkT, OpenStream, first_model, parsed
from clients.requests import Call, ChatOptions, CompletionOptions, Message, Prompt, Streaming
from clients.retries import Retries


class AsyncStream(OpenStream[ChunkT]):
    """An answer as it comes, to be iterated once."""

    async def __aiter__(self) -> AsyncIterator[ChunkT]:
        """Raises ClientError, also in the middle."""
        with transport_errors(self._base_url):
            async for data in self._response.aiter_bytes():
                for chunk in self._reader.feed(data):
                    yield chunk
                if self._reader.is_done:
                    return
        self._reader.end()


class AsyncClient:
    """As `Client`, for one event loop. A cancelled task closes its stream, which aborts it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: Retries | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = requests.server_url(base_url)
        self._model = model
        self._retries = retries or Retries()
        self._chance = random.Random()
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            headers=requests.headers(api_key),
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def chat(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> ChatCompletion:
        """The whole answer to a conversation."""
        call = requests.chat(await self.model(), messages, options)
        return await self._whole(call, ChatCompletion)

    @asynccontextmanager
    async def stream_chat(
        self,
        messages: Sequence[Message],
        streaming: Streaming | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[AsyncStream[ChatChunk]]:
        """The answer as it comes. To leave the context is to abort what is not read."""
        streaming = streaming or Streaming()
        call = requests.chat(await self.model(), messages, options, streaming)
        async with self._stream(call, ChatChunk) as stream:
            yield stream

    async def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """How a text goes on."""
        call = requests.completion(await self.model(), prompt, options)
        return await self._whole(call, Completion)

    @asynccontextmanager
    async def stream_complete(
        self,
        prompt: Prompt,
        streaming: Streaming | None = None,
        **options: Unpack[CompletionOptions],
    ) -> AsyncIterator[AsyncStream[CompletionChunk]]:
        """The same as it comes. To leave the context is to abort what is not read."""
        streaming = streaming or Streaming()
        call = requests.completion(await self.model(), prompt, options, streaming)
        async with self._stream(call, CompletionChunk) as stream:
            yield stream

    async def model(self) -> str:
        """The one that requests name."""
        if self._model is None:
            self._model = first_model(await self.models())
        return self._model

    def use_model(self, name: str) -> None:
        """Requests name this one from now on."""
        self._model = name

    async def models(self) -> list[ModelCard]:
        return (await self._whole(Call("/v1/models"), ModelList)).data

    async def tokenize(self, text: str | Sequence[Message]) -> Tokens:
        """The token ids of a prompt, or of a conversation up to where its answer begins."""
        return await self._whole(requests.tokenize(text), Tokens)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        call = Call("/detokenize", {"tokens": list(tokens)})
        return (await self._whole(call, Detokenized)).prompt

    async def version(self) -> str:
        """The server's."""
        return (await self._whole(Call("/version"), Version)).version

    async def _whole(self, call: Call, kind: type[AnswerT]) -> AnswerT:
        async with self._opened(call) as response:
            with transport_errors(self.base_url):
                return parsed(kind, await response.aread())

    @asynccontextmanager
    async def _stream(self, call: Call, kind: type[ChunkT]) -> AsyncIterator[AsyncStream[ChunkT]]:
        async with self._opened(call) as response:
            yield AsyncStream(response, kind, self.base_url)

    @asynccontextmanager
    async def _opened(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """The answer to the first try that succeeds, unread; closed behind the context."""
        response = await self._first_success(call)
        try:
            yield response
        finally:
            await response.aclose()

    async def _first_success(self, call: Call) -> httpx2.Response:
        for failures in count(1):
            try:
                return await self._try(call)
            except ClientError as error:
                pause_s = self._retries.pause_s(failures, error, self._chance)
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("counting has no end")

    async def _try(self, call: Call) -> httpx2.Response:
        with transport_errors(self.base_url):
            request = self._http.build_request(call.method, call.path, json=call.body)
            response = await self._http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                body = await response.aread()
            finally:
                await response.aclose()
            raise from_response(response.status_code, response.headers, body)
