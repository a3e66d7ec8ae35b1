"""Verification of an untrusted bundle: its manifest, and its files against it.

A bundle is closed-world: it holds exactly the files that its manifest lists, unaltered. Nothing in it is
unpickled, followed or executed before that check. Digests protect against accidents and against tampering by
anyone who cannot rewrite the manifest; a signature (`bundle.format.signature`) proves who made the bundle.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.bundle.format.documents import (
    OPEN_PLAIN,
    file_type,
    parse_document,
    pinned,
    read_document,
    refuse,
)
from loka_onnx.bundle.format.signature import (
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
    signature_bytes,
)
from loka_onnx.core.manifest import (
    MANIFEST_NAME,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_PATH_DEPTH,
    BundleFile,
    EngineEntry,
    Manifest,
    digest_lineage,
    paths_problem,
    sample_key,
)
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.rewrite import INDEX, Part
from loka_onnx.errors import ModelError
from loka_onnx.sessions.dlpack import DTYPES
from loka_onnx.sessions.model_files import data_locations, read_model

Arrays = dict[str, npt.NDArray[Any]]

MAX_FILE_BYTES = 1 << 50
"""Larger than any file, and valid in every size field of a header or system call."""
_DIGEST = re.compile("[0-9a-f]{64}")

MAX_SAMPLE_BYTES = 256 << 20
"""Largest unpacked sample; a few rows of every input and output are far smaller."""
_NO_SAMPLE = (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, RuntimeError)
"""Errors of NumPy and zipfile for an altered sample; RuntimeError for an encryption or compression."""


def verify_bundle(directory: Path) -> Manifest:
    """Verify that a bundle is complete and holds nothing else. BundleInvalid for a missing, extra, altered or
    special file, a link, a path outside the bundle, or a manifest that is too large, not JSON, of another
    schema, or contradictory.
    """
    return verify_directory(directory).manifest


@dataclass(frozen=True)
class Verified:
    """A verified bundle: its manifest and signature, which also are there as they were read, the fingerprints
    of keys that it claims to be signed with (unverified), and that of the accepted key that signed it (None
    where no key was given).
    """

    manifest: Manifest
    text: bytes
    signature: bytes | None
    claimed: tuple[str, ...]
    signer: str | None


def verify_directory(directory: Path, keys: Sequence[Path] = (), progress: Progress = silent) -> Verified:
    """Verify a bundle as `verify_bundle`, and with `keys` that one of these public keys signed it.

    Everything is read from one directory even if another replaces it meanwhile, and each document once.
    Raises BundleInvalid if it does not verify or no accepted key signed it, ConfigError if a key is not an
    Ed25519 public key, MissingPackage if there are keys but no `cryptography`.
    """
    with pinned(directory) as pin:
        directory = pin.path
        text = read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        verified = check_documents(text, signature_bytes(directory), keys, directory)
        manifest = verified.manifest
        present = set(_walk(directory)) - {MANIFEST_NAME, SIGNATURE_NAME}
        listed = {f.path for f in manifest.files}
        for path in sorted(present - listed):
            refuse(directory, f"file {path!r} is not listed in the manifest", f"{len(listed)} are listed")
        for path in sorted(listed - present):
            refuse(directory, f"file {path!r} is missing", f"{len(present)} files are there")
        digests: dict[tuple[int, int], str] = {}
        done = 0
        for entry in manifest.files:
            _verify_file(directory, entry, digests)
            done += entry.bytes
            progress("verify", done, manifest.total_bytes)
        check_models(manifest, directory, lambda path: read_model(directory / path))
        return verified


def check_documents(text: bytes, signature: bytes | None, keys: Sequence[Path], where: Path) -> Verified:
    """Check a manifest and its signature, and with `keys` that one of them made it; `where` names the bundle
    in messages. Its files are not checked.
    """
    signer = check_signature(signature, text, keys, where) if keys else None
    manifest = parse_manifest(text, where)
    claimed = () if signature is None else parse_signature(signature, text, where).keys
    return Verified(manifest, text, signature, claimed, signer)


def check_models(manifest: Manifest, where: Path, load: Callable[[str], onnx.ModelProto]) -> None:
    """Check that the models of a bundle are ONNX, and read weights only from its files (`BundleInvalid`).
    `load` reads the model at a path of the manifest, without external data.
    """
    files = {f.path: f for f in manifest.files}
    locations: dict[str, tuple[str, ...]] = {}
    # Name for messages, path, and whether ONNX Runtime opens it.
    models = [
        (f"engine '{entry.id}'", entry.path, entry.backend.startswith("onnxruntime"))
        for entry in manifest.candidates
    ]
    models += [("the lookup model", manifest.cut.lookup, True)] if manifest.cut is not None else []
    for what, path, is_run in models:
        if not path.endswith(".onnx"):
            # ONNX Runtime decides by the suffix: it could take such a file for another format, or for a
            # model.
            if is_run or path.lower().endswith(".onnx"):
                remedy = "write the bundle again with a model of that name"
                refuse(where, f"{what} is not a file '*.onnx'", f"it names '{path}'", remedy)
            continue
        digest = files[path].sha256
        try:
            if digest not in locations:
                locations[digest] = data_locations(load(path))
        except ModelError as error:
            refuse(where, f"{what}: '{path}' is not an ONNX model", error.evidence)
        folder = path.rpartition("/")[0]
        for location in locations[digest]:
            if (f"{folder}/{location}" if folder else location) not in files:
                problem = f"{what} reads weights from a file that is not listed"
                refuse(where, problem, f"external data at {location!r}")


@dataclass(frozen=True)
class Sample:
    """Rows for the self-test of an engine: inputs, its answer during evaluation, rows of cut tensors."""

    inputs: Arrays
    expected: Arrays
    looked_up: Arrays = field(default_factory=dict)


def read_sample(directory: Path, manifest: Manifest, engine: EngineEntry) -> Sample:
    """Read the sample of one engine from a verified bundle; `BundleInvalid` unless it holds all arrays."""
    path = directory / manifest.sample
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_SAMPLE_BYTES:
            refuse(directory, "the sample is too large", f"{unpacked} bytes, the limit is {MAX_SAMPLE_BYTES}")
        with np.load(path, allow_pickle=False) as arrays:
            inputs = {i.name: _rows_of(arrays, sample_key("input", i.name)) for i in manifest.inputs}
            expected = {
                o.name: _array_of(arrays, sample_key("expected", engine.id, o.name)) for o in manifest.outputs
            }
            cut = () if manifest.cut is None else manifest.cut.tensors
            looked_up = {t.name: _rows_of(arrays, sample_key("looked_up", t.name)) for t in cut}
    except KeyError as error:
        refuse(directory, f"the sample of engine '{engine.id}' lacks an array", str(error))
    except _NO_SAMPLE as error:
        refuse(directory, f"'{manifest.sample}' is not an npz of plain arrays", str(error))
    return Sample(inputs, expected, looked_up)


def _array_of(arrays: Mapping[str, Any], key: str) -> npt.NDArray[Any]:
    value = arrays[key]
    # NumPy returns the bytes of a member that is no array.
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{key!r} is no array")
    return value


def _rows_of(arrays: Mapping[str, Any], key: str) -> npt.NDArray[Any]:
    value = _array_of(arrays, key)
    if not value.ndim or not len(value):
        raise ValueError(f"{key!r} holds no rows: its shape is {value.shape}")
    return value


def _walk(directory: Path) -> Iterator[str]:
    """Yield all files, relative to the bundle; refuse everything but plain files and directories."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        # Bounds the walk of an endless tree.
        if prefix.count("/") + 2 > MAX_PATH_DEPTH:
            refuse(directory, f"directory {prefix[:200]!r} is too deep", f"paths have {MAX_PATH_DEPTH} parts")
        try:
            with os.scandir(directory / prefix) as entries:
                items = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
        except OSError as error:
            refuse(directory, f"directory {prefix[:200]!r} cannot be read", str(error)[:400])
        if prefix and not items:
            refuse(directory, f"directory {prefix!r} is empty", "a bundle has no directories without files")
        for name, mode in sorted(items):
            path = f"{prefix}/{name}" if prefix else name
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                yield path
            else:
                refuse(directory, f"{path!r} is not a regular file", file_type(mode))


