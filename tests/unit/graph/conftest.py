"""Models written in ONNX's text form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from loka_onnx.graph import storage

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def every_table_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests have some hundred bytes; the limit has a test of its own."""
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)


@pytest.fixture
def write_model(tmp_path: Path) -> Write:
    """A function that writes ``agraph (…) => (…) {…}`` with the given initializers; returns the path."""

    def write(
        text: str, weights: dict[str, Any] | None = None, opset: int = 21, name: str = "model.onnx"
    ) -> Path:
        header = f'<ir_version: 10, opset_import: ["" : {opset}]>'
        model = onnx.parser.parse_model(f"{header}\n{text}")
        for key, values in (weights or {}).items():
            array = np.ones(values, np.float32) if isinstance(values, tuple) else values
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), key))
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        return path

    return write
