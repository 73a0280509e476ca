"""What is asked of each command in the documentation. None is run, but requests are sent.

The arguments of the project's own commands are parsed by their own parsers; deployments that are
named are read; targets and variables of make, extras of pip and paths exist. Of other programs only
the paths are checked: they may stand in marked blocks alone.
"""

import argparse
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.api.protocol import ChatBody, CompletionBody
from service.config import DEFAULT_MODEL, parse_settings
from service.emulation.cli import make_setups
from service.evaluation.configuration import Options, configurations
from tests.api_server import MODEL
from tests.markdown import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
SERVER = "http://127.0.0.1:8000"
FIELDS = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
HARMLESS = {".", "cd", "cp", "echo", "pytest"}
FORWARDED = {"BENCH": "benchmarks.chat", "LOAD": "loadtest"}  # make's variables that are arguments
# What is asked of arguments beyond their parser, without running the command.
FURTHER: dict[str, Callable[[argparse.Namespace], object]] = {
    "spd-emulate": make_setups,
    "spd-eval": lambda options: configurations(Options(**vars(options))),
}


def exists(word: str) -> bool:
    """Whether what begins with a folder of the project is there; `mine` and `my-..` are the
    reader's."""
    first, slash, _ = word.partition("/")
    mine = re.match(r"mine$|my\b", word.rsplit("/", 1)[-1])
    return not slash or first not in FOLDERS or mine is not None or (ROOT / word).exists()


class ParsedError(Exception):
    """The arguments are right; the command goes no further."""


class Rules:
    """What is asked of a command, by its program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
        self._monkeypatch, self._server = monkeypatch, server
        self._by_program: dict[str, Callable[[list[str]], None]] = {
            **dict.fromkeys(PROJECT["scripts"], self._entry_point),
            "curl": self._curl,
            "make": self._make,
            "pip": self._pip,
            "python": self._python,
            "serve": lambda words: self._deployment(words[2]),
            "spd-serve": lambda words: self._deployment(words[1]),
        }

    def check(self, words: list[str], needs: str | None) -> None:
        """`needs`: the mark of the command's block."""
        program = words[0].removeprefix(".venv/bin/")
        if words[:2] != ["kubectl", "port-forward"]:  # of service/NAME
            for word in words[1:]:
                assert exists(word), f"there is no {word}"
        if program in self._by_program:
            self._by_program[program]([program, *words[1:]])
        else:
            free = program in HARMLESS or words[:2] == ["kubectl", "kustomize"]
            assert needs or free, f"no rule and no mark for: {' '.join(words)}"

    def _entry_point(self, words: list[str]) -> None:
        module, function = PROJECT["scripts"][words[0]].split(":")
        self._parse(getattr(importlib.import_module(module), function), words)

    def _parse(self, main: Callable[[], object], words: list[str]) -> None:
        """Runs a command up to where its arguments are parsed."""
        parse = argparse.ArgumentParser.parse_args

        def parse_and_stop(*how: Any) -> None:
            raise ParsedError(parse(*how))

        helps = "--help" in words
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", words)
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
            with pytest.raises(SystemExit if helps else ParsedError) as found:
                main()
        if helps:
            assert found.value.args == (0,)
        elif further := FURTHER.get(words[0]):
            further(found.value.args[0])

    def _python(self, words: list[str]) -> None:
        flag, what, *rest = words[1:]
        if flag == "-c":
            compile(what, "<docs>", "exec")
        elif what in ("service.launch", "service.preflight"):
            self._deployment(*rest)
        elif what == "service.settings_page":
            assert not rest
        else:
            assert flag == "-m"
            command = ROOT.joinpath(*what.split("."))
            module = f"{what}.__main__" if command.is_dir() else what
            self._parse(importlib.import_module(module).main, [what, *rest])

    def _deployment(self, file: str) -> None:
        if not Path(file).name.startswith("my"):
            for application in yaml.safe_load((ROOT / file).read_text())["applications"]:
                parse_settings(application["args"])

    def _make(self, words: list[str]) -> None:
        for word in words[1:]:
            name, given, value = word.partition("=")
            known = rf"^(export )?{name} \?=|\$\({name}\)" if given else rf"^{name}:"
            assert re.search(known, MAKEFILE, re.M), f"the Makefile has no {name}"
            if name in FORWARDED:
                self.check(["python", "-m", FORWARDED[name], *value.split()], None)
            if name == "CONFIG":
                self._deployment(value)

    def _pip(self, words: list[str]) -> None:
        named = re.fullmatch(r"(?:\.|spd-serve)\[([\w,]+)\]", words[-1])
        assert named, f"{words[-1]} is not of this project"
        assert set(named[1].split(",")) <= PROJECT["optional-dependencies"].keys()

    def _curl(self, words: list[str]) -> None:
        parser = argparse.ArgumentParser()
        for flag in ("-s", "-N"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("-d", dest="body")
        parser.add_argument("-H", dest="headers", action="append", default=[])
        parser.add_argument("url")
        options = parser.parse_args(words[1:])
        headers = dict(header.split(": ") for header in options.headers)
        method = "GET" if options.body is None else "POST"
        body = options.body and options.body.replace(DEFAULT_MODEL, MODEL)
        assert json.loads(body or "{}").keys() <= FIELDS, "the API ignores unknown fields"
        url = options.url.replace(SERVER, self._server)
        assert httpx.request(method, url, content=body, headers=headers).status_code == 200
