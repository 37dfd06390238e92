"""Fixtures of all tests."""

import sys
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness  # noqa: E402


@pytest.fixture(scope="session")
def redis() -> Iterator[harness.Redis]:
    """One Redis for all tests of a run, each with a prefix of its own."""
    server = harness.Redis()
    yield server
    server.close()
