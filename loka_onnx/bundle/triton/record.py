"""`loka-onnx.json` of a Triton repository: files that were written, and whether something else is there."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.serde import STRICT
from loka_onnx.engines.triton.models import VERSION
from loka_onnx.errors import LokaError

RECORD_NAME = "loka-onnx.json"
"""File of a repository that says what this project wrote into it."""
BYTE_CODE = "__pycache__"
"""Directory that Python writes beside the models of the Python backend when a server runs them."""


@dataclass(frozen=True)
class RepositoryModel:
    """A model that clients call with the bundle's own inputs.

    `backend` is Triton's name; `runs` are the models that it consists of, itself alone unless it is an
    ensemble; `remarks` say what Triton does otherwise than `load`, and what the host must have.
    """

    __pydantic_config__ = STRICT

    name: str
    engine: str
    backend: str
    runs: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeclinedEngine:
    """An engine of the bundle that is not in the repository, and why."""

    __pydantic_config__ = STRICT

    engine: str
    reason: str


@dataclass(frozen=True)
class RepositoryFile:
    """A file that was written; its path is relative to the repository, with ``/``."""

    __pydantic_config__ = STRICT

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TritonRepository:
    """A repository that was written (`loka-onnx.json`).

    Attributes:
        bundle: SHA-256 of the manifest of the bundle that it was made from.
        model: Digest of the exported model.
        name: The model that clients call.
        preferred: Id of the engine behind it.
        models: Models that take the bundle's own inputs, the preferred first.
        directories: The directory of every model, sorted.
        files: Every file but this document, by its path.
        remarks: What holds for the repository as a whole.
    """

    SCHEMA: ClassVar[str] = "triton-repository/1"
    __pydantic_config__ = STRICT

    bundle: str
    model: str
    name: str
    preferred: str
    models: tuple[RepositoryModel, ...]
    directories: tuple[str, ...]
    files: tuple[RepositoryFile, ...]
    declined: tuple[DeclinedEngine, ...] = ()
    remarks: tuple[str, ...] = ()


def files_of(root: Path) -> Iterator[RepositoryFile]:
    """Every file below a directory that holds files and directories only, by its path."""
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        yield RepositoryFile(path.relative_to(root).as_posix(), path.stat().st_size, digest_file(path))


def why_in_the_way(destination: Path) -> str:
    """Why what is at a place may not be replaced by a repository; empty where it may.

    An empty directory may, and a repository in which everything is as this project wrote it, or missing.
    """
    try:
        if not destination.is_dir():
            return "it is not a directory"
        if not any(destination.iterdir()):
            return ""
        record = serde.read(TritonRepository, destination / RECORD_NAME)
        return next(_additions(destination, record), "") or next(_changes(destination, record), "")
    except (LokaError, OSError) as error:
        reason = error.what if isinstance(error, LokaError) else str(error)
        return f"it exists and is no repository that this project wrote, so it is not replaced: {reason}"


def _additions(root: Path, record: TritonRepository) -> Iterator[str]:
    """Yield files and directories beside those of the record; links are not followed."""
    files = {RECORD_NAME, *(file.path for file in record.files)}
    folders = {parent.as_posix() for path in files for parent in Path(path).parents}
    folders |= {f"{name}{end}" for name in record.directories for end in ("", f"/{VERSION}")}
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            items = sorted(entries, key=lambda entry: entry.name)
        for entry in items:
            path = Path(entry.path).relative_to(root).as_posix()
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and path in folders:
                pending.append(Path(entry.path))
            elif is_folder and _is_byte_code(Path(entry.path)):
                continue
            elif is_folder or path not in files or not entry.is_file(follow_symlinks=False):
                yield f"it holds '{path}', which this project did not write"


def _changes(root: Path, record: TritonRepository) -> Iterator[str]:
    """Files of the record that are there with another content, the sizes of all first."""
    present = [file for file in record.files if os.path.lexists(root / file.path)]
    sizes = (file for file in present if (root / file.path).lstat().st_size != file.bytes)
    contents = (file for file in present if digest_file(root / file.path) != file.sha256)
    for file in itertools.chain(sizes, contents):
        yield f"'{file.path}' was changed after this project wrote it"


def _is_byte_code(folder: Path) -> bool:
    """True if a directory is Python's own and holds nothing else."""
    return folder.name == BYTE_CODE and all(
        path.suffix == ".pyc" and stat.S_ISREG(path.lstat().st_mode) for path in folder.iterdir()
    )
