"""Reading of an untrusted bundle's manifest; `bundle.format.files` checks the files."""

from __future__ import annotations

import math
import re
from pathlib import Path

from loka_onnx.bundle.format.documents import parse_document, read_document, refuse
from loka_onnx.bundle.format.pinned import pinned
from loka_onnx.bundle.format.signature import SIGNATURE_NAME
from loka_onnx.core.manifest import (
    MANIFEST_NAME,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    BundleFile,
    Manifest,
    digest_lineage,
    paths_problem,
)
from loka_onnx.core.rewrite import Part
from loka_onnx.sessions.dlpack import DTYPES

MAX_FILE_BYTES = 1 << 50
"""Larger than any file, and valid in every size field of a header or system call."""
_DIGEST = re.compile("[0-9a-f]{64}")


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
            refuse(
                where,
                f"engine '{entry.id}' and the list of files disagree on '{entry.path}'",
                f"{entry.bytes} bytes, sha256 {entry.digest[:12]}… against "
                f"{listed.bytes} bytes, sha256 {listed.sha256[:12]}…",
            )
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
    if cut is None:
        if dense:
            what = f"engine '{dense[0]}' takes looked-up rows, and the manifest has no cut"
            refuse(where, what, f"its part is '{Part.DENSE}'")
        return
    inputs = {spec.name for spec in manifest.inputs}
    unknown = sorted({*cut.lookup_inputs, *cut.passed} - inputs)
    if unknown:
        refuse(where, f"the cut reads '{unknown[0]}', which is no input", f"inputs {sorted(inputs)}")
    names = [spec.name for spec in cut.tensors]
    if not names or len(set(names)) != len(names) or inputs & set(names):
        what = "the cut needs tensors whose names differ from one another and from those of the inputs"
        refuse(where, what, f"tensors {names}, inputs {sorted(inputs)}")
