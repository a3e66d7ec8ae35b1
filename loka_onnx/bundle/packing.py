"""Packing a bundle into a single file."""

from __future__ import annotations

import os
from pathlib import Path

from loka_onnx.bundle.format.archive import verify_path, write_archive
from loka_onnx.bundle.format.replace import check_replaceable_file, staged_file
from loka_onnx.core.progress import Progress, silent


def pack_bundle(directory: Path, archive: Path, progress: Progress = silent) -> Path:
    """Writes a bundle as a single file, atomically.

    The bundle is verified first, and what was written is read back before it takes its place. Equal bundles
    give equal archives.

    Args:
        directory: The bundle.
        archive: Where the file goes, ``….loka`` by convention. An old archive there is replaced.
        progress: Called with bytes done.

    Returns:
        The archive, with links resolved.

    Raises:
        BundleInvalid: The bundle does not verify.
        OutputError: The place cannot be written, or holds something that is not a bundle.
    """
    destination = Path(os.path.realpath(archive))
    check_replaceable_file(destination)
    with staged_file(destination) as file:
        write_archive(directory, file, progress)
        verify_path(file, progress=progress)
    return destination
