"""What a run directory keeps of the run before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_onnx.pipeline.directory import RunDirectory


def begun(place: Path, text: str) -> None:
    with (
        RunDirectory.create(place, {}, {}, force=True, resume=False) as directory,
        directory.undone_on_error(),
    ):
        (directory.path / "plan.json").write_text(text)
        if text == "broken":
            raise KeyboardInterrupt


def test_a_run_that_is_accepted_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    begun(tmp_path / "run", "first")
    begun(tmp_path / "run", "second")
    files = {path.name: path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files["plan.json"].read_text() == "second"
    assert not [path for path in (tmp_path / "run").iterdir() if path.is_dir()], "no earlier run beside it"


def test_a_run_that_is_not_gives_the_one_before_back(tmp_path: Path) -> None:
    begun(tmp_path / "run", "first")
    with pytest.raises(KeyboardInterrupt):
        begun(tmp_path / "run", "broken")
    assert (tmp_path / "run" / "plan.json").read_text() == "first"
