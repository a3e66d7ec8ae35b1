"""Registries with small parts."""

import pytest

from loka_onnx.bundle.registry import names


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of a registry are cut into parts of 10,000 bytes."""
    monkeypatch.setattr(names, "PART_BYTES", 10_000)
