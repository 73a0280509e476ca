"""/tokenize, /detokenize and /version."""

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api_server import MAX_LEN, MODEL, WAIT_S, make_api, serving
from tests.fake_pipeline import FakePipeline, FakeTokenizer

FIRST = 0x10FFFF  # the token that stands before a text with special tokens
HELLO = [{"role": "user", "content": "hi"}]


class TextTokenizer(FakeTokenizer):
    """Has a first token and an end of prompts, so that each flag shows."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [FIRST] * add_special_tokens + [ord(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != FIRST)

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **_: Any
    ) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise ValueError("The template refuses this.")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + ">" * add_generation_prompt, add_special_tokens=False)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        serving(make_api(FakePipeline(), tokenizer=TextTokenizer())) as url,
        httpx.Client(base_url=url, timeout=WAIT_S) as client,
    ):
        yield client


def _post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Sends lone surrogates too."""
    headers = {"Content-Type": "application/json"}
    return http.post(path, content=json.dumps(body), headers=headers)


def _ids(text: str) -> list[int]:
    return [ord(char) for char in text]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "aé"}, [FIRST, *_ids("aé")]),
        ({"prompt": "a", "add_special_tokens": True}, [FIRST, *_ids("a")]),
        ({"prompt": "a", "add_special_tokens": False, "model": MODEL}, _ids("a")),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "a", "messages": None, "add_special_tokens": None}, [FIRST, *_ids("a")]),
        ({"messages": HELLO}, _ids("<user>hi>")),
        ({"messages": HELLO, "add_generation_prompt": True}, _ids("<user>hi>")),
        ({"messages": HELLO, "add_generation_prompt": False}, _ids("<user>hi")),
        ({"messages": [{"role": "developer", "content": "x"}]}, _ids("<system>x>")),
        ({"prompt": "x" * 99, "add_special_tokens": False}, _ids("x" * 99)),  # any length
    ],
)
def test_tokenize(http: httpx.Client, body: dict[str, Any], tokens: list[int]) -> None:
    response = _post(http, "/tokenize", body)
    assert response.status_code == 200
    assert response.json() == {"tokens": tokens, "count": len(tokens), "max_model_len": MAX_LEN}


def test_detokenize(http: httpx.Client) -> None:
    body = {"tokens": [FIRST, *_ids("aé")]}
    assert _post(http, "/detokenize", body).json() == {"prompt": "aé"}
    assert _post(http, "/detokenize", {"tokens": [], "model": MODEL}).json() == {"prompt": ""}


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(st.characters(exclude_categories=["Cs"], max_codepoint=FIRST - 1)))
def test_there_and_back(http: httpx.Client, text: str) -> None:
    tokens = _post(http, "/tokenize", {"prompt": text}).json()["tokens"]
    assert _post(http, "/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ("/tokenize", {"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": HELLO, "add_generation_prompt": "no"}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens.1"),
        ("/detokenize", {"tokens": [1.0]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0x110000]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1], "text": "a"}, "text"),
        ("/detokenize", {"tokens": [1], "model": "\udfff"}, "model"),
    ],
)
def test_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = _post(http, path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})]
)
def test_other_models(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = _post(http, path, body | {"model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("spd-serve")}
