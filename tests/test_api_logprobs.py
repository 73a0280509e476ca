"""Log-probabilities, echoes and token ids."""

import json
from math import inf, nan
from typing import Any

import httpx
import openai
import pytest

from service.messages import Delta, Logprobs, PromptScored
from tests.api_server import CHAT, MODEL, TEXT, post
from tests.fake_pipeline import STATS, FakePipeline, text

FIRST_BYTE, SECOND_BYTE = 0x10FFC3, 0x10FFA9  # the two tokens of "é"
SPECIAL = 0xE000  # a token without text
A, B, END = 97, 98, 2


def _scored(chosen: float, *top: tuple[int, float]) -> Logprobs:
    return Logprobs(chosen, top)


HELD = [
    Delta(A, "a", logprobs=_scored(-0.5, (A, -0.5), (B, -1.5))),
    Delta(FIRST_BYTE, "", logprobs=_scored(-1)),
    Delta(SECOND_BYTE, "é", logprobs=_scored(-2, (SECOND_BYTE, -2))),
    Delta(END, "", "stop", STATS, _scored(-inf, (A, -inf), (B, nan))),
]


def _chunks(response: httpx.Response) -> list[dict[str, Any]]:
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def _named(token: str, raw: list[int], logprob: float, *top: Any) -> dict[str, Any]:
    alternatives = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in top]
    return {"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": alternatives}


# --- chats ------------------------------------------------------------------------------------

CONTENT = [
    _named("a", [97], -0.5, ("a", -0.5), ("b", -1.5)),
    _named("\ufffd", [0xC3], -1),
    _named("\ufffd", [0xA9], -2)
    | {"top_logprobs": [{"token": "\ufffd", "logprob": -2, "bytes": [0xA9]}]},
    _named("\x02", [2], -9999, ("a", -9999), ("b", -9999)),
]


def test_chat(http: httpx.Client, client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(HELD)
    choice = post(http, CHAT | {"logprobs": True, "top_logprobs": 2}).json()["choices"][0]
    assert choice["logprobs"] == {"content": CONTENT, "refusal": None}
    assert pipeline.requests[0].logprobs == 2
    assert not pipeline.requests[0].prompt_logprobs
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=20)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.logprob for token in logprobs.content] == [-0.5, -1, -2, -9999]


def test_chat_stream(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(HELD)
    chunks = _chunks(post(http, CHAT | {"logprobs": True, "top_logprobs": 2, "stream": True}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "a", "é", None]
    found = [choice["logprobs"] and choice["logprobs"]["content"] for choice in choices]
    assert found == [None, CONTENT[:1], CONTENT[1:3], CONTENT[3:]]
    assert choices[-1]["finish_reason"] == "stop"


def test_chat_stream_bytes(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(A, "a", "stop", STATS, _scored(-0.5, (B, -1)))])
    response = post(http, CHAT | {"logprobs": True, "top_logprobs": 1, "stream": True})
    assert (
        '"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a",'
        '"logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"b","logprob":-1,"bytes":[98]}]}],'
        '"refusal":null},"finish_reason":null}]}\n\n'
    ) in response.text
    assert '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}' in response.text


@pytest.mark.parametrize("body", [{}, {"logprobs": None}, {"logprobs": False, "top_logprobs": 0}])
def test_chat_unasked(http: httpx.Client, pipeline: FakePipeline, body: dict[str, Any]) -> None:
    assert post(http, CHAT | body).json()["choices"][0]["logprobs"] is None
    assert pipeline.requests[0].logprobs is None


def test_chosen_alone(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(A, "a", "stop", STATS, _scored(-0.5))])
    choice = post(http, CHAT | {"logprobs": True}).json()["choices"][0]
    assert choice["logprobs"]["content"] == [_named("a", [97], -0.5)]
    assert pipeline.requests[0].logprobs == 0


# --- completions ------------------------------------------------------------------------------

