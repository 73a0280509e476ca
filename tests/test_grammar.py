"""Constrained decoding: masks, rollback, what is refused, tokenizers of all kinds."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from service.config import ConfigError
from service.messages import Grammar
from service.text import grammar as grammar_module
from service.text.grammar import Follower, Grammars, NoGrammars
from service.text.tokenizer import Tokenizer

END = 2
WIDTH = 49_160  # a head that is wider than the vocabulary of 49,152

many = settings(max_examples=100, deadline=None)


@pytest.fixture(scope="session")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="session")
def grammars(default_model: Path) -> Grammars:
    return Grammars.load(default_model, WIDTH)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def ids_of(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(mask).tolist())


def refusal(follower: Follower, ids: Sequence[int], end: int = END) -> str | None:
    """Where a complete answer is not allowed; None if it is, token by token."""
    for i, token in enumerate([*ids, end]):
        mask = follower.allowed(ids[:i])
        if mask is None or not mask[token]:
            return f"token {i} of {list(ids)}: {token}"
    return None


def walk(
    follower: Follower, choose: Callable[[np.ndarray], int], end: int = END, limit: int = 300
) -> list[int]:
    """An answer of tokens that `choose` takes from a mask, until it may end."""
    ids: list[int] = []
    for _ in range(limit):
        allowed = follower.allowed(ids)
        assert allowed is not None
        if allowed[end]:
            break
        ids.append(choose(allowed))
    return ids


def first(mask: np.ndarray) -> int:
    return int(mask.argmax())


# --- masks -------------------------------------------------------------------------------------


def test_exact_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    follower = grammars.follow(Grammar("lark", 'start: "yes" | "no" "!"?'))

    def texts(text: str) -> set[str]:
        ids = ids_of(follower.allowed([tokenizer.encode(c)[0] for c in text]))
        return {"END" if i == END else tokenizer.decode([i]) for i in ids}

    assert texts("") == {"y", "ye", "yes", "n", "no"}
    assert texts("n") == {"o"}
    assert texts("no") == {"!", "END"}
    assert texts("no!") == {"END"}
    assert texts("yes") == {"END"}


def test_mask_is_as_wide_as_the_head_and_the_callers_own(grammars: Grammars) -> None:
    follower = grammars.follow(Grammar("regex", "(?s:.*)"))
    mask = follower.allowed([])
    assert mask is not None
    assert (mask.shape, mask.dtype) == ((WIDTH,), np.bool_)
    assert mask[END]
    assert not mask[49_152:].any()
    assert ids_of(mask) & set(range(17)) == {END}  # no other special token
    mask[:] = False
    assert follower.allowed([])[END]  # type: ignore[index]


def test_text_that_does_not_fit(grammars: Grammars, tokenizer: Tokenizer) -> None:
    follower = grammars.follow(Grammar("regex", "[0-9]{2}"))
    one, a = tokenizer.encode("1")[0], tokenizer.encode("a")[0]
    assert follower.allowed([a]) is None
    assert follower.allowed([one, a]) is None
    assert follower.allowed([END]) is None  # it may not end here
    assert ids_of(follower.allowed([one, one])) == {END}
    assert follower.allowed([one, one, one]) is None
    assert ids_of(follower.allowed([one, one, END])) == {END}
    assert ids_of(follower.allowed([one, one, END, END])) == {END}
    assert follower.allowed([one, one, END, one]) is None
    assert one in ids_of(follower.allowed([one]))


def test_json_has_no_white_space_but_one_space_behind_separators(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    def fits(text: str) -> bool:
        follower = grammars.follow(schema({"type": "object"}))
        return refusal(follower, tokenizer.encode(text)) is None

    assert fits('{"a": [1, 2.5e3], "ü": {}}')
    assert fits('{"a":[1,2.5e3],"ü":{}}')
    for spaced in ('{ "a": 1}', '{"a" : 1}', '{"a":  1}', '{"a": 1 }', '{\n"a": 1}', " {}", "{} "):
        assert not fits(spaced)


def test_clients_can_not_set_llguidances_options(grammars: Grammars, tokenizer: Tokenizer) -> None:
    flexible = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert refusal(grammars.follow(schema(flexible)), tokenizer.encode("{ }")) is not None


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_end|> b", "<repo_name>"])
def test_special_tokens_are_spelled(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    """The written form of a special token, where the grammar demands it, is plain text."""
    for exact in (schema({"const": text}), schema({"enum": [text, text + "!"]})):
        follower = grammars.follow(exact)
        ids = walk(follower, first)
        assert tokenizer.decode(ids) in (json.dumps(text), json.dumps(text + "!"))
        assert ids_of(follower.allowed(ids)) == {END}


def test_end_token_in_a_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """It ends the answer, as everywhere."""
    follower = grammars.follow(Grammar("lark", 'start: "a" <|im_end|> "b"'))
    a = tokenizer.encode("a")
    assert ids_of(follower.allowed(a)) == {END}
    assert ids_of(follower.allowed([*a, END])) == {END}
    assert follower.allowed([*a, END, *tokenizer.encode("b")]) is None


# --- properties --------------------------------------------------------------------------------

# As in test_text.py: the vocabulary of SmolLM2 lacks some bytes, "<" begins special tokens.
text = st.text(
    st.characters(exclude_categories=["Cs", "Cn", "Cc"], exclude_characters="<"), max_size=12
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "größer"]}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "children": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/node"},
                    "maxItems": 2,
                },
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
CODE = {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"}
NUMBERS = {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4}
ANYTHING = {"type": "object"}

floats = st.floats(allow_nan=False, allow_infinity=False)
nodes: st.SearchStrategy[Any] = st.deferred(
    lambda: st.builds(
        lambda value, children: {"value": value, "children": children},
        st.sampled_from([True, False, None]),
        st.lists(nodes, max_size=2),
    )
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
INSTANCES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (
        PERSON,
        st.fixed_dictionaries(
            {"name": text, "age": st.integers(0, 150)},
            optional={
                "tags": st.lists(st.sampled_from(["red", "green", "größer"]), max_size=3),
                "born": st.dates().map(str),
            },
        ),
    ),
    (TREE, nodes),
    (
        CODE,
        st.from_regex(
            "^[a-f]{2}-[0-9]{1,3}$", fullmatch=True, alphabet=st.characters(codec="ascii")
        ),
    ),
    (NUMBERS, st.lists(floats | st.integers(), min_size=1, max_size=4)),
    (ANYTHING, st.dictionaries(text, anything, max_size=3)),
]


@many
@given(data=st.data())
def test_every_valid_json_can_be_written(
    grammars: Grammars, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    rules, instances = data.draw(st.sampled_from(INSTANCES))
    value = data.draw(instances)
    if rules is PERSON:  # properties have the order of the schema
        value = {key: value[key] for key in PERSON["properties"] if key in value}
    jsonschema.validate(value, rules)
    dense = data.draw(st.booleans())
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":") if dense else None)
    assert refusal(grammars.follow(schema(rules)), tokenizer.encode(written)) is None


@many
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_whatever_is_written_is_valid_json(
    grammars: Grammars, tokenizer: Tokenizer, data: st.DataObject, seed: int
) -> None:
    """A model that says anything at all, kept to the grammar, if it likes to close brackets."""
    rules = data.draw(st.sampled_from([PERSON, TREE, CODE, NUMBERS, ANYTHING]))
    generator = np.random.default_rng(seed)
    closing = [i for c in '"]},0' for i in tokenizer.encode(c)]

    def choose(mask: np.ndarray) -> int:
        closes = [i for i in closing if mask[i]]
        if closes and generator.random() < 0.6:
            return int(generator.choice(closes))
        return int(generator.choice(np.flatnonzero(mask)))

    ids = walk(grammars.follow(schema(rules)), choose)
    assume(len(ids) < 300)
    jsonschema.validate(json.loads(tokenizer.decode(ids)), rules)


GRAMMARS = [
    schema(PERSON),
    schema(TREE),
    schema({"enum": ["<|im_end|>", "<|im_end|>b", "other"]}),
    Grammar("regex", "([a-z]+ ?)+|[0-9]{3}"),
    Grammar("lark", 'start: "a" <repo_name>* ("b" | "bc")+ "<|im_start|>"'),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rollback_is_as_if_fresh(grammars: Grammars, data: st.DataObject) -> None:
    """Texts that grow, are cut back, and end in proposals that don't fit."""
    rules = data.draw(st.sampled_from(GRAMMARS))
    follower, ids = grammars.follow(rules), []
    wrong = st.lists(st.integers(0, 49_151) | st.just(END), max_size=2)
    for _ in range(data.draw(st.integers(1, 12))):
        ids = ids[: len(ids) - data.draw(st.integers(0, 3))]
        mask = follower.allowed(ids)
        if mask is None:
            ids = []
            continue
        fresh = grammars.follow(rules).allowed(ids)
        assert fresh is not None
        assert ids_of(mask) == ids_of(fresh)
        proposal = [*ids, *data.draw(wrong)]
        found, expected = follower.allowed(proposal), grammars.follow(rules).allowed(proposal)
        assert (found is None) == (expected is None)
        assert found is None or ids_of(found) == ids_of(expected)
        ids = [*ids, int(data.draw(st.sampled_from(np.flatnonzero(mask).tolist())))]
        assert follower.allowed(ids) is not None  # each token of a mask can be taken


