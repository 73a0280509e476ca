"""The client for programs without an event loop."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from clients.errors import ClientError, from_response, transport_errors
from clients.reading import AnswerT, ChunkT, OpenStream, first_model, parsed
from clients.requests import Call, ChatOptions, CompletionOptions, Message, Prompt, Streaming
from clients.retries import Retries

CONNECT_S = 5.0
DEFAULT_TIMEOUT_S = 600.0


class Stream(OpenStream[ChunkT]):
    """An answer as it comes, to be iterated once."""

    def __iter__(self) -> Iterator[ChunkT]:
        """Raises ClientError, also in the middle."""
        with transport_errors(self._base_url):
            for data in self._response.iter_bytes():
                yield from self._reader.feed(data)
                if self._reader.is_done:
                    return
        self._reader.end()


class Client:
    """Talks to the server at `base_url` (else SPD_BASE_URL, else this machine's port 8000) with
    `api_key` (else SPD_API_KEY, else none). May be shared by threads.

    `model`: the one that requests name; unset: the server's first. `timeout_s`: for how long
    nothing may come; a whole answer comes at once, at its end. All methods raise ClientError.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.base_url = requests.server_url(base_url)
        self._model = model
        self._retries = retries or Retries()
        self._chance = random.Random()
        self._http = httpx2.Client(
            base_url=self.base_url,
            headers=requests.headers(api_key),
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> ChatCompletion:
        """The whole answer to a conversation."""
        return self._whole(requests.chat(self.model(), messages, options), ChatCompletion)

    def stream_chat(
        self,
        messages: Sequence[Message],
        streaming: Streaming | None = None,
        **options: Unpack[ChatOptions],
    ) -> AbstractContextManager[Stream[ChatChunk]]:
        """The answer as it comes. To leave the context is to abort what is not read."""
        streaming = streaming or Streaming()
        call = requests.chat(self.model(), messages, options, streaming)
        return self._stream(call, ChatChunk)

    def complete(self, prompt: Prompt, **options: Unpack[CompletionOptions]) -> Completion:
        """How a text goes on."""
        return self._whole(requests.completion(self.model(), prompt, options), Completion)

    def stream_complete(
        self,
        prompt: Prompt,
        streaming: Streaming | None = None,
        **options: Unpack[CompletionOptions],
    ) -> AbstractContextManager[Stream[CompletionChunk]]:
        """The same as it comes. To leave the context is to abort what is not read."""
        streaming = streaming or Streaming()
        call = requests.completion(self.model(), prompt, options, streaming)
        return self._stream(call, CompletionChunk)

    def model(self) -> str:
        """The one that requests name."""
        if self._model is None:
            self._model = first_model(self.models())
        return self._model

    def use_model(self, name: str) -> None:
        """Requests name this one from now on."""
        self._model = name

    def models(self) -> list[ModelCard]:
        return self._whole(Call("/v1/models"), ModelList).data

    def tokenize(self, text: str | Sequence[Message]) -> Tokens:
        """The token ids of a prompt, or of a conversation up to where its answer begins."""
        return self._whole(requests.tokenize(text), Tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._whole(Call("/detokenize", {"tokens": list(tokens)}), Detokenized).prompt

    def version(self) -> str:
        """The server's."""
        return self._whole(Call("/version"), Version).version

    def _whole(self, call: Call, kind: type[AnswerT]) -> AnswerT:
        with self._opened(call) as response, transport_errors(self.base_url):
            return parsed(kind, response.read())

    @contextmanager
    def _stream(self, call: Call, kind: type[ChunkT]) -> Iterator[Stream[ChunkT]]:
        with self._opened(call) as response:
            yield Stream(response, kind, self.base_url)

    @contextmanager
    def _opened(self, call: Call) -> Iterator[httpx2.Response]:
        """The answer to the first try that succeeds, unread; closed behind the context."""
        response = self._first_success(call)
        try:
            yield response
        finally:
            response.close()

    def _first_success(self, call: Call) -> httpx2.Response:
        for failures in count(1):
            try:
                return self._try(call)
            except ClientError as error:
                pause_s = self._retries.pause_s(failures, error, self._chance)
                if pause_s is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError("counting has no end")

    def _try(self, call: Call) -> httpx2.Response:
        with transport_errors(self.base_url):
            request = self._http.build_request(call.method, call.path, json=call.body)
            response = self._http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                body = response.read()
            finally:
                response.close()
            raise from_response(response.status_code, response.headers, body)
