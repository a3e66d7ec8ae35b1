"""A verified bundle as text."""

from __future__ import annotations

from pathlib import Path

from loka_onnx.core.manifest import Manifest
from loka_onnx.core.split import Part
from loka_onnx.sessions.bundle_files import verify_bundle


def inspect_bundle(directory: Path) -> str:
    """Verifies a bundle and describes it for a terminal.

    Raises:
        BundleInvalid: It does not verify.
    """
    return describe(verify_bundle(directory))


def describe(manifest: Manifest) -> str:
    """What a manifest says, one line per fact, ending with a newline."""
    lines = [
        f"bundle written by {manifest.created_by}",
        f"model     sha256 {manifest.model_digest}",
        f"files     {len(manifest.files)}, {manifest.total_bytes:,} bytes",
        *(f"input     {t.name}: {t.dtype}{_shape(t.shape)}" for t in manifest.inputs),
        *(f"output    {t.name}: {t.dtype}{_shape(t.shape)}" for t in manifest.outputs),
        *_cut(manifest),
        *(f"target    {t.target}: {t.engine}: {t.reason}" for t in manifest.choice.targets),
        *(
            f"requests  {t.target}: to {r.batch} rows: {r.engine}"
            for t in manifest.choice.targets
            for r in t.routes
        ),
    ]
    for entry in manifest.candidates:
        role = "fallback " if entry is manifest.fallback else "engine   "
        simulated = ", FP8 simulated" if entry.simulated else ""
        lines += [
            f"{role} {entry.id}: plan {entry.plan}{simulated}",
            f"            {entry.backend} {entry.version} on {entry.architecture}; "
            f"batches of {entry.batch.min} to {entry.batch.max}; {entry.bytes:,} bytes",
            f"            loads on: {entry.portability or 'not stated'}",
            *(["            takes looked-up rows"] if entry.part is Part.DENSE else []),
        ]
    lines += [f"file      {f.sha256[:16]}… {f.bytes:>14,} {f.path}" for f in manifest.files]
    return "\n".join(lines) + "\n"


def _cut(manifest: Manifest) -> list[str]:
    cut = manifest.cut
    if cut is None:
        return []
    return [
        f"lookup    {cut.lookup} reads {', '.join(cut.lookup_inputs)}",
        *(f"looked up {t.name}: {t.dtype}{_shape(t.shape)}" for t in cut.tensors),
    ]


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
