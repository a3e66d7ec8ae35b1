"""The skip policy of tests/conftest.py, on a small suite of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = Path(__file__).parents[2] / "conftest.py"
SUITE = """
import warnings
import pytest

def test_passes(): ...

def test_expected(): pytest.skip("needs a GPU with FP8")

@pytest.mark.xfail
def test_known(): assert False

def test_filtered_warning():
    warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use something else", FutureWarning)
    warnings.warn("# The axis name: batch will not be used, since it shares the same shape", UserWarning)
"""
LATER = 'def test_later(): pytest.skip("later")\n'


def run_suite(
    directory: Path, suite: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, directory)
    (directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (directory / "test_suite.py").write_text(suite)
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST_", "COV_", "LOKA_ONNX_")) and key != "CI"
    }
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=directory, env={**clean, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_an_unexpected_skip_fails_the_run(tmp_path, options):
    result = run_suite(tmp_path, SUITE + LATER, *options, LOKA_ONNX_EXPECT_NO_SKIP="1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "test_suite.py::test_later: later\n" in result.stdout
    assert "::test_expected: " not in result.stdout and "::test_known: " not in result.stdout


def test_expected_skips_pass_and_are_printed(tmp_path):
    result = run_suite(tmp_path, SUITE, LOKA_ONNX_EXPECT_NO_SKIP="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "needs a GPU with FP8" in result.stdout


def test_a_skipped_module_counts(tmp_path):
    suite = 'import pytest\npytest.importorskip("no_such_package")\n'
    result = run_suite(tmp_path, suite, LOKA_ONNX_EXPECT_NO_SKIP="1")
    assert result.returncode == 1
    assert "test_suite.py: could not import 'no_such_package'" in result.stdout
