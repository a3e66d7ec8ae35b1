"""What every test shares: thread limits, hypothesis profiles, warning filters, test data, the skip policy.

The skip policy: with `LOKA_ONNX_EXPECT_NO_SKIP=1` (set by CI) the run fails when a test is skipped for any
reason that does not begin with one of `EXPECTED_SKIPS`, because a test that CI never runs guards nothing.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Before NumPy, torch or ONNX Runtime is imported: xdist runs one worker per core, and libraries that each
# take every core slow one another down many times over.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Containers often forbid bytecode. Then each worker rewrites every assert anew, and each process of a test
# compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Helpers of tests in several folders.
sys.path.append(str(Path(__file__).parent / "support"))

# A mod that fails on a model is left out of a user's run; here it is a defect.
os.environ.setdefault("LOKA_ONNX_STRICT_MODS", "1")

# A disk takes milliseconds for each of the thousands of files that tests write, and no test cuts the power.
# A bad descriptor still fails, and child processes still wait for the disk.
os.fsync = os.fstat

# No test reads or leaves anything in the user's own cache; the workers of xdist share one.
if "LOKA_ONNX_CACHE" not in os.environ:
    os.environ["LOKA_ONNX_CACHE"] = tempfile.mkdtemp(prefix="loka-onnx-tests-")
    atexit.register(shutil.rmtree, os.environ["LOKA_ONNX_CACHE"], ignore_errors=True)

EXPECTED_SKIPS = (
    "needs a GPU",
    "needs migraphx",
    # Integer products of a CPU; a host without them declines INT8, which is tested everywhere.
    "needs VNNI",
    # With the space: TensorRT for RTX ("needs tensorrt_rtx") is installed in CI and must run there.
    "needs tensorrt ",
    # 1.6 GB; what it exports is transcribed, and held against it where it is installed.
    "needs tensorflow",
    # Only where `data_root` finds the variable unset; a wrong path is a failure.
    "needs LOKA_ONNX_DATA",
)
# Packages that tests/pythons.sh runs without: it names them, and here it is looked up that they are missing.
EXPECTED_SKIPS += tuple(
    f"needs {name}"
    for name in os.environ.get("LOKA_ONNX_WITHOUT", "").split()
    if importlib.util.find_spec(name) is None
)

# Pytest turns warnings into errors. These come from libraries, say nothing about our use of them, and are
# matched by text so that any other warning of theirs still fails. A filter cannot hold a colon: "." stands
# for it.
THIRD_PARTY_WARNINGS = (
    # torch.export copies its own pytree specs through a deprecated isinstance check.
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    # torch.onnx: two inputs share one dynamic batch axis, which is what we ask for.
    r"ignore:# The axis name. .* will not be used:UserWarning",
)

# Shared machines make deadlines flaky, and a draw that differs from run to run makes a red CI unrepeatable.
_fixed = {"derandomize": True, "database": None} if os.environ.get("CI") else {}
hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, **_fixed)
hypothesis.settings.register_profile("ci", max_examples=100, deadline=None, **_fixed)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "fast")
)


def pytest_configure(config: pytest.Config) -> None:
    """Registers filters and markers, and the skip policy where it is asked for."""
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    config.addinivalue_line(
        "markers", "gpu: needs an accelerator; skips as 'needs a GPU' where there is none"
    )
    # The order is that of `pytest_collection_modifyitems`; xdist would start the file of the demo last.
    config.option.loadscopereorder = False
    if os.environ.get("LOKA_ONNX_EXPECT_NO_SKIP") == "1" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipPolicy(), "loka-onnx-skip-policy")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under xdist, files with most tests of the full tier first, so that short files fill up both workers."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and collected tests stay: the garbage collector looks at them neither here nor in any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    """At exit everything is freed: nanobind prints what is not."""
    gc.unfreeze()


class SkipPolicy:
    """Collects unexpected skips and fails the session; lives in the controller when xdist is used."""

    def __init__(self) -> None:
        self.unexpected: dict[str, str] = {}

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not reason.startswith(EXPECTED_SKIPS):
            self.unexpected[report.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.unexpected and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unexpected:
            return
        terminalreporter.section("unexpected skips: the run fails", red=True)
        for nodeid, reason in sorted(self.unexpected.items()):
            terminalreporter.line(f"{nodeid}: {reason}")
        terminalreporter.line(f"a skip's reason must begin with one of {EXPECTED_SKIPS}")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The directory that holds ``movielens-1m/``; skips where `LOKA_ONNX_DATA` is unset."""
    value = os.environ.get("LOKA_ONNX_DATA")
    if not value:
        pytest.skip("needs LOKA_ONNX_DATA, the directory that holds movielens-1m/")
    root = Path(value)
    if not (root / "movielens-1m").is_dir():
        pytest.fail(f"LOKA_ONNX_DATA is '{value}', which holds no movielens-1m/")
    return root
