"""The run directory: files of the stages, and resuming.

A stage is finished when its record is in `run.json`. The record holds the key of everything that the stage
depends on and the digest of every file that it wrote; a stage is reused only when its key is unchanged and
all of its files are as they were. Interrupted work leaves files without a record, which the next run writes
again.

`run.json` is written before anything else, so that a directory without one is never taken for a run. Until a
run has accepted its inputs (`undone_on_error`) it can be taken back as a whole; `--force` sets the earlier
run aside that long. All of this is one process's: the directory is locked for the life of the run.

The lock is an flock on a hidden file: it ends with the process, however that ends, so that a run that was
killed can be resumed at once. The file is removed by whoever holds the lock. It is a file of its own because
the bundle is moved into place under an flock on the directory itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast, get_type_hints

from pydantic import BaseModel

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.core.lineage import RunRecord, StageRecord
from loka_onnx.core.rewrite import ModelSplit
from loka_onnx.data import Dataset
from loka_onnx.errors import CheckFailed, OutputError, UserError
from loka_onnx.graph.storage import model_files

T = TypeVar("T")

RECORD = "run.json"
RUN_FILE = "RUN.yaml"
"""The run file that the demo writes."""
_DIRECTORIES = ("bundle", "calibration", "data", "engines", "jobs", "model", "planned", "train")
_DOCUMENTS = (
    "attempt-2 attempt-3 choice corrections engines evaluation ladder plan profile refined refinement "
    "refresh report rewrites throughput"
)
OWNED = (
    RUN_FILE,
    *_DIRECTORIES,
    *(f"{name}.json" for name in _DOCUMENTS.split()),
    "report.html",
    "report.md",
    RECORD,
)
"""Files of a run, which `--force` may remove; the record last."""
EARLIER, DISCARDED = ".earlier-run", ".discarded-run"
"""Directories for the earlier run: until the inputs are accepted, and during its deletion."""
LOCK = ".run.lock"
"""The file that is locked; a run that was killed leaves it behind."""


@dataclass(frozen=True)
class DocumentStage(Generic[T]):
    """A stage whose result is a document, or a dataclass of documents (a mapping has the path of each)."""

    name: str
    document: str | Mapping[str, str]
    kind: type[T]

    def write(self, value: T, root: Path) -> list[Path]:
        """Write the documents of a result; return them, and the files of models that they describe."""
        parts = {"": self.document} if isinstance(self.document, str) else self.document
        files = []
        for name, place in parts.items():
            part = getattr(value, name) if name else value
            serde.write(
                _moved(part, lambda model: replace(model, path=model.path.relative_to(root))), root / place
            )
            files += [root / place, *(file for model in _models(part) for file in model_files(model.path))]
        return files

    def read(self, root: Path) -> T:
        """Read the documents of a result; a `UserError` where one is missing or of another version."""

        def load(kind: Any, place: str) -> Any:
            return _moved(serde.read(kind, root / place), lambda model: model.placed(root))

        if isinstance(self.document, str):
            return cast(T, load(self.kind, self.document))
        kinds = get_type_hints(self.kind)
        return self.kind(**{name: load(kinds[name], place) for name, place in self.document.items()})


def _models(value: Any) -> tuple[ModelArtifact, ...]:
    if isinstance(value, ModelArtifact):
        return (value,)
    if isinstance(value, ModelSplit) and value.halves is not None:
        return (value.halves.lookup, value.halves.dense)
    return ()


def _moved(value: Any, move: Callable[[ModelArtifact], ModelArtifact]) -> Any:
    """Return a document with its models moved."""
    if isinstance(value, ModelArtifact):
        return move(value)
    if isinstance(value, ModelSplit) and value.halves is not None:
        lookup, dense = map(move, _models(value))
        return replace(value, halves=replace(value.halves, lookup=lookup, dense=dense))
    return value


def keyed(value: Any) -> Any:
    """Plain data that identifies an input of a stage: models and data by digest, documents as written."""
    if isinstance(value, ModelArtifact | Dataset):
        return value.digest
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: keyed(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [keyed(item) for item in value]
    return serde.to_plain(value) if is_dataclass(value) else value


MOST_READ, MOST_TOLD = 100, 3
"""Parts of an input that are told apart, and changes that are listed."""
DIGEST = "sha256:"
_DIGESTS = re.compile(rf"{DIGEST}|\b[0-9a-f]{{64}}\b")


def readable(value: Any, name: str = "") -> dict[str, str]:
    """The parts of an input by dotted name: plain values as JSON, one digest for larger ones and others."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    parts = {name: DIGEST + digest_json(keyed(value))[:12]}
    if isinstance(plain, str | int | float | bool | None):
        return {name: json.dumps(plain)}
    if not isinstance(plain, Mapping | tuple | list):
        return parts
    items = plain.items() if isinstance(plain, Mapping) else enumerate(plain)
    texts: dict[str, str] = {}
    for key, item in items:
        place = f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}".lstrip(".")
        texts |= readable(item, place)
        if len(texts) > MOST_READ:
            return parts if name else texts
    return texts


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Changes in the inputs of a stage, as of ``outputs[0].budget: 0.0002 → 0.001``."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    told = []
    for name in names[:MOST_TOLD]:
        was, is_now = before.get(name, "none"), now.get(name, "none")
        told.append(name if _DIGESTS.search(f"{was} {is_now}") else f"{name}: {was} → {is_now}")
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return ", ".join(told) + more


