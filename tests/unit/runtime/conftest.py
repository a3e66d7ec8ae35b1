"""Makes `sample_run` importable, and builds one run for all tests."""

import sys
from pathlib import Path

import pytest

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("report", "bundle", "sessions"))

from sample_run import SampleRun, make_run


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("run") / "run")
