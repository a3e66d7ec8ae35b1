"""Verification of an untrusted bundle: its files against its manifest (`bundle.format.manifest`).

A bundle is closed-world: it holds exactly the files that its manifest lists, unaltered. Nothing in it is
unpickled, followed or executed before that check. Digests protect against accidents and against tampering by
anyone who cannot rewrite the manifest; a signature (`bundle.format.signature`) proves who made the bundle.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.bundle.format.documents import OPEN_PLAIN, kind_of, read_document, refuse
from loka_onnx.bundle.format.manifest import parse_manifest
from loka_onnx.bundle.format.pinned import pinned
from loka_onnx.bundle.format.signature import (
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
    signature_bytes,
)
from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.core.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_PATH_DEPTH,
    BundleFile,
    EngineEntry,
    Manifest,
    sample_key,
)
from loka_onnx.core.progress import Progress, silent
from loka_onnx.errors import ModelError
from loka_onnx.sessions.model_files import data_locations, read_model

Arrays = dict[str, npt.NDArray[Any]]

MODEL_SUFFIX = ".onnx"
ONNX_RUNTIME = "onnxruntime"
"""Prefix of backends whose engines ONNX Runtime opens."""
_WRITE_AGAIN = "write the bundle again with a model of that name"

MAX_SAMPLE_BYTES = 256 << 20
"""Largest unpacked sample; a few rows of every input and output are far smaller."""
_NO_SAMPLE = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    # An encrypted member, or (NotImplementedError) an unknown compression.
    RuntimeError,
)
"""Errors of NumPy and zipfile for an altered sample."""


def verify_bundle(directory: Path) -> Manifest:
    """Verify that a bundle is complete and holds nothing else; links inside it are refused.

    Raises:
        BundleInvalid: A missing, extra, altered or special file; a path outside the bundle; a manifest that
            is too large, not JSON, of an unknown schema, or contradictory.
    """
    return verify_directory(directory).manifest


@dataclass(frozen=True)
class Verified:
    """A verified bundle: its manifest, the fingerprints of keys that it claims to be signed with
    (unverified), and the fingerprint of the accepted key that signed it (None where no key was given).
    """

    manifest: Manifest
    claimed: tuple[str, ...]
    signer: str | None


def verify_directory(directory: Path, keys: Sequence[Path] = (), progress: Progress = silent) -> Verified:
    """Verify a bundle as `verify_bundle`, and with `keys` that one of these public keys signed it.

    Everything is read from one directory even if another replaces it meanwhile, and each document once.

    Raises:
        BundleInvalid: It does not verify, or no accepted key signed it.
        ConfigError: A key is not an Ed25519 public key.
        MissingPackage: There are keys, but `cryptography` is not installed.
    """
    with pinned(directory) as pin:
        return _verify(pin.path, keys, progress)


def _verify(directory: Path, keys: Sequence[Path], progress: Progress) -> Verified:
    data = read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    signature = signature_bytes(directory)
    signer = check_signature(signature, data, keys, directory) if keys else None
    manifest = parse_manifest(data, directory)
    claimed = () if signature is None else parse_signature(signature, data, directory).keys
    present = set(_walk(directory)) - {MANIFEST_NAME, SIGNATURE_NAME}
    listed = {f.path for f in manifest.files}
    for path in sorted(present - listed):
        refuse(directory, f"file {path!r} is not listed in the manifest", f"{len(listed)} files are listed")
    for path in sorted(listed - present):
        refuse(directory, f"file {path!r} is missing", f"{len(present)} files are there")
    digests: dict[tuple[int, int], str] = {}
    done = 0
    for entry in manifest.files:
        _verify_file(directory, entry, digests)
        done += entry.bytes
        progress("verify", done, manifest.total_bytes)
    check_models(manifest, directory, lambda path: read_model(directory / path))
    return Verified(manifest, claimed, signer)


def check_models(manifest: Manifest, where: Path, load: Callable[[str], onnx.ModelProto]) -> None:
    """Check that the ONNX models of a bundle read weights only from its files.

    `load` reads the model at a path of the manifest, without external data.

    Raises:
        BundleInvalid: One reads another file, is not a model, or runs in ONNX Runtime under another suffix.
    """
    files = {f.path: f for f in manifest.files}
    locations: dict[str, tuple[str, ...]] = {}
    for what, path, is_run in _models(manifest):
        if not path.endswith(MODEL_SUFFIX):
            # ONNX Runtime decides by the suffix: it could take such a file for another format, or for a
            # model.
            if is_run or path.lower().endswith(MODEL_SUFFIX):
                refuse(where, f"{what} is not a file '*{MODEL_SUFFIX}'", f"it names '{path}'", _WRITE_AGAIN)
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
                refuse(
                    where,
                    f"{what} reads weights from a file that is not listed",
                    f"external data at {location!r}",
                )


def _models(manifest: Manifest) -> Iterator[tuple[str, str, bool]]:
    """Possible ONNX models: name for messages, path, and whether ONNX Runtime opens them."""
    for entry in manifest.candidates:
        yield f"engine '{entry.id}'", entry.path, entry.backend.startswith(ONNX_RUNTIME)
    if manifest.cut is not None:
        yield "the lookup model", manifest.cut.lookup, True


@dataclass(frozen=True)
class Sample:
    """Rows for the self-test of an engine: inputs, the engine's answer during evaluation, and rows of cut
    tensors.
    """

    inputs: Arrays
    expected: Arrays
    looked_up: Arrays = field(default_factory=dict)


def read_sample(directory: Path, manifest: Manifest, engine: EngineEntry) -> Sample:
    """Read the sample of one engine from a verified bundle.

    Raises:
        BundleInvalid: The sample is not an npz of plain arrays, is too large, or lacks an array.
    """
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


def external_data_locations(model: Path) -> tuple[str, ...]:
    """External data files of an ONNX model, as it names them, sorted."""
    return data_locations(read_model(model))


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
                refuse(directory, f"{path!r} is not a regular file", kind_of(mode))


def _verify_file(directory: Path, entry: BundleFile, digests: dict[tuple[int, int], str]) -> None:
    """Check size and digest of a file; one with several names is read once (`digests`)."""
    try:
        descriptor = os.open(directory / entry.path, OPEN_PLAIN)
        with os.fdopen(descriptor, "rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_size != entry.bytes:
                refuse(
                    directory,
                    f"file '{entry.path}' has another size",
                    f"{status.st_size} bytes, the manifest says {entry.bytes}",
                )
            file = (status.st_dev, status.st_ino)
            # Inode numbers are unreliable on some file systems, so that only files with several names share
            # digests.
            digest = digests.get(file, "") if status.st_nlink > 1 else ""
            digest = digest or _digest_of(stream)
            digests[file] = digest
    except OSError as error:
        refuse(directory, f"file '{entry.path}' cannot be read", str(error))
    if digest != entry.sha256:
        refuse(
            directory,
            f"file '{entry.path}' was altered",
            f"sha256 {digest[:16]}…, the manifest says {entry.sha256[:16]}…",
        )


def _digest_of(stream: BinaryIO) -> str:
    state = hashlib.sha256()
    while chunk := stream.read(CHUNK_BYTES):
        state.update(chunk)
    return state.hexdigest()
