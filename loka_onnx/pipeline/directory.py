"""The run directory: where stages leave their files, and how a run resumes.

A stage is finished when its record is in `run.json`. The record holds the key of everything that the stage
depends on and the digest of every file that it wrote; a stage is reused only when its key is unchanged and
all of its files are as they were. Interrupted work leaves files without a record, which the next run writes
again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.core.lineage import RunRecord, StageRecord
from loka_onnx.errors import OutputError, UserError

T = TypeVar("T")

RECORD = "run.json"
OWNED = (
    "calibration",
    "data",
    "engines",
    "model",
    "planned",
    "train",
    "bundle",
    "choice.json",
    "engines.json",
    "evaluation.json",
    "plan.json",
    "profile.json",
    "report.html",
    "report.json",
    "report.md",
    "rewrites.json",
    RECORD,
)
"""What a run may leave in its directory, and `--force` may remove."""


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        stage: Name of the stage.
        reused: Whether an earlier result was taken over.
        seconds: Wall time now; 0 when reused.
    """

    stage: str
    reused: bool
    seconds: float


@dataclass
class RunDirectory:
    """A directory that stages write to.

    Attributes:
        path: The directory, absolute.
        record: What `run.json` holds.
        on_stage: Called when a stage begins (with None) and when it ends.
    """

    path: Path
    record: RunRecord
    on_stage: Callable[[str, Outcome | None], None] = field(default=lambda stage, outcome: None)

    @classmethod
    def create(
        cls, path: Path, config: dict[str, Any], versions: dict[str, str], *, force: bool, resume: bool
    ) -> RunDirectory:
        """Open a directory for a run.

        Args:
            path: The directory; created when missing.
            config: The run file as it was understood.
            versions: Versions of the libraries that take part.
            force: Remove what an earlier run left.
            resume: Take over the finished stages of an earlier run.

        Raises:
            OutputError: The directory is not empty and neither was asked for, holds something else than a
                run, or cannot be written.
        """
        path = path.absolute()
        fresh = RunRecord(config, versions, (), path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            left = sorted(entry.name for entry in path.iterdir())
        except OSError as error:
            raise OutputError(f"cannot use the output directory '{path}'", evidence=str(error)) from error
        if not os.access(path, os.W_OK):
            raise OutputError(
                f"the output directory '{path}' is not writable",
                evidence=f"its mode is {path.stat().st_mode & 0o777:o}",
                remedy="choose another directory with --output",
            )
        if left and not (force or resume):
            raise OutputError(
                f"the output directory '{path}' is not empty",
                evidence=f"it holds {', '.join(left[:4])}{' …' if len(left) > 4 else ''}",
                remedy="pass --resume to go on from its last finished stage, or --force to start over",
            )
        if force:
            _clear(path, left)
            return cls(path, fresh)
        if resume and RECORD in left:
            earlier = serde.read(RunRecord, path / RECORD)
            return cls(path, replace(fresh, stages=earlier.stages))
        return cls(path, fresh)

    def stage(self, name: str, key: Any, produce: Callable[[], Sequence[Path]], load: Callable[[], T]) -> T:
        """Run a stage, or take over its earlier result, and load what it left.

        Args:
            name: Name of the stage.
            key: Plain data that the result depends on.
            produce: Does the work and returns the files it wrote, below the run directory.
            load: Reads the result from the files.
        """
        digest = digest_json({"stage": name, "key": key})
        self.on_stage(name, None)
        if self._is_finished(name, digest):
            try:
                value = load()
            except UserError:
                # written by another version of the schema: the stage is run again
                pass
            else:
                self.on_stage(name, Outcome(name, True, 0.0))
                return value
        began = time.perf_counter()
        files = produce()
        seconds = time.perf_counter() - began
        self._note(StageRecord(name, digest, self._parents(name), self._digests(files), seconds))
        self.on_stage(name, Outcome(name, False, seconds))
        return load()

    def relative(self, path: Path) -> Path:
        """The path below the run directory."""
        return path.relative_to(self.path)

    def _is_finished(self, name: str, key: str) -> bool:
        record = next((r for r in self.record.stages if r.stage == name and r.key == key), None)
        if record is None:
            return False
        return all(
            (self.path / file).is_file() and digest_file(self.path / file) == digest
            for file, digest in record.files.items()
        )

    def _digests(self, files: Sequence[Path]) -> dict[str, str]:
        return {self.relative(file).as_posix(): digest_file(file) for file in files}

    def _parents(self, name: str) -> dict[str, str]:
        """Keys of the stages that came before."""
        return {r.stage: r.key for r in self.record.stages if r.stage != name}

    def _note(self, record: StageRecord) -> None:
        others = tuple(r for r in self.record.stages if r.stage != record.stage)
        self.record = replace(self.record, stages=(*others, record))
        serde.write(self.record, self.path / RECORD)


def _clear(path: Path, left: Sequence[str]) -> None:
    """Remove an earlier run; refuse to remove anything else."""
    foreign = [name for name in left if name not in OWNED and not name.startswith(".")]
    if foreign and RECORD not in left:
        raise OutputError(
            f"'{path}' does not look like a run directory",
            evidence=f"it has no {RECORD} and holds {', '.join(foreign[:4])}",
            remedy="choose an empty directory with --output",
        )
    for name in left:
        if name in OWNED:
            target = path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()
