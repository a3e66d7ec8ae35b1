"""Reading a bundle without trusting it.

A bundle is closed-world: it holds exactly the files that its manifest lists, unaltered. Nothing in it is
unpickled, followed or executed before that has been checked. The digests protect against accidents and
against tampering by someone who cannot rewrite the manifest; they do not say who made the bundle.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core import serde
from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.core.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BundleFile,
    EngineEntry,
    Manifest,
    paths_problem,
    sample_expected_key,
    sample_input_key,
    sample_looked_up_key,
)
from loka_onnx.core.split import Part
from loka_onnx.errors import BundleInvalid, ModelError, UserError

Arrays = dict[str, npt.NDArray[Any]]

MAX_SAMPLE_BYTES = 256 << 20
"""Unpacked size of a sample; a few rows of every input and output are far below it."""

_REMEDY = "copy the bundle again from where it was written, or write it again"


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
    manifest = read_manifest(directory)
    found = set(_walk(directory))
    listed = {f.path for f in manifest.files}
    for path in sorted(found - listed - {MANIFEST_NAME}):
        _refuse(directory, f"file {path!r} is not listed in the manifest", f"{len(listed)} files are listed")
    for path in sorted(listed - found):
        _refuse(directory, f"file {path!r} is missing", f"{len(found - {MANIFEST_NAME})} files are there")
    for entry in manifest.files:
        _verify_file(directory, entry)
    for engine in manifest.candidates:
        _verify_external_data(directory, f"engine '{engine.id}'", engine.path, listed)
    if manifest.cut is not None:
        _verify_external_data(directory, "the lookup model", manifest.cut.lookup, listed)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Reads a manifest and checks it against itself, but not against the files.

    Raises:
        BundleInvalid: As `verify_bundle`, as far as the manifest alone shows it.
    """
    if not directory.is_dir():
        _refuse(directory, "there is no bundle here", "not a directory", "name the directory of a bundle")
    manifest = _parse(directory, _manifest_text(directory))
    problem = paths_problem([MANIFEST_NAME, *(f.path for f in manifest.files)])
    if problem is not None:
        _refuse(directory, f"the manifest lists a forbidden path: {problem}", MANIFEST_NAME)
    _check_consistency(directory, manifest)
    return manifest


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
            _refuse(
                directory, "the sample is too large", f"{unpacked} bytes, the limit is {MAX_SAMPLE_BYTES}"
            )
        with np.load(path, allow_pickle=False) as arrays:
            inputs = {i.name: arrays[sample_input_key(i.name)] for i in manifest.inputs}
            expected = {o.name: arrays[sample_expected_key(engine.id, o.name)] for o in manifest.outputs}
            cut = () if manifest.cut is None else manifest.cut.tensors
            looked_up = {t.name: arrays[sample_looked_up_key(t.name)] for t in cut}
    except KeyError as error:
        _refuse(directory, f"the sample of engine '{engine.id}' lacks an array", str(error))
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        _refuse(directory, f"'{manifest.sample}' is not an npz of plain arrays", str(error))
    return Sample(inputs, expected, looked_up)


def external_data_locations(model: Path) -> tuple[str, ...]:
    """Files that an ONNX model keeps weights in, as it names them, sorted.

    Raises:
        ModelError: The file is not an ONNX model.
    """
    try:
        proto = onnx.load(os.fspath(model), format="protobuf", load_external_data=False)
    except Exception as error:
        # google.protobuf's DecodeError has no stable import path across its implementations.
        raise ModelError(f"'{model}' is not an ONNX model", evidence=str(error)[:200]) from error
    bodies = (_node_tensors(function.node) for function in proto.functions)
    return tuple(
        sorted(
            {
                item.value
                for tensor in itertools.chain(_tensors(proto.graph), *bodies)
                if tensor.data_location == onnx.TensorProto.EXTERNAL
                for item in tensor.external_data
                if item.key == "location"
            }
        )
    )


def _refuse(directory: Path, what: str, evidence: str, remedy: str = _REMEDY) -> NoReturn:
    raise BundleInvalid(what, where=str(directory), evidence=evidence, remedy=remedy)


def _manifest_text(directory: Path) -> str:
    path = directory / MANIFEST_NAME
    try:
        status = path.lstat()
    except OSError as error:
        _refuse(directory, f"'{MANIFEST_NAME}' is missing", str(error))
    if not stat.S_ISREG(status.st_mode):
        _refuse(directory, f"'{MANIFEST_NAME}' is not a regular file", _kind(status.st_mode))
    if status.st_size > MAX_MANIFEST_BYTES:
        _refuse(
            directory,
            "the manifest is too large",
            f"{status.st_size} bytes, the limit is {MAX_MANIFEST_BYTES}",
        )
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _refuse(directory, "the manifest cannot be read as UTF-8", str(error))


def _parse(directory: Path, text: str) -> Manifest:
    try:
        # Parsed first by itself: a repeated key would let two readers see two manifests.
        json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        _refuse(directory, "the manifest is not valid JSON", str(error))
    try:
        return serde.loads(Manifest, text, where=MANIFEST_NAME)
    except UserError as error:
        expected = serde.schema_id(Manifest)
        raise BundleInvalid(
            f"the manifest is not a {expected} document: {error.what}",
            where=str(directory),
            evidence=error.evidence,
            remedy=f"read it with a version of loka-onnx that knows its schema; this one knows {expected}",
        ) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return keys