# --- bytes -------------------------------------------------------------------------------------


def test_bytes_of_all_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for i in range(17, 49_152):
        assert grammars.token_bytes(i).decode("utf-8", "replace") == tokenizer.decode([i])
    assert grammars.token_bytes(END) == b"<|im_end|>"
    assert grammars.token_bytes(3) == b"<repo_name>"
    assert grammars.token_bytes(49_152) == b""


@many
@given(text=text)
def test_bytes_of_a_text(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(grammars.token_bytes, tokenizer.encode(text))) == text.encode()


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("json_schema", "{"), r"JSON schema can't be used: it is no JSON \("),
        (Grammar("json_schema", "[" * 99_999), r"it is no JSON \("),
        (Grammar("json_schema", "[]"), "should be an object"),
        (Grammar("json_schema", "false"), "should be an object"),
        (schema({"type": "objekt"}), "JSON schema can't be used: Invalid type: objekt$"),
        (schema({"not": {}}), r'Unimplemented keys: \["not"\]$'),
        (schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (schema({"$ref": "#/$defs/a"}), "does not exist"),
        (schema({"$ref": "https://example.com/a.json"}), "retrieving it failed"),
        (schema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable schema"),
        (schema({"oneOf": [{"type": "object"}, {"type": "object"}]}), "oneOf .* not supported.$"),
        (schema({"$ref": "#"}), "JSON schema can't be used: no answer can satisfy it$"),
        (Grammar("lark", "start: other"), 'Lark grammar can\'t be used: .*unknown name: "other"'),
        (Grammar("lark", ""), "no start rule"),
        (
            Grammar("lark", 'start: "a" b\nb: %json {"type": "objekt"}'),
            "The JSON schema can't be used: Invalid type: objekt$",
        ),
        (Grammar("lark", '{"grammars": []}'), "begins with a brace"),
        (Grammar("lark", "start: " + "(" * 9_000 + '"a"' + ")" * 9_000), "too deeply nested"),
        (Grammar("lark", "x" * 100_001), "is longer than 100000 characters"),
        (Grammar("regex", "(a"), r"(?s)regular expression can't be used: .*unclosed group"),
    ],
)
def test_refused(grammars: Grammars, grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        grammars.check(grammar)
    assert "/main/" not in str(raised.value)
    assert "<non-verbose" not in str(raised.value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "true"),
        schema({}),
        schema({"type": "object", "title": "T", "default": {}, "nullable": True, "foo": 1}),
        Grammar("regex", ""),
        Grammar("lark", 'start: "a" start?'),
    ],
)
def test_accepted(grammars: Grammars, grammar: Grammar) -> None:
    grammars.check(grammar)


