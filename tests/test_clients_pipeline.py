"""The pipeline's events as our client reads them, from the real scheduler."""

from collections.abc import Iterator

import pytest

from clients import Client, Cycle, Streaming
from clients.terminal.session import Session
from tests.api_server import make_api, serving
from tests.talking_pipeline import MAX_LEN, TalkingPipeline

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pipeline = TalkingPipeline()
    pipeline.stages = 3
    pipeline.reply = "Hello, there."
    with serving(make_api(pipeline, max_len=MAX_LEN)) as url:
        yield url


def cycles(url: str, **options) -> tuple[list[Cycle], int, str]:
    """All cycles of an answer, its tokens by the usage, and who drafted."""
    with (
        Client(url) as client,
        client.stream_chat(HELLO, Streaming(pipeline=True), **options) as stream,
    ):
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == "Hello, there."
    parts = [chunk.pipeline for chunk in chunks if chunk.pipeline]
    assert {part.stages for part in parts} == {3}
    (drafter,) = {part.drafter for part in parts}
    found = [cycle for part in parts for cycle in part.cycles]
    return found, chunks[-1].usage.completion_tokens, drafter


def test_cycles(url: str) -> None:
    found, tokens, drafter = cycles(url)
    assert drafter == "pdm"
    assert all(len(cycle.rows) == 3 for cycle in found)
    numbers = [cycle.cycle for cycle in found]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    verdicts = [cycle.verdict for cycle in found if cycle.verdict]
    assert len(verdicts) == tokens
    assert "".join(verdict.text for verdict in verdicts[:-1]) == "Hello, there."  # and then the end
    assert {"accepted", "rejected"} <= {verdict.outcome for verdict in verdicts}
    assert found[0].rows[0].source == "prompt"


def test_without_speculation(url: str) -> None:
    found, _, drafter = cycles(url, speculation=False)
    assert drafter == "off"
    assert {cycle.verdict.outcome for cycle in found if cycle.verdict} == {"undrafted"}


def test_not_asked_for(url: str) -> None:
    with Client(url) as client, client.stream_chat(HELLO) as stream:
        assert all(chunk.pipeline is None for chunk in stream)


def test_the_terminal_counts_drafts_while_they_come(url: str) -> None:
    with Client(url) as client:
        session = Session(client, {})
        seen = [(tally := session.tallies[-1]).acceptance for _ in session.answer("hi")]
    assert None not in seen[4:]
    assert tally.usage is not None
    assert seen[-1] == pytest.approx(tally.acceptance, abs=0.2)