def _check_consistency(directory: Path, manifest: Manifest) -> None:
    files = {f.path: f for f in manifest.files}
    for role, path in (("plans", manifest.plans), ("sample", manifest.sample)):
        if path not in files:
            _refuse(directory, f"the manifest names {role} '{path}' but does not list it", MANIFEST_NAME)
    for path in manifest.report:
        if path not in files:
            _refuse(directory, f"the manifest names report '{path}' but does not list it", MANIFEST_NAME)
    _check_cut(directory, manifest, files)
    _check_routes(directory, manifest)
    ids = [e.id for e in manifest.candidates]
    if len(set(ids)) != len(ids):
        _refuse(directory, "two engines of the manifest have one id", ", ".join(sorted(ids)))
    outputs = {o.name for o in manifest.outputs}
    for entry in manifest.candidates:
        listed = files.get(entry.path)
        if listed is None:
            _refuse(
                directory, f"engine '{entry.id}' names '{entry.path}' but it is not listed", MANIFEST_NAME
            )
        if (listed.sha256, listed.bytes) != (entry.digest, entry.bytes):
            _refuse(
                directory,
                f"engine '{entry.id}' and the list of files disagree on '{entry.path}'",
                f"{entry.bytes} bytes, sha256 {entry.digest[:12]}… against "
                f"{listed.bytes} bytes, sha256 {listed.sha256[:12]}…",
            )
        if not 1 <= entry.batch.min <= entry.batch.max:
            _refuse(directory, f"engine '{entry.id}' has an empty batch range", f"{entry.batch}")
        # A NaN or infinite tolerance would make the self-test pass whatever comes out.
        if set(entry.tolerance) != outputs or not all(
            math.isfinite(t) and t >= 0 for t in entry.tolerance.values()
        ):
            _refuse(
                directory,
                f"engine '{entry.id}' needs one finite tolerance for each output",
                f"tolerances {entry.tolerance}, outputs {sorted(outputs)}",
            )


def _check_routes(directory: Path, manifest: Manifest) -> None:
    """Requests must have an engine of the bundle to go to, whatever their size."""
    ids = {entry.id for entry in manifest.engines}
    for choice in manifest.choice.targets:
        missing = [name for name in choice.engines if name not in ids] if choice.routes else []
        if missing:
            _refuse(
                directory, f"requests are routed to engine '{missing[0]}', which is not there", choice.target
            )
        sizes = [route.batch for route in choice.routes]
        if sizes != sorted({size for size in sizes if size >= 1}):
            _refuse(directory, f"the routes of '{choice.target}' are out of order", f"batch sizes {sizes}")


def _check_cut(directory: Path, manifest: Manifest, files: Mapping[str, BundleFile]) -> None:
    cut = manifest.cut
    dense = [entry.id for entry in manifest.candidates if entry.part is Part.DENSE]
    if manifest.fallback.part is not Part.WHOLE:
        _refuse(directory, "the fallback is not the whole model", f"its part is '{manifest.fallback.part}'")
    if cut is None:
        if dense:
            _refuse(
                directory,
                f"engine '{dense[0]}' takes looked-up rows, and the manifest has no cut",
                f"its part is '{Part.DENSE}'",
            )
        return
    if cut.lookup not in files:
        _refuse(
            directory, f"the manifest names lookup model '{cut.lookup}' but does not list it", MANIFEST_NAME
        )
    inputs = {spec.name for spec in manifest.inputs}
    unknown = sorted({*cut.lookup_inputs, *cut.passed} - inputs)
    if unknown:
        _refuse(directory, f"the cut reads '{unknown[0]}', which is no input", f"inputs {sorted(inputs)}")
    names = [spec.name for spec in cut.tensors]
    if not names or len(set(names)) != len(names) or inputs & set(names):
        _refuse(
            directory,
            "the cut needs tensors whose names differ from one another and from those of the inputs",
            f"tensors {names}, inputs {sorted(inputs)}",
        )


def _walk(directory: Path) -> Iterator[str]:
    """Paths of all files, relative to the bundle; refuses whatever is not a plain file or directory."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            names = sorted(entries, key=lambda e: e.name)
        if prefix and not names:
            _refuse(directory, f"directory {prefix!r} is empty", "a bundle has no directories without files")
        for entry in names:
            path = f"{prefix}/{entry.name}" if prefix else entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                yield path
            else:
                _refuse(directory, f"{path!r} is not a regular file", _kind(mode))


def _verify_file(directory: Path, entry: BundleFile) -> None:
    # O_NOFOLLOW and O_NONBLOCK: a link or a pipe put there since the walk is refused, not followed.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(directory / entry.path, flags)
        with os.fdopen(descriptor, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != entry.bytes:
                _refuse(
                    directory,
                    f"file '{entry.path}' has another size",
                    f"{size} bytes, the manifest says {entry.bytes}",
                )
            state = hashlib.sha256()
            while chunk := stream.read(CHUNK_BYTES):
                state.update(chunk)
    except OSError as error:
        _refuse(directory, f"file '{entry.path}' cannot be read", str(error))
    if state.hexdigest() != entry.sha256:
        _refuse(
            directory,
            f"file '{entry.path}' was altered",
            f"sha256 {state.hexdigest()[:16]}…, the manifest says {entry.sha256[:16]}…",
        )


def _verify_external_data(directory: Path, what: str, path: str, listed: set[str]) -> None:
    if not path.endswith(".onnx"):
        return
    try:
        locations = external_data_locations(directory / path)
    except ModelError as error:
        _refuse(directory, f"{what}: '{path}' is not an ONNX model", error.evidence)
    folder = path.rpartition("/")[0]
    for location in locations:
        if (f"{folder}/{location}" if folder else location) not in listed:
            _refuse(
                directory,
                f"{what} reads weights from a file that is not listed",
                f"external data at {location!r}",
            )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for graph in attribute.graphs:
                yield from _tensors(graph)


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    ):
        if test(mode):
            return name
    return "a special file"
