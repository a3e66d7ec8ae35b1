"""Makes the runs of `report` importable, and builds one for all tests that ask for it."""

from __future__ import annotations

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
