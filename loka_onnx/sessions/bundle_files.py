"""Reading a bundle without trusting it.

A bundle is closed-world: it holds exactly the files that its manifest lists, unaltered. Nothing in it is
unpickled, followed or executed before that has been checked. The digests protect against accidents and
against tampering by someone who cannot rewrite the manifest; a signature (`sessions.bundle_signature`) says
who made the bundle.
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
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.digests import CHUNK_BYTES
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
    sample_expected_key,
    sample_input_key,
    sample_looked_up_key,
)
from loka_onnx.core.split import Part
from loka_onnx.errors import ModelError
from loka_onnx.sessions.bundle_documents import (
    OPEN_PLAIN,
    kind_of,
    parse_document,
    read_document,
    refuse,
)
from loka_onnx.sessions.bundle_signature import (
    SIGNATURE_NAME,
    check_signature,
    parse_signature,
    signature_bytes,
)
from loka_onnx.sessions.dlpack import DTYPES
from loka_onnx.sessions.model_files import read_model
from loka_onnx.sessions.pinned import pinned

Arrays = dict[str, npt.NDArray[Any]]

MODEL_SUFFIX = ".onnx"
ONNX_RUNTIME = "onnxruntime"
"""What names of backends that ONNX Runtime opens begin with."""
_WRITE_AGAIN = "write the bundle again with a model of that name"
MAX_FILE_BYTES = 1 << 50
"""More than any file; small enough for every field of a header or system call that takes a size."""
_DIGEST = re.compile("[0-9a-f]{64}")

MAX_SAMPLE_BYTES = 256 << 20
"""Unpacked size of a sample; a few rows of every input and output are far below it."""
_NO_SAMPLE = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    # An encrypted member, and, as NotImplementedError, one compressed in a way that is not known.
    RuntimeError,
)
"""What NumPy and zipfile raise for an altered sample."""


def verify_bundle(directory: Path) -> Manifest:
    """Checks that a bundle is whole and holds nothing else.

    Args:
        directory: The bundle. It may be reached through a link; nothing inside it may be one.

    Returns:
        Its manifest.

    Raises:
        BundleInvalid: A missing, extra, altered or special file; a path that leaves the bundle; a
            manifest that is too large, not JSON, of an unknown schema, or contradicts itself.
    """
    return verify_directory(directory).manifest


@dataclass(frozen=True)
class Verified:
    """A bundle that verifies.

    Attributes:
        manifest: Its manifest.
        claimed: Fingerprints of the keys that it claims to be signed with.
        signer: Fingerprint of the accepted key that signed it; None where no key was given.
    """

    manifest: Manifest
    claimed: tuple[str, ...]
    signer: str | None


def verify_directory(directory: Path, keys: Sequence[Path] = ()) -> Verified:
    """Checks that a bundle is whole, and who signed it.

    Everything is read of one directory, though another takes its place meanwhile, and each document once.

    Args:
        directory: The bundle.
        keys: Public keys of which one must have signed it; where there are none, no signature is asked for.

    Raises:
        BundleInvalid: As `verify_bundle`, or none of the keys signed it.
        ConfigError: A key is not an Ed25519 public key.
        MissingPackage: There are keys, and no `cryptography` here.
    """
    with pinned(directory) as pin:
        verified = _verify(pin.path, keys)
        pin.check()
        return verified


def _verify(directory: Path, keys: Sequence[Path]) -> Verified:
    data = read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    signature = signature_bytes(directory)
    signer = check_signature(signature, data, keys, directory) if keys else None
    manifest = parse_manifest(data, directory)
    claimed = () if signature is None else parse_signature(signature, data, directory).keys
    found = set(_walk(directory)) - {MANIFEST_NAME, SIGNATURE_NAME}
    listed = {f.path for f in manifest.files}
    for path in sorted(found - listed):
        refuse(directory, f"file {path!r} is not listed in the manifest", f"{len(listed)} files are listed")
    for path in sorted(listed - found):
        refuse(directory, f"file {path!r} is missing", f"{len(found)} files are there")
    digests: dict[tuple[int, int], str] = {}
    for entry in manifest.files:
        _verify_file(directory, entry, digests)
    check_models(manifest, directory, lambda path: read_model(directory / path))
    return Verified(manifest, claimed, signer)


def read_manifest(directory: Path) -> Manifest:
    """Reads a manifest and checks it against itself, but not against the files.

    Raises:
        BundleInvalid: As `verify_bundle`, as far as the manifest alone shows it.
    """
    with pinned(directory) as pin:
        return parse_manifest(read_document(pin.path, MANIFEST_NAME, MAX_MANIFEST_BYTES), pin.path)


def parse_manifest(data: bytes, where: Path) -> Manifest:
    """A manifest from its bytes, checked against itself.

    Args:
        data: The bytes.
        where: The bundle, for messages.

    Raises:
        BundleInvalid: As `verify_bundle`, as far as the manifest alone shows it.
    """
    manifest = parse_document(Manifest, data, MANIFEST_NAME, where)
    if len(manifest.files) > MAX_FILES:
        refuse(where, "the manifest lists too many files", f"{len(manifest.files)}, the limit is {MAX_FILES}")
    problem = paths_problem([MANIFEST_NAME, SIGNATURE_NAME, *(f.path for f in manifest.files)])
    if problem is not None:
        refuse(where, f"the manifest lists a forbidden path: {problem}", MANIFEST_NAME)
    _check_consistency(where, manifest)
    return manifest


def check_models(manifest: Manifest, where: Path, load: Callable[[str], onnx.ModelProto]) -> None:
    """Checks that ONNX models of a bundle read weights from files of the bundle only.

    Args:
        manifest: Its manifest.
        where: The bundle, for messages.
        load: Reads the model at a path of the manifest, without external data.

    Raises:
        BundleInvalid: One reads another file, is not a model, or runs in ONNX Runtime under another suffix.
    """
    files = {f.path: f for f in manifest.files}
    locations: dict[str, tuple[str, ...]] = {}
    for what, path, is_run in _models(manifest):
        if not path.endswith(MODEL_SUFFIX):
            # ONNX Runtime goes by the suffix: a file of another name may be of another format, or a model.
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
    """What may be an ONNX model: what messages call it, its path, and whether ONNX Runtime opens it."""
    for entry in manifest.candidates:
        yield f"engine '{entry.id}'", entry.path, entry.backend.startswith(ONNX_RUNTIME)
    if manifest.cut is not None:
        yield "the lookup model", manifest.cut.lookup, True


@dataclass(frozen=True)
class Sample:
    """Rows to try a loaded engine on.

    Attributes:
        inputs: One array per graph input, the batch on axis 0.
        expected: What the engine answered when it was evaluated, per output.
        looked_up: One array per cut tensor, of the same rows; empty where the model was not cut.
    """

    inputs: Arrays
    expected: Arrays
    looked_up: Arrays = field(default_factory=dict)


def read_sample(directory: Path, manifest: Manifest, engine: EngineEntry) -> Sample:
    """Reads the sample of one engine from a verified bundle.

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
            inputs = {i.name: _rows_of(arrays, sample_input_key(i.name)) for i in manifest.inputs}
            expected = {
                o.name: _array_of(arrays, sample_expected_key(engine.id, o.name)) for o in manifest.outputs
            }
            cut = () if manifest.cut is None else manifest.cut.tensors
            looked_up = {t.name: _rows_of(arrays, sample_looked_up_key(t.name)) for t in cut}
    except KeyError as error:
        refuse(directory, f"the sample of engine '{engine.id}' lacks an array", str(error))
    except _NO_SAMPLE as error:
        refuse(directory, f"'{manifest.sample}' is not an npz of plain arrays", str(error))
    return Sample(inputs, expected, looked_up)


