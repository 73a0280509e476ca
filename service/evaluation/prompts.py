"""Prompts from JSONL files, and the requests made of them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config import ConfigError
from service.messages import GenerateRequest, Sampling
from service.text.tokenizer import NoChatTemplate, Tokenizer

Messages = list[dict[str, str]]

OVERALL = "overall"  # the name of all data sets together


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a data set."""

    data_set: str  # the file's stem
    line: int  # in its file, from 1
    messages: Messages

    @property
    def name(self) -> str:
        return f"{self.data_set}:{self.line}"


def messages_of(value: Any) -> Messages:
    """The chat of one line: the first of `turns`, `messages` as they are, or `prompt`. Raises
    ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"should be a JSON object, not {type(value).__name__}")
    if "turns" in value:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("`turns` should be a list of texts, the first of them the user's")
        return [{"role": "user", "content": _text(turns[0], "turns[0]")}]
    if "messages" in value:
        messages = value["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError("`messages` should be a list of objects with `role` and `content`")
        return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if "prompt" in value:
        return [{"role": "user", "content": _text(value["prompt"], "prompt")}]
    raise ValueError("has none of `turns`, `messages` and `prompt`")


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` should be an object with `role` and `content`")
    return {key: _text(value.get(key), f"{name}.{key}") for key in ("role", "content")}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"`{name}` should be a text that is not empty")
    return value


def read_data_set(file: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file. Raises ConfigError naming the line that is
    wrong; empty lines are none."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompts {file} can't be read: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if len(prompts) == limit:
            break
        if not line.strip():
            continue
        try:
            prompts.append(Prompt(file.stem, number, messages_of(json.loads(line))))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number}: is no JSON: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
    if not prompts:
        raise ConfigError(f"The file {file} has no prompts.")
    return prompts


def read_data_sets(files: Sequence[Path], limit: int | None = None) -> list[Prompt]:
    """The prompts of all files. Raises ConfigError for two data sets of one name."""
    prompts: list[Prompt] = []
    names = {OVERALL}
    for file in files:
        if file.stem in names:
            raise ConfigError(
                f"--prompts: {file} would be the data set {file.stem!r}, which is another's name "
                "already; rename the file"
            )
        names.add(file.stem)
        prompts += read_data_set(file, limit)
    return prompts


def encode(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, max_len: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """The prompt ids by the target's chat template. Raises ConfigError naming the prompt that
    leaves no room for its answer: a shorter answer would be counted as if it were one of many."""
    encoded = []
    for prompt in prompts:
        try:
            ids = tokenizer.render_chat(prompt.messages)
        except NoChatTemplate:
            raise ConfigError(
                "The model has no chat template, and the prompts are chats."
            ) from None
        except ValueError as error:
            raise ConfigError(f"The prompt {prompt.name}: {error}") from error
        if len(ids) + max_tokens > max_len:
            raise ConfigError(
                f"The prompt {prompt.name} has {len(ids)} tokens; with an answer of {max_tokens} "
                f"it does not fit max_len, {max_len} positions. Raise --max-len, lower "
                "--max-tokens, or take the prompt out."
            )
        encoded.append(tuple(ids))
    return encoded


def make_requests(
    prompts: Sequence[Prompt],
    encoded: Sequence[tuple[int, ...]],
    max_tokens: int,
    temperature: float,
    seed: int,
    seeded: bool = False,
) -> list[GenerateRequest]:
    """Requests named as their prompts. Above temperature 0 they are rejection sampling (or, seeded,
    as requests with a seed), with keys by `seed` and prompt, so that an evaluation repeats."""
    return [
        GenerateRequest(
            request_id=prompt.name,
            prompt_ids=ids,
            max_tokens=max_tokens,
            sampling=Sampling(temperature, seeded=seeded, key=_key(seed, prompt)),
        )
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def _key(seed: int, prompt: Prompt) -> int:
    digest = hashlib.sha256(f"{seed} {prompt.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
