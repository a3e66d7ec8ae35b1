"""Runs mods one after the other and holds each against the model before it, on data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.rewrite import Declined, RewriteLog, RewriteRecord
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.fuse_layer_norm import FuseLayerNorm
from loka_onnx.transforms.fuse_rms_norm import FuseRMSNorm

Arrays = Mapping[str, npt.NDArray[Any]]

DEFAULT_MODS: tuple[type[Mod[Any]], ...] = (FuseLayerNorm, FuseRMSNorm)


@dataclass(frozen=True)
class Rewritten:
    """A model after a sequence of mods.

    Attributes:
        model: The rewritten model.
        log: What each mod did and declined.
    """

    model: ModelArtifact
    log: RewriteLog


def apply_mods(
    model: ModelArtifact,
    rows: Sequence[Arrays],
    target: Path,
    mods: Sequence[Mod[Any]] | None = None,
    progress: Progress = silent,
) -> Rewritten:
    """Rewrite a model; a mod that moves an output beyond its tolerance is rolled back.

    Args:
        model: The model before.
        rows: Batches that each mod is checked on.
        target: Where the rewritten model is written.
        mods: Mods in order; the default sequence when None.
        progress: Called after each mod.
    """
    chosen = [kind() for kind in DEFAULT_MODS] if mods is None else list(mods)
    graph = GraphModel.load(model.path)
    records: list[RewriteRecord] = []
    reference: list[dict[str, npt.NDArray[Any]]] | None = None
    for number, mod in enumerate(chosen):
        candidate = graph.copy()
        record = _apply(mod, candidate)
        if record.applied:
            began = time.perf_counter()
            if reference is None:
                reference = _outputs(model.path, rows)
            candidate.save(target)
            record = _judge(record, mod, reference, _outputs(target, rows))
            record = replace(record, check_seconds=time.perf_counter() - began)
            # Reading the file back gives the new tensors their inferred types and shapes.
            graph = graph if record.rolled_back else GraphModel.load(target)
        records.append(record)
        progress("mods", number + 1, len(chosen))
    digest = graph.save(target)
    origins = {site.name: site.merged_from for site in model.sites}
    sites = find_sites(GraphModel.load(target), origins)
    return Rewritten(
        replace(model, path=target, digest=digest, opset=graph.opset, sites=sites), RewriteLog(tuple(records))
    )


def _apply(mod: Mod[Any], graph: GraphModel) -> RewriteRecord:
    began = time.perf_counter()
    found = mod.match(graph)
    applied = tuple(mod.rewrite(graph, match) for match in found.matches)
    return RewriteRecord(mod.name, applied, found.declined, seconds=time.perf_counter() - began)


def _outputs(path: Path, rows: Sequence[Arrays]) -> list[dict[str, npt.NDArray[Any]]]:
    session = OnnxSession(path, SessionOptions(optimize=False))
    return [session.run(batch) for batch in rows]


def _judge(
    record: RewriteRecord,
    mod: Mod[Any],
    before: Sequence[Arrays],
    after: Sequence[Arrays],
) -> RewriteRecord:
    moved, largest = 0.0, 1.0
    for old, new in zip(before, after, strict=True):
        for name, values in old.items():
            difference = np.abs(new[name].astype(np.float64) - values.astype(np.float64))
            moved = max(moved, float(difference.max()) if np.isfinite(difference).all() else float("inf"))
            largest = max(largest, float(np.abs(values).max()))
    tolerance = mod.tolerance * largest
    if moved <= tolerance:
        return replace(record, max_abs=moved, tolerance=tolerance)
    reason = f"moved an output by {moved:.3g} on the check rows, tolerance {tolerance:.3g}: rolled back"
    return replace(
        record,
        applied=(),
        declined=(*record.declined, *(Declined(a.at, reason) for a in record.applied)),
        max_abs=moved,
        tolerance=tolerance,
        rolled_back=True,
    )
