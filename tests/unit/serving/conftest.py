"""One bundle with a loaded engine for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_run import SampleRun

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.runtime import Engine, load


@pytest.fixture(scope="session")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(sample.contents, tmp_path_factory.mktemp("served") / "ranker")


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    engine = load(bundle)
    yield engine
    engine.close()