def _verify_file(directory: Path, entry: BundleFile, digests: dict[tuple[int, int], str]) -> None:
    """Check size and digest of a file; one with several names is read once (`digests`)."""
    try:
        with os.fdopen(os.open(directory / entry.path, OPEN_PLAIN), "rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_size != entry.bytes:
                evidence = f"{status.st_size} bytes, the manifest says {entry.bytes}"
                refuse(directory, f"file '{entry.path}' has another size", evidence)
            file = (status.st_dev, status.st_ino)
            # Inode numbers are unreliable on some file systems, so that only files with several names share
            # digests.
            digest = digests.get(file, "") if status.st_nlink > 1 else ""
            digest = digest or hashlib.file_digest(stream, "sha256").hexdigest()
            digests[file] = digest
    except OSError as error:
        refuse(directory, f"file '{entry.path}' cannot be read", str(error))
    if digest != entry.sha256:
        evidence = f"sha256 {digest[:16]}…, the manifest says {entry.sha256[:16]}…"
        refuse(directory, f"file '{entry.path}' was altered", evidence)


def read_manifest(directory: Path) -> Manifest:
    """Read a manifest and check its consistency (`BundleInvalid`), but not the files."""
    with pinned(directory) as pin:
        return parse_manifest(read_document(pin.path, MANIFEST_NAME, MAX_MANIFEST_BYTES), pin.path)


def parse_manifest(data: bytes, where: Path) -> Manifest:
    """Parse a manifest and check its consistency (`BundleInvalid`); `where` names the bundle in messages."""
    manifest = parse_document(Manifest, data, MANIFEST_NAME, where)
    if len(manifest.files) > MAX_FILES:
        refuse(where, "the manifest lists too many files", f"{len(manifest.files)}, the limit is {MAX_FILES}")
    problem = paths_problem([MANIFEST_NAME, SIGNATURE_NAME, *(f.path for f in manifest.files)])
    if problem is not None:
        refuse(where, f"the manifest lists a forbidden path: {problem}", MANIFEST_NAME)
    _check_consistency(where, manifest)
    return manifest


def _check_consistency(where: Path, manifest: Manifest) -> None:
    files = {f.path: f for f in manifest.files}
    named = [("plans", manifest.plans), ("sample", manifest.sample)]
    named += [("report", path) for path in manifest.report]
    named += [(f"engine '{entry.id}'", entry.path) for entry in manifest.candidates]
    named += [("lookup model", manifest.cut.lookup)] if manifest.cut is not None else []
    for role, path in named:
        if path not in files:
            refuse(where, f"the manifest names {role} '{path}' but does not list it", MANIFEST_NAME)
    _check_cut(where, manifest)
    _check_tensors(where, manifest)
    _check_routes(where, manifest)
    _check_digests(where, manifest)
    ids = [e.id for e in manifest.candidates]
    if len(set(ids)) != len(ids):
        refuse(where, "two engines of the manifest have one id", ", ".join(sorted(ids)))
    outputs = {o.name for o in manifest.outputs}
    for entry in manifest.candidates:
        listed = files[entry.path]
        if (listed.sha256, listed.bytes) != (entry.digest, entry.bytes):
            sizes = f"{entry.bytes} bytes, sha256 {entry.digest[:12]}…"
            evidence = f"{sizes} against {listed.bytes} bytes, sha256 {listed.sha256[:12]}…"
            refuse(where, f"engine '{entry.id}' and the list of files disagree on '{entry.path}'", evidence)
        if not 1 <= entry.batch.min <= entry.batch.max:
            refuse(where, f"engine '{entry.id}' has an empty batch range", f"{entry.batch}")
        # The self-test would pass any answer under a NaN or infinite tolerance.
        is_finite = all(math.isfinite(t) and t >= 0 for t in entry.tolerance.values())
        if set(entry.tolerance) != outputs or not is_finite:
            what = f"engine '{entry.id}' needs one finite tolerance for each output"
            refuse(where, what, f"tolerances {entry.tolerance}, outputs {sorted(outputs)}")


def _check_tensors(where: Path, manifest: Manifest) -> None:
    cut = () if manifest.cut is None else manifest.cut.tensors
    for what, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs), ("cut tensors", cut)):
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            refuse(where, f"two {what} of the manifest have one name", f"{names}")
        for spec in specs:
            if spec.dtype not in DTYPES:
                known = ", ".join(sorted(DTYPES))
                refuse(where, f"'{spec.name}' has type {spec.dtype[:80]!r}, which is none", known)


