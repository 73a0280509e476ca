"""What is sent: scenarios as YAML, and the requests that a seed makes of them."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clients import Message

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Of long prompts: common words, which cost a token each.
WORDS = ("time", "year", "people", "way", "day", "thing", "world", "life", "hand", "part", "place")


class ScenarioError(ValueError):
    """A scenario that can't be run; the message says why."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Load(_Section):
    """How requests follow each other. `closed`: each of `chats` sends the next request when its
    last one has ended. `open`: requests come at `per_second` by chance, whatever has ended."""

    loop: Literal["closed", "open"]
    requests: int = Field(ge=1)
    chats: int | None = Field(None, ge=1)
    per_second: Positive | None = None

    @model_validator(mode="after")
    def _fits_the_loop(self) -> Self:
        needed, other = "chats", "per_second"
        if self.loop == "open":
            needed, other = other, needed
        if getattr(self, needed) is None or getattr(self, other) is not None:
            raise ValueError(f"loop: {self.loop} needs `{needed}`, and no `{other}`")
        return self


class Aborts(_Section):
    """A share of the requests whose clients go after so many pieces of text."""

    share: float = Field(gt=0, le=1)
    after: int = Field(ge=1)


class Goal(_Section):
    """What counts as good: the first token and each further one in time."""

    first_token_ms: Positive
    per_token_ms: Positive


class Scenario(_Section):
    """One scenario: `variants` are sets of fields that requests have besides; they take turns in
    `rounds`, so that what a busy machine takes, it takes from all of them."""

    name: str = Field(pattern="^[a-z0-9-]+$")
    about: str
    load: Load
    prompts: str = Field(description="JSONL of `messages`, beside the scenario.")
    long_words: int = Field(0, ge=0, description="Words before each prompt, other ones each time.")
    max_tokens: int = Field(ge=1)
    body: dict[str, Any] = {}
    variants: dict[str, dict[str, Any]] = Field({"as served": {}}, min_length=1)
    rounds: int = Field(1, ge=1)
    warm_up: int = Field(2, ge=0, description="Requests before the first round, not counted.")
    aborts: Aborts | None = None
    goal: Goal
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of a block. `at_s`: seconds from its beginning; 0 in closed loops. `abort_after`
    so many pieces of text; None: never."""

    index: int
    at_s: float
    messages: Sequence[Message]
    fields: Mapping[str, Any]
    abort_after: int | None = None


def read_scenario(file: Path) -> tuple[Scenario, list[list[Message]]]:
    """A scenario and its prompts. Raises ScenarioError naming each field that is wrong."""
    try:
        scenario = Scenario.model_validate(yaml.safe_load(file.read_text()))
        text = (file.parent / scenario.prompts).read_text()
        prompts = [json.loads(line)["messages"] for line in text.splitlines() if line]
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ScenarioError(f"{file} can't be used:\n" + "\n".join(lines)) from None
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{file} can't be used: {error}") from error
    if not prompts:
        raise ScenarioError(f"{file}: {scenario.prompts} has no prompts")
    return scenario, prompts


def planned(
    scenario: Scenario, prompts: Sequence[list[Message]], variant: str, number: int
) -> list[Planned]:
    """The requests of one block: `variant` in round `number`. All variants get the same ones, and
    the prompts go on in the next round where they ended in the last."""
    chance = random.Random(f"{scenario.seed} {number}")
    fields = {**scenario.body, **scenario.variants[variant], "max_tokens": scenario.max_tokens}
    found = []
    at_s = 0.0
    for index in range(scenario.load.requests):
        if scenario.load.per_second is not None:
            at_s += chance.expovariate(scenario.load.per_second)
        messages = prompts[(number * scenario.load.requests + index) % len(prompts)]
        aborts = scenario.aborts
        leaves = aborts is not None and chance.random() < aborts.share
        found.append(
            Planned(
                index,
                at_s,
                _longer(messages, scenario.long_words, chance),
                fields,
                aborts.after if aborts and leaves else None,
            )
        )
    return found


def _longer(messages: list[Message], words: int, chance: random.Random) -> list[Message]:
    """With so many words before the last turn."""
    if not words:
        return messages
    *before, last = messages
    text = " ".join(chance.choices(WORDS, k=words))
    return [*before, {**last, "content": f"{text}\n\n{last.get('content')}"}]
