"""The timing cache: latencies of tactics on a device, kept between builds.

Half of a build is measuring tactics. TensorRT can reuse the measurements of an earlier build for the same
device and version (NVIDIA's developer guide, "Timing Cache"), so that each has a file below
`core.installation`. Parallel builds share it: a file is replaced as a whole, after merging another
process's changes under a lock. The first of conflicting entries stays.

A cache that TensorRT refuses, or that cannot be written, costs time but fails no build.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core.installation import cache_directory


def timing_cache_file(module: str, version: str, device: str, architecture: str) -> Path:
    """File of a device, by the driver's name of it, and a version."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} {architecture}").strip("-")
    return cache_directory() / "timing" / f"{module}-{version}" / f"{name}.cache"


@dataclass
class TimingCache:
    """The timing cache of one build.

    `found` is the file's content at its start; the configuration does not keep `attached` alive.
    """

    file: Path
    found: bytes = b""
    attached: object = None

    def attach(self, config: Any) -> None:
        """Add earlier measurements to a builder configuration."""
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
        """Write the build's measurements, merged with those of other processes."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(lock):
                fcntl.flock(lock, fcntl.LOCK_EX)
                now = self._read()
                if now not in {b"", self.found}:
                    other = config.create_timing_cache(now)
                    if other is not None and not cache.combine(other, ignore_mismatch=False):
                        print(f"timing cache '{self.file}' of another process is not merged", flush=True)
                unfinished = self.file.with_suffix(".unfinished")
                unfinished.write_bytes(bytes(cache.serialize()))
                unfinished.replace(self.file)
        except OSError as error:
            print(f"timing cache '{self.file}' is not kept: {error}", flush=True)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError:
            return b""