def chain(link: str, count: int, last: str) -> str:
    return "".join(link.format(i, i + 1) for i in range(count)) + last.format(count)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: r0\n" + chain('r{}: "x" r{}\n', 6_000, 'r{}: "a"')),
        Grammar("lark", "start: T0\n" + chain('T{}: ("x" T{}) | "y"\n', 4_000, 'T{}: "a"')),
        Grammar(
            "json_schema",
            '{"$ref":"#/$defs/d0","$defs":{'
            + chain('"d{}":{{"items":{{"items":{{"$ref":"#/$defs/d{}"}}}}}},', 1_800, '"d{}":{{}}')
            + "}}",
        ),
    ],
)
def test_long_chains_do_not_end_the_process(grammars: Grammars, grammar: Grammar) -> None:
    """On a usual stack, llguidance overflows it."""
    grammars.check(grammar)
    assert ids_of(grammars.follow(grammar).allowed([]))


def test_limits_end_the_text(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(step_max_items=50, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    digits = "0123456789"
    items = " | ".join(f"a{i}" for i in range(100))
    rules = "\n".join(f'a{i}: "b" a{(i + 1) % 100} | "c"' for i in range(100))
    follower = grammars.follow(Grammar("lark", f'start: "{digits}" ({items})\n{rules}'))
    ids = tokenizer.encode(digits)
    assert ids_of(follower.allowed([])) == {ids[0]}
    for _ in range(2):  # back, and again
        assert ids_of(follower.allowed(ids[:9])) == {END}
        assert ids_of(follower.allowed(ids)) == {END}
        assert ids_of(follower.allowed([*ids[:9], END])) == {END}
        assert ids_of(follower.allowed(ids[:2])) == {ids[2]}


# --- tokenizers --------------------------------------------------------------------------------


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


def sentencepiece(
    decoder: Any = None,
) -> tokenizers.Tokenizer:
    """In the manner of Llama 2 and Mistral."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'ab{}":,12']
    merges = [("▁", "a"), ("▁", "{"), ("▁", '"'), ('"', ":")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    prepend, spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, spaces])
    tokenizer.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def folder(path: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_other_tokenizers(tmp_path: Path, kind: Callable[[], tokenizers.Tokenizer]) -> None:
    made = kind()
    size = made.get_vocab_size()
    end = made.token_to_id("</s>")
    grammars = Grammars.load(folder(tmp_path, made), size + 400)
    assert grammars.token_bytes(end) == b"</s>"
    exact = schema({"const": {"a": ["b</s>", "é"], "12": "<tool_call>"}})
    follower = grammars.follow(exact)
    ids = walk(follower, first, end)
    written = b"".join(map(grammars.token_bytes, ids)).decode()
    assert json.loads(written) == {"a": ["b</s>", "é"], "12": "<tool_call>"}
    assert ids_of(follower.allowed(ids)) == {end}
    ids = made.encode('{"a": ["b", "é"]}').ids
    fitting = ids if kind is byte_level else [made.token_to_id("{"), *ids[1:]]  # without the space
    assert refusal(grammars.follow(schema({"type": "object"})), fitting, end) is None


def test_bytes_of_sentencepiece(tmp_path: Path) -> None:
    made = sentencepiece()
    grammars = Grammars.load(folder(tmp_path, made), made.get_vocab_size())
    assert [grammars.token_bytes(i) for i in made.encode("a b é").ids] == [
        b" a", b" ", b"b", b" ", b"\xc3", b"\xa9",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "config", "message"),
    [
        (word_level, 3, {}, "can't be constrained by a grammar: can't determine decoder type"),
        (lambda: sentencepiece(decoders.Metaspace()), 300, {}, "can't determine decoder type"),
        (byte_level, 100, {}, "vocab"),
        (byte_level, 300, {"eos_token": None}, "it names no end token"),
    ],
)
def test_tokenizers_that_can_not_be_used(
    tmp_path: Path,
    kind: Callable[[], tokenizers.Tokenizer],
    size: int,
    config: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        Grammars.load(folder(tmp_path, kind(), **config), size)


def test_a_target_that_can_not_be_constrained_is_served_all_the_same(tmp_path: Path) -> None:
    grammars = NoGrammars(folder(tmp_path, word_level()), ConfigError("why"))
    with pytest.raises(ValueError, match=r"^This model's answers can't be constrained"):
        grammars.check(schema({}))
    assert grammars.token_bytes(0) == b"a"
