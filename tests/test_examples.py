"""The examples of clients/examples, run as they are."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clients import Client, Streaming
from tests.api_server import MODEL
from tests.fake_pipeline import FakePipeline, text
from tests.serving import serve

EXAMPLES = Path("clients/examples").absolute()
WAIT_S = 200  # for a busy machine
PARIS = "The capital of France is Paris."


def run(*command: str, url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "SPD_BASE_URL": url, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def output(*command: str, url: str) -> str:
    done = run(*command, url=url)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def node() -> str:
    if (found := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    if not (EXAMPLES / "node_modules" / "openai").exists():
        pytest.skip("the openai client is not there: npm install in clients/examples")
    return found


@pytest.mark.parametrize("name", ["own_client.py", "openai_python.py", "openai_node.mjs"])
def test_whole_and_streamed(url: str, pipeline: FakePipeline, name: str) -> None:
    pipeline.play(text("Pa", "ris"))
    program = node() if name.endswith(".mjs") else sys.executable
    assert output(program, str(EXAMPLES / name), url=url) == "Paris\nParis\n"


def test_asyncio(url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("Pa", "ris"))
    said = output(sys.executable, str(EXAMPLES / "own_async_client.py"), url=url)
    assert [re.sub(r" \(\d+ cycles\)", "", line) for line in said.splitlines()] == ["Paris"] * 2


def test_curl(url: str, pipeline: FakePipeline) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    pipeline.play(text("Pa", "ris"))
    whole, *events = output(str(EXAMPLES / "curl.sh"), url=url).split("\n", 1)
    assert json.loads(whole)["choices"][0]["message"]["content"] == "Paris"
    assert json.loads(whole)["model"] == MODEL
    frames = events[0].strip().split("\n\n")
    assert frames[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Paris"


def test_no_server(url: str) -> None:  # noqa: ARG001
    done = run(
        sys.executable, str(EXAMPLES / "own_client.py"), url="http://127.0.0.1:9", PYTHONWARNINGS=""
    )
    assert done.returncode == 1
    assert done.stderr.startswith("http://127.0.0.1:9 can't be reached")


@pytest.mark.full
def test_with_the_served_model(tmp_path: Path, default_model: Path) -> None:  # noqa: ARG001
    """All of them, and our client's events, against the default deployment."""
    with serve(tmp_path / "log") as served:
        for name in ("own_client.py", "openai_python.py"):
            said = output(sys.executable, str(EXAMPLES / name), url=served.url)
            assert said == f"{PARIS}\n{PARIS}\n"
        assert output(node(), str(EXAMPLES / "openai_node.mjs"), url=served.url).startswith(PARIS)
        said = output(sys.executable, str(EXAMPLES / "own_async_client.py"), url=served.url)
        assert said.startswith(PARIS)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        with (
            Client(served.url) as client,
            client.stream_chat(messages, Streaming(pipeline=True), temperature=0) as stream,
        ):
            chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == PARIS
        events = [chunk.pipeline for chunk in chunks if chunk.pipeline]
        verdicts = [cycle.verdict for event in events for cycle in event.cycles if cycle.verdict]
        assert len(verdicts) == chunks[-1].usage.completion_tokens
