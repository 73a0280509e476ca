"""Tokenizer, chat template, and text that streams."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import AutoTokenizer

from service.config import ConfigError
from service.messages import Stopping
from service.text.stream import TextStream
from service.text.tokenizer import ChatTemplateError, NoChatTemplate, Tokenizer

Decode = Callable[[Sequence[int]], str]

many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="session")
def broken_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that begin or end inside a character, or are no UTF-8 at all."""
    return [i for i in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([i])]


def stream(decode: Decode, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """All that a stream lets out."""
    text = TextStream(decode, Stopping(tuple(stop)))
    return "".join(text.push(i)[0] for i in ids) + text.finish()


def cut(text: str, stop: Sequence[str]) -> str:
    """The oracle, character by character: the text before the stop that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


# --- tokenizer ---------------------------------------------------------------------------------


# The vocabulary of SmolLM2 lacks some control characters and the bytes of unassigned planes; its
# special tokens, which have no text, begin with "<".
assigned = st.characters(
    exclude_categories=["Cs", "Cn", "Cc"], exclude_characters="<", include_characters="\n\r\t"
)


@many
@given(text=st.text(assigned))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_end|>") == [2]
    hello = tokenizer.encode("Hello , world")
    assert tokenizer.decode([1, *hello, 2]) == "Hello , world"


def test_chat_is_the_template_tokenised(tokenizer: Tokenizer, default_model: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1. Go"},
    ]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    expected = text + "<|im_start|>assistant\n"
    ids = tokenizer.render_chat(messages)
    assert ids == tokenizer.encode(expected, add_special_tokens=False)
    hf = AutoTokenizer.from_pretrained(default_model)
    assert hf.decode(ids, skip_special_tokens=False) == expected


@pytest.fixture
def copy(default_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, tmp_path)
    return tmp_path


def test_no_chat_template(copy: Path) -> None:
    with pytest.raises(NoChatTemplate, match="/v1/completions"):
        Tokenizer.load(copy).render_chat([{"role": "user", "content": "Hi"}])


def test_template_refuses(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}"
        "{% endif %}"
        "{{ messages[0].content + '!' }}"
    )
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == tokenizer.encode("Hi!")
    with pytest.raises(ChatTemplateError, match="Roles must alternate"):
        tokenizer.render_chat([{"role": "assistant", "content": "Hi"}])
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: .*content"):
        tokenizer.render_chat([{"role": "user"}])
    with pytest.raises(ChatTemplateError, match="empty conversation"):
        tokenizer.render_chat([])


def test_folder_without_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"can't be loaded"):
        Tokenizer.load(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer: it should hold tokenizer\.json"):
        Tokenizer.load(copy)


# --- streams -----------------------------------------------------------------------------------


def test_plain_text_goes_out_at_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("A list:\n\n1. one,  two")
    text = TextStream(tokenizer.decode)
    assert [text.push(i) for i in ids] == [(tokenizer.decode([i]), False) for i in ids]
    assert text.finish() == ""


def test_characters_go_out_whole(tokenizer: Tokenizer) -> None:
    text = TextStream(tokenizer.decode)
    out = [text.push(i)[0] for i in tokenizer.encode("a\U0001f99b b")]
    assert out[0] == "a"
    assert [part for part in out if part] == ["a", "\U0001f99b", " b"]
    assert len(out) > 3  # the hippopotamus is several tokens
    incomplete = TextStream(tokenizer.decode)
    assert incomplete.push(tokenizer.encode("\U0001f99b")[0]) == ("", False)
    assert incomplete.finish() == "\ufffd"


def test_stop_across_tokens_does_not_leak(tokenizer: Tokenizer) -> None:
    ids = [i for part in ("Hi", " <", "/", "end", "> more") for i in tokenizer.encode(part)]
    text = TextStream(tokenizer.decode, Stopping(("</end>",)))
    pushes = [text.push(i) for i in ids]
    found = pushes.index(next(p for p in pushes if p[1]))
    assert pushes[:found] == [("Hi", False), (" ", False), *[("", False)] * (found - 2)]
    assert pushes[found:] == [("", True)] * (len(ids) - found)
    assert text.finish() == ""


def test_a_stop_can_be_part_of_the_text(tokenizer: Tokenizer) -> None:
    text = TextStream(tokenizer.decode, Stopping(("</end>",), include_in_text=True))
    pushes = [text.push(i) for i in tokenizer.encode("Hi </end>!")]
    assert "".join(out for out, _ in pushes) == "Hi </end>"
    assert pushes[-1] == ("", True)


def test_the_first_tokens_stop_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two one two one two")
    assert len(ids) == 6
    for least in range(7):
        text = TextStream(tokenizer.decode, Stopping((" two",), min_tokens=least))
        out = "".join(text.push(i)[0] for i in ids) + text.finish()
        assert out == {0: "one", 1: "one", 2: "one two one", 3: "one two one"}.get(
            least, "one two one two one" if least < 6 else "one two one two one two"
        )


def test_what_might_have_been_a_stop_goes_out(tokenizer: Tokenizer) -> None:
    text = TextStream(tokenizer.decode, Stopping(("</end>",)))
    assert [text.push(tokenizer.encode(p)[0]) for p in (" <", "/", "x")] == [
        (" ", False), ("", False), ("</x", False),
    ]  # fmt: skip
    assert text.push(tokenizer.encode("<")[0]) == ("", False)
    assert text.finish() == "<"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["cd"], "ab"),
        (["cd", "bcd"], "a"),  # complete at once: the one that began first
        (["abcdef", "cd"], "ab"),  # the one that was complete first, though it began later
        (["x", "f"], "abcde"),
        (["g"], "abcdef"),
        (["abcdefg"], "abcdef"),
        (["a"], ""),
    ],
)
def test_first_stop_wins_in_any_splitting(stop: list[str], expected: str) -> None:
    for size in (1, 2, 3, 6):
        pieces = ["abcdef"[i : i + size] for i in range(0, 6, size)]
        assert stream(lambda ids, p=pieces: "".join(p[i] for i in ids), range(6 // size), stop) == (
            expected
        )


@many
@given(data=st.data())
def test_any_ids_stream_as_decoded_at_once(
    tokenizer: Tokenizer, broken_ids: list[int], data: st.DataObject
) -> None:
    token = st.one_of(
        st.integers(0, tokenizer.vocab_size + 9),  # a head may be wider than the vocabulary
        st.integers(0, 16),  # special tokens
        st.sampled_from(broken_ids),
        st.sampled_from(tokenizer.encode("日本語ン👩\u200d🚀 é\n\n1 ")),
    )
    ids = data.draw(st.lists(token, max_size=120))
    whole = tokenizer.decode(ids)
    at = st.integers(0, len(whole))
    piece = st.builds(lambda a, n: whole[a : a + n], at, st.integers(1, 4)).filter(bool)
    some = piece | st.text(min_size=1, max_size=3)
    stop = data.draw(st.lists(some, max_size=3)) if whole else []
    assert stream(tokenizer.decode, ids, stop) == cut(whole, stop)


@many
@given(data=st.data())
def test_endless_broken_text_costs_the_same_everywhere(
    tokenizer: Tokenizer, broken_ids: list[int], data: st.DataObject
) -> None:
    few = data.draw(st.lists(st.sampled_from(broken_ids), min_size=1, max_size=5))
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    ids = few * 40
    assert stream(decode, ids) == tokenizer.decode(ids)
    assert longest <= 48


def sentencepiece() -> tokenizers.Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces are ▁, unknown characters are bytes."""
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁▁"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


SENTENCEPIECE = sentencepiece()


@many
@given(
    st.lists(
        st.sampled_from(["<s>", "▁", "a", "b", "▁a", "▁▁"])
        | st.sampled_from("é語🎉🚀\u0301\n").map(str.encode),
        max_size=20,
    )
)
def test_sentencepiece_streams_too(pieces: list[str | bytes]) -> None:
    ids: list[int] = []
    for piece in pieces * 4:  # long runs of bytes, longer than what a stream remembers
        names = [piece] if isinstance(piece, str) else [f"<0x{byte:02X}>" for byte in piece]
        ids += [SENTENCEPIECE.token_to_id(name) for name in names]

    def decode(ids: Sequence[int]) -> str:
        text: str = SENTENCEPIECE.decode(list(ids), skip_special_tokens=True)
        return text

    assert stream(decode, ids) == decode(ids)
