"""Decodes chats in one way and says what they took. A process of its own for each way, so that none
finds another one's memory, threads or Ray. Started by `benchmarks.chat`."""

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from benchmarks.machine import cpu_seconds, memory_bytes
from benchmarks.ways import Way
from service.config import parse_settings
from service.engine.engine import Engine
from service.engine.recorder import NullRecorder
from service.evaluation.prompts import encode, read_data_sets
from service.messages import (
    CyclePlan,
    CycleResult,
    Delta,
    Event,
    Failure,
    GenerateRequest,
    RequestStats,
    Stopping,
)
from service.pipeline.blueprint import make_blueprint
from service.pipeline.choice import make_graph
from service.pipeline.graph import ServingGraph
from service.target import eos_token_ids, resolve_target
from service.text.tokenizer import Tokenizer

MAX_LEN = 2048

Ids = tuple[int, ...]
Talk = Callable[[Ids, int], Iterator[list[int]]]  # prompt, most tokens -> new tokens as they come


class EngineTalk(Protocol):
    def __call__(self, ids: Ids, most: int, *, ignore_eos: bool = False) -> Iterator[list[int]]: ...


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is to do."""

    way: Way
    model: str
    prompts: tuple[str, ...]
    limit: int | None
    max_tokens: int
    gguf: str | None = None  # the model for llama.cpp


class Cycles(NullRecorder):
    """Takes a cycle apart, in seconds: from one end to the next, of it in the graph, of that in the
    slowest stage or the drafter."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.answers: list[RequestStats] = []
        self.parts: list[tuple[float, float, float, float]] = []

    def cycle(self, _plan: CyclePlan, result: CycleResult, _decoding: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            slowest = max(stage.seconds for stage in result.stages)
            drafter = result.drafter.seconds if result.drafter else 0.0
            self.parts.append((now - self._last, result.seconds, slowest, drafter))
        self._last = now

    def rest(self) -> None:
        """The next cycle does not follow this one."""
        self._last = None

    def acceptance(self) -> float:
        """Accepted drafts, of all tokens that could have been drafted."""
        decoded = sum(answer.decoded for answer in self.answers)
        return sum(answer.accepted for answer in self.answers) / max(1, decoded)

    def medians_ms(self) -> dict[str, float]:
        names = ("cycle", "graph", "slowest stage", "drafter")
        columns = zip(*self.parts, strict=True)
        medians = {n: 1000 * statistics.median(c) for n, c in zip(names, columns, strict=True)}
        overhead = [
            (whole - max(stage, drafter)) / whole for whole, _, stage, drafter in self.parts
        ]
        return {
            **medians,
            "drafter mean": 1000 * statistics.mean(part[3] for part in self.parts),
            "overhead share": statistics.median(overhead),
            "accepted": self.acceptance(),
        }


def engine(task: Task, stack: ExitStack, cycles: Cycles) -> EngineTalk:
    """This server's engine, without HTTP."""
    from service.replica import make_scheduler

    settings = parse_settings(task.way.settings)
    blueprint = make_blueprint(settings)

    def graph() -> ServingGraph:
        return make_graph(blueprint, settings.pipeline)

    running = Engine(graph, make_scheduler(settings, blueprint), cycles)
    stack.callback(running.close)
    number = iter(range(10**9))

    def talk(ids: Ids, most: int, *, ignore_eos: bool = False) -> Iterator[list[int]]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cycles.rest()
        stop = Stopping(ignore_eos=ignore_eos)
        request = GenerateRequest(str(next(number)), ids, most, stop=stop)
        running.submit(request, events.put)
        while isinstance(event := events.get(), Delta):
            yield [event.token_id]
            if event.stats is not None:
                cycles.answers.append(event.stats)
                return
        raise RuntimeError(event.message if isinstance(event, Failure) else str(event))

    return talk


def http(task: Task, stack: ExitStack) -> Talk:
    """This server, as its user meets it."""
    import socket

    import httpx
    from ray import serve

    from service.app import build

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    stack.callback(serve.shutdown)
    serve.run(build(task.way.settings))
    client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600))

    def talk(ids: Ids, most: int) -> Iterator[list[int]]:
        body = {"prompt": list(ids), "max_tokens": most, "temperature": 0, "stream": True,
                "return_token_ids": True, "model": task.model}  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(response.read().decode())
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice.get("token_ids") or []

    return talk


