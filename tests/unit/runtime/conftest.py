"""Makes `sample_run` importable, and builds one run and its bundle for all tests."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("report", "bundle", "sessions"))

from sample_run import SampleRun, make_run

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import Manifest
from loka_onnx.sessions import onnx_session
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Arrays


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def original(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that no test changes."""
    return write_bundle(sample.contents, tmp_path_factory.mktemp("original") / "bundle")


@pytest.fixture(scope="session")
def manifest(original: Path) -> Manifest:
    return verify_bundle(original)


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


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