TEXT_LOGPROBS = {
    "tokens": ["a", "\ufffd", "\ufffd", "\x02"],
    "token_logprobs": [-0.5, -1, -2, -9999],
    "top_logprobs": [
        {"a": -0.5, "b": -1.5},
        {"\ufffd": -1},
        {"\ufffd": -2},
        {"a": -9999, "b": -9999, "\x02": -9999},
    ],
    "text_offset": [0, 1, 2, 2],
}


def _part(start: int, end: int) -> dict[str, Any]:
    return {name: values[start:end] for name, values in TEXT_LOGPROBS.items()}


def test_completion(http: httpx.Client, client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(HELD)
    choice = post(http, TEXT | {"logprobs": 2}).json()["choices"][0]
    assert choice["logprobs"] == TEXT_LOGPROBS
    assert pipeline.requests[0].logprobs == 2
    answer = client.completions.create(**TEXT, logprobs=2)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5, -1, -2, -9999]


def test_completion_stream(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(HELD)
    chunks = _chunks(post(http, TEXT | {"logprobs": 2, "stream": True}))
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert found == [_part(0, 1), _part(1, 3), _part(3, 4)]


def test_offsets_of_several_choices(http: httpx.Client, pipeline: FakePipeline) -> None:
    lone = _scored(-1)
    pipeline.play(
        [Delta(A, "a", logprobs=lone), Delta(B, "b", "stop", STATS, lone)],
        [Delta(FIRST_BYTE, "", logprobs=lone), Delta(SECOND_BYTE, "é", "stop", STATS, lone)],
    )
    for stream in (True, False):
        response = post(http, TEXT | {"n": 2, "logprobs": 0, "stream": stream})
        bodies = _chunks(response) if stream else [response.json()]
        offsets: dict[int, list[int]] = {0: [], 1: []}
        for choice in (choice for body in bodies for choice in body["choices"]):
            offsets[choice["index"]] += (choice["logprobs"] or {"text_offset": []})["text_offset"]
        assert offsets == {0: [0, 1], 1: [0, 1]}


def test_one_name_for_two_tokens(http: httpx.Client, pipeline: FakePipeline) -> None:
    """The largest alternative is the likeliest token's: by that, lm-eval knows a greedy one."""
    top = _scored(-5, (0x10FF80, -0.25), (A, -1))
    pipeline.play([Delta(FIRST_BYTE, "\ufffd", "stop", STATS, top)])
    choice = post(http, TEXT | {"logprobs": 2}).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.25, "a": -1}]


