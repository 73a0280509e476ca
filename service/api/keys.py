"""The API keys: read once, kept as digests, so that neither a log nor a pickle has one in it."""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from service.config import ConfigError

VARIABLE = "SPD_API_KEYS"
_KEY = re.compile(r"[!-~]+")  # what a header carries unchanged; a comma only in a file


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys that open the API. None at all: it is open."""

    digests: frozenset[bytes] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.digests)

    def has(self, key: str) -> bool:
        """Takes the same time for each wrong key, whatever its length and its first letters."""
        given, found = _digest(key), False
        for digest in self.digests:  # all of them: the time says nothing of which one it was
            found |= hmac.compare_digest(given, digest)
        return found


def load_keys(file: str | None, environ: Mapping[str, str]) -> ApiKeys:
    """The keys of `file` and of SPD_API_KEYS together.

    Raises ConfigError for a source that is named and gives none: an open server is what nobody
    asked for who names one.
    """
    keys: list[str] = []
    if file is not None:
        keys += _from_file(file)
    if VARIABLE in environ:
        keys += _from_variable(environ[VARIABLE])
    return ApiKeys(frozenset(map(_digest, keys)))


def _from_file(file: str) -> list[str]:
    source = f"api.keys_file is {file!r}"
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}, which can't be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{source}, which is no text file") from None
    lines = [(f"line {number}", line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    keys = _checked(source, [(place, line) for place, line in lines if not line.startswith("#")])
    if not keys:
        raise ConfigError(f"{source}, which has no key in it; leave it out to ask for none")
    return keys


def _from_variable(value: str) -> list[str]:
    source = f"The environment variable {VARIABLE} is set"
    items = [(f"item {number}", item.strip()) for number, item in enumerate(value.split(","), 1)]
    keys = _checked(source, items)
    if not keys:
        raise ConfigError(f"{source}, but has no key in it; unset it to ask for none")
    return keys


def _checked(source: str, items: list[tuple[str, str]]) -> list[str]:
    """Those that are not blank. The message of a bad one says where it is, not what."""
    keys = []
    for place, item in items:
        if not item:
            continue
        if not _KEY.fullmatch(item):
            raise ConfigError(
                f"{source}, but {place} is no key: a key is printable ASCII without blanks, and "
                "a comment has a line of its own"
            )
        keys.append(item)
    return keys


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
