"""The timing cache: what tactics took on a device, kept between builds.

Half of a build is measuring tactics. TensorRT can take over what an earlier build measured, for the same
device and version only (NVIDIA's developer guide, "Timing Cache"), so there is one file for each, below
`core.cache_directory`. Builds of several processes share it: a file is replaced as a whole, and what another
process wrote meanwhile is merged in under a lock. Conflicting entries keep their first value.

A cache that TensorRT refuses is as good as none, and one that cannot be written costs the next build time:
neither fails a build.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core.cache_directory import cache_directory


def timing_cache_file(module: str, version: str, device: str, architecture: str) -> Path:
    """The file for one device and version.

    Args:
        module: ``tensorrt`` or ``tensorrt_rtx``.
        version: Its version.
        device: Name of the GPU, as the driver gives it: tactics take other times on another of the same
            architecture.
        architecture: For example ``sm90``.
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} {architecture}").strip("-")
    return cache_directory() / "timing" / f"{module}-{version}" / f"{name}.cache"


@dataclass
class TimingCache:
    """The timing cache of one build.

    Attributes:
        file: Where it is kept.
        found: What the file held when the build began.
        attached: The vendor's cache; the configuration does not keep it alive.
    """

    file: Path
    found: bytes = b""
    attached: object = None

    def attach(self, config: Any) -> None:
        """Give a builder configuration what earlier builds measured."""
        self.found = self._read()
        cache = self.attached = config.create_timing_cache(self.found)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            print(f"timing cache '{self.file}': {len(self.found)} bytes", flush=True)
            return
        print(
            f"timing cache '{self.file}' is of another device or version, or damaged: begun anew", flush=True
        )
        self.found = b""
        cache = self.attached = config.create_timing_cache(b"")
        config.set_timing_cache(cache, ignore_mismatch=False)

    def keep(self, config: Any) -> None:
        """Write what the build measured, with what another process wrote meanwhile."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.file.with_suffix(".lock")):
                now = self._read()
                if now not in {b"", self.found}:
                    other = config.create_timing_cache(now)
                    if other is not None and not cache.combine(other, ignore_mismatch=False):
                        print(f"timing cache '{self.file}' of another process is not merged", flush=True)
                _replace(self.file, bytes(cache.serialize()))
        except OSError as error:
            print(f"timing cache '{self.file}' is not kept: {error}", flush=True)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError:
            return b""


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an flock; it ends with the process, however that ends."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
