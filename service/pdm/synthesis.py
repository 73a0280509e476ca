"""Training texts from nothing but the target: given the opening of a user's turn it writes the
query, then the answer.

All slots decode at once, one row each; a slot whose document has ended begins the next one. The
hidden states that decoding computes anyway are kept, so that training never runs the target again.
"""

import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from service.config import ConfigError
from service.pdm.corpus import CorpusInfo, Document, shard_tokens, write_shard
from service.pdm.memory import keep_freed_memory
from service.pdm.teacher import Teacher
from service.target import eos_token_ids
from service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

QUERY_MIN_P = 0.02  # the query is drawn at temperature 1, without the least likely tokens
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # one is drawn for each document
_LOOP = 24  # an answer that repeats this many tokens goes in circles
_LOOP_CHECK = 8


@dataclass(frozen=True, slots=True)
class SynthesisSettings:
    """How texts are written."""

    slots: int = 96
    max_len: int = 384
    max_query: int = 160
    documents_per_shard: int = 256
    opened: float = 0.6  # share of queries that begin with one of `openings.txt`


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What the chat template puts around a user's turn, and the openings of one, as token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    openings: tuple[tuple[int, ...], ...]
    eos: frozenset[int]

    @classmethod
    def of(cls, folder: Path) -> "ChatFrame":
        """Reads it off two chats that differ in the user's words alone."""
        tokenizer = Tokenizer.load(folder)
        x, y = (tokenizer.render_chat([{"role": "user", "content": c}]) for c in ("x", "y"))
        start = next(i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b)
        end = next(i for i, (a, b) in enumerate(zip(x[::-1], y[::-1], strict=False)) if a != b)
        text = files("service.pdm").joinpath("openings.txt").read_text(encoding="utf-8")
        openings = [line.replace("\\n", "\n") for line in text.splitlines() if line]
        return cls(
            tuple(x[:start]),
            tuple(x[len(x) - end :]),
            tuple(tuple(tokenizer.encode(o, add_special_tokens=False)) for o in openings),
            eos_token_ids(folder, tokenizer),
        )


@dataclass(slots=True)
class Writing:
    """A document being written in a slot. `tokens[:position]` have been through the target."""

    tokens: list[int]
    temperature: float
    position: int
    answer_start: int | None = None

    def loops(self) -> bool:
        """Whether the answer's last tokens stand in it a second time."""
        assert self.answer_start is not None
        answer = self.tokens[self.answer_start :]
        if len(answer) < 2 * _LOOP or len(answer) % _LOOP_CHECK:
            return False
        ending = answer[-_LOOP:]
        return any(answer[i : i + _LOOP] == ending for i in range(len(answer) - 2 * _LOOP + 1))


