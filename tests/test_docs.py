"""The documentation: every link leads somewhere, and every command and example could be typed.

Python blocks are run, and so are requests by curl, against the API over a pipeline that follows
scripts. Commands are checked, and not run (`tests/command_rules.py`). A block that needs what tests
have not says so in the line before it (`<!-- needs: GPU -->`).
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from loadtest.scenario import Scenario
from service.config import DEFAULT_MODEL, Settings, parse_settings
from service.settings_page import FILE, page
from tests.api_server import MODEL, make_api, serving
from tests.command_rules import SERVER, Rules
from tests.fake_pipeline import FakePipeline, FakeTokenizer
from tests.markdown import (
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    commands,
    inline_code,
    links,
    simple_commands,
)

BLOCKS = [block for p in PAGES for block in blocks(p)]
NEEDS = {"GPU", "a cluster", "a registry", "Prometheus"}


def of(*languages: str) -> Any:
    found = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", found, ids=str)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    tokenizer = FakeTokenizer()
    with serving(make_api(FakePipeline(), tokenizer=tokenizer, max_len=4096)) as url:
        yield url


# --- commands ---------------------------------------------------------------------------------


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, server: str) -> Rules:
    return Rules(monkeypatch, server)


@of("sh", "console")
def test_commands(block: Block, rules: Rules) -> None:
    for words in commands(block):
        rules.check(words, block.needs)


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_commands_in_the_text(file: Path, rules: Rules) -> None:
    for code in inline_code(file):
        if re.match(r"(make|pip install|python -m|serve run|spd-serve) [\w'.]", code):
            for words in simple_commands(code):
                rules.check(words, None)


@pytest.mark.parametrize(
    "command",
    [
        "spd-train",
        "spd-eval --widths two --prompts x.jsonl",
        "spd-emulate --stages 4",
        "spd-chat --tokens 3",
        "spd-serve deployments/none.yaml",
        "make bnech",
        "make serve CONFIGS=my.yaml",
        "make load LOAD=--uri",
        "python -m benchmarks.chat --rounds 1.5",
        "python -m benchmarks.none",
        "python -c import",
        "pip install -e '.[all]'",
        "kubectl kustomize k8s/overlays/none",
        "kubectl get pods",
        f"curl {SERVER}/v1/chat",
        f"curl {SERVER}/v1/completions -d '{{\"n\": 2}}'",
        f"curl {SERVER}/version -d '{{\"temprature\": 2}}'",
        "spd-eval --prompts x.jsonl --replay gold.json",
        "spd-emulate --widths 2,4 --stage-ms 3",
        "ollama run x",
    ],
)
def test_wrong_commands_are_found(command: str, rules: Rules) -> None:
    with pytest.raises((AssertionError, SystemExit, OSError, ImportError, SyntaxError, ValueError)):
        rules.check(next(simple_commands(command)), None)


# --- other blocks -----------------------------------------------------------------------------


def test_every_block_has_a_language_and_a_known_need() -> None:
    known = {"sh", "console", "python", "yaml", "json", "promql", "text"}
    assert [str(b) for b in BLOCKS if b.language not in known] == []
    assert {b.needs for b in BLOCKS} - {None} <= NEEDS


@of("python")
def test_python(block: Block, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs it. A text behind it is what it prints."""
    code = block.text.replace(SERVER, server).replace(DEFAULT_MODEL, MODEL)
    exec(compile(code, str(block), "exec"), {"__name__": "__main__"})
    printed, behind = capsys.readouterr().out, BLOCKS[BLOCKS.index(block) + 1 :]
    if behind and behind[0].language == "text" and behind[0].line == block.end + 2:
        assert printed.strip() == behind[0].text


@of("json")
def test_json(block: Block) -> None:
    json.loads(block.text.replace("[…]", "[]"))


@of("promql")
def test_promql(block: Block) -> None:
    promql_parser.parse(block.text)


def manifests() -> Iterator[dict[str, Any]]:
    for file in (ROOT / "k8s").rglob("*.yaml"):
        yield from (m for m in yaml.safe_load_all(file.read_text()) if isinstance(m, dict))


@of("yaml")
def test_yaml(block: Block) -> None:
    found = yaml.safe_load(block.text)
    if "loop" in found.get("load", {}):
        Scenario.model_validate(found)
    elif found.get("kind") == "Kustomization":
        for path in [*found["resources"], *found["components"]]:
            assert (ROOT / "k8s/overlays" / path.removeprefix("../")).exists()
    elif "patches" in found:
        named = {(m.get("kind"), m.get("metadata", {}).get("name")) for m in manifests()}
        assert {(p["target"]["kind"], p["target"]["name"]) for p in found["patches"]} <= named
    elif "applications" in found:
        for application in found["applications"]:
            parse_settings(application["args"])
    elif found.keys() <= Settings.model_fields.keys():
        parse_settings(found)
    else:
        assert block.needs, f"{block}: these are no settings: {sorted(found)}"


# --- pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", PAGES, ids=str)
def test_links(file: Path) -> None:
    for link in links(file):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (ROOT / file.parent / path).resolve() if path else ROOT / file
        assert target.exists(), f"{file}: there is no {link}"
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT)), f"{file}: there is no {link}"


def test_the_index_has_every_page() -> None:
    listed = {(ROOT / "docs" / link).resolve() for link in links(Path("docs/README.md"))}
    written = {file.resolve() for file in (ROOT / "docs").glob("*.md")}
    assert written - listed == {(ROOT / "docs/README.md").resolve()}


def test_settings_page() -> None:
    assert FILE.read_text() == page(), "run: python -m service.settings_page"