@dataclass(frozen=True)
class StageOutcome:
    """Outcome of a stage: an earlier result was taken over, or why not, and the wall time."""

    stage: str
    reused: bool
    seconds: float
    because: str = ""


@dataclass
class RunDirectory:
    """A directory that stages write to; locked until the end of its `with` block.

    `on_stage` is called when a stage begins (with None) and when it ends. Nothing of an earlier run is taken
    over where it `is_fresh`; `made` is the outermost directory that was created for this run.
    """

    path: Path
    record: RunRecord
    on_stage: Callable[[str, StageOutcome | None], None] = field(default=lambda stage, outcome: None)
    is_fresh: bool = False
    made: Path | None = None
    _last: str | None = field(default=None, init=False, repr=False)
    _lock: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    @classmethod
    def create(
        cls, path: Path, config: dict[str, Any], versions: dict[str, str], *, force: bool, resume: bool
    ) -> RunDirectory:
        """Open and lock a directory for a run; with `force`, what an earlier run left is removed later.

        Raises OutputError if another run is at work in the directory, it is not empty and neither was asked
        for, it holds something else than a run, or cannot be written.
        """
        path = path.absolute()
        fresh = RunRecord(config, versions, (), path)
        missing = [place for place in (path, *path.parents) if not place.exists()]
        unusable = OutputError(
            f"E1501 cannot use the output directory '{path}'", remedy="choose another directory with --output"
        )
        with ExitStack() as held, unusable.in_place_of(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise OutputError(
                    f"E1503 the output directory '{path}' is not writable",
                    evidence=f"its mode is {path.stat().st_mode & 0o777:o}",
                    remedy="choose another directory with --output",
                )
            refuse_links(path)
            # Before anything is looked at: a run at work may have set things aside for a moment.
            held.enter_context(locked(path))
            _restore(path)
            entries = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
            _check_usable(path, entries, may_hold_run=force or resume)
            if resume and not force and RECORD in entries:
                earlier = serde.read(RunRecord, path / RECORD)
                opened = cls(path, replace(fresh, stages=earlier.stages, reads=earlier.reads))
            else:
                _set_aside(path)
                serde.write(fresh, path / RECORD)
                opened = cls(path, fresh, is_fresh=True, made=missing[-1] if missing else None)
            opened._lock = held.pop_all()
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Take back what a fresh run left if the block, which reads the user's inputs, fails."""
        try:
            yield
        except BaseException:
            if self.is_fresh:
                with suppress(OSError):
                    _remove_owned(self.path, OWNED)
                    _restore(self.path)
                    self._lock.close()
                    if self.made is not None:
                        for directory in (self.path, *self.path.parents):
                            directory.rmdir()
                            if directory == self.made:
                                break
            raise
        if self.is_fresh and (self.path / EARLIER).exists():
            # A rename first, so that half of it is never restored.
            (self.path / EARLIER).rename(self.path / DISCARDED)
            shutil.rmtree(self.path / DISCARDED)

    @contextmanager
    def watched(self, name: str) -> Iterator[None]:
        """Report work that is always done, and never taken over, as a stage."""
        self.on_stage(name, None)
        began = time.perf_counter()
        yield
        self.on_stage(name, StageOutcome(name, False, time.perf_counter() - began))

    def stage(
        self,
        name: str,
        reads: Any,
        produce: Callable[[], Iterable[Path]],
        load: Callable[[], T],
        *,
        again: bool | Callable[[T], bool] = False,
    ) -> T:
        """Run a stage, or take over its earlier result, and load it.

        `reads` are inputs and settings that the result depends on (`keyed`). `produce` does the work and
        returns the files it wrote. `again` repeats finished work: always, or if it holds of the result.
        """
        key = digest_json({"stage": name, "key": keyed(reads), "versions": self.record.versions})
        parts = {**readable(reads), **readable(self.record.versions, "versions")}
        before = self.record.reads.get(name, parts)
        because = changes(before, parts)
        self.on_stage(name, None)
        own = next((r for r in self.record.stages if r.stage == name and r.key == key), None)
        if (again is not True and own is not None) and all(
            (self.path / file).is_file() and digest_file(self.path / file) == digest
            for file, digest in own.files.items()
        ):
            because = "more can be measured now"
            try:
                value = load()
            except (UserError, CheckFailed):
                # written by another version of the schema, or a bundle with a file too many: run again
                because = "its files are of another version"
            else:
                if not again or not again(value):
                    self._last = name
                    self.on_stage(name, StageOutcome(name, True, 0.0))
                    return value
        began = time.perf_counter()
        files = {file.relative_to(self.path).as_posix(): digest_file(file) for file in produce()}
        seconds = time.perf_counter() - began
        parents = {record.stage: digest_json(record.files) for record in self.before(name)}
        place, others = self._place(name), [r for r in self.record.stages if r.stage != name]
        record = StageRecord(name, key, parents, files, seconds)
        self.record = replace(self.record, reads={**self.record.reads, name: parts})
        self._write((*others[:place], record, *others[place:]))
        self._last = name
        self.on_stage(name, StageOutcome(name, False, seconds, because))
        return load()

    def document(
        self,
        stage: DocumentStage[T],
        reads: Mapping[str, Any],
        make: Callable[[], T],
        files: Callable[[list[Path]], Iterable[Path]] = list,
        *,
        again: bool | Callable[[T], bool] = False,
    ) -> T:
        """Run a stage that leaves documents, or take them over; `files` adds to those of its `write`."""
        return self.stage(
            stage.name,
            reads,
            lambda: files(stage.write(make(), self.path)),
            lambda: stage.read(self.path),
            again=again,
        )

    def forget(self, name: str) -> None:
        """Remove the record and the files of a stage that the run file does not ask for any more."""
        for record in self.record.stages:
            if record.stage == name:
                for file in record.files:
                    # A directory of that name, or a file in the place of one on the way, is not the stage's.
                    with suppress(IsADirectoryError, NotADirectoryError):
                        (self.path / file).unlink(missing_ok=True)
                reads = {stage: parts for stage, parts in self.record.reads.items() if stage != name}
                self.record = replace(self.record, reads=reads)
                self._write(tuple(other for other in self.record.stages if other is not record))

    def before(self, name: str) -> tuple[StageRecord, ...]:
        """Records of the stages that come before one."""
        return self.record.stages[: self._place(name)]

    def _place(self, name: str) -> int:
        """Position of a stage in the record: its own, or behind the stage that it follows in this run."""
        names = [record.stage for record in self.record.stages]
        if name in names:
            return names.index(name)
        return names.index(self._last) + 1 if self._last in names else len(names)

    def _write(self, stages: tuple[StageRecord, ...]) -> None:
        self.record = replace(self.record, stages=stages)
        serde.write(self.record, self.path / RECORD)


def refuse_links(directory: Path) -> None:
    """Raise OutputError for a link in a run directory that leads out of it.

    Paths in documents stay inside as text (`core.serde.InsidePath`). The directory itself may be a link.
    """
    home = Path(os.path.realpath(directory))
    for top in (*OWNED, EARLIER, DISCARDED):
        # `os.walk` of a file yields nothing, and follows no link but the first.
        below = () if (home / top).is_symlink() else os.walk(home / top)
        inside = (Path(at) / name for at, names, files in below for name in (*names, *files))
        for entry in chain((home / top,), inside):
            # `Path.resolve` raises for a circle of links.
            if entry.is_symlink() and not Path(os.path.realpath(entry)).is_relative_to(home):
                raise OutputError(
                    f"E1502 the run directory '{directory}' holds a link that leads out of it",
                    where=entry.relative_to(home).as_posix(),
                    evidence=f"it leads to '{entry.readlink()}'",
                    remedy="remove the link, or put what it leads to in its place; to keep runs elsewhere, "
                    "let `output` name that place",
                )


def _check_usable(path: Path, entries: Sequence[str], *, may_hold_run: bool) -> None:
    """Refuse a directory that must not be written to: nothing that is not a run is ever touched."""
    if not entries:
        return
    holds = f"it holds {', '.join(entries[:4])}{' …' if len(entries) > 4 else ''}"
    if not _is_run(path):
        raise OutputError(
            f"E1504 the output directory '{path}' is not empty and not a run directory",
            evidence=f"{holds}, and no {RECORD} of a run",
            remedy="choose an empty directory with --output",
        )
    if not may_hold_run:
        raise OutputError(
            f"E1505 the output directory '{path}' is not empty",
            evidence=holds,
            remedy="pass --resume to go on from its last finished stage, or --force to start over",
        )


def _is_run(path: Path) -> bool:
    """Return True if a run wrote the directory, in any version of the record."""
    try:
        document = json.loads(serde.read_text(path / RECORD))
    except (OSError, ValueError, RecursionError):
        return False
    kind = serde.schema_id(RunRecord).rpartition("/")[0]
    return isinstance(document, dict) and str(document.get("schema", "")).startswith(f"{kind}/")


def _set_aside(path: Path) -> None:
    """Move an earlier run out of the way. Its record goes last and comes back last."""
    for name in OWNED:
        if (path / name).exists():
            (path / EARLIER).mkdir(exist_ok=True)
            (path / name).rename(path / EARLIER / name)


def _restore(path: Path) -> None:
    """Bring back the earlier run, whether this process set it aside or one that was killed did."""
    _remove_owned(path, [DISCARDED])
    if not (path / EARLIER).exists():
        return
    back = [name for name in OWNED if (path / EARLIER / name).exists()]
    _remove_owned(path, back)
    for name in back:
        (path / EARLIER / name).rename(path / name)
    (path / EARLIER).rmdir()


def _remove_owned(path: Path, names: Sequence[str]) -> None:
    for name in names:
        target = path / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock on a run directory; an OutputError where a run in any process holds it."""
    file = directory / LOCK
    descriptor = _acquire(file)
    try:
        yield
    finally:
        # Removed while locked: a waiting process sees that its open file has lost the name.
        with suppress(OSError):
            file.unlink()
        os.close(descriptor)


def _acquire(file: Path) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last run may have removed the file.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), file.stat()):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on '{socket.gethostname()}'".encode())
                    return descriptor
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise OutputError(
                f"E1519 the output directory '{file.parent}' is in use by another run",
                evidence=f"{holder} holds the lock on '{file.name}'",
                remedy="wait until that run has ended, or choose another directory with --output",
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
