"""Runs a scenario: blocks of its variants in turns."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from clients import Client, Message
from loadtest.block import Block
from loadtest.openloop import send_open
from loadtest.sample import Sample, read_samples
from loadtest.scenario import Scenario, ScenarioError, planned

ROOT = Path(__file__).parent.parent
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
MOST_S = 1800


def run_scenario(
    scenario: Scenario, prompts: list[list[Message]], url: str, say: Callable[[str], None]
) -> list[Sample]:
    """All samples but those of the warm-up. Raises ScenarioError for what can't be measured, and
    ClientError if the server can't be reached."""
    with Client(url) as client:
        model = client.model()
        for number, messages in enumerate(prompts[: scenario.warm_up]):
            say(f"{scenario.name}: warm-up {number + 1} of {scenario.warm_up}")
            client.chat(messages, max_tokens=scenario.max_tokens, extra=scenario.body)
    samples: list[Sample] = []
    for number, variant in turns(list(scenario.variants), scenario.rounds):
        requests = planned(scenario, prompts, variant, number)
        block = Block(url, model, variant, number, requests, scenario.load.chats)
        found = send_block(block)
        say(f"{scenario.name}: round {number + 1} of {scenario.rounds}, {variant}")
        _check_variant(scenario, variant, found)
        samples += found
    return samples


def turns(variants: list[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and variant of each block; none is always the first of its round."""
    for number in range(rounds):
        at = number % len(variants)
        for variant in variants[at:] + variants[:at]:
            yield number, variant


def send_block(block: Block) -> list[Sample]:
    """Closed loops run in a process of their own: Locust changes the interpreter's sockets."""
    if block.chats is None:
        return asyncio.run(send_open(block))
    if importlib.util.find_spec("locust") is None:
        raise ScenarioError("A closed loop needs Locust: pip install 'spd-serve[loadtest]'")
    with tempfile.TemporaryDirectory() as folder:
        told, result = Path(folder, "block.json"), Path(folder, "samples.jsonl")
        block.write(told)
        command = [sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless"]
        options = ["--users", str(block.chats), "--spawn-rate", str(block.chats)]
        done = subprocess.run(
            [*command, *options, "--loglevel", "WARNING", "--exit-code-on-error", "0"],
            cwd=ROOT,
            env={**os.environ, "SPD_LOAD_BLOCK": str(told), "SPD_LOAD_SAMPLES": str(result)},
            capture_output=True,
            text=True,
            timeout=MOST_S,
        )
        if done.returncode or not result.exists():
            raise ScenarioError(f"Locust failed:\n{(done.stdout + done.stderr)[-2000:]}")
        return sorted(read_samples(result), key=lambda sample: sample.index)


def _check_variant(scenario: Scenario, variant: str, samples: list[Sample]) -> None:
    """A server that does not know the switch would be compared with itself."""
    switched_off = scenario.variants[variant].get("speculation") is False
    if switched_off and any(sample.accepted or sample.rejected for sample in samples):
        raise ScenarioError(
            f"{scenario.name}: the server drafts although `speculation` is false; it does not "
            "know this field"
        )
