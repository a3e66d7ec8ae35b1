"""Access to a directory that another may replace meanwhile.

Bundles are replaced by exchanging directories, so that two files opened by path in turn may belong to two
bundles. Linux resolves paths below an open directory through ``/proc/self/fd`` whatever its current name:
everything read through a pin is of one directory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.bundle.format.documents import printable, refuse
from loka_onnx.errors import LokaError

DESCRIPTORS = Path("/proc/self/fd")
"""Linux's links to the open files of a process, followed without their names."""


@dataclass(frozen=True)
class Pin:
    """A directory that stays open.

    `path` opens its files, in this process and its forks until the pin ends; `name` is for messages.
    """

    path: Path
    name: Path
    status: os.stat_result

    @property
    def is_current(self) -> bool:
        """True if the directory still has its name."""
        return _is_at(self.name, self.status)

    def worded(self, text: str) -> str:
        """Replace the pin's path in a text by its name."""
        return re.sub(re.escape(str(self.path)) + r"(?!\d)", lambda _: printable(str(self.name)), text)


@contextlib.contextmanager
def pinned(directory: Path) -> Iterator[Pin]:
    """Pin a directory for a block; errors of this package that leave the block show its name.

    Raises:
        BundleInvalid: There is no directory, or it cannot be read.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        evidence = str(error) if directory.is_dir() else "not a directory"
        refuse(directory, "there is no bundle here", evidence, "name the directory of a bundle")
    try:
        status = os.fstat(descriptor)
        pin = Pin(DESCRIPTORS / str(descriptor), directory, status)
        if not _is_at(pin.path, status):
            refuse(directory, "the bundle cannot be held open", f"no '{DESCRIPTORS}'", "mount /proc")
        try:
            yield pin
        except LokaError as error:
            LokaError.__init__(
                error,
                pin.worded(error.what),
                where=pin.worded(error.where),
                evidence=pin.worded(error.evidence),
                remedy=pin.worded(error.remedy),
            )
            raise
    finally:
        os.close(descriptor)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)  # noqa: PTH116 — status of whatever is there
    except OSError:
        return False