# --- echo -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["hi", [104, SPECIAL, 105]])
def test_echo(http: httpx.Client, pipeline: FakePipeline, prompt: Any) -> None:
    pipeline.play(text("!", "?"))
    body = TEXT | {"prompt": prompt, "echo": True}
    assert post(http, body).json()["choices"][0]["text"] == "hi!?"
    assert not pipeline.requests[0].prompt_logprobs
    chunks = _chunks(post(http, body | {"stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hi", "!", "?", ""]


def test_echo_of_several(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("0"), text("1"), text("2"), text("3"))
    body = TEXT | {"prompt": ["a", "b"], "n": 2, "echo": True}
    texts = [choice["text"] for choice in post(http, body).json()["choices"]]
    assert texts == ["a0", "a1", "b2", "b3"]


SCORED = PromptScored((_scored(-1, (A, -0.1)), _scored(-2, (105, -2))))
ECHOED: dict[str, Any] = {
    "tokens": ["h", "\ue000", "i", "!"],
    "token_logprobs": [None, -1, -2, -3],
    "top_logprobs": [None, {"a": -0.1, "\ue000": -1}, {"i": -2}, {"!": -3}],
    "text_offset": [0, 1, 1, 2],
}


def test_echo_with_logprobs(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play([SCORED, Delta(33, "!", "length", STATS, _scored(-3, (33, -3)))])
    body = TEXT | {"prompt": [104, SPECIAL, 105], "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = post(http, body).json()["choices"][0]
    assert choice["text"] == "hi!"
    assert choice["logprobs"] == ECHOED
    assert pipeline.requests[0].prompt_logprobs
    first, second, last = (c["choices"][0] for c in _chunks(post(http, body | {"stream": True})))
    assert first["logprobs"] == {name: values[:3] for name, values in ECHOED.items()}
    assert second["logprobs"] == {name: values[3:] for name, values in ECHOED.items()}
    assert (last["logprobs"], last["finish_reason"]) == (None, "length")


def test_echo_alone(http: httpx.Client, client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play([SCORED, Delta(33, "!", "stop", STATS, _scored(-3, (33, -3)))])
    body = TEXT | {"prompt": [104, SPECIAL, 105], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = post(http, body | {"return_token_ids": True}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"] == {name: values[:3] for name, values in ECHOED.items()}
    assert choice["token_ids"] == []
    assert answer["usage"]["completion_tokens"] == 0
    assert pipeline.requests[0].max_tokens == 1
    chunks = _chunks(post(http, body | {"stream": True}))
    assert [c["choices"][0]["text"] for c in chunks] == ["hi", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]
    plain = client.completions.create(model=MODEL, prompt="hi", max_tokens=0, echo=True)
    assert plain.choices[0].text == "hi"


@pytest.mark.parametrize("script", [[], [PromptScored(())]])
def test_echo_of_one_token(http: httpx.Client, pipeline: FakePipeline, script: Any) -> None:
    pipeline.play([*script, Delta(33, "!", "stop", STATS, _scored(-3))])
    body = TEXT | {"prompt": "h", "echo": True, "logprobs": 0}
    assert post(http, body).json()["choices"][0]["logprobs"]["token_logprobs"] == [None, -3]


def test_lm_eval_reads_it(http: httpx.Client, pipeline: FakePipeline) -> None:
    """The sum and the greediness of a continuation, as lm-eval's `parse_logprobs` has them."""
    pipeline.play([SCORED, Delta(33, "!", "length", STATS, _scored(-3, (33, -3)))])
    body = TEXT | {"prompt": [[104, SPECIAL, 105]], "echo": True, "logprobs": 1, "max_tokens": 1}
    found = post(http, body).json()["choices"][0]["logprobs"]
    for context, total, greedy in [(1, -3, [False, True]), (2, -2, [True])]:
        chosen = found["token_logprobs"][context:-1]
        top = found["top_logprobs"][context:-1]
        assert sum(chosen) == total
        assert [c == max(t.values()) for c, t in zip(chosen, top, strict=True)] == greedy


# --- token ids --------------------------------------------------------------------------------


def test_token_ids(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(HELD)
    ids = {"return_token_ids": True}
    answer = post(http, CHAT | ids | {"n": 2}).json()
    assert answer["prompt_token_ids"] == [ord(c) for c in "<user>hi"]
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        [A, FIRST_BYTE, SECOND_BYTE, END]
    ] * 2
    answer = post(http, TEXT | ids | {"prompt": ["a", "b"], "echo": True}).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[A], [B]]
    assert answer["choices"][0]["token_ids"] == [A, FIRST_BYTE, SECOND_BYTE, END]
    assert "prompt_token_ids" not in answer


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_token_ids_in_chunks(
    http: httpx.Client, pipeline: FakePipeline, body: dict[str, Any]
) -> None:
    pipeline.play(HELD)
    chunks = _chunks(post(http, body | {"return_token_ids": True, "stream": True}))
    ids = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert ids == [[]] * (body is CHAT) + [[A], [FIRST_BYTE, SECOND_BYTE], [END]]
    places = [chunk if body is CHAT else chunk["choices"][0] for chunk in chunks]
    assert ["prompt_token_ids" in place for place in places] == [True] + [False] * (len(ids) - 1)


@pytest.mark.parametrize("body", [CHAT, TEXT])
def test_no_token_ids_unasked(http: httpx.Client, body: dict[str, Any]) -> None:
    for stream in (True, False):
        assert "token_ids" not in post(http, body | {"stream": stream}).text
