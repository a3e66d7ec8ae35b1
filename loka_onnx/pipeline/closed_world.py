"""Directories that hold exactly the files that a document of theirs lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from loka_onnx.core.digests import digest_file
from loka_onnx.errors import ModelError


def list_files(directory: Path, document: str) -> dict[str, str]:
    """SHA-256 of every file below a directory but its document, by path relative to it."""
    return {name: digest_file(directory / name) for name in sorted(_names(directory, ())) if name != document}


def verify_files(
    directory: Path, files: Mapping[str, str], document: str, besides: Collection[str] = ()
) -> None:
    """Hold a directory against what its document lists.

    Args:
        directory: The directory; nothing inside it may be a link.
        files: SHA-256 by path relative to it.
        besides: Names of directories at the top that are no part of it.

    Raises:
        ModelError: A path that leaves the directory, or a missing, extra, altered or special file.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.as_posix() != name:
            _refuse(directory, f"'{document}' lists a path that leaves the directory", repr(name))
    found = _names(directory, besides)
    for name in sorted(found - set(files) - {document}):
        _refuse(directory, f"file '{name}' is not listed in '{document}'", f"{len(files)} files are listed")
    for name, digest in sorted(files.items()):
        if name not in found:
            _refuse(directory, f"file '{name}' is missing", f"'{document}' lists it")
        actual = digest_file(directory / name)
        if actual != digest:
            evidence = f"its SHA-256 is {actual[:16]}…, '{document}' says {digest[:16]}…"
            _refuse(directory, f"file '{name}' was altered", evidence)


def _names(directory: Path, besides: Collection[str]) -> set[str]:
    names = set()
    for path in directory.rglob("*"):
        relative = path.relative_to(directory)
        # What is being written there has a hidden name that begins with its own (`engines.isolation`).
        if any(relative.parts[0] == name or relative.parts[0].startswith(f".{name}.") for name in besides):
            continue
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            _refuse(
                directory, f"'{relative.as_posix()}' is neither a file nor a directory", "links are refused"
            )
        if path.is_file():
            names.add(relative.as_posix())
    return names


def _refuse(directory: Path, what: str, evidence: str) -> None:
    raise ModelError(what, where=str(directory), evidence=evidence, remedy="copy the whole directory again")