def _check_digests(where: Path, manifest: Manifest) -> None:
    sizes: dict[str, BundleFile] = {}
    for file in manifest.files:
        if not 0 <= file.bytes <= MAX_FILE_BYTES or not _DIGEST.fullmatch(file.sha256):
            evidence = f"{file.bytes} bytes, sha256 {file.sha256[:80]!r}"
            refuse(where, f"'{file.path}' is listed with a size or digest that no file has", evidence)
        other = sizes.setdefault(file.sha256, file)
        if other.bytes != file.bytes:
            evidence = f"'{other.path}' and '{file.path}': {other.bytes} and {file.bytes} bytes"
            refuse(where, "two files of the manifest have one digest and two sizes", evidence)
    digest = digest_lineage(manifest.lineage)
    if digest != manifest.lineage_digest:
        evidence = f"sha256 {digest[:12]}… against {manifest.lineage_digest[:12]}…"
        refuse(where, "the lineage of the manifest is not that of its digest", evidence)


def _check_routes(where: Path, manifest: Manifest) -> None:
    """Every route must name an engine of the bundle, for ascending batch sizes."""
    ids = {entry.id for entry in manifest.engines}
    for choice in manifest.choice.targets:
        missing = [name for name in choice.engines if name not in ids] if choice.routes else []
        if missing:
            refuse(where, f"requests are routed to engine '{missing[0]}', which is not there", choice.target)
        sizes = [route.batch for route in choice.routes]
        if sizes != sorted({size for size in sizes if size >= 1}):
            refuse(where, f"the routes of '{choice.target}' are out of order", f"batch sizes {sizes}")


