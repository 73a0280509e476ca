"""Several choices and prompts in one request, and what of a body reaches the pipeline."""

import json
import re
from typing import Any

import httpx
import openai
import pytest

from service.messages import Delta, Failure, Stopping
from tests.api_server import CHAT, MAX_LEN, MODEL, TEXT, WAIT_S, access_log, hang_up, post
from tests.fake_pipeline import STATS, FakePipeline, Gate, Hang, text

STEP = 0x9E3779B97F4A7C15


def _pairs(response: httpx.Response) -> list[tuple[int, str, str | None]]:
    """Index, text and reason of each choice in each chunk of completions."""
    frames = [f.removeprefix("data: ") for f in response.text.split("\n\n") if f]
    assert frames[-1] == "[DONE]"
    choices = [choice for frame in frames[:-1] for choice in json.loads(frame)["choices"]]
    return [(c["index"], c["text"], c["finish_reason"]) for c in choices]


# --- n ----------------------------------------------------------------------------------------


def test_n(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"), text("c", reason="length"), text("d", "", "e"))
    answer = client.chat.completions.create(**CHAT, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["ab", "c", "de"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length", "stop"]
    assert len({request.request_id for request in pipeline.requests}) == 3
    assert len({request.prompt_ids for request in pipeline.requests}) == 1


def test_n_stream(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"), text("c"))
    chunks = list(client.chat.completions.create(**CHAT, n=2, stream=True))
    for index, pieces in [(0, ["", "a", "b", None]), (1, ["", "c", None])]:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.content for choice in own] == pieces
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_choices_take_turns(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"), text("c", "d", reason="length"))
    assert _pairs(post(http, TEXT | {"n": 2, "stream": True})) == [
        (0, "a", None),
        (1, "c", None),
        (0, "b", None),
        (0, "", "stop"),
        (1, "d", None),
        (1, "", "length"),
    ]


def test_choices_do_not_wait_for_each_other(http: httpx.Client, pipeline: FakePipeline) -> None:
    gate = Gate()
    pipeline.play([gate, *text("a")], text("b"))
    body = json.dumps(TEXT | {"n": 2, "stream": True})
    headers = {"Content-Type": "application/json"}
    with http.stream("POST", "/v1/completions", content=body, headers=headers) as response:
        received = ""
        for line in response.iter_lines():
            received += line
            if line.endswith('"index":1,"text":"","logprobs":null,"finish_reason":"stop"}]}'):
                gate.open()
    assert re.findall(r'"index":(\d),"text":"(\w*)"', received) == [
        ("1", "b"),
        ("1", ""),
        ("0", "a"),
        ("0", ""),
    ]


@pytest.mark.parametrize("seed", [7, 0, -1, 2**63 - 1])
def test_seeds(http: httpx.Client, pipeline: FakePipeline, seed: int) -> None:
    post(http, TEXT | {"prompt": ["a", "b"], "n": 3, "seed": seed})
    keys = [request.sampling.key for request in pipeline.requests]
    assert keys == [(seed + turn * STEP) % 2**64 for turn in (0, 1, 2)] * 2
    assert all(request.sampling.seeded for request in pipeline.requests)


def test_no_seed(http: httpx.Client, pipeline: FakePipeline) -> None:
    post(http, TEXT | {"prompt": ["a", "a"], "n": 3})
    assert len({request.sampling.key for request in pipeline.requests}) == 6
    assert not any(request.sampling.seeded for request in pipeline.requests)


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]], ["ab", [99]]])
def test_prompts(client: openai.OpenAI, pipeline: FakePipeline, prompt: Any) -> None:
    pipeline.play(text("0"), text("1"), text("2"), text("3"))
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "0"), (1, "1"), (2, "2"), (3, "3"),
    ]  # fmt: skip
    prompts = [request.prompt_ids for request in pipeline.requests]
    assert prompts == [(97, 98), (97, 98), (99,), (99,)]


def test_most_choices(http: httpx.Client, pipeline: FakePipeline) -> None:
    assert len(post(http, TEXT | {"prompt": ["a", "b"], "n": 32}).json()["choices"]) == 64
    assert len(post(http, CHAT | {"n": 64}).json()["choices"]) == 64
    assert len(pipeline.requests) == 128


def test_any_prompt_may_be_too_long(http: httpx.Client, pipeline: FakePipeline) -> None:
    response = post(http, TEXT | {"prompt": ["a", "x" * MAX_LEN]})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not pipeline.requests


def test_room_is_each_prompts_own(http: httpx.Client, pipeline: FakePipeline) -> None:
    post(http, TEXT | {"prompt": ["a", "x" * (MAX_LEN - 2)]})
    assert [request.max_tokens for request in pipeline.requests] == [16, 2]


