"""Where caches are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_onnx.core.installation import cache_directory


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOKA_ONNX_CACHE": "/fast/cache", "XDG_CACHE_HOME": "/xdg"}, "/fast/cache"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/loka-onnx"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/loka-onnx"),
        ({}, "/home/someone/.cache/loka-onnx"),
    ],
)
def test_the_first_that_is_set_counts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("LOKA_ONNX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
