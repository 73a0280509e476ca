"""The API on a real server, and what its tests share."""

import json
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from service.api.keys import load_keys
from service.api.routes import create_api
from service.config import ApiSettings
from tests.fake_pipeline import FakeGrammars, FakePipeline, FakeTokenizer

MODEL = "org/model"
MAX_LEN = 64
WAIT_S = 10
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
JSON_TYPE = {"Content-Type": "application/json"}

# Of `guarded_api`.
LIMIT = 2000
ORIGIN = "https://chat.example.com"
BEARER = {"Authorization": "Bearer sk-one"}
AUTHORIZED = "Authorization: Bearer sk-one"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


async def metrics_text() -> bytes:
    return b"# TYPE spd_x gauge\nspd_x 1.0\n"


def make_api(pipeline: FakePipeline, **options: Any) -> FastAPI:
    return create_api(
        pipeline=pipeline,
        model=MODEL,
        metrics_text=metrics_text,
        **{"max_len": MAX_LEN, "tokenizer": FakeTokenizer(), "grammars": FakeGrammars()} | options,
    )


def post(http: httpx.Client, body: Any, path: str | None = None) -> httpx.Response:
    """Sends what httpx itself would refuse to encode, such as NaN and lone surrogates, too."""
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    return http.post(path, content=json.dumps(body), headers=JSON_TYPE)


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Runs the application in a thread, on a free port if none is given; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    # It listens at once: a client waits, and does not fail.
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


@contextmanager
def guarded_api() -> Iterator[tuple[FakePipeline, str]]:
    """With two keys, a small limit and one origin."""
    pipeline = FakePipeline()
    settings = ApiSettings(cors_origins=(ORIGIN,), max_body_bytes=LIMIT)
    keys = load_keys(None, {"SPD_API_KEYS": "sk-one, sk-two"})
    with serving(make_api(pipeline, settings=settings, keys=keys)) as url:
        yield pipeline, url


def hang_up(url: str, pipeline: FakePipeline, body: dict[str, Any], *, read: bytes = b"") -> None:
    """Sends a request, waits until it runs (and until `read` has come), and closes the socket."""
    content = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        assert pipeline.started.wait(WAIT_S)
        received = b""
        while read not in received:
            received += connection.recv(4096)
        assert not pipeline.ended.is_set()


class AccessLog(logging.Handler):
    """The lines of the log, parsed. They come just after the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())

    def next(self) -> dict[str, Any]:
        return json.loads(self.lines.get(timeout=WAIT_S))


@contextmanager
def access_log() -> Iterator[AccessLog]:
    logger, handler = logging.getLogger("ray.serve.access"), AccessLog()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Connection:
    """A socket to the server, for what no HTTP client would send."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=WAIT_S)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def end(self) -> None:
        """Nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def post(self, path: str, *headers: str) -> None:
        """The head of a request."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
        self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON body of the next answer."""
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._read(1)
        first, *lines = head.decode().strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = b""
        while len(body) < int(headers["content-length"]):
            body += self._read(int(headers["content-length"]) - len(body))
        return int(first.split()[1]), headers, json.loads(body)

    def rest(self) -> bytes:
        """What comes until the server ends the connection. Raises TimeoutError if it does not."""
        data = b""
        with suppress(ConnectionResetError):
            while more := self._socket.recv(4096):
                data += more
        return data

    def _read(self, count: int) -> bytes:
        data = self._socket.recv(count)
        assert data, "the server has closed the connection"
        return data
