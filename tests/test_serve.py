"""The default deployment over real Ray Serve and real HTTP, as its users meet it."""

import asyncio
import json
import re
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import serve

MODEL = "smollm2-135m-instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
ENDLESS = [{"role": "user", "content": "Count from 1 to 1000."}]


@pytest.fixture(scope="module")
def served(tmp_path_factory, default_model):  # noqa: ARG001 (made before the clock starts)
    """The default deployment, with one slot: a request that is not aborted blocks the next."""
    log = tmp_path_factory.mktemp("serve") / "log"
    args = {"pipeline": {"slots": 1, "max_len": 1024}}
    with serve(log, args) as served:
        yield served


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_says_where_to_send_what(served) -> None:
    deadline = time.monotonic() + 30
    while "Ready: " not in (log := served.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert f"Ready: {MODEL} in 2 stages, speculation lookup+pdm" in log
    assert "untrained" not in log
    assert f"POST {served.url}/v1/chat/completions" in log


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 1024


def test_chat(client) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert answer.choices[0].message.content == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 8
    details = answer.usage.completion_tokens_details
    # All but the first token and the last are drafted.
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens >= 5


def test_chat_stream(client) -> None:
    """One token, one chunk."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [c.choices[0].delta.content for c in chunks[1:-2]]
    assert pieces == ["The", " capital", " of", " France", " is", " Paris", "."]
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 8


def test_stream_bytes(served) -> None:
    """SSE framing, byte for byte, up to the id and the time."""
    body = {"model": MODEL, "messages": FRANCE, "temperature": 0, "stream": True, "max_tokens": 2}
    response = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    head = r'data: \{"id":"chatcmpl-\w+","object":"chat.completion.chunk","created":\d+,'
    head += rf'"model":"{MODEL}","choices":\[\{{"index":0,"delta":'
    tail = ',"logprobs":null,"finish_reason":'
    parts = [
        (r'\{"role":"assistant","content":""\}', "null"),
        (r'\{"content":"The"\}', "null"),
        (r'\{"content":" capital"\}', "null"),
        (r"\{\}", '"length"'),
    ]
    pattern = "".join(rf"{head}{delta}{tail}{reason}\}}\]\}}\n\n" for delta, reason in parts)
    assert re.fullmatch((pattern + r"data: \[DONE\]\n\n").encode(), response.content)


async def test_async_client(served) -> None:
    """Two at once: the second waits for the slot, both are right."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=FRANCE, temperature=0, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(ask(), ask()) == [PARIS, PARIS]


def test_completions(client) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=8, temperature=0
    )
    assert answer.choices[0].text.startswith(" 6, 7,")
    pieces = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(c.choices[0].text for c in pieces) == answer.choices[0].text


def test_a_stop_string_is_not_shown(client) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, stop=[" is Par"]
    )
    assert answer.choices[0].message.content == "The capital of France"
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_means_the_same_text(client) -> None:
    def ask(seed: int) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=1.2, seed=seed, max_tokens=20
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_unseeded_sampling(client) -> None:
    """Rejection sampling through the whole pipeline, q included."""
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0.8, top_p=0.9, max_tokens=24
    )
    assert answer.choices[0].message.content


def test_json_of_a_schema(client) -> None:
    """Constrained at verification and in the draft, over actors."""
    schema = {
        "type": "object",
        "properties": {
            "fruits": {"type": "array", "items": {"enum": ["apple", "pear"]}, "maxItems": 2},
            "ripe": {"type": "boolean"},
        },
        "required": ["fruits", "ripe"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name two fruits as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "f", "schema": schema}},
        max_tokens=60,
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"fruits", "ripe"}
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_tool_that_must_be_called(client) -> None:
    city = {"type": "string", "maxLength": 20}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": "get_weather", "parameters": parameters | {"additionalProperties": False}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_in_its_slot(client) -> None:
    first = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    turns = [
        *FRANCE,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Spain?"},
    ]
    second = client.chat.completions.create(
        model=MODEL, messages=turns, temperature=0, max_tokens=8
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens < cached < second.usage.prompt_tokens
    assert "Madrid" in second.choices[0].message.content


def test_log_probabilities_and_penalties(client) -> None:
    plain, penalised = (
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            max_tokens=8,
            **more,
        )
        for more in ({}, {"logit_bias": {"504": -100}, "presence_penalty": 1.0})
    )
    for answer in (plain, penalised):
        for token in answer.choices[0].logprobs.content:
            assert token.logprob <= token.top_logprobs[0].logprob <= 0
    assert plain.choices[0].logprobs.content[0].token == "The"
    assert penalised.choices[0].message.content != PARIS


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(served, client, stream: bool) -> None:
    """There is one slot, and an endless answer would hold it for a minute or more: the next
    request is answered because the first one is gone."""
    body = {
        "model": MODEL,
        "messages": ENDLESS,
        "temperature": 0,
        "stream": stream,
        "max_tokens": 900,
        "stop": None,
    }
    began = time.monotonic()
    try:
        with httpx.stream(
            "POST",
            f"{served.url}/v1/chat/completions",
            json=body,
            timeout=httpx.Timeout(60, read=60 if stream else 2),
        ) as response:
            lines = response.iter_lines()
            for _ in range(8):
                next(lines)
    except httpx.ReadTimeout:
        assert not stream
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, timeout=25)
    assert answer.choices[0].message.content == PARIS
    assert time.monotonic() - began < 60


def test_errors_are_openais(served, client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"2\d\d\d tokens.*1024 tokens") as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 2000}]
        )
    assert caught.value.code == "context_length_exceeded"
    response = httpx.post(f"{served.url}/v1/chat/completions", content="{")
    assert response.status_code == 400
    assert "error" in response.json()


def test_probes_and_docs(served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/ready").json() == {
        "ready": True,
        "detail": "serving",
        "speculation": "lookup+pdm",
    }
    assert httpx.get(f"{served.url}/openapi.json").status_code == 200


def test_metrics(served, client) -> None:
    """Ray's exporters lag by some seconds; the page has what this deployment did."""
    client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    wanted = {
        "ray_spd_generation_tokens",
        "ray_spd_prompt_tokens",
        "ray_spd_pipeline_cycles",
        "ray_spd_spec_decode_num_drafts",
        "ray_spd_cycle_seconds",
        "ray_spd_stage_forward_seconds",
        "ray_spd_draft_forward_seconds",
        "ray_spd_time_to_first_token_seconds",
        "ray_spd_pipeline_stages",
    }
    deadline = time.monotonic() + 60
    missing = wanted
    while missing and time.monotonic() < deadline:
        page = httpx.get(f"{served.url}/metrics", timeout=30).text
        missing = wanted - {family.name for family in text_string_to_metric_families(page)}
        time.sleep(0.5)
    assert not missing
