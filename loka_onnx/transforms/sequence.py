"""Run mods in order, and compare each with the model before it, on data."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.progress import Progress, collector_paused, silent
from loka_onnx.core.rewrite import Declined, RewriteLog, RewriteRecord
from loka_onnx.errors import EngineError, LokaError, MissingPackage, ModelError, OutputError, TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.products import other_products
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.weights import Exported
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.interactions.conv_to_matmul import ConvToMatMul
from loka_onnx.transforms.interactions.einsum_to_matmul import EinsumToMatMul
from loka_onnx.transforms.interactions.reassociate_interaction import ReassociateInteraction
from loka_onnx.transforms.linears.column_to_row import ColumnToRow
from loka_onnx.transforms.linears.merge_parallel_linears import MergeParallelLinears
from loka_onnx.transforms.linears.outer_to_mul import OuterToMul
from loka_onnx.transforms.linears.pad_sites import PadSites
from loka_onnx.transforms.linears.split_concat import SplitConcat
from loka_onnx.transforms.linears.sum_experts import SumExperts
from loka_onnx.transforms.lookups.bags import BagsToSums, SplitToRows
from loka_onnx.transforms.lookups.merge_gathers import MergeGathers
from loka_onnx.transforms.norms.fold_batch_norm import FoldBatchNorm
from loka_onnx.transforms.norms.fold_norm_affine import FoldNormAffine
from loka_onnx.transforms.norms.fuse import FuseLayerNorm, FuseRMSNorm
from loka_onnx.transforms.tidying.fold_constants import FoldConstants
from loka_onnx.transforms.tidying.join_parts import JoinParts
from loka_onnx.transforms.tidying.masks_to_where import MasksToWhere
from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps
from loka_onnx.transforms.tidying.share_duplicates import ShareDuplicates

Arrays = Mapping[str, npt.NDArray[Any]]
Outputs = list[dict[str, npt.NDArray[Any]]]
"""Graph outputs by name, batch by batch."""

_OPTIONS = SessionOptions(optimize=False)

STRICT = "LOKA_ONNX_STRICT_MODS"
"""Environment variable that lets the error of a mod end a run, as in tests."""
_NOT_THE_MODS = (OSError, MemoryError, OutputError, MissingPackage)
"""Errors of the machine, which the next mod would meet too."""
_LONGEST_REASON = 300
_MOST_ROUNDS = 4
"""Graphs were seen to need two, and a third that finds nothing."""

DEFAULT_MODS: tuple[type[Mod[Any]], ...] = (
    EinsumToMatMul,
    ConvToMatMul,
    FoldConstants,
    ColumnToRow,
    BagsToSums,
    SplitToRows,
    RemoveNoOps,
    MasksToWhere,
    ShareDuplicates,
    FuseLayerNorm,
    FuseRMSNorm,
    FoldBatchNorm,
    FoldNormAffine,
    SplitConcat,
    OuterToMul,
    ReassociateInteraction,
    MergeGathers,
    SumExperts,
    MergeParallelLinears,
    JoinParts,
    PadSites,
)
"""In this order few mods match again after a later one. Products first, for all the others; constants,
no-ops and twins hide patterns, and no-ops shapes: they go before patterns are read; norms fold into linears
of one channel before these become elementwise; K and N are padded last, when shapes are final."""


@dataclass(frozen=True)
class Rewritten:
    """A model after a sequence of mods."""

    model: ModelArtifact
    log: RewriteLog


def apply_mods(
    model: ModelArtifact,
    rows: Sequence[Arrays],
    target: Path,
    mods: Sequence[Mod[Any]] | None = None,
    progress: Progress = silent,
) -> Rewritten:
    """Write a rewritten copy of a model to `target`; `mods` None are `DEFAULT_MODS`.

    A mod that fails, or moves an output beyond its tolerance on the rows, is rolled back. The result of one
    may match another, so rounds follow until one finds nothing, four at most. Raises TransformError if there
    are no rows; ModelError, OutputError and MissingPackage where files or packages are at fault.
    """
    if not any(len(array) for batch in rows for array in batch.values()):
        raise TransformError(
            "E0608 mods are checked on data, and there are no rows",
            evidence=f"{len(rows)} batches",
            remedy="pass rows of the calibration split",
        )
    chosen = [kind() for kind in DEFAULT_MODS] if mods is None else list(mods)
    graph, accepted = GraphModel.load(model.path), None
    records: list[RewriteRecord] = []
    outputs: Outputs | None = None
    for number, mod in enumerate(_in_rounds(chosen, records)):
        began = time.perf_counter()
        try:
            tried = _try(mod, graph)
        except _NOT_THE_MODS:
            raise
        except Exception as error:
            # Every mod is optional: one that fails costs speed, not the run.
            if os.environ.get(STRICT):
                raise
            records.append(_failed(mod, error, time.perf_counter() - began))
            # The failed mod may have edited the graph.
            graph = GraphModel.load(model.path) if accepted is None else GraphModel.read_back(accepted)
            continue
        finally:
            if number < len(chosen):
                progress("mods", number + 1, len(chosen))
        if number >= len(chosen) and not tried.record.applied:
            continue
        record = replace(tried.record, seconds=time.perf_counter() - began)
        if tried.exported is not None:
            began = time.perf_counter()
            if outputs is None:
                session = OnnxSession(model.path, _OPTIONS)
                outputs = [session.run(batch) for batch in rows]
            record, outputs = _judge(record, mod, outputs, partial(_run, tried.exported, target, rows))
            record = replace(record, check_seconds=time.perf_counter() - began)
            if record.rolled_back:
                graph = tried.before
            else:
                # Reading back infers types and shapes of the new tensors.
                graph, accepted = GraphModel.read_back(tried.exported), tried.exported
        records.append(record)
    exported = graph.export()
    digest = exported.write(target)
    written = GraphModel.read_back(exported)
    sites, others = find_sites(written, _origins(model, records)), other_products(written)
    rewritten = replace(model, path=target, digest=digest, opset=graph.opset, sites=sites)
    return Rewritten(replace(rewritten, other_products=others), RewriteLog(tuple(records)))


def _in_rounds(mods: Sequence[Mod[Any]], records: Sequence[RewriteRecord]) -> Iterator[Mod[Any]]:
    """Yield the mods, and while a round applies anything those of `DEFAULT_MODS` again.

    Records of further rounds are those of matches alone; a mod that was rolled back is not repeated.
    """
    seen = 0
    for _ in range(_MOST_ROUNDS):
        undone = {record.transform for record in records if record.rolled_back}
        yield from (mod for mod in mods if not seen or (type(mod) in DEFAULT_MODS and mod.name not in undone))
        if not any(record.applied for record in records[seen:]):
            return
        seen = len(records)


@dataclass(frozen=True)
class _Tried:
    """A mod applied to a graph, exported if there was a match."""

    record: RewriteRecord
    before: GraphModel
    exported: Exported | None


def _try(mod: Mod[Any], graph: GraphModel) -> _Tried:
    with collector_paused():
        matching = mod.match(graph)
        # Most mods match nothing, and copying a large graph takes as long as the search.
        before = graph.copy() if matching.matches else graph
        applied = tuple(mod.rewrite(graph, match) for match in matching.matches)
    record = RewriteRecord(mod.name, applied, matching.declined)
    return _Tried(record, before, graph.export() if applied else None)


def _failed(mod: Mod[Any], error: Exception, seconds: float) -> RewriteRecord:
    """Return the record of a failed mod: error and source line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = f"{error.what}: {error.evidence}" if isinstance(error, LokaError) else str(error)
    reason = (
        f"rolled back: the mod failed on this model: {type(error).__name__}: {said[:_LONGEST_REASON]} "
        f"({Path(frame.filename).name}:{frame.lineno})"
    )
    return RewriteRecord(mod.name, (), (Declined("", reason),), rolled_back=True, seconds=seconds)


