"""The API over the tokenizer and the grammars of the default model."""

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from service.messages import Delta, Logprobs
from service.target import load_target_config
from service.text.grammar import Grammars
from service.text.tokenizer import RESERVED_TEMPLATE_KWARGS, ChatTemplateError, Tokenizer
from tests.api_server import CHAT, TEXT, WAIT_S, make_api, post, serving
from tests.fake_pipeline import STATS, FakePipeline, text

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="module")
def grammars(default_model: Path) -> Grammars:
    return Grammars.load(default_model, load_target_config(default_model).vocab_size)


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer, grammars: Grammars) -> Iterator[tuple[FakePipeline, str]]:
    pipeline = FakePipeline()
    app = make_api(pipeline, tokenizer=tokenizer, grammars=grammars, max_len=2048)
    with serving(app) as url:
        yield pipeline, url


@pytest.fixture
def http(served: tuple[FakePipeline, str]) -> Iterator[httpx.Client]:
    served[0].play(text("ok"))
    with httpx.Client(base_url=served[1], timeout=WAIT_S) as client:
        yield client


# --- templates --------------------------------------------------------------------------------


def test_reserved_names_are_all_that_could_override_ours() -> None:
    ours = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    ours |= set(inspect.signature(render_jinja_template).parameters)
    assert ours - {"kwargs", "documents"} | {"messages"} == RESERVED_TEMPLATE_KWARGS


def test_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    def written(messages: list[dict[str, Any]], **how: bool) -> str:
        ids = tokenizer.render_chat([{"role": "system", "content": "S"}, *messages], **how)
        text: str = tokenizer._hf.decode(ids)
        return text.removeprefix("<|im_start|>system\nS<|im_end|>\n")

    hi = "<|im_start|>user\nHi<|im_end|>\n"
    assert written(HELLO) == hi + "<|im_start|>assistant\n"
    assert written(HELLO, add_generation_prompt=False) == hi
    begun = [*HELLO, {"role": "assistant", "content": "Well, "}]
    continued = written(begun, add_generation_prompt=False, continue_final_message=True)
    assert continued == hi + "<|im_start|>assistant\nWell, "


@pytest.fixture
def folder(default_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, tmp_path)
    return tmp_path


def test_template_variables(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{{ mode | default('none') }} {{ messages[0].content }}"
    )
    tokenizer = Tokenizer.load(folder)

    def written(**how: Any) -> str:
        return tokenizer.decode(tokenizer.render_chat(HELLO, **how))

    assert written() == "none Hi"
    assert written(template_kwargs={"mode": "fast", "unused": 1}) == "fast Hi"
    assert written(tools=[TOOL, TOOL]) == "clock clock none Hi"
    with pytest.raises(ChatTemplateError):
        written(continue_final_message=True)  # and a new message too


def test_chat_template(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
    bare = Tokenizer.load(folder)
    assert bare.chat_template is None
    bare._hf.chat_template = {"default": "a", "tool_use": "b"}
    assert bare.chat_template == "b"
    bare._hf.chat_template = {"default": "a"}
    assert bare.chat_template == "a"


def test_added_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.added_tokens["<|im_end|>"] == 2


# --- requests ---------------------------------------------------------------------------------


def test_schemas_are_checked(http: httpx.Client) -> None:
    def ask(schema: Any) -> httpx.Response:
        answer = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return post(http, CHAT | {"response_format": answer})

    assert ask({"type": "object", "properties": {"a": {"type": "integer"}}}).status_code == 200
    assert ask({}).status_code == 200
    for bad in ({"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        response = ask(bad)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
    assert post(http, CHAT | {"response_format": {"type": "json_object"}}).status_code == 200


def test_calls_that_must_be(http: httpx.Client, served: tuple[FakePipeline, str]) -> None:
    pipeline, _ = served
    pipeline.play(text('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'))
    response = post(http, CHAT | {"tools": [TOOL], "tool_choice": "required"})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert pipeline.requests[0].grammar is not None
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}
    response = post(http, CHAT | {"tools": [wrong], "tool_choice": "required"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_names_of_tokens(
    http: httpx.Client, served: tuple[FakePipeline, str], tokenizer: Tokenizer
) -> None:
    """Joined, their bytes are the text; their offsets are those of the text."""
    answer = "Grüße, 🦛 ok"
    ids = tokenizer.encode(answer)
    scores = Logprobs(-1.0)
    deltas = [Delta(token, "", logprobs=scores) for token in ids]
    served[0].play([*deltas, Delta(2, answer, "stop", STATS, scores)])
    found = post(http, TEXT | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert found["tokens"][-1] == "<|im_end|>"
    assert found["text_offset"][-1] == len(answer)
    assert found["text_offset"][:2] == [0, len(found["tokens"][0])]
    content = post(http, CHAT | {"logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    raw = bytes(byte for token in content[:-1] for byte in token["bytes"])
    assert raw.decode() == answer
