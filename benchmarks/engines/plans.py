"""The models, plans and engines that are compared for one case.

Every plan is of the whole model or of the part that follows the embeddings: untouched, and with all mods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engines.cases import RECIPES, Case, Exported
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import E4M3FN, Precision
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.rewrite import Declined, ModelSplit
from loka_onnx.core.site import SiteKind
from loka_onnx.engines.inductor.backend import FUSE, STATIC
from loka_onnx.engines.onnxruntime.io_binding_settings import CUDA_GRAPH
from loka_onnx.engines.registry import get_backend
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.scales import amax_scale
from loka_onnx.pipeline.splitting import Source, source_of
from loka_onnx.planning.costs import useful_flops
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.lookups.split_sparse import (
    DENSE_FILE,
    LOOKUP_FILE,
    describe_halves,
    split_sparse,
)
from loka_onnx.transforms.sequence import apply_mods

Arrays = Mapping[str, npt.NDArray[Any]]
FEW = 64
"""Rows that scales are taken from: random weights ask for no more."""
WORTH = 1 << 19
"""K·N from which FP8 pays on an H100 when its quantize step is fused (`records`)."""
BLANKET, PAYS = "fp8-all", "fp8-pays"
NAMES = {
    "bf16": "BF16",
    "fp16": "FP16",
    BLANKET: "blanket FP8",
    "fp8-outside": "FP8 outside of fused kernels",
    PAYS: "FP8 at large sites outside of fused kernels",
}
TODAY = "today"
"""How the names of engines of the untouched model begin."""
TORCH = "torch.compile"
"""In place of a backend: the PyTorch module, compiled where it is timed."""


@dataclass(frozen=True)
class Variant:
    """A model that plans are written into.

    Attributes:
        source: The whole model, or the part that follows the embeddings, and its plans.
        lookup: What gives its inputs; None for the whole model.
    """

    source: Source
    lookup: Path | None


@dataclass(frozen=True)
class Wanted:
    """Which engines are made.

    Attributes:
        today: Precisions of the untouched model.
        onnxruntime: Whether ONNX Runtime runs it as well.
        static: Whether each batch size gets a program of its own.
        whole: Whether engines look embeddings up, in tables of a few rows.
        export: Whether max-autotune compiles the untouched model as well.
    """

    today: tuple[str, ...] = ("bf16", "fp16")
    onnxruntime: bool = False
    static: bool = False
    whole: bool = False
    export: bool = True


@dataclass(frozen=True)
class Engine:
    """One engine to time.

    Attributes:
        name: What it is, for the record.
        variant: Its model.
        plan: Its plan.
        backend: Its maker, or `TORCH`.
        options: Of the build.
    """

    name: str
    variant: Variant
    plan: PrecisionPlan
    backend: str = "inductor"
    options: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """With its share of the operations that could run in FP8."""
        return f"{self.name} ({self.plan.fp8_share:.0%} FP8)"


def whole(model: ModelArtifact, plans: PlanSet) -> Variant:
    """A model that looks its embeddings up, with its plans."""
    return Variant(source_of(model, plans, None), None)


def cut(model: ModelArtifact, plans: PlanSet, directory: Path) -> Variant:
    """What follows the embeddings of a model, with its plans."""
    directory.mkdir(exist_ok=True)
    found = split_sparse(GraphModel.load(model.path))
    if isinstance(found, Declined):
        raise RuntimeError(f"{model.path}: {found}")
    found.lookup.save(directory / LOOKUP_FILE)
    found.dense.save(directory / DENSE_FILE)
    halves = describe_halves(found, model, directory)
    return Variant(source_of(model, plans, ModelSplit(model.digest, halves, None, None)), halves.lookup.path)


def wide_plan(model: ModelArtifact, precision: Precision) -> PrecisionPlan:
    """Everything in one precision, as who has no plan does."""
    decisions = tuple(
        Decision(site.name, precision, None, Verdict.NOT_JUDGED, "everything is") for site in model.sites
    )
    return PrecisionPlan(str(precision), model.digest, precision, decisions, {}, 0.0)


def float8_plan(
    name: str, graph: GraphModel, model: ModelArtifact, scales: Mapping[str, float], keep: Collection[str]
) -> PrecisionPlan:
    """FP8 at every linear site but some, BF16 elsewhere."""
    flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
    decisions = []
    for site in model.sites:
        decision = Decision(site.name, Precision.BF16, None, Verdict.NOT_JUDGED, "kept")
        if site.weight is not None and site.kind is SiteKind.LINEAR and site.name not in keep:
            weight = values_of(graph.node(site.name).inputs[site.weight.index])
            decision = Decision(
                site.name,
                Precision.FP8,
                PER_TENSOR,
                Verdict.NOT_JUDGED,
                "asked for",
                scales[site.activation.tensor],
                (amax_scale(float(np.abs(weight).max()), E4M3FN),),
            )
        decisions.append(decision)
    chosen = sum(flops.get(d.site, 0) for d in decisions if d.precision is Precision.FP8)
    share = chosen / sum(flops.values())
    return PrecisionPlan(name, model.digest, Precision.BF16, tuple(decisions), {}, share)


def high_precision_plans(model: ModelArtifact, names: Sequence[str]) -> PlanSet:
    """Plans without FP8."""
    return PlanSet(tuple(wide_plan(model, Precision(name)) for name in names))


def our_plans(model: ModelArtifact, exported: Exported, directory: Path) -> PlanSet:
    """BF16, FP16, blanket FP8, and FP8 outside of what one of our kernels computes.

    Scales are those of a few rows. Of plans that are alike the first stands.
    """
    data = exported.data.open("calibration")
    probe = Probe(model, model.sites, data, PassOptions(recipes=RECIPES, batch_size=FEW, rows=FEW))
    (scales,) = scales_of(probe.ranges(directory), RECIPES).values()
    graph = GraphModel.load(model.path)
    wide = high_precision_plans(model, ["bf16", "fp16"])
    fused = set(get_backend("inductor").fused_sites(model.path, Precision.BF16))
    small = {site.name for site in model.sites if site.k * site.n < WORTH}
    kept = {BLANKET: set[str](), "fp8-outside": fused, PAYS: fused | small}
    plans = {name: float8_plan(name, graph, model, scales, keep) for name, keep in kept.items()}
    unlike = {frozenset(plan.fp8_sites): plan for plan in reversed(plans.values()) if plan.fp8_sites}
    return PlanSet((*wide.plans, *(plan for plan in plans.values() if plan in unlike.values())))


def engines_of(case: Case, exported: Exported, directory: Path, wanted: Wanted) -> list[Engine]:
    """Every engine of a case, the untouched model's first.

    Args:
        case: The case.
        exported: Its model.
        directory: For files.
        wanted: What is asked for.
    """
    rows = [exported.rows(FEW)]
    fixed = (STATIC, int(wanted.static))
    variant = (lambda model, plans, _: whole(model, plans)) if wanted.whole else cut
    wide = high_precision_plans(exported.model, wanted.today)
    plain = variant(exported.model, wide, directory / "plain")
    tuned = ((FUSE, 0), (STATIC, 1), ("max_autotune", 1), ("search_launches", 1))
    engines = []
    for plan in plain.source.plans.plans:
        engines.append(Engine(f"{TODAY}, {plan.id}", plain, plan, options=((FUSE, 0), fixed)))
        if wanted.export:
            engines.append(Engine(f"{TODAY}, {plan.id} max-autotune", plain, plan, options=tuned))
    if wanted.whole:
        engines += [Engine(f"{TODAY}, {TORCH} {plan.id}", plain, plan, TORCH) for plan in wide.plans]
    if wanted.onnxruntime:
        fp16 = high_precision_plans(exported.model, ["fp16"])
        other = variant(exported.model, fp16, directory / "onnxruntime")
        (plan,) = other.source.plans.plans
        name = f"{TODAY}, onnxruntime fp16"
        engines.append(Engine(name, other, plan, "onnxruntime", ((CUDA_GRAPH, 1),)))
    modified = apply_mods(exported.model, rows, directory / "modified.onnx").model
    ours = variant(modified, our_plans(modified, exported, directory / "ours"), directory / "ours")
    engines += [Engine(NAMES[plan.id], ours, plan, options=(fixed,)) for plan in ours.source.plans.plans]
    return engines


def inputs_of(variant: Variant, rows: Arrays, count: int) -> dict[str, npt.NDArray[Any]]:
    """What an engine takes, of so many rows."""
    few = {name: value[: min(count, len(value))] for name, value in rows.items()}
    looked_up = {} if variant.lookup is None else OnnxSession(variant.lookup).run(few)
    names = [spec.name for spec in variant.source.model.inputs]
    taken = {name: looked_up[name] if name in looked_up else few[name] for name in names}
    return {name: np.resize(value, (count, *value.shape[1:])) for name, value in taken.items()}