# --- usage ------------------------------------------------------------------------------------


def test_usage_counts_a_prompt_once(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play(text("a", "b"), text("c"), text("d"), text("e", "f", "g"))
    usage = post(http, TEXT | {"prompt": ["ab", "c"], "n": 2}).json()["usage"]
    assert usage == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "completion_tokens_details": {
            "accepted_prediction_tokens": 4 * STATS.accepted,
            "rejected_prediction_tokens": 4 * (STATS.drafted - STATS.accepted),
        },
        "prompt_tokens_details": {"cached_tokens": 2 * STATS.cached},
    }


@pytest.mark.parametrize("stream", [True, False])
def test_usage_is_logged(http: httpx.Client, pipeline: FakePipeline, stream: bool) -> None:
    pipeline.play(text("a", "b"), text("c"))
    with access_log() as log:
        post(http, TEXT | {"n": 2, "stream": stream})
        entry = log.next()
    assert (entry["prompt_tokens"], entry["completion_tokens"]) == (2, 3)


@pytest.mark.parametrize("final", [True, False])
def test_usage_in_every_chunk(http: httpx.Client, pipeline: FakePipeline, final: bool) -> None:
    pipeline.play(text("a", "b"), text("c"))
    options = {"continuous_usage_stats": True, "include_usage": final}
    response = post(http, CHAT | {"n": 2, "stream": True, "stream_options": options})
    chunks = [json.loads(f.removeprefix("data: ")) for f in response.text.split("\n\n")[:-2]]
    prompt = len("<user>hi")
    assert all(chunk["usage"]["prompt_tokens"] == prompt for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 1, 2, 2, 3, 3] + [3] * final
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * 7 + [False] * final


# --- what reaches the pipeline ----------------------------------------------------------------


def test_sampling(client: openai.OpenAI, pipeline: FakePipeline) -> None:
    client.chat.completions.create(
        **CHAT,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100, "0": 1.5},  # type: ignore[dict-item]
        extra_body={"min_p": 1, "repetition_penalty": 0.5, "top_k": 3},
    )
    sampling = pipeline.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2, 2)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.top_k) == (1, 0.5, 3)
    assert sampling.logit_bias == ((5, -100), (0, 1.5))


def test_stopping(http: httpx.Client, pipeline: FakePipeline) -> None:
    body = {
        "stop": "x",
        "stop_token_ids": [7, 0, 7],
        "include_stop_str_in_output": True,
        "min_tokens": 16,
        "ignore_eos": True,
    }
    assert post(http, TEXT | body).status_code == 200
    assert pipeline.requests[0].stop == Stopping(("x",), (7, 0), True, 16, True)


def test_most_of_everything(http: httpx.Client, pipeline: FakePipeline) -> None:
    body = {
        "stop": ["x"] * 16,
        "stop_token_ids": list(range(64)),
        "logit_bias": {str(token): 100 for token in range(1024)},
        "n": 64,
        "best_of": 64,
        "logprobs": 20,
        "min_tokens": 16,
    }
    assert post(http, TEXT | body).status_code == 200
    assert len(pipeline.requests[0].sampling.logit_bias) == 1024


# --- what ends one ends all -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [Failure("x"), RuntimeError("x")])
def test_a_failure_before_the_first_token(
    http: httpx.Client, pipeline: FakePipeline, stream: bool, failure: Any
) -> None:
    pipeline.play([Hang()], [failure], [Hang()])
    assert post(http, CHAT | {"n": 3, "stream": stream}).status_code >= 500
    assert pipeline.ended.is_set()


def test_a_failure_in_mid_stream(http: httpx.Client, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()], [Delta(0, "b"), Failure("x")], [Hang()])
    response = post(http, TEXT | {"n": 3, "stream": True})
    *chunks, error, done, rest = response.text.split("\n\n")
    assert [json.loads(c.removeprefix("data: "))["choices"][0]["text"] for c in chunks] == [
        "a",
        "b",
    ]
    assert "The pipeline failed" in error
    assert (done, rest) == ("data: [DONE]", "")
    assert pipeline.ended.is_set()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [[], [Delta(0, "a")]])
def test_a_client_that_goes(
    url: str, pipeline: FakePipeline, stream: bool, first: list[Delta]
) -> None:
    pipeline.play([*first, Hang()], [Hang()], [*text("b")], [*first, Hang()])
    hang_up(url, pipeline, CHAT | {"n": 4, "stream": stream})
    assert pipeline.ended.wait(WAIT_S)