def _origins(model: ModelArtifact, records: Sequence[RewriteRecord]) -> dict[str, tuple[str, ...]]:
    """Map each site to the sites of the exported model that it replaces; empty for original ones."""
    origins = {site.name: site.merged_from for site in model.sites}
    for record in records:
        for applied in record.applied:
            for name, replaced in applied.origins.items():
                # A merged site stands for the sites it came from.
                known = [origins.get(other) or (other,) for other in replaced]
                origins[name] = tuple(dict.fromkeys(origin for group in known for origin in group))
    return origins


def _run(exported: Exported, target: Path, rows: Sequence[Arrays]) -> Outputs:
    """Run a model that is not written: files would take most of the time of a large model's sequence."""
    model = exported.in_memory()
    if model is None:
        exported.write(target)
        session = OnnxSession(target, _OPTIONS)
    else:
        session = OnnxSession.in_memory(model.proto, model.weights, target, _OPTIONS)
    return [session.run(batch) for batch in rows]


def _judge(
    record: RewriteRecord, mod: Mod[Any], before: Outputs, run: Callable[[], Outputs]
) -> tuple[RewriteRecord, Outputs]:
    """Return the record with its verdict, and the outputs for the next comparison."""
    try:
        after = run()
    except (ModelError, EngineError) as error:
        return _rolled_back(record, f"{error.what}: {error.evidence}"), before
    changes = {name: change(mod.tolerance, name, before, after) for name in before[0]}
    output, (moved, tolerance) = max(changes.items(), key=lambda item: item[1][0] / item[1][1])
    record = replace(record, max_abs=moved, tolerance=tolerance)
    if moved <= tolerance:
        return record, after
    return _rolled_back(record, f"moved output '{output}' by {moved:.3g}, tolerance {tolerance:.3g}"), before


def change(tolerance: float, name: str, before: Outputs, after: Outputs) -> tuple[float, float]:
    """Return max |after − before| of one output, inf for NaN or inf, and `tolerance` · max(1, |before|)."""
    moved, largest = 0.0, 1.0
    for old, new in zip(before, after, strict=True):
        with np.errstate(invalid="ignore"):
            difference = np.abs(new[name].astype(np.float64) - old[name].astype(np.float64))
        # NaN or infinity on either side proves no equivalence.
        moved = max(moved, float(difference.max(initial=0.0)) if np.isfinite(difference).all() else np.inf)
        magnitudes = np.abs(old[name][np.isfinite(old[name])].astype(np.float64))
        largest = max(largest, float(magnitudes.max(initial=0.0)))
    return moved, tolerance * largest


def _rolled_back(record: RewriteRecord, evidence: str) -> RewriteRecord:
    reason = f"rolled back on the check rows: {evidence}"
    declined = (*record.declined, *(Declined(applied.at, reason) for applied in record.applied))
    return replace(record, applied=(), declined=declined, rolled_back=True)
