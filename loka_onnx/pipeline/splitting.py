"""The cut at the embeddings in a run: the halves, and what engines are built from.

Plans and profile stay those of the whole: the dense half has the same sites. What changes is the model that a
plan is written into, the inputs that an engine takes, and that a lookup runs before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.evaluation import Latency
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.rewrite import Declined, ModelSplit, Part, SplitCheck
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import model_files
from loka_onnx.pipeline.context import CHECK_ROWS, Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.sessions.runner import Arrays
from loka_onnx.transforms.lookups.split_sparse import (
    DENSE_FILE,
    LOOKUP_FILE,
    describe_halves,
    split_sparse,
    verify_split,
)
from loka_onnx.transforms.precision.apply_plan import check_plan

SPLIT = DocumentStage("split", "model/split.json", ModelSplit)
LOOKUP = "lookup"
"""Id under which the lookup is timed among engines, whose ids name a target and a backend."""


@dataclass(frozen=True)
class Source:
    """Model that engines are built from (the modified one, or its dense half), and the plans for it."""

    model: ModelArtifact
    plans: PlanSet
    part: Part


def cut_model(context: Context, model: ModelArtifact) -> ModelSplit | None:
    """Cut the modified model → `model/lookup.onnx`, `model/dense.onnx`, `model/split.json`.

    Returns the cut or the reason why there is none; None if the run file does not ask for it.
    """
    if not context.config.model.split_sparse:
        context.directory.forget(SPLIT.name)
        return None

    def make() -> ModelSplit:
        began = time.perf_counter()
        split = _cut(model, context.first_rows(CHECK_ROWS), context.path("model"))
        return replace(split, seconds=time.perf_counter() - began)

    reads = {"model": model, "data": context.splits.calibration.digest}
    # The tables are those of the modified model: its stage has written them.
    return context.directory.document(
        SPLIT, reads, make, lambda written: sorted({*written} - {*model_files(model.path)})
    )


def source_of(model: ModelArtifact, plans: PlanSet, split: ModelSplit | None) -> Source:
    """Return the dense half with its plans, but `untouched`, if the model was cut; else the whole model."""
    if split is None or split.halves is None:
        return Source(model, plans, Part.WHOLE)
    dense = split.halves.dense
    cut = [plan for plan in plans.plans if not plan.untouched]
    for plan in cut:
        check_plan(plan, split.parent)
    # What a plan keeps wide may be a lookup, or its pooling: no engine computes that.
    nodes = {node.name for node in GraphModel.load(dense.path).nodes}
    handed = tuple(
        replace(plan, model_digest=dense.digest, wide=tuple(w for w in plan.wide if w.node in nodes))
        for plan in cut
    )
    return Source(dense, PlanSet(handed), Part.DENSE)


def beside_lookup(latencies: Mapping[str, tuple[Latency, ...]]) -> dict[str, tuple[Latency, ...]]:
    """Return latencies of engines, each with that of the lookup, which was timed among them."""
    medians = {latency.batch: latency.p50_us for latency in latencies.get(LOOKUP, ())}
    return {
        engine: tuple(replace(item, lookup_p50_us=medians.get(item.batch)) for item in timed)
        for engine, timed in latencies.items()
        if engine != LOOKUP
    }


def _cut(model: ModelArtifact, rows: Arrays, directory: Path) -> ModelSplit:
    """Cut a model and compare the halves with the whole on all rows, and on one alone."""
    sparse, check = split_sparse(GraphModel.load(model.path)), None
    declined = sparse if isinstance(sparse, Declined) else None
    if not isinstance(sparse, Declined):
        batches = [rows, {name: values[:1] for name, values in rows.items()}]
        declined = verify_split(sparse, model.path, batches, directory)
        check = SplitCheck(tuple(len(next(iter(batch.values()))) for batch in batches), declined is None)
        if declined is None:
            return ModelSplit(model.digest, describe_halves(sparse, model, directory), check, None)
    for name in (LOOKUP_FILE, DENSE_FILE):
        (directory / name).unlink(missing_ok=True)
    return ModelSplit(model.digest, None, check, declined)