def transformers(task: Task) -> Talk:
    """`generate`, greedy; with its prompt lookup where the way asks for it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(task.way.threads)
    folder = resolve_target(task.model)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = sorted(eos_token_ids(folder, Tokenizer.load(folder)))
    extra = {"prompt_lookup_num_tokens": 10} if task.way.lookup else {}

    class Stream(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tokens: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()

        def put(self, value: torch.Tensor) -> None:
            self.tokens.put(value.flatten().tolist())

        def end(self) -> None:
            self.tokens.put(None)

    def talk(ids: Ids, most: int) -> Iterator[list[int]]:
        stream = Stream()
        prompt = torch.tensor([ids])
        thread = threading.Thread(
            target=lambda: model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=most,
                do_sample=False, eos_token_id=ends, pad_token_id=ends[0], streamer=stream, **extra,
            )
        )  # fmt: skip
        thread.start()
        stream.tokens.get()  # the prompt itself
        while (tokens := stream.tokens.get()) is not None:
            yield tokens
        thread.join()

    return talk


def llama_cpp(task: Task) -> Talk:
    """llama.cpp, by its Python package."""
    from llama_cpp import Llama

    threads = task.way.threads
    model = Llama(
        task.gguf, n_ctx=MAX_LEN, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def talk(ids: Ids, most: int) -> Iterator[list[int]]:
        ends = {model.token_eos()}
        for count, token in enumerate(model.generate(list(ids), temp=0.0), start=1):
            yield [token]
            if token in ends or count == most:
                return

    return talk


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a worker's chats together."""

    cpu_s: float
    memory_mib: float
    cycle: dict[str, float] | None  # see Cycles.medians_ms


@dataclass(frozen=True, slots=True)
class Chat:
    tokens: list[int]
    first_s: float  # to the first tokens
    decode_s: float  # from those to the last ones
    decoded: int  # tokens behind the first ones


def _chat(talk: Talk, ids: Ids, most: int) -> Chat:
    began = time.perf_counter()
    arrivals = [(time.perf_counter(), tokens) for tokens in talk(ids, most) if tokens]
    first, last = arrivals[0], arrivals[-1]
    tokens = [token for _, new in arrivals for token in new]
    return Chat(tokens, first[0] - began, last[0] - first[0], len(tokens) - len(first[1]))


def work(task: Task, asks: Connection, log: str) -> None:
    """Decodes the prompt of each number that comes, and answers with the chat; None ends it, and
    the answer are the figures of the whole. What is printed goes to the file `log`."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    tokenizer = Tokenizer.load(resolve_target(task.model))
    prompts = read_data_sets([Path(p) for p in task.prompts], task.limit)
    encoded = encode(prompts, tokenizer, MAX_LEN, task.max_tokens)
    cycles = Cycles()
    with ExitStack() as stack:
        talk: Talk
        if task.way.kind == "engine":
            talk = engine(task, stack, cycles)
        elif task.way.kind == "http":
            talk = http(task, stack)
        else:
            talk = transformers(task) if task.way.kind == "transformers" else llama_cpp(task)
        list(talk(encoded[0][:16], 8))  # finds everything cold
        cycles.parts.clear()
        cycles.answers.clear()
        asks.send(len(encoded))
        used = 0.0
        while (number := asks.recv()) is not None:
            before = cpu_seconds()
            asks.send(_chat(talk, encoded[number], task.max_tokens))
            used += cpu_seconds() - before
        memory = memory_bytes() / 2**20
    asks.send(Figures(used, memory, cycles.medians_ms() if cycles.parts else None))
