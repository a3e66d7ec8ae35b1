"""Makes `sample_run` importable, and one bundle with a loaded engine for all tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))

from sample_run import make_run

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.runtime import Engine, load


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    return write_bundle(make_run(place / "run").contents, place / "ranker")


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    engine = load(bundle)
    yield engine
    engine.close()
