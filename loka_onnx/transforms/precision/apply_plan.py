"""Write a plan into a model file.

High-error channels that the plan need not split are rejoined first; then come Q/DQ, corrections, and the base
precision.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions
from loka_onnx.core.correction import Corrections
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan, Wide
from loka_onnx.core.rewrite import RewriteLog, RewriteRecord
from loka_onnx.core.site import Site, high_error_parts
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.base import record
from loka_onnx.transforms.linears.split_high_error_channels import rejoin
from loka_onnx.transforms.precision.correct import Typing, correct
from loka_onnx.transforms.precision.explicit_casts import cast_to_base, fp32_nodes
from loka_onnx.transforms.precision.insert_qdq import insert_qdq
from loka_onnx.transforms.precision.place_qdq import place_qdq
from loka_onnx.transforms.requests.share_users import SHARE_USERS, share_users


@dataclass(frozen=True)
class PlannedModel:
    """A planned model file, what was written, by node, and the sites that it still has."""

    path: Path
    digest: str
    log: RewriteLog
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class PlanForm:
    """Form in which a plan is written for a backend, with precision `base` for everything but FP8 sites.

    Q/DQ must not split `fusions`, kernels of the backend. `corrections` are fitted constants to add. `shared`
    are inputs that are equal within a request, for the request form; empty for plain rows.
    """

    base: Precision
    fusions: Fusions = field(default_factory=Fusions)
    corrections: Corrections | None = None
    shared: tuple[str, ...] = ()


def apply_plan(model: ModelArtifact, plan: PrecisionPlan, form: PlanForm, target: Path) -> PlannedModel:
    """Write a copy of the model with the plan in it to `target`.

    Raises TransformError if the plan is of another model, or this one has no types in the base precision, or
    no request form for `form.shared`; OutputError if the file cannot be written.
    """
    graph = GraphModel.load(model.path)
    check_plan(plan, model.digest, {node.name for node in graph.nodes})
    records: list[RewriteRecord] = []
    began = time.perf_counter()
    # The extra product pays only where the rest of the site runs in FP8.
    joined = {
        name: part
        for name, part in high_error_parts(model.sites).items()
        if not {name, part} & {*plan.quantized_sites}
    }
    if joined:
        rejoined = record("rejoin-loud-channels", [rejoin(graph, name) for name in joined])
        records.append(_timed(rejoined, began))
        began = time.perf_counter()
    if plan.quantized_sites:
        records.append(_timed(insert_qdq(graph, model.sites, plan), began))
        began = time.perf_counter()
        records.append(_timed(place_qdq(graph, plan.quantized_sites, form.fusions), began))
    if form.corrections is not None and not form.corrections.is_empty:
        began = time.perf_counter()
        typing = Typing(form.base, fp32_nodes(graph, form.base, plan))
        corrected = correct(graph, form.corrections, typing)
        records.append(_timed(corrected.record, began))
        wide = (Wide(name, "adds a constant to an output, or carries it there") for name in corrected.wide)
        plan = replace(plan, wide=(*plan.wide, *wide))
    if form.base is not Precision.FP32:
        began = time.perf_counter()
        records.append(_timed(cast_to_base(graph, form.base, plan), began))
    if form.shared:
        began = time.perf_counter()
        graph = GraphModel.read_back(graph.export())
        shared = record(SHARE_USERS, share_users(graph, form.shared))
        if not shared.applied:
            raise TransformError(
                f"E0609 plan '{plan.id}' has no request form", evidence=shared.declined[0].reason
            )
        records.append(_timed(shared, began))
    digest = graph.save(target)
    sites = tuple(site for site in model.sites if site.name not in joined.values())
    return PlannedModel(target, digest, RewriteLog(tuple(records)), sites)


def check_plan(plan: PrecisionPlan, digest: str, nodes: Collection[str] | None = None) -> None:
    """Raise TransformError if a plan has another digest, or names a node that is not in `nodes`, if given."""
    evidence, named = "", {*plan.quantized_sites, *(wide.node for wide in plan.wide)}
    if plan.model_digest != digest:
        evidence = f"it names {plan.model_digest[:12]}, the model is {digest[:12]}"
    elif nodes is not None and (unknown := named.difference(nodes)):
        evidence = f"the model has no node '{min(unknown)}'"
    if evidence:
        raise TransformError(
            f"E0602 plan '{plan.id}' was made for another model",
            evidence=evidence,
            remedy="run again without --resume: the run's plans were altered",
        )


def _timed(done: RewriteRecord, began: float) -> RewriteRecord:
    return replace(done, seconds=time.perf_counter() - began)
