"""What a page may ask for in ``<!-- before: … -->``: made once, copied into the page's directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from synthetic_runs import make_columns, make_workplace, write_rows

from loka_onnx.pipeline.run import run


class Prepared:
    """Makes what pages ask for, each thing once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copy(self, name: str, target: Path) -> None:
        """Put one thing into a page's directory."""
        shutil.copytree(self._made(name), target, dirs_exist_ok=True)

    def _made(self, name: str) -> Path:
        place = self.directory / name.replace(" ", "-")
        if not place.is_dir():
            CONTENTS[name](self, place)
        return place

    def _finished_run(self, place: Path) -> None:
        """``ranker.yaml``, its model and rows, the finished run ``runs/ranker``, rows of two later days."""
        work = make_workplace(place)
        # Drift is judged from eight full batches of the profile on.
        work.write_run_file(calibration={"batch_size": 64})
        work.run_file.rename(place / "ranker.yaml")
        run(place / "ranker.yaml")
        for seed, name in enumerate(("today", "day-10"), start=7):
            write_rows(place / f"{name}.parquet", make_columns(seed=seed))

    def _two_finished_runs(self, place: Path) -> None:
        """The run as ``runs/monday`` and ``runs/tuesday``, beside what a finished run has."""
        shutil.copytree(self._made("a finished run"), place)
        for name in ("monday", "tuesday"):
            shutil.copytree(place / "runs" / "ranker", place / "runs" / name)


CONTENTS: dict[str, Callable[[Prepared, Path], None]] = {
    "a finished run": Prepared._finished_run,
    "two finished runs": Prepared._two_finished_runs,
}
