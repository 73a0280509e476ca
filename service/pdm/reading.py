"""Given texts as training data: the target reads them once, and its hidden states are kept."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from service.config import ConfigError
from service.pdm.corpus import CorpusInfo, Document, write_shard
from service.pdm.teacher import Teacher
from service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_AT_ONCE = 12
_DOCUMENTS_PER_SHARD = 256
_UNKNOWN = float("nan")


class _Message(BaseModel):
    role: str
    content: str


class _Conversation(BaseModel):
    messages: list[_Message]


def conversations(file: Path, tokenizer: Tokenizer) -> Iterator[Document]:
    """The chats of a JSONL file: on each line an object with `messages`, the last one an answer,
    which is the document's. Raises ConfigError naming the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            messages = _Conversation.model_validate_json(line).messages
            yield _document([m.model_dump() for m in messages], tokenizer)
        except ValueError as error:  # pydantic's, the template's and our own
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise ConfigError(
                f'{file}, line {number}: expected {{"messages": [{{"role", "content"}}, ...]}} '
                f"with an answer of the assistant at the end; {reason}"
            ) from None


def _document(messages: list[dict[str, str]], tokenizer: Tokenizer) -> Document:
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError("the last message is not the assistant's")
    answer = tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
    if not answer:
        raise ValueError("the answer is empty")
    prompt = tokenizer.render_chat(messages[:-1])
    return Document((*prompt, *answer), len(prompt), _UNKNOWN)


def read_texts(
    folder: Path,
    out: Path,
    name: str,
    info: CorpusInfo,
    documents: Sequence[Document],
    max_len: int = 512,
) -> None:
    """Adds documents, cut to `max_len` tokens, to the corpus `out` as shards `<name>-<number>`.
    Shards that are there already are left alone: an interrupted run goes on."""
    whole = [d for d in documents if d.answer_start < max_len]
    if len(whole) < len(documents):
        log.warning(
            "%d prompts are longer than %d tokens; left out", len(documents) - len(whole), max_len
        )
    texts = [replace(d, tokens=d.tokens[:max_len]) for d in whole]
    shards = {
        out / f"{name}-{i // _DOCUMENTS_PER_SHARD:05}.safetensors": texts[
            i : i + _DOCUMENTS_PER_SHARD
        ]
        for i in range(0, len(texts), _DOCUMENTS_PER_SHARD)
    }
    missing = {file: part for file, part in shards.items() if not file.exists()}
    if not missing:
        return
    teacher = Teacher(folder, info.anchors, _AT_ONCE, max_len, one_row_each=False)
    for file, part in missing.items():
        began = time.monotonic()
        states = [
            s
            for i in range(0, len(part), _AT_ONCE)
            for s in teacher.read([d.tokens for d in part[i : i + _AT_ONCE]])
        ]
        write_shard(file, info, part, states)
        count = sum(len(d.tokens) for d in part)
        log.info(
            "read %s: %d tokens, %.0f tokens/s",
            file.name,
            count,
            count / (time.monotonic() - began),
        )
