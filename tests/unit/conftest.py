"""Makes the runs of `report` importable; makes one of them and its bundle for all tests that ask for them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sample_run import SampleRun

sys.path.insert(0, str(Path(__file__).parent / "report"))


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    from sample_run import make_run

    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="session")
def original(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that no test changes."""
    from loka_onnx.bundle.writer import write_bundle

    return write_bundle(sample.contents, tmp_path_factory.mktemp("original") / "bundle")


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundle"))
