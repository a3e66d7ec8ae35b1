"""Engines are built in the process of the test."""

import pytest
from built_here import build_here


@pytest.fixture(autouse=True)
def built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    build_here(monkeypatch)