def draw(logits: Tensor, temperatures: Tensor, min_p: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row of logits [B, V] at temperatures [B]; tokens less likely than min_p [B]
    times the likeliest are left out. -> [B]"""
    tokens = logits.argmax(dim=-1)
    warm = temperatures > 0
    probs = torch.softmax(logits[warm] / temperatures[warm, None], dim=-1)
    floor = min_p[warm, None] * probs.amax(dim=-1, keepdim=True)
    probs.masked_fill_(probs < floor, 0.0)
    cumulative = probs.cumsum(dim=-1)
    at = torch.rand(len(probs), 1, generator=generator) * cumulative[:, -1:]
    tokens[warm] = torch.searchsorted(cumulative, at)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens


@dataclass
class Writer:
    """Writes documents without end; `step` advances each by one token."""

    teacher: Teacher
    frame: ChatFrame
    settings: SynthesisSettings
    generator: torch.Generator
    slots: list[Writing] = field(default_factory=list)

    def __post_init__(self) -> None:
        t = self.teacher
        # [slots, max_len, A, H]: the states of what has been written so far
        self._states = torch.zeros(
            t.slots, t.max_len, len(t.anchors), t.config.hidden_size, dtype=torch.bfloat16
        )
        self._read_common_prefix()
        self.slots = [self._new() for _ in range(t.slots)]

    def _read_common_prefix(self) -> None:
        """What stands before the user's words is the same in all documents: it is read once, into
        every slot, and stays there."""
        for position, token in enumerate(self.frame.before[:-1]):
            _, states = self.teacher.step(
                torch.full((self.teacher.slots,), token),
                torch.full((self.teacher.slots,), position),
            )
            self._states[:, position] = states

    def _new(self) -> Writing:
        opening: Sequence[int] = ()
        if self._random() < self.settings.opened:
            opening = self.frame.openings[int(self._random() * len(self.frame.openings))]
        temperature = ANSWER_TEMPERATURES[int(self._random() * len(ANSWER_TEMPERATURES))]
        return Writing([*self.frame.before, *opening], temperature, len(self.frame.before) - 1)

    def _random(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def step(self) -> list[tuple[Document, Tensor]]:
        """One token in every slot. Returns what ended, with its states [S, A, H]."""
        tokens = torch.tensor([w.tokens[w.position] for w in self.slots])
        positions = torch.tensor([w.position for w in self.slots])
        logits, states = self.teacher.step(tokens, positions)
        self._states[torch.arange(len(self.slots)), positions] = states.to(torch.bfloat16)
        in_query = torch.tensor([w.answer_start is None for w in self.slots])
        temperatures = torch.tensor([w.temperature for w in self.slots])
        drawn = draw(
            logits,
            torch.where(in_query, 1.0, temperatures),
            torch.where(in_query, QUERY_MIN_P, 0.0),
            self.generator,
        )
        return [
            done for slot, token in enumerate(drawn.tolist()) if (done := self._put(slot, token))
        ]

    def _put(self, slot: int, token: int) -> tuple[Document, Tensor] | None:
        """Takes the token drawn in a slot; a finished document leaves it."""
        writing = self.slots[slot]
        writing.position += 1
        if writing.position < len(writing.tokens):
            return None  # of given tokens, what the target expects is not asked for
        before, after = self.frame.before, self.frame.after
        if writing.answer_start is None:
            query = len(writing.tokens) - len(before)
            if (
                token not in self.frame.eos
                and token != after[0]
                and query < self.settings.max_query
            ):
                writing.tokens.append(token)
            elif query < 3:
                self.slots[slot] = self._new()
            else:
                writing.tokens += after
                writing.answer_start = len(writing.tokens)
            return None
        full = len(writing.tokens) == self.teacher.max_len
        if token not in self.frame.eos and not full and not writing.loops():
            writing.tokens.append(token)
            return None
        self.slots[slot] = self._new()
        if len(writing.tokens) == writing.answer_start:
            return None
        document = Document(tuple(writing.tokens), writing.answer_start, writing.temperature)
        return document, self._states[slot, : len(writing.tokens)].clone()


def synthesise(
    folder: Path,
    out: Path,
    info: CorpusInfo,
    tokens: int,
    *,
    seed: int,
    worker: int = 0,
    settings: SynthesisSettings = SynthesisSettings(),
) -> None:
    """Writes shards `<seed>-<worker>-<number>.safetensors` into `out` until these hold `tokens`
    tokens. What is already there counts: an interrupted run goes on. Raises ConfigError for a chat
    template that leaves no room."""
    keep_freed_memory()
    torch.set_num_threads(1)  # several processes of one thread are faster than one of several
    made = sorted(out.glob(f"{seed}-{worker}-*.safetensors"))
    written, number = sum(shard_tokens(file) for file in made), len(made)
    if written >= tokens:
        return
    frame = ChatFrame.of(folder)
    longest = len(frame.before) + settings.max_query + len(frame.after)
    if longest >= settings.max_len:
        raise ConfigError(
            f"a prompt of the target's chat template may take {longest} tokens, and texts have "
            f"{settings.max_len}"
        )
    teacher = Teacher(folder, info.anchors, settings.slots, settings.max_len, one_row_each=True)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {worker} {number}".encode()))
    writer = Writer(teacher, frame, settings, generator)
    began, before = time.monotonic(), written
    done: list[tuple[Document, Tensor]] = []
    while written < tokens:
        done += writer.step()
        if len(done) < settings.documents_per_shard:
            continue
        file = out / f"{seed}-{worker}-{number:05}.safetensors"
        write_shard(file, info, [d for d, _ in done], [s for _, s in done])
        written += sum(len(d.tokens) for d, _ in done)
        number, done = number + 1, []
        rate = (written - before) / (time.monotonic() - began)
        log.info("writer %d: %d of %d tokens, %.0f tokens/s", worker, written, tokens, rate)
