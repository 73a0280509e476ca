"""The gold texts: what the target itself answers at temperature 0, whatever drafts. They are made
by a real run, once, and kept in a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from service.config import ConfigError
from service.evaluation.store import digest
from service.files import whole_file
from service.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Gold:
    """The token ids of a prompt and of its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def text(self) -> tuple[int, ...]:
        return self.prompt + self.answer


class _Content(BaseModel):
    """The file. Answers stand by the digest of their prompt's token ids."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    target_fingerprint: str
    answers: dict[str, tuple[int, ...]] = {}


class GoldFile:
    """Answers in float32, by prompt. A longer answer serves for a shorter one too."""

    def __init__(self, file: Path, target_fingerprint: str, eos_ids: frozenset[int]) -> None:
        """The file may not be there yet. Raises ConfigError for one of another target."""
        self._file, self._eos_ids = file, eos_ids
        self._content = _Content(target_fingerprint=target_fingerprint)
        if file.exists():
            self._content = _read(file)
        if self._content.target_fingerprint != target_fingerprint:
            raise ConfigError(
                f"--replay: {file} has texts of the target {self._content.target_fingerprint}, and "
                f"this one is {target_fingerprint}. Give another file."
            )

    def missing(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Those whose text is not known in its whole length."""
        return [request for request in requests if not self._knows(request)]

    def __getitem__(self, request: GenerateRequest) -> Gold:
        """The text of a request that is not missing."""
        return Gold(request.prompt_ids, self._answer(request))

    def _answer(self, request: GenerateRequest) -> tuple[int, ...]:
        return self._content.answers.get(digest([request.prompt_ids]), ())[: request.max_tokens]

    def _knows(self, request: GenerateRequest) -> bool:
        answer = self._answer(request)
        ended = bool(answer) and answer[-1] in self._eos_ids
        return ended or len(answer) == request.max_tokens

    def add(
        self, requests: Sequence[GenerateRequest], answers: Mapping[str, Sequence[int]]
    ) -> None:
        """Takes the answers by request id, and writes the file."""
        made = {digest([r.prompt_ids]): tuple(answers[r.request_id]) for r in requests}
        merged = {"answers": self._content.answers | made}
        self._content = self._content.model_copy(update=merged)
        try:
            with whole_file(self._file) as partial:
                partial.write_text(self._content.model_dump_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--replay: {self._file} can't be written: {error}") from error


def _read(file: Path) -> _Content:
    try:
        return _Content.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"--replay: {file} can't be read: {error}") from error
    except ValidationError:
        raise ConfigError(f"--replay: {file} is no file of gold texts of spd-eval") from None