def _check_cut(where: Path, manifest: Manifest) -> None:
    cut = manifest.cut
    dense = [entry.id for entry in manifest.candidates if entry.part is Part.DENSE]
    if manifest.fallback.part is not Part.WHOLE:
        refuse(where, "the fallback is not the whole model", f"its part is '{manifest.fallback.part}'")
    inputs = {spec.name for spec in manifest.inputs}
    shared = [entry.id for entry in manifest.candidates if entry.part is Part.REQUEST]
    if not {*manifest.shared} <= inputs or (INDEX in inputs and shared) or (shared and not manifest.shared):
        what = "inputs that are equal within a request are not among those of the model"
        refuse(where, what, f"shared {sorted(manifest.shared)}, inputs {sorted(inputs)}")
    if cut is None:
        if dense:
            what = f"engine '{dense[0]}' takes looked-up rows, and the manifest has no cut"
            refuse(where, what, f"its part is '{Part.DENSE}'")
        return
    unknown = sorted({*cut.lookup_inputs, *cut.passed} - inputs)
    if unknown:
        refuse(where, f"the cut reads '{unknown[0]}', which is no input", f"inputs {sorted(inputs)}")
    names = [spec.name for spec in cut.tensors]
    if not names or inputs & set(names):
        what = "the cut needs tensors whose names differ from those of the inputs"
        refuse(where, what, f"tensors {names}, inputs {sorted(inputs)}")
