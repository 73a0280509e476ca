"""Where API keys come from, and what is refused there."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.api.keys import load_keys
from service.config import ConfigError


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufeff# ours\r\nsk-a\r\n\r\n  sk,b # \r\n".replace(" # ", "").encode())
    keys = load_keys(str(file), {"SPD_API_KEYS": " sk-c ,,sk-a"})
    assert [keys.has(key) for key in ("sk-a", "sk,b", "sk-c")] == [True] * 3
    assert len(keys.digests) == 3
    assert not any(keys.has(key) for key in ("", "# ours", "sk-", "sk-aa", "SK-A", "sk", "\xff"))


def test_no_source_means_no_keys() -> None:
    assert not load_keys(None, {})
    assert load_keys(None, {"SPD_API_KEYS": "a"})


def test_keys_are_kept_nowhere() -> None:
    keys = load_keys(None, {"SPD_API_KEYS": "sk-one"})
    assert "sk-one" not in repr(keys) + str(keys)


SPACES = st.sampled_from(["", " ", "\t", "  "])
PLAIN = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=8)
KEY = PLAIN.filter(lambda key: not key.startswith("#"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=st.lists(st.tuples(SPACES, KEY | st.just("") | PLAIN.map("#".__add__), SPACES)))
def test_every_key_of_a_file_opens(tmp_path: Path, lines: list[tuple[str, str, str]]) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(map("".join, lines)))
    wanted = {line for _, line, _ in lines if line and not line.startswith("#")}
    if wanted:
        keys = load_keys(str(file), {})
        assert all(map(keys.has, wanted))
        assert len(keys.digests) == len(wanted)
        assert not keys.has("")
    else:
        with pytest.raises(ConfigError):
            load_keys(str(file), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "which has no key in it; leave it out to ask for none"),
        (b"\n# a comment\n  \n", "which has no key in it; leave it out to ask for none"),
        (b"\xff\xfe", "which is no text file"),
        (b"sk-a\nsk-secret # Bob's\n", "but line 2 is no key: a key is printable ASCII"),
        ("sk-a\n\nsk-sécret\n".encode(), "but line 3 is no key: a key is printable ASCII"),
    ],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_keys(str(file), {"SPD_API_KEYS": "sk-b"})
    assert str(caught.value).startswith(f"api.keys_file is {str(file)!r}, {message}")
    assert "cret" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    with pytest.raises(ConfigError) as caught:
        load_keys(file, {})
    reason = "which can't be read: No such file or directory"
    assert str(caught.value) == f"api.keys_file is {file!r}, {reason}"
    with pytest.raises(ConfigError, match="which can't be read: Is a directory"):
        load_keys(str(tmp_path), {})


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_an_empty_variable_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="SPD_API_KEYS is set, but has no key in it; unset it"):
        load_keys(None, {"SPD_API_KEYS": value})


def test_a_bad_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="SPD_API_KEYS is set, but item 2 is no key") as caught:
        load_keys(None, {"SPD_API_KEYS": "sk-a,sk b"})
    assert "sk b" not in str(caught.value)
