"""Makes `sample_run` importable, and builds one run and two deployments for all tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "report"))

from compared_deployments import Place, make_place
from sample_run import SampleRun, make_run


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Do not write into its directories."""
    return make_place(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_run(tmp_path_factory.mktemp("run") / "run")
