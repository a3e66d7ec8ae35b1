"""Work in a process of its own, and what it takes of memory and storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Usage(Generic[R]):
    """What work returned and took.

    Attributes:
        result: What it returned.
        anonymous_peak_mib: Largest growth of anonymous resident memory while it ran.
        mapped_peak_mib: Largest growth of the resident part of mapped files: page cache, which the system may
            take back.
        storage_read_bytes: Bytes that came from storage, not from the page cache.
    """

    result: R
    anonymous_peak_mib: float
    mapped_peak_mib: float
    storage_read_bytes: int


def apart(work: Callable[..., R], *arguments: Any) -> R:
    """Run in a fresh process, which inherits no memory.

    Args:
        work: A function of a module.
        arguments: What it is called with; pickled, as is what it returns.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def used(work: Callable[[], R]) -> Usage[R]:
    """Run, and look at the memory of this process every five milliseconds."""
    before, read = _resident_mib(), _storage_read_bytes()
    peak, is_done = dict(before), threading.Event()

    def watch() -> None:
        while not is_done.wait(0.005):
            for name, value in _resident_mib().items():
                peak[name] = max(peak[name], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        is_done.set()
        watcher.join()
    return Usage(
        result,
        peak["RssAnon"] - before["RssAnon"],
        peak["RssFile"] - before["RssFile"],
        _storage_read_bytes() - read,
    )


def _resident_mib() -> dict[str, float]:
    fields = _fields(Path("/proc/self/status"))
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


def _storage_read_bytes() -> int:
    return int(_fields(Path("/proc/self/io"))["read_bytes"])


def _fields(path: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines() if ":" in line)
