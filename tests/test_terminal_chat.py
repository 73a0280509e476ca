"""spd-chat: by lines, and in a real terminal that tmux holds."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from clients import Client, Retries, Usage
from clients.answers import ChatChunk
from clients.terminal import commands, plain
from clients.terminal.markdown import Tail, harmless, settled
from clients.terminal.session import Session
from clients.terminal.tally import Tally
from service.messages import Delta
from tests.api_server import MODEL, WAIT_S, make_api, serving
from tests.fake_pipeline import FakePipeline, Gate, Hang, text
from tests.serving import free_port

SPD_CHAT = [sys.executable, "-m", "clients.terminal"]


@pytest.fixture
def session(url: str) -> Iterator[Session]:
    with Client(url, retries=Retries(most=0)) as client:
        yield Session(client, {"temperature": 0})


def say(session: Session, said: str) -> str:
    with closing(session.answer(said)) as pieces:
        return "".join(pieces)


def prompts(pipeline: FakePipeline) -> list[str]:
    return ["".join(map(chr, request.prompt_ids)) for request in pipeline.requests]


# --- the conversation -------------------------------------------------------------------------


def test_a_conversation(session: Session, pipeline: FakePipeline) -> None:
    session.system = "Be kind."
    assert say(session, "one") == "ok"
    assert say(session, "two") == "ok"
    first = "<system>Be kind.<user>one"
    assert prompts(pipeline) == [first, first + "<assistant>ok<user>two"]
    session.reset()
    say(session, "three")
    assert prompts(pipeline)[2] == "<system>Be kind.<user>three"


def test_a_stopped_answer_is_kept(session: Session, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "a"), Hang()])
    with closing(session.answer("one")) as pieces:
        assert next(pieces) == "a"
    assert pipeline.ended.wait(WAIT_S)
    assert session.turns[-1] == {"role": "assistant", "content": "a"}


def test_what_had_no_answer_is_not_kept(session: Session, pipeline: FakePipeline) -> None:
    pipeline.play([RuntimeError("secret")])
    errors = io.StringIO()
    assert plain.chat(session, io.StringIO("one\n"), io.StringIO(), errors) == 1
    assert errors.getvalue() == "spd-chat: 500: Internal server error.\n"
    assert (session.turns, session.tallies) == ([], [])


def test_an_empty_answer_is_one(session: Session, pipeline: FakePipeline) -> None:
    pipeline.play(text(""))
    assert say(session, "one") == ""
    assert session.turns[-1] == {"role": "assistant", "content": ""}


def test_tally() -> None:
    tally = Tally(begun_s=10.0, first_s=10.25, last_s=12.25, usage=usage(5, 3, 1))
    assert tally.line() == (
        "5 tokens, 2.0 tokens/s, first after 250 ms, 75% of the drafts accepted"
    )
    assert Tally(usage=usage(1, 0, 0)).line() == "1 token"


def test_tally_of_pipeline_events() -> None:
    """While it goes on; with the usage, that counts."""
    verdicts = [None, "undrafted", "accepted", "rejected", "accepted"]
    cycles = [
        {
            "cycle": number,
            "milliseconds": 1.0,
            "rows": [None, {"position": 3, "count": 1, "token": 1, "text": "a", "source": "pdm"}],
            "verdict": outcome and {"position": 3, "token": 1, "text": "a", "outcome": outcome},
            "void": [],
        }
        for number, outcome in enumerate(verdicts)
    ]
    delta = {"index": 0, "delta": {"content": "abcd"}}
    events = {"stages": 2, "drafter": "lookup+pdm", "cycles": cycles}
    tally = Tally()
    tally.take(chunk(choices=[delta], pipeline=events))
    assert (tally.tokens, tally.acceptance) == (4, 2 / 3)
    tally.take(chunk(choices=[], usage=usage(9, 1, 1).model_dump()))
    assert (tally.tokens, tally.acceptance) == (9, 0.5)


def usage(tokens: int, accepted: int, rejected: int) -> Usage:
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    counts = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    return Usage.model_validate({**counts, "completion_tokens_details": details})


def chunk(**fields) -> ChatChunk:
    return ChatChunk.model_validate({"id": "x", "model": "m", **fields})


# --- commands ---------------------------------------------------------------------------------


def test_commands(session: Session, pipeline: FakePipeline, tmp_path: Path) -> None:
    assert commands.run(session, "/stats") == "There are no answers yet."
    assert commands.run(session, "/system") == "There is no system message."
    assert commands.run(session, "/system Be kind. ") == "System: Be kind."
    assert commands.run(session, "/model") == f"* {MODEL}"
    assert commands.run(session, "/model other") == f"There is no model other:\n* {MODEL}"
    assert commands.run(session, f"/model {MODEL}") == f"* {MODEL}"
    assert "/nothing; /help lists" in commands.run(session, "/nothing")
    say(session, "hi")
    assert commands.run(session, "/stats").startswith("1. 1 token, first after ")
    file = tmp_path / "a b.json"
    assert commands.run(session, f"/save {file}") == f"Saved to {file}."
    assert json.loads(file.read_text()) == session.messages
    assert commands.run(session, f"/save {file}") == f"Not saved: File exists: {file}"
    commands.run(session, f"/save {tmp_path / 'a.md'}")
    expected = "**system**\n\nBe kind.\n\n**user**\n\nhi\n\n**assistant**\n\nok\n"
    assert (tmp_path / "a.md").read_text() == expected
    assert commands.run(session, "/save") == "Where to? /save FILE"
    assert commands.run(session, "/reset") == "A new conversation."
    assert commands.run(session, "/system -") == "There is no system message."
    assert session.messages == []
    with pytest.raises(EOFError):
        commands.run(session, "/quit")
    assert all(name in commands.run(session, "/help") for name in commands.COMMANDS)
    assert len(pipeline.requests) == 1


# --- without a terminal -----------------------------------------------------------------------


def piped(url: str, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*SPD_CHAT, "--url", url, *options]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)


def test_lines(url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("Hé", "llo"), text("bye"))
    done = piped(url, "one\n\n/reset\ntwo\n/quit\nthree\n", "--system", "S", "--seed", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Héllo\nA new conversation.\nbye\n"
    assert prompts(pipeline) == ["<system>S<user>one", "<system>S<user>two"]
    assert all(request.sampling.seeded for request in pipeline.requests)


def test_lines_without_a_server() -> None:
    out, errors = io.StringIO(), io.StringIO()
    with Client(f"http://127.0.0.1:{free_port()}", retries=Retries(most=0)) as client:
        assert plain.chat(Session(client, {}), io.StringIO("one\n"), out, errors) == 1
    assert "Is the server running?" in errors.getvalue()


def test_nobody_reads_the_answer(url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("a"))
    command = [*SPD_CHAT, "--url", url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdout.close()
        process.stdin.write("one\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_a_bad_url() -> None:
    done = piped("localhost", "")
    assert done.returncode == 1
    assert done.stderr.startswith("spd-chat: The base URL 'localhost' should begin with")


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['prompt_toolkit'] = None\n"
        "sys.stdin.isatty = sys.stdout.isatty = lambda: True\n"
        "sys.argv = ['spd-chat']; from clients.terminal.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "needs prompt_toolkit: pip install 'spd-serve[chat]'" in done.stderr


# --- Markdown that grows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grown", "done"),
    [
        ("a\n\nb", "a\n\n"),
        ("a\n\n", ""),  # an indented line may follow
        ("a\nb", ""),
        ("a\n\n```\n\nb\n\nc", "a\n\n"),
        ("```\n\nb\n```\n\nc", "```\n\nb\n```\n\n"),
        ("````\n```\n\nb", ""),
        ("- a\n\n- b\n\n  c\n\nd", "- a\n\n- b\n\n  c\n\n"),
        ("1. a\n\n2. b", ""),
        ("> a\n\n> b", ""),
    ],
)
def test_settled(grown: str, done: str) -> None:
    assert grown[: settled(grown)] == done


@settings(deadline=None)
@given(st.text("ab \n`-", max_size=40), st.text("ab \n`-", max_size=10))
def test_settled_stays(text: str, more: str) -> None:
    assert settled(text) <= settled(text + more) <= len(text + more)


def test_nothing_that_a_terminal_obeys() -> None:
    assert harmless("a\x1b]52;c;eA==\x07\tb\r\n\x9b2Jé") == "a�]52;c;eA==�\tb�\n�2Jé"


def test_a_tail_shows_the_end() -> None:
    console = Console(width=20, height=7, file=io.StringIO())
    console.print(Tail("\n\n".join(f"line {number}" for number in range(30))), end="")
    lines = console.file.getvalue().split("\n")
    assert len(lines) == 6
    assert lines[4].strip() == "line 29"


# --- in a terminal ----------------------------------------------------------------------------


class Terminal:
    """A program in tmux."""

    def __init__(self, name: str) -> None:
        self._tmux = ["tmux", "-L", name, "-f", "/dev/null"]

    def start(self, *command: str) -> None:
        environment = {**os.environ, "LANG": "C.UTF-8"}
        environment.pop("TMUX", None)
        size = ["-x", "90", "-y", "30"]
        line = shlex.join(command) + "; echo exit code $?; read"
        subprocess.run([*self._tmux, "-u", "new-session", "-d", *size, line],
                       check=True, env=environment)  # fmt: skip

    def type(self, text: str, *keys: str) -> None:
        """A text, and then keys by tmux's names."""
        if text:
            subprocess.run([*self._tmux, "send-keys", "-l", "--", text], check=True)
        if keys:
            subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> str:
        """What can be seen, and what has left at the top."""
        command = [*self._tmux, "capture-pane", "-p", "-S", "-1000"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def wait_for(self, *texts: str) -> str:
        """The screen, when all of these are on it."""
        deadline = time.monotonic() + 30
        while not all(text in (screen := self.screen()) for text in texts):
            assert time.monotonic() < deadline, f"{texts} did not come:\n{screen}"
            time.sleep(0.05)
        return screen

    def end(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt install tmux")
    terminal = Terminal(f"spd-test-{os.getpid()}-{tmp_path.name}")
    yield terminal
    terminal.end()


def test_in_a_terminal(terminal: Terminal, url: str, pipeline: FakePipeline) -> None:
    pipeline.play(text("A **bold", "** word.\n\n", "```py\nx = 1\n", "```\n\n", "- item\n"))
    terminal.start(*SPD_CHAT, "--url", url)
    terminal.wait_for(f"{MODEL} at {url}", "turn 1 | no answers yet")
    terminal.type("first line", "M-Enter")
    terminal.type("second line", "Enter")
    screen = terminal.wait_for("turn 2 | 5 tokens", "50% of the drafts accepted", "• item")
    assert "A bold word." in screen
    assert "x = 1" in screen
    assert "**" not in screen
    assert "```" not in screen
    assert prompts(pipeline) == ["<user>first line\nsecond line"]
    terminal.type("/stats", "Enter")
    terminal.wait_for("1. 5 tokens")
    terminal.type("/quit", "Enter")
    terminal.wait_for("exit code 0")


def test_a_long_answer(terminal: Terminal, url: str, pipeline: FakePipeline) -> None:
    """Longer than the screen: all of it stays, once, and nothing of what was drawn on the way."""
    paragraphs = [f"Paragraph {number}.\n\n" for number in range(20)]
    code = ["```py\n", *(f"line_{number} = 0\n" for number in range(50)), "```\n\n"]
    pipeline.play(text(*paragraphs, *code, "The end."))
    terminal.start(*SPD_CHAT, "--url", url)
    terminal.wait_for("no answers yet")
    terminal.type("go", "Enter")
    lines = [line.strip() for line in terminal.wait_for("turn 2 |").splitlines() if line.strip()]
    shown = lines[lines.index("> go") + 1 : lines.index("The end.") + 1]
    expected = [*(p.strip() for p in paragraphs), *(c.strip() for c in code[1:-1]), "The end."]
    assert shown == expected


def test_ctrl_c_stops_the_answer(terminal: Terminal, url: str, pipeline: FakePipeline) -> None:
    pipeline.play([Delta(0, "begun"), Hang()])
    terminal.start(*SPD_CHAT, "--url", url)
    terminal.wait_for("no answers yet")
    terminal.type("one", "Enter")
    terminal.wait_for("begun")
    assert not pipeline.ended.is_set()
    terminal.type("", "C-c")
    terminal.wait_for("stopped", "turn 2")
    assert pipeline.ended.wait(WAIT_S)
    pipeline.play(text("again"))
    terminal.type("two", "C-c")  # of what is typed, the line alone
    terminal.type("three", "Enter")
    terminal.wait_for("again")
    assert prompts(pipeline) == ["<user>one<assistant>begun<user>three"]
    terminal.type("", "C-d")
    terminal.wait_for("exit code 0")


def test_typing_ahead(terminal: Terminal, url: str, pipeline: FakePipeline) -> None:
    """While an answer comes: it waits, Enter and Ctrl-D too, and is not drawn into the answer."""
    gate, other = Gate(), Gate()
    pipeline.play([Delta(0, "begun"), gate, *text("")], [Delta(0, "again"), other, *text("")])
    terminal.start(*SPD_CHAT, "--url", url)
    terminal.wait_for("no answers yet")
    terminal.type("one", "Enter")
    terminal.wait_for("begun")
    terminal.type("two", "Enter")
    gate.open()
    screen = terminal.wait_for("again")
    assert screen.index("begun") < screen.index("> two")
    assert screen.count("two") == 1
    assert prompts(pipeline)[1] == "<user>one<assistant>begun<user>two"
    terminal.type("", "C-d")
    other.open()
    terminal.wait_for("exit code 0")


def test_a_server_that_is_started_anew(terminal: Terminal) -> None:
    """Errors are one line, and the conversation goes on."""
    pipeline, port = FakePipeline(), free_port()
    with serving(make_api(pipeline), port):
        terminal.start(*SPD_CHAT, "--url", f"http://127.0.0.1:{port}")
        terminal.wait_for("no answers yet")
        gate = Gate()
        pipeline.play([Delta(0, "old"), gate, RuntimeError("x")])
        terminal.type("one", "Enter")
        terminal.wait_for("old")
        gate.open()
        terminal.wait_for("Internal server error.")
    pipeline.play(text("new"))
    terminal.type("two", "Enter")  # nobody is there: it is tried again
    with serving(make_api(pipeline), port):
        screen = terminal.wait_for("new")
    assert "Traceback" not in screen
    assert prompts(pipeline) == ["<user>one<assistant>old<user>two"]
    terminal.type("/quit", "Enter")
    terminal.wait_for("exit code 0")
