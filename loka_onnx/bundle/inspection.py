"""A verified bundle as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loka_onnx.bundle.format.archive import verify_path
from loka_onnx.bundle.format.documents import printable
from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.rewrite import Part


def inspect_bundle(path: Path) -> str:
    """Describe a bundle for a terminal, once its files match its manifest; no signature is checked."""
    verified = verify_path(path)
    manifest, cut = verified.manifest, verified.manifest.cut
    lines = [
        f"bundle written by {manifest.created_by}",
        f"bundle    sha256 {manifest.seal}",
        f"model     sha256 {manifest.model_digest}",
        f"lineage   sha256 {manifest.lineage_digest}",
        f"files     {len(manifest.files)}, {manifest.total_bytes:,} bytes",
        *(f"input     {t.name}: {layout(t)}" for t in manifest.inputs),
        *(f"output    {t.name}: {layout(t)}" for t in manifest.outputs),
        *([f"lookup    {cut.lookup} reads {', '.join(cut.lookup_inputs)}"] if cut else []),
        *(f"looked up {t.name}: {layout(t)}" for t in (cut.tensors if cut else ())),
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
            f"            needs: {'; '.join(map(str, entry.requires)) or 'not stated'}",
            *_measured(entry.evaluation),
            *(["            takes looked-up rows"] if entry.part is Part.DENSE else []),
            *(["            computes a user once"] if entry.part is Part.REQUEST else []),
        ]
    lines += [f"file      {f.sha256[:16]}… {f.bytes:>14,} {f.path}" for f in manifest.files]
    lines += [f"signed    claims key {key}, not verified" for key in verified.claimed] or ["signed    no"]
    return "\n".join(map(printable, lines)) + "\n"


def _measured(evaluation: Evaluation | None) -> Iterator[str]:
    if evaluation is None:
        yield "            not measured"
        return
    if not evaluation.outputs:
        yield f"            {evaluation.status}"
    for output in evaluation.outputs:
        if output.difference is None:
            continue
        judged = output.difference.judged
        yield (
            f"            {output.output}: {output.difference.judged_name} {judged.value:.3g} "
            f"[{judged.lower:.3g}, {judged.upper:.3g}] on {evaluation.rows} rows of {evaluation.split}; "
            f"budget {output.budget:.3g}: {output.verdict}"
        )
    for latency in evaluation.latencies:
        yield (
            f"            {latency.batch} rows: p50 {latency.p50_us:.1f} µs, p99 {latency.p99_us:.1f} µs "
            f"on {latency.device}"
        )


def layout(spec: TensorSpec) -> str:
    """Type and shape of a tensor, such as ``float32[?, 4]``."""
    return f"{spec.dtype}[{', '.join('?' if size is None else str(size) for size in spec.shape)}]"
