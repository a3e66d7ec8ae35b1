"""Makes `sample_run` importable, and builds one run for all tests."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from sample_run import SampleRun, make_run

from loka_onnx.bundle.registry import names
from loka_onnx.bundle.writer import write_bundle


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def original(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that no test changes."""
    return write_bundle(sample.contents, tmp_path_factory.mktemp("original") / "bundle")


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of a registry are cut into parts of 10,000 bytes."""
    monkeypatch.setattr(names, "PART_BYTES", 10_000)