def _array_of(arrays: Mapping[str, Any], key: str) -> npt.NDArray[Any]:
    value = arrays[key]
    # NumPy gives the bytes of a member that is no array.
    if not isinstance(value, np.ndarray):
        raise ValueError(f"{key!r} is no array")
    return value


def _rows_of(arrays: Mapping[str, Any], key: str) -> npt.NDArray[Any]:
    value = _array_of(arrays, key)
    if not value.ndim or not len(value):
        raise ValueError(f"{key!r} holds no rows: its shape is {value.shape}")
    return value


def external_data_locations(model: Path) -> tuple[str, ...]:
    """Files that an ONNX model keeps weights in, as it names them, sorted.

    Raises:
        ModelError: The file is not an ONNX model.
    """
    return data_locations(read_model(model))


def data_locations(model: onnx.ModelProto) -> tuple[str, ...]:
    """Files that an ONNX model keeps weights in, as it names them, sorted.

    Wherever a tensor may stand is looked at: initializers, attributes of nodes, bodies and defaults of
    functions, sparse tensors, training information.
    """
    return tuple(
        sorted(
            {
                item.value
                for tensor in _tensors(model)
                if tensor.data_location == onnx.TensorProto.EXTERNAL
                for item in tensor.external_data
                if item.key == "location"
            }
        )
    )


