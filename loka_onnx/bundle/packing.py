"""Packing a bundle into a single file."""

from __future__ import annotations

import os
from pathlib import Path

from loka_onnx.errors import OutputError
from loka_onnx.sessions.bundle_archive import verify_path, write_archive
from loka_onnx.sessions.replace import staged_file

_ZIP = b"PK\x03\x04"


def pack_bundle(directory: Path, archive: Path) -> Path:
    """Writes a bundle as a single file, atomically.

    The bundle is verified first, and what was written is read back before it takes its place. Equal bundles
    give equal archives.

    Args:
        directory: The bundle.
        archive: Where the file goes, ``….loka`` by convention. An old archive there is replaced.

    Returns:
        The archive, with links resolved.

    Raises:
        BundleInvalid: The bundle does not verify.
        OutputError: The place cannot be written, or holds something that is not an archive.
    """
    destination = archive.resolve()
    _check_replaceable(destination)
    with staged_file(destination) as file:
        write_archive(directory, file)
        verify_path(file)
    return destination


def _check_replaceable(destination: Path) -> None:
    if not os.path.lexists(destination):
        return
    if destination.is_file():
        with destination.open("rb") as stream:
            if stream.read(len(_ZIP)) == _ZIP:
                return
    raise OutputError(
        f"'{destination}' is in the way",
        evidence="it exists and is not a single-file bundle, so it is not replaced",
        remedy="choose another name, or move it away",
    )
