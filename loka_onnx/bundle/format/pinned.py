"""Holding on to a directory while another one may take its place.

Bundles are replaced by exchanging directories, so that two files that are opened by path one after the other
may be of two bundles. Linux opens paths below an open directory through ``/proc/self/fd``, whatever the
directory is called by then: all that is read through a pin is of one directory. Where there is no such path,
the directory that has the name is compared with the one that was opened.
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
"""Where Linux lists the open files of a process, each as a link that is followed without its name."""


@dataclass(frozen=True)
class Pin:
    """A directory that stays open.

    Attributes:
        path: What its files are opened through; good until the pin ends, in this process and its forks.
        name: What it was opened as, and what messages call it.
        status: Device and inode of it.
    """

    path: Path
    name: Path
    status: os.stat_result

    @property
    def is_held(self) -> bool:
        """Whether `path` stays that of this directory, whatever takes its place."""
        return self.path != self.name

    @property
    def is_current(self) -> bool:
        """Whether the directory still has its name."""
        return _is_at(self.name, self.status)

    def check(self) -> None:
        """Fails where `path` may be that of another directory by now.

        Raises:
            BundleInvalid: Another one took its place.
        """
        if not self.is_held and not self.is_current:
            refuse(self.name, "the bundle was replaced while it was read", "another directory", "try again")

    def worded(self, text: str) -> str:
        """The text with the name where it has the path."""
        if not self.is_held:
            return text
        return re.sub(re.escape(str(self.path)) + r"(?!\d)", lambda _: printable(str(self.name)), text)


@contextlib.contextmanager
def pinned(directory: Path) -> Iterator[Pin]:
    """Holds on to a directory for the time of a block.

    Args:
        directory: The directory, or a link to it.

    Yields:
        The pin. Errors of this package that leave the block have the name in place of its path.

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
        path = DESCRIPTORS / str(descriptor)
        pin = Pin(path if _is_at(path, status) else directory, directory, status)
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