def _check_consistency(directory: Path, manifest: Manifest) -> None:
    files = {f.path: f for f in manifest.files}
    for role, path in (("plans", manifest.plans), ("sample", manifest.sample)):
        if path not in files:
            refuse(directory, f"the manifest names {role} '{path}' but does not list it", MANIFEST_NAME)
    for path in manifest.report:
        if path not in files:
            refuse(directory, f"the manifest names report '{path}' but does not list it", MANIFEST_NAME)
    _check_cut(directory, manifest, files)
    _check_tensors(directory, manifest)
    _check_routes(directory, manifest)
    _check_digests(directory, manifest)
    ids = [e.id for e in manifest.candidates]
    if len(set(ids)) != len(ids):
        refuse(directory, "two engines of the manifest have one id", ", ".join(sorted(ids)))
    outputs = {o.name for o in manifest.outputs}
    for entry in manifest.candidates:
        listed = files.get(entry.path)
        if listed is None:
            refuse(directory, f"engine '{entry.id}' names '{entry.path}' but it is not listed", MANIFEST_NAME)
        if (listed.sha256, listed.bytes) != (entry.digest, entry.bytes):
            refuse(
                directory,
                f"engine '{entry.id}' and the list of files disagree on '{entry.path}'",
                f"{entry.bytes} bytes, sha256 {entry.digest[:12]}… against "
                f"{listed.bytes} bytes, sha256 {listed.sha256[:12]}…",
            )
        if not 1 <= entry.batch.min <= entry.batch.max:
            refuse(directory, f"engine '{entry.id}' has an empty batch range", f"{entry.batch}")
        # A NaN or infinite tolerance would make the self-test pass whatever comes out.
        if set(entry.tolerance) != outputs or not all(
            math.isfinite(t) and t >= 0 for t in entry.tolerance.values()
        ):
            refuse(
                directory,
                f"engine '{entry.id}' needs one finite tolerance for each output",
                f"tolerances {entry.tolerance}, outputs {sorted(outputs)}",
            )


def _check_tensors(directory: Path, manifest: Manifest) -> None:
    cut = () if manifest.cut is None else manifest.cut.tensors
    for what, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs), ("cut tensors", cut)):
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            refuse(directory, f"two {what} of the manifest have one name", f"{names}")
        for spec in specs:
            if spec.dtype not in DTYPES:
                known = ", ".join(sorted(DTYPES))
                refuse(directory, f"'{spec.name}' has type {spec.dtype[:80]!r}, which is none", known)


