"""Which engines of ONNX Runtime a bundle may load without vouching for its origin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loka_onnx.core.rewrite import Part
from loka_onnx.engines.onnxruntime import spec
from loka_onnx.runtime import Cause
from loka_onnx.runtime.selection import is_program, obstacle
from loka_onnx.sessions.backends import get_spec
from loka_onnx.sessions.onnx_session import SessionOptions


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of `open_io_binding`."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(spec, "open_io_binding", lambda *arguments: asked.append(arguments))
    return asked


def entry(backend: str, architecture: str) -> Any:
    return SimpleNamespace(backend=backend, architecture=architecture, version="1.31.1", path="engine.onnx")


def open_entry(bundle: Path, entry: Any, options: SessionOptions | None) -> None:
    """As the runtime opens an engine."""
    get_spec(entry.backend).open(bundle / entry.path, entry.architecture, entry.version, options)


def test_a_graph_on_cuda_is_data(opened: list[tuple[Any, ...]], tmp_path: Path) -> None:
    cuda = entry("onnxruntime", "sm90")
    assert not is_program(cuda)
    open_entry(tmp_path, cuda, SessionOptions(threads=3))
    open_entry(tmp_path, cuda, None)
    asked = (tmp_path / "engine.onnx", "onnxruntime", "sm90", "1.31.1")
    assert opened == [(*asked, 3), (*asked, 0)]


@pytest.mark.parametrize(
    ("backend", "architecture"), [("onnxruntime_tensorrt", "sm90"), ("onnxruntime", "gfx942")]
)
def test_what_a_provider_compiled_is_a_program(
    backend: str, architecture: str, opened: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    compiled = entry(backend, architecture)
    found = obstacle(compiled, Part.WHOLE, is_trusted=False)
    assert found is not None and found.cause is Cause.UNTRUSTED
    assert f"engine of {backend} on {architecture} is a program" in found.reason
    assert "`trust=True`" in found.reason
    open_entry(tmp_path, compiled, None)
    assert opened == [(tmp_path / "engine.onnx", backend, architecture, "1.31.1", 0)]
