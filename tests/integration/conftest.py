"""A workplace for each test, one finished run for those that only look, and copies of it for others."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from built_here import build_here
from synthetic_runs import Command, Workplace, call, make_workplace

from loka_onnx.pipeline.run import RunResult, run


@pytest.fixture(autouse=True, scope="module")
def built_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children build `finished` and what runs in processes of its own, and where a module says so."""
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(request.module, "BUILT_BY_CHILDREN"):
            build_here(patch)
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process."""
    return partial(call, capsys)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path / "work")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Do not write into its directory."""
    return run(make_workplace(tmp_path_factory.mktemp("finished")).run_file)


@pytest.fixture
def copied(finished: RunResult, tmp_path: Path) -> Workplace:
    """The finished run, to write into and to go on with."""
    return Workplace(Path(shutil.copytree(finished.directory.parents[1], tmp_path / "copied")))
