"""Makes `run_files` importable, and writes a run file beside what it names."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "config"))

from run_files import FILES, RUN_FILE


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).touch()
    path = tmp_path / "ranker-fp8.yaml"
    path.write_text(RUN_FILE)
    return path
