"""Cache of built engines, by everything that they were built from.

An entry is ``<two digits>/<key>/`` below the cache's directory: ``entry.json`` and ``engine/``. The key is
the digest of everything that a build depends on (`cache_key`). An entry appears as a whole, by a rename, and
is renamed away before removal. Processes therefore need no lock: a reader whose entry is removed finds a
missing file or a digest other than in ``entry.json``, and builds.

Engines are copied, never linked, because users may alter files in a run directory.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from loka_onnx.core import serde
from loka_onnx.core.digests import CHUNK_BYTES, digest_file, digest_files, digest_json
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.serde import STRICT
from loka_onnx.engines.base import Backend
from loka_onnx.engines.isolation import replace_directory, staged
from loka_onnx.engines.request import ENGINE, BuildRequest
from loka_onnx.errors import OutputError, UserError
from loka_onnx.graph.storage import model_digest
from loka_onnx.sessions.host_devices import device_of_architecture, instruction_sets

ENTRY, STAGED = "entry.json", "entry"
"""Document of an entry; name of what is staged beside the entries before and after it is one."""
_ELSEWHERE = {"model", "sample", "output", "relative_to", "limits", "target", "plan"}
"""Fields of a request that are not in the key, or in another form."""
_BUILDING = defaultdict[str, Lock](Lock)
"""Held while an engine of a key is built in this process."""
_CODE = ("engines", "sessions", "graph")
"""Packages of this project whose code determines an engine and its reading."""


@dataclass(frozen=True)
class CachedEngine:
    """One entry: paths are relative to the engine's directory, and each file has its SHA-256."""

    SCHEMA: ClassVar[str] = "cached-engine/1"
    __pydantic_config__ = STRICT

    key: str
    artifact: EngineArtifact
    files: dict[str, str]
    built: str


def cache_key(backend: Backend, request: BuildRequest) -> str:
    """Digest of everything that determines an engine and its measured properties. The device counts with its
    full name: another one of the same architecture may need other kernels.
    """
    plain: dict[str, Any] = serde.to_plain(request)
    availability = backend.availability()
    return digest_json(
        {
            "model": model_digest(request.model),
            "plan": _assigned(request.plan),
            "sample": digest_file(request.sample),
            "request": {name: value for name, value in plain.items() if name not in _ELSEWHERE},
            "backend": [backend.name, availability.version],
            "code": _code_digest(inspect.getsourcefile(type(backend)) or ""),
            "package": version("loka-onnx"),
            # Compilers target the processor that they run on, and hosts may share a cache.
            "processor": [platform.machine(), *sorted(instruction_sets())],
            "device": device_of_architecture(request.architecture),
            # Measured properties of an engine are unknown where it cannot run.
            "runs": not backend.why_not_run(request.architecture),
        }
    )