def _check_digests(directory: Path, manifest: Manifest) -> None:
    sizes: dict[str, BundleFile] = {}
    for file in manifest.files:
        if not 0 <= file.bytes <= MAX_FILE_BYTES or not _DIGEST.fullmatch(file.sha256):
            evidence = f"{file.bytes} bytes, sha256 {file.sha256[:80]!r}"
            refuse(directory, f"'{file.path}' is listed with a size or digest that no file has", evidence)
        other = sizes.setdefault(file.sha256, file)
        if other.bytes != file.bytes:
            evidence = f"'{other.path}' and '{file.path}': {other.bytes} and {file.bytes} bytes"
            refuse(directory, "two files of the manifest have one digest and two sizes", evidence)
    digest = digest_lineage(manifest.lineage)
    if digest != manifest.lineage_digest:
        refuse(
            directory,
            "the lineage of the manifest is not that of its digest",
            f"sha256 {digest[:12]}… against {manifest.lineage_digest[:12]}…",
        )


def _check_routes(directory: Path, manifest: Manifest) -> None:
    """Requests must have an engine of the bundle to go to, whatever their size."""
    ids = {entry.id for entry in manifest.engines}
    for choice in manifest.choice.targets:
        missing = [name for name in choice.engines if name not in ids] if choice.routes else []
        if missing:
            refuse(
                directory, f"requests are routed to engine '{missing[0]}', which is not there", choice.target
            )
        sizes = [route.batch for route in choice.routes]
        if sizes != sorted({size for size in sizes if size >= 1}):
            refuse(directory, f"the routes of '{choice.target}' are out of order", f"batch sizes {sizes}")


def _check_cut(directory: Path, manifest: Manifest, files: Mapping[str, BundleFile]) -> None:
    cut = manifest.cut
    dense = [entry.id for entry in manifest.candidates if entry.part is Part.DENSE]
    if manifest.fallback.part is not Part.WHOLE:
        refuse(directory, "the fallback is not the whole model", f"its part is '{manifest.fallback.part}'")
    if cut is None:
        if dense:
            refuse(
                directory,
                f"engine '{dense[0]}' takes looked-up rows, and the manifest has no cut",
                f"its part is '{Part.DENSE}'",
            )
        return
    if cut.lookup not in files:
        refuse(
            directory, f"the manifest names lookup model '{cut.lookup}' but does not list it", MANIFEST_NAME
        )
    inputs = {spec.name for spec in manifest.inputs}
    unknown = sorted({*cut.lookup_inputs, *cut.passed} - inputs)
    if unknown:
        refuse(directory, f"the cut reads '{unknown[0]}', which is no input", f"inputs {sorted(inputs)}")
    names = [spec.name for spec in cut.tensors]
    if not names or len(set(names)) != len(names) or inputs & set(names):
        refuse(
            directory,
            "the cut needs tensors whose names differ from one another and from those of the inputs",
            f"tensors {names}, inputs {sorted(inputs)}",
        )


def _walk(directory: Path) -> Iterator[str]:
    """Paths of all files, relative to the bundle; refuses whatever is not a plain file or directory."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        # A tree without an end would be walked until a path is too long for the system.
        if prefix.count("/") + 2 > MAX_PATH_DEPTH:
            refuse(directory, f"directory {prefix[:200]!r} is too deep", f"paths have {MAX_PATH_DEPTH} parts")
        try:
            with os.scandir(directory / prefix) as entries:
                found = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
        except OSError as error:
            refuse(directory, f"directory {prefix[:200]!r} cannot be read", str(error)[:400])
        if prefix and not found:
            refuse(directory, f"directory {prefix!r} is empty", "a bundle has no directories without files")
        for name, mode in sorted(found):
            path = f"{prefix}/{name}" if prefix else name
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                yield path
            else:
                refuse(directory, f"{path!r} is not a regular file", kind_of(mode))


def _verify_file(directory: Path, entry: BundleFile, digests: dict[tuple[int, int], str]) -> None:
    """Checks size and digest of a file; a file with several names is read once, and kept in `digests`."""
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
            # Some file systems number files as they please: a file with one name is read as such.
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


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model, found by its type, whichever field of whichever message holds it."""
    pending: list[Any] = [model]
    while pending:
        message = pending.pop()
        if isinstance(message, onnx.TensorProto):
            yield message
            continue
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None:
                pending.extend((value,) if hasattr(value, "ListFields") else value)
