"""A minute of the fuzzer, always of the same seed: what is red in CI is red again."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_minute_of_hostile_inputs_finds_nothing() -> None:
    """What it prints names the input: `python -m tests.fuzz --seed 0 --kinds … --only N` shows it again."""
    kinds = "models,rows,run_files,documents"
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "60", "--seed", "0", "--kinds", kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