class EngineCache:
    """Cache of engines in a directory; beyond `limit_bytes` the least recently used go, 0 keeps none."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes

    def build(self, backend: Backend, request: BuildRequest) -> EngineArtifact:
        """Return a cached engine of the same inputs, or build one by `Backend.build` and cache it. Its detail
        says that it is cached, or why the cache cannot be read or written, with the remedy.
        """
        if self.limit_bytes <= 0 or not request.model.is_file() or not request.sample.is_file():
            return backend.build(request)
        if backend.decline(request.plan, request.architecture) or backend.build_blocker(request.architecture):
            return backend.build(request)
        key = cache_key(backend, request)
        trouble = ""
        # Plans of one run may lead to the same engine: the second waits for the first.
        with _BUILDING[key]:
            try:
                cached = self._take(key, request)
            except OSError as error:
                cached, trouble = None, self._trouble("be read", error)
            if cached is not None:
                return cached
            built = backend.build(request)
            if built.is_built and not trouble:
                trouble = self._keep(key, built, request)
        return replace(built, detail="; ".join(filter(None, (built.detail, trouble)))) if trouble else built

    def _trouble(self, what: str, error: Exception) -> str:
        said = getattr(error, "evidence", "") or error
        remedy = "correct its permissions, name another place with `build.cache`, or do without"
        return f"the engine cache '{self.directory}' cannot {what} ({said}): {remedy} (`build.cache_gb: 0`)"

    def entries(self) -> list[Path]:
        """Directories of the entries, the least recently used first."""
        entries = []
        for place in self.directory.glob(f"[0-9a-f][0-9a-f]/*/{ENTRY}"):
            with suppress(OSError):
                entries.append((place.stat().st_mtime_ns, place.parent))
        return [entry for _, entry in sorted(entries)]

    def _take(self, key: str, request: BuildRequest) -> EngineArtifact | None:
        """Copy the engine of a key to the requested output; None where there is no complete one."""
        entry = self.directory / key[:2] / key
        # In a directory without search permission, `is_file` raises an error.
        if not (entry / ENTRY).is_file():
            return None
        with staged(request.output) as staging:
            cached = self._copy_out(entry, key, staging / ENGINE)
            if cached is None:
                self._remove(entry)
                return None
            replace_directory(staging / ENGINE, request.output, staging)
        with suppress(OSError):
            os.utime(entry / ENTRY)
        artifact = cached.artifact
        said = f"taken from the engine cache, built there in {artifact.build_seconds:.1f} s on {cached.built}"
        log = request.output.with_name(f"{request.output.name}.log")
        serde.write_text(f"{said}: {entry}\n", log)
        inner = artifact.path or Path()
        return replace(
            artifact,
            plan=request.plan.id,
            target=request.target,
            path=(request.output / inner).relative_to(request.relative_to or request.output),
            detail=f"{artifact.detail}; {said}" if artifact.detail else said,
        )

    def _copy_out(self, entry: Path, key: str, into: Path) -> CachedEngine | None:
        """Copy an entry's files; None where one is missing, extra or altered."""
        try:
            cached = serde.loads(CachedEngine, (entry / ENTRY).read_text(encoding="utf-8"))
            if cached.key != key or set(cached.files) != _files_below(entry / ENGINE):
                return None
            if not all(_copy(entry / ENGINE / n, into / n, digest) for n, digest in cached.files.items()):
                return None
        except OutputError:
            raise
        except (UserError, UnicodeDecodeError, FileNotFoundError):
            # Of another version, damaged, or just removed by another process.
            return None
        return cached

    def _keep(self, key: str, built: EngineArtifact, request: BuildRequest) -> str:
        """Copy an engine into the cache; return the error text if that fails."""
        if _bytes_below(request.output) > self.limit_bytes:
            return ""
        try:
            with staged(self.directory / STAGED) as staging:
                new, entry = staging / key, self.directory / key[:2] / key
                shutil.copytree(request.output, new / ENGINE)
                files = {n: digest_file(new / ENGINE / n) for n in sorted(_files_below(new / ENGINE))}
                place = (request.relative_to or request.output) / (built.path or Path())
                artifact = replace(built, path=place.relative_to(request.output))
                now = datetime.now(UTC).isoformat(timespec="seconds")
                serde.write(CachedEngine(key, artifact, files, now), new / ENTRY)
                entry.parent.mkdir(exist_ok=True)
                # Keep the entry of another process that built the same.
                if not entry.exists():
                    new.rename(entry)
            sizes = {each: _bytes_below(each) for each in self.entries()}
            total = sum(sizes.values())
            for each, size in sizes.items():
                if total > self.limit_bytes:
                    self._remove(each)
                    total -= size
        except (OSError, UserError) as error:
            return self._trouble("be written", error)
        return ""

    def _remove(self, entry: Path) -> None:
        # Another process may have removed it, or the cache is read-only.
        with suppress(OSError, OutputError), staged(self.directory / STAGED) as staging:
            entry.rename(staging / "gone")


def _copy(source: Path, target: Path, digest: str) -> bool:
    """Copy one file if it has a digest; return whether it has. Only an unreadable source is an OSError."""
    with source.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
            return False
        stream.seek(0)
        with OutputError(
            f"E0809 cannot write '{target}'",
            remedy="make room there or correct its permissions, and go on with `run --resume`",
        ).in_place_of(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as into:
                shutil.copyfileobj(stream, into, CHUNK_BYTES)
    return True


def _assigned(plan: PrecisionPlan) -> Mapping[str, Any]:
    plain: dict[str, Any] = serde.to_plain(plan)
    prose = {"verdict", "reason"}
    return {
        "base": plain["base"],
        "decisions": [{k: v for k, v in d.items() if k not in prose} for d in plain["decisions"]],
        "wide": sorted(wide["node"] for wide in plain["wide"]),
    }


@functools.cache
def _code_digest(source: str) -> str:
    """Digest of the code of builds: packages of this project, and the backend's own file."""
    root = Path(__file__).parents[1]
    files = [path for name in _CODE for path in sorted((root / name).rglob("*.py"))]
    return digest_files([*files, *([Path(source)] if source else [])])


def _files_below(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
