"""Atomic publication of a directory: staged beside its destination, then renamed."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from loka_onnx.engines.isolation import interrupts_held
from loka_onnx.errors import OutputError


def _make_staging(output: Path) -> Path:
    """Make a staging directory beside the output, and remove those of dead processes."""
    prefix = f".{output.name}.building-"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for stale in output.parent.glob(f"{glob.escape(prefix)}*"):
            owner = stale.name.removeprefix(prefix).partition("-")[0]
            if owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(stale, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=output.parent))
    except OSError as error:
        raise OutputError(f"E0883 cannot write '{output}'", evidence=str(error)) from error


def replace_directory(source: Path, target: Path, staging: Path) -> None:
    """Move a finished directory into place; an earlier one is first moved into the staging directory.

    Where that fails, the earlier one is put back, with an `OutputError`.
    """
    replaced = staging / "replaced"
    try:
        if target.exists():
            target.rename(replaced)
        try:
            source.rename(target)
        except OSError:
            if replaced.exists():
                replaced.rename(target)
            raise
    except OSError as error:
        raise OutputError(f"E0884 cannot write '{target}'", evidence=str(error)) from error


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Give a staging directory for an output, and remove it afterwards."""
    staging: Path | None = None
    try:
        with interrupts_held():
            staging = _make_staging(output)
        yield staging
    finally:
        if staging is not None:
            with interrupts_held():
                shutil.rmtree(staging, ignore_errors=True)
