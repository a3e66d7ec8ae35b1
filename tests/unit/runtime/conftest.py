"""Makes `sample_run` importable, and builds one run and its bundle for all tests."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("report", "bundle", "sessions"))

from sample_run import SampleRun, make_run

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core.manifest import Manifest


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
