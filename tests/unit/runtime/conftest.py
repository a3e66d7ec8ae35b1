"""The manifest of the bundle of all tests, and what ONNX Runtime opens and runs of it."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bundle", "sessions"))

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.core.manifest import Manifest
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Arrays


@pytest.fixture(scope="session")
def manifest(original: Path) -> Manifest:
    return verify_bundle(original)


class Sessions:
    """Models that ONNX Runtime opened, and rows of each batch that it ran."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.ran: list[int] = []
        self.failing: tuple[int, str, type[Exception]] = (-1, "", Exception)

    def fail_at(self, rows: int, folder: str, error: type[Exception]) -> None:
        """Engines whose directory's name ends so fail on batches of so many rows."""
        self.failing = (rows, folder, error)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    seen = Sessions()

    class Watched(OnnxSession):
        def __init__(self, path: Path, *arguments: Any) -> None:
            super().__init__(path, *arguments)
            seen.opened.append(path.name)
            self.folder = path.parent.name

        def run(self, inputs: Any, *arguments: Any) -> Arrays:
            count, (rows, folder, error) = len(next(iter(inputs.values()))), seen.failing
            seen.ran.append(count)
            if count == rows and self.folder.endswith(folder):
                raise error(f"no memory for {rows} rows")
            return super().run(inputs, *arguments)

    monkeypatch.setattr(onnx_session, "OnnxSession", Watched)
    return seen
