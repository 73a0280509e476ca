"""Texts that the target writes or reads for training: its arithmetic in batches, the chats, and the
shards that keep them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.config import ConfigError
from service.pdm.batches import pack, shuffled
from service.pdm.corpus import (
    Corpus,
    CorpusInfo,
    Document,
    read_documents,
    repeated_four_grams,
    shard_tokens,
    write_shard,
)
from service.pdm.reading import conversations, read_texts
from service.pdm.synthesis import (
    ChatFrame,
    SynthesisSettings,
    Writer,
    Writing,
    draw,
    synthesise,
)
from service.pdm.teacher import Teacher
from service.text.tokenizer import Tokenizer
from tests.toys import (
    ARCHITECTURES,
    hidden_states,
    prompts_of,
    reference,
    toy_chat_target,
    toy_target,
)

LAYERS = 4
ANCHORS = (1, 3, 4)
INFO = CorpusInfo("0123456789abcdef", ANCHORS)
CHAT: dict[str, Any] = {"layers": LAYERS, "sharpness": 0.3, "eos_token_id": 2}
SMALL = SynthesisSettings(slots=5, max_len=80, max_query=12, documents_per_shard=6)


@pytest.fixture(scope="module")
def chat_target(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    return toy_chat_target(tmp_path_factory.mktemp("chat"), default_model, **CHAT)


# --- the target in batches ----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_target_reads_and_writes_as_transformers_does(
    tmp_path: Path, architecture: str
) -> None:
    """Whole texts at once, and token by token with each slot at a position of its own."""
    folder = toy_target(tmp_path, architecture, LAYERS)
    model = reference(folder)
    texts = prompts_of([3, 9, 6], seed=4)
    expected = [hidden_states(model, text)[list(ANCHORS)].transpose(0, 1) for text in texts]
    reader = Teacher(folder, ANCHORS, 3, 16, one_row_each=False, dtype=torch.float32)
    for found, states in zip(reader.read(texts), expected, strict=True):
        torch.testing.assert_close(found, states, rtol=1e-4, atol=1e-4)
    writer = Teacher(folder, ANCHORS, 3, 16, one_row_each=True, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([text])).logits[0] for text in texts]
    for step in range(16):
        positions = [min(step, len(text) - 1) for text in texts]  # the short ones wait
        tokens = [text[p] for text, p in zip(texts, positions, strict=True)]
        scores, states = writer.step(torch.tensor(tokens), torch.tensor(positions))
        for slot, position in enumerate(positions):
            close = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(states[slot], expected[slot][position], **close)
            torch.testing.assert_close(scores[slot], logits[slot][position], rtol=1e-3, atol=1e-3)


def test_a_sliding_window_must_hold_the_texts(tmp_path: Path) -> None:
    folder = toy_target(tmp_path, "MistralForCausalLM", LAYERS, sliding_window=8)
    with pytest.raises(ConfigError, match=r"texts of 9 tokens are longer than .* window of 8"):
        Teacher(folder, ANCHORS, 1, 9, one_row_each=True)


# --- drawing and writing ------------------------------------------------------------------------


def test_draws_have_the_distribution_asked_for() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    rows = 20_000
    generator = torch.Generator().manual_seed(0)
    for temperature, min_p in ((1.0, 0.0), (0.7, 0.0), (1.0, 0.2)):
        probs = torch.softmax(logits / temperature, -1)
        probs[probs < min_p * probs.max()] = 0
        probs /= probs.sum()
        drawn = draw(
            logits.expand(rows, -1),
            torch.full((rows,), temperature),
            torch.full((rows,), min_p),
            generator,
        )
        share = torch.bincount(drawn, minlength=5) / rows
        assert torch.all(share[probs == 0] == 0)
        # Five standard deviations of a share.
        assert torch.all((share - probs).abs() <= 5 * (probs * (1 - probs) / rows).sqrt() + 1e-9)


def test_a_draw_at_zero_is_the_likeliest() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0])
    drawn = draw(logits, temperatures, torch.zeros(4), torch.Generator().manual_seed(2))
    assert torch.equal(drawn[::2], logits.argmax(-1)[::2])
    alone = draw(logits[:1], torch.zeros(1), torch.zeros(1), torch.Generator())
    assert alone.tolist() == [int(logits[0].argmax())]


def test_loops() -> None:
    def answer(tokens: list[int]) -> Writing:
        return Writing([7, 8, *tokens], 0.0, 0, answer_start=2)

    assert not answer(list(range(48))).loops()
    assert answer([1, 2, 3, 4] * 12).loops()
    assert answer([*range(24), *range(24)]).loops()
    assert not answer([*range(24), *range(24), 1]).loops(), "looked at now and then only"


def test_the_frame_of_a_chat(default_model: Path) -> None:
    frame = ChatFrame.of(default_model)
    tokenizer = Tokenizer.load(default_model)
    question = tokenizer.encode("What is 2+2?")
    chat = tokenizer.render_chat([{"role": "user", "content": "What is 2+2?"}])
    assert [*frame.before, *question, *frame.after] == chat
    assert frame.eos == {2}
    assert len(frame.openings) > 100
    assert all(0 < len(opening) < 20 for opening in frame.openings)


def test_documents_are_chats_and_their_states_the_targets(chat_target: Path) -> None:
    frame = ChatFrame.of(chat_target)
    teacher = Teacher(
        chat_target, ANCHORS, SMALL.slots, SMALL.max_len, one_row_each=True, dtype=torch.float32
    )
    writer = Writer(teacher, frame, SMALL, torch.Generator().manual_seed(0))
    documents = []
    while len(documents) < 6:
        documents += writer.step()
    model = reference(chat_target)
    before, after = list(frame.before), list(frame.after)
    for document, states in documents:
        tokens, start = list(document.tokens), document.answer_start
        assert tokens[: len(before)] == before
        assert tokens[start - len(after) : start] == after
        query = tokens[len(before) : start - len(after)]
        assert 3 <= len(query) <= SMALL.max_query + max(map(len, frame.openings))
        assert not set(query) & frame.eos
        assert start < len(tokens) <= SMALL.max_len
        expected = hidden_states(model, tokens)[list(ANCHORS)].transpose(0, 1)
        # The states are kept in bfloat16.
        torch.testing.assert_close(states.float(), expected, rtol=1e-2, atol=2e-2)
        if document.temperature == 0:
            with torch.no_grad():
                likeliest = model(torch.tensor([tokens])).logits[0].argmax(-1)
            assert likeliest[start - 1 : -1].tolist() == tokens[start:]
    assert {d.temperature for d, _ in documents} <= {0.0, 0.7, 1.0}


def test_writing_goes_on_where_it_was_interrupted(chat_target: Path, tmp_path: Path) -> None:
    synthesise(chat_target, tmp_path, INFO, 300, seed=3, settings=SMALL)
    first = sorted(tmp_path.iterdir())
    assert [f.name for f in first] == [f"3-0-{i:05}.safetensors" for i in range(len(first))]
    assert sum(map(shard_tokens, first)) >= 300
    content = [f.read_bytes() for f in first]
    synthesise(chat_target, tmp_path, INFO, 300, seed=3, settings=SMALL)  # enough is there
    assert sorted(tmp_path.iterdir()) == first
    more = sum(map(shard_tokens, first)) + 1
    synthesise(chat_target, tmp_path, INFO, more, seed=3, settings=SMALL)
    assert len(list(tmp_path.iterdir())) == len(first) + 1
    assert [f.read_bytes() for f in first] == content
    texts = [d.tokens for f in sorted(tmp_path.iterdir()) for d in read_documents(f)]
    assert len(set(texts)) == len(texts)


def test_a_frame_without_room(chat_target: Path, tmp_path: Path) -> None:
    short = replace(SMALL, max_len=30)
    with pytest.raises(ConfigError, match="may take 42 tokens, and texts have 30"):
        synthesise(chat_target, tmp_path, INFO, 10, seed=0, settings=short)


# --- given texts --------------------------------------------------------------------------------


def test_conversations(tmp_path: Path, default_model: Path) -> None:
    tokenizer = Tokenizer.load(default_model)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages, "id": 3}) + "\n\n")
    [document] = conversations(file, tokenizer)
    assert list(document.tokens[: document.answer_start]) == tokenizer.render_chat(messages[:3])
    assert tokenizer.decode(document.tokens[document.answer_start :]) == "See you."
    assert math.isnan(document.temperature)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Invalid JSON"),
        ("[]", "an object"),
        ('{"messages": []}', "not the assistant's"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "not the assistant's"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "the answer is empty"),
        ('{"messages": [{"role": "assistant"}]}', "Field required"),
    ],
)
def test_lines_that_are_no_conversation(
    tmp_path: Path, default_model: Path, line: str, problem: str
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=f"(?s)chats.jsonl, line 2: expected .*{problem}"):
        list(conversations(file, Tokenizer.load(default_model)))


def test_texts_are_read_once(tmp_path: Path, chat_target: Path) -> None:
    texts = [Document(tuple(t), 2, 0.0) for t in prompts_of([5, 9, 20, 3], vocabulary=97)]
    read_texts(chat_target, tmp_path, "mine", INFO, texts, max_len=12)
    [file] = tmp_path.iterdir()
    assert [d.tokens for d in read_documents(file)] == [d.tokens[:12] for d in texts]
    written = file.stat().st_mtime_ns
    read_texts(chat_target, tmp_path, "mine", INFO, texts, max_len=12)
    assert file.stat().st_mtime_ns == written


# --- corpus and batches -------------------------------------------------------------------------


def shard(file: Path, texts: list[list[int]], info: CorpusInfo = INFO) -> None:
    documents = [Document(tuple(t), 1, 1.0) for t in texts]
    states = [torch.full((len(t), 3, 2), float(sum(t))) for t in texts]
    write_shard(file, info, documents, states)


def test_a_corpus_has_each_document_once(tmp_path: Path) -> None:
    texts = prompts_of([4, 40, 7], seed=5)
    loop = [*texts[1][:20], 1]  # begins as another one does
    shard(tmp_path / "a.safetensors", texts)
    shard(tmp_path / "b.safetensors", [texts[0], loop, [70_000, 3, 4]])
    corpus = Corpus(tmp_path, INFO)
    assert [list(d.tokens) for d in corpus.documents] == [*texts, [70_000, 3, 4]]
    assert corpus.duplicates == 2
    for index, document in enumerate(corpus.documents):
        states = corpus.states(index)
        assert states.shape == (len(document.tokens), 3, 2)
        assert torch.all(states == torch.tensor(float(sum(document.tokens))).bfloat16())
    assert "4 documents" in corpus.summary()
    assert "2 duplicates" in corpus.summary()


def test_what_is_held_out_stays_so(tmp_path: Path) -> None:
    texts = prompts_of([6] * 90, seed=6)
    texts += [[t + 1, *reversed(text)] for t, text in enumerate(texts)]
    shard(tmp_path / "b.safetensors", texts[:120])
    before = Corpus(tmp_path, INFO)
    shard(tmp_path / "a.safetensors", texts[120:])
    after = Corpus(tmp_path, INFO)
    held_out = [{c.documents[i].tokens for i in c.held_out} for c in (before, after)]
    assert held_out[0]
    assert held_out[0] <= held_out[1]
    assert sorted([*after.train, *after.held_out]) == list(range(len(after.documents)))


def test_a_corpus_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no documents"):
        Corpus(tmp_path, INFO)
    shard(tmp_path / "a.safetensors", prompts_of([6, 7]), CorpusInfo("f" * 16, ANCHORS))
    with pytest.raises(ConfigError, match=r"a\.safetensors was made with .*f{16}.* needs .*0123"):
        Corpus(tmp_path, INFO)
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"a\.safetensors is no shard"):
        Corpus(tmp_path, INFO)


def test_common_prefix_and_counts(tmp_path: Path) -> None:
    shard(tmp_path / "a.safetensors", [[5, 6, 7, 8], [5, 6, 9, 9], [5, 6, 7]])
    corpus = Corpus(tmp_path, INFO)
    assert corpus.common_prefix() == 2
    assert corpus.token_counts(11).tolist() == [0, 0, 0, 0, 0, 0, 3, 2, 1, 2, 0]


def test_repeated_four_grams() -> None:
    assert repeated_four_grams([1, 2, 3]) == 0
    assert repeated_four_grams([1, 2, 3, 4, 1, 2, 3, 4]) == 1
    assert repeated_four_grams([1] * 10) == 6


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    rows=st.integers(1, 5),
    size=st.integers(5, 40),
    seed=st.integers(0, 3),
)
def test_packing_uses_each_document_once(
    lengths: list[int], rows: int, size: int, seed: int
) -> None:
    order = shuffled(range(len(lengths)), seed, epoch=1)
    assert sorted(order) == list(range(len(lengths)))
    batches = pack(lengths, order, rows, size)
    used = [d for batch in batches for row in batch for d in row]
    assert sorted(used) == sorted(order)
    assert all(len(batch) == rows for batch in batches[:-1])
    for row in (row for batch in batches for row in batch):
        assert sum(min(lengths[d], size) for d in row) <= size
