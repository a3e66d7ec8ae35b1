"""What `report_size` measures: a generated ranker of about 5,000 nodes, and a report of it.

The ranker looks up hundreds of columns and stacks Wukong layers on them. It enters as any foreign model does;
its statistics are generated, because only their size matters here: each site has the ranges and histograms of
its operands, an error and a sensitivity, as calibration writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import (
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    PairedDifference,
    TargetChoice,
    TaskMetrics,
)
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval, RatioMoments
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, SiteSpeed, SpeedVerdict, Verdict
from loka_onnx.core.profile import (
    LOSS,
    DeltaSums,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteProfile,
    WeightedMean,
)
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, MagnitudeHistogram, RangeStats
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.model_graph import read_model_graph
from loka_onnx.report import DataDescription, ReportData, SplitDescription

WIDTH = 16
TOKENS = 8
OUTPUT = OutputSpec("ctr", OutputKind.LOGIT, "clicked")
DEVICE = "nvidia-h100"


@dataclass
class _Builder:
    """Nodes and weights as they are added; names carry module paths, as exporters write them."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def add(self, op: str, module: str, *inputs: str, **attributes: object) -> str:
        name = f"/{module.replace('.', '/')}/{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def weight(self, name: str, *shape: int) -> str:
        values = (self.rng.standard_normal(shape) / 4).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def integers(self, name: str, *values: int) -> str:
        if all(tensor.name != name for tensor in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def linear(self, module: str, x: str, k: int, n: int) -> str:
        return self.add(
            "Gemm", module, x, self.weight(f"{module}.weight", k, n), self.weight(f"{module}.bias", n)
        )

    def norm(self, module: str, x: str, width: int) -> str:
        scale = self.weight(f"{module}.weight", width)
        return self.add("LayerNormalization", module, x, scale, axis=-1)


def write_ranker(path: Path, layers: int, tables: int) -> None:
    """Write a ranker of `tables` lookups and `layers` Wukong layers, of about 3 and 17 nodes each."""
    made = _Builder()
    looked_up = []
    for table in range(tables):
        module = f"embeddings.column_{table}"
        column = made.add("Gather", module, "ids", made.integers(f"{module}.index", table), axis=1)
        rows = made.weight(f"{module}.table", 4, WIDTH)
        vectors = made.add("Gather", module, rows, column, axis=0)
        looked_up.append(made.add("Mul", module, vectors, made.weight(f"{module}.importance", 1)))
    x = made.add("Concat", "embeddings", *looked_up, axis=1)
    x = made.add("Transpose", "compress", x, perm=[0, 2, 1])
    x = made.add("MatMul", "compress", x, made.weight("compress.weight", tables, TOKENS))
    x = made.add("Transpose", "compress", x, perm=[0, 2, 1])
    for layer in range(layers):
        x = _wukong_layer(made, f"layers.{layer}", x)
    x = made.add("Reshape", "head", x, made.integers("flat", 0, TOKENS * WIDTH))
    logit = made.linear("head", x, TOKENS * WIDTH, 1)
    made.nodes.append(helper.make_node("Identity", [logit], ["ctr"], name="/output/Identity"))
    graph = helper.make_graph(
        made.nodes,
        "ranker",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", tables])],
        [helper.make_tensor_value_info("ctr", TensorProto.FLOAT, ["batch", 1])],
        made.weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def _wukong_layer(made: _Builder, module: str, x: str) -> str:
    """Factorization machine and linear compression of half the tokens each, a residual and a norm."""
    half = TOKENS // 2
    turned = made.add("Transpose", f"{module}.fmb", x, perm=[0, 2, 1])
    projected = made.add(
        "MatMul", f"{module}.fmb.project", turned, made.weight(f"{module}.project.weight", TOKENS, half)
    )
    pairs = made.add("MatMul", f"{module}.fmb", x, projected)
    flat = made.add("Reshape", f"{module}.fmb", pairs, made.integers("pairs", 0, TOKENS * half))
    normed = made.norm(f"{module}.fmb.norm", flat, TOKENS * half)
    hidden = made.add(
        "Relu", f"{module}.fmb.mlp", made.linear(f"{module}.fmb.mlp.fc1", normed, TOKENS * half, WIDTH)
    )
    hidden = made.add("Relu", f"{module}.fmb.mlp", made.linear(f"{module}.fmb.mlp.fc2", hidden, WIDTH, WIDTH))
    wide = made.linear(f"{module}.fmb.mlp.fc3", hidden, WIDTH, half * WIDTH)
    made_tokens = made.add("Reshape", f"{module}.fmb", wide, made.integers("tokens", 0, half, WIDTH))
    mixed = made.add("MatMul", f"{module}.lcb.mix", turned, made.weight(f"{module}.mix.weight", TOKENS, half))
    kept = made.add("Transpose", f"{module}.lcb", mixed, perm=[0, 2, 1])
    joined = made.add("Concat", module, made_tokens, kept, axis=1)
    return made.norm(f"{module}.norm", made.add("Add", module, joined, x), WIDTH)


def describe(directory: Path, layers: int, tables: int) -> ReportData:
    """The report of a generated ranker, with its model under `directory`."""
    source = directory / "source.onnx"
    write_ranker(source, layers, tables)
    model = import_onnx(source, directory / "model.onnx", (OUTPUT,))
    plans = PlanSet(
        tuple(_plan(name, model) for name in ("fp32", "bf16", "fp8-all", "fp8-safe")),
        speeds=tuple(_speed(i, site) for i, site in enumerate(model.linear_sites)),
    )
    engines = tuple(_engine(plan) for plan in plans.plans)
    chosen = engines[-1]
    return ReportData(
        title="A generated ranker of 5,000 nodes",
        exported=model,
        modified=model,
        profile=_profile(model),
        plans=plans,
        rewrites={"mods": RewriteLog(())},
        engines=engines,
        evaluations=EvaluationSet(tuple(_evaluation(i, engine) for i, engine in enumerate(engines))),
        choice=Choice((TargetChoice("h100", chosen.id, "fp8-safe", "the fastest", "generated", ()),)),
        data=DataDescription(
            (SplitDescription("calibration", "generated", 4096, "d" * 64, "all"),), "none", True
        ),
        versions={"loka-onnx": "generated"},
        graph=read_model_graph(model.path, [site.name for site in model.sites]),
    )


def _is_fp8(plan: str, index: int, site: Site) -> bool:
    able = site.kind is SiteKind.LINEAR and plan.startswith("fp8")
    return able and (plan == "fp8-all" or _judged(index, site) is Verdict.SAFE)


def _judged(index: int, site: Site) -> Verdict:
    if site.kind is not SiteKind.LINEAR:
        return Verdict.NOT_JUDGED
    return Verdict.UNSAFE if index % 17 == 3 else Verdict.UNDECIDED if index % 29 == 5 else Verdict.SAFE


def _plan(name: str, model: ModelArtifact) -> PrecisionPlan:
    base = Precision.FP32 if name == "fp32" else Precision.BF16
    decisions = []
    for index, site in enumerate(model.sites):
        verdict = _judged(index, site)
        reason = (
            f"KL {1e-4 * (index % 89):.5f} % (upper bound {2e-4 * (index % 89):.5f} % at 99.996 %, corrected)"
        )
        if _is_fp8(name, index, site):
            decisions.append(Decision(site.name, Precision.FP8, PER_TENSOR, verdict, reason, 0.01, (0.002,)))
        else:
            decisions.append(Decision(site.name, base, None, verdict, reason))
    return PrecisionPlan(
        name, model.digest, base, tuple(decisions), {}, 0.9 if name.startswith("fp8") else 0.0
    )


def _speed(index: int, site: Site) -> SiteSpeed:
    verdict = (SpeedVerdict.FAST, SpeedVerdict.SLOW, SpeedVerdict.UNKNOWN)[index % 3]
    saved = {"1024": 1.5 - index % 3, "4096": 4.0 - index % 5}
    tensor = site.activation.tensor
    return SiteSpeed(site.name, DEVICE, verdict, saved, {"1024": 0.7}, tensor, bool(index % 2), "generated")


def _engine(plan: PrecisionPlan) -> EngineArtifact:
    sites = tuple(
        SitePrecision(d.site, d.precision, ("float", "float"), True, "generated") for d in plan.decisions
    )
    return EngineArtifact(
        backend="inductor",
        plan=plan.id,
        target="h100",
        architecture="sm90",
        status=BuildStatus.READY,
        simulated=False,
        path=Path("engines") / plan.id,
        bytes=1,
        digest="e" * 64,
        backend_version="generated",
        sites=sites,
        build_seconds=1.0,
        portability="generated",
    )


def _evaluation(index: int, engine: EngineArtifact) -> Evaluation:
    change = Interval(2e-5 * index, 1e-5 * index, 3e-5 * index, 0.95, 4096)
    difference = PairedDifference(LOSS, change, change, change, None, change, 1e-3, 1e-2)
    metrics = TaskMetrics(0.5, 0.8, 0.75, 1.0)
    output = OutputEvaluation("ctr", OutputKind.LOGIT, metrics, difference, OUTPUT.budget, "within", None)
    latency = Latency(1024, 120.0 - 9 * index, 130.0 - 9 * index, 150.0, 200, DEVICE, True)
    return Evaluation(
        engine.id,
        engine.backend,
        engine.plan,
        engine.target,
        "selection",
        4096,
        (output,),
        (latency,),
        "measured",
    )


def _profile(model: ModelArtifact) -> Profile:
    rng = np.random.default_rng(9)
    scales = {site.activation.tensor: 0.01 for site in model.sites}
    return Profile(
        model_digest=model.digest,
        data_digest="f" * 64,
        rows=4096,
        error_rows=4096,
        sampling=Sampling(2000, 1, 2000),
        synthetic=True,
        sites=tuple(_site_profile(site, rng) for site in model.sites),
        baseline_loss={"ctr": WeightedMean(ExactSum.of([900.0]), ExactSum.of([2000.0]))},
        scales={PER_TENSOR.activation_id: scales},
        seconds={"ranges": ExactSum.of([1.0])},
    )


def _site_profile(site: Site, rng: np.random.Generator) -> SiteProfile:
    operands = {operand.tensor: _range(rng) for operand in site.operands}
    if site.kind is SiteKind.NORM:
        return SiteProfile(site.name, operands, (), ())
    energies = (ExactSum.of([float(value)]) for value in rng.uniform(0.1, 250, 2))
    error = ErrorStats(PER_TENSOR.id, 0.01, 65536, *energies, 65536, 2, 5)
    delta = DeltaSums(*(ExactSum.of([float(value)]) for value in rng.uniform(0.4, 4000, 3)))
    name = SensitivityName(PER_TENSOR.id, OUTPUT.name, LOSS)
    sensitivity = Sensitivity.of(name, delta, _moments(rng), _moments(rng))
    return SiteProfile(site.name, operands, (error,), (sensitivity,))


def _range(rng: np.random.Generator) -> RangeStats:
    """That of a thousand values, with a histogram as wide as those of trained models are."""
    values = rng.standard_normal(65536) * rng.uniform(0.1, 3)
    bins, counts = np.unique((np.log2(np.abs(values)) * 8).astype(int) + 1032, return_counts=True)
    filled = np.zeros(bins[-1] - bins[0] + 1, int)
    filled[bins - bins[0]] = counts
    histogram = MagnitudeHistogram(0, int(bins[0]), tuple(filled.tolist()))
    sums = (ExactSum.of([float(values.sum())]), ExactSum.of([float((values**2).sum())]))
    amax = float(np.abs(values).max())
    return RangeStats(values.size, amax, float(values.min()), float(values.max()), *sums, histogram)


def _moments(rng: np.random.Generator) -> RatioMoments:
    units, mean = 2000, float(rng.uniform(1e-7, 1e-4))
    squares = mean * mean * units * 1.4
    sums = (mean * units, float(units), squares, mean * units, float(units))
    return RatioMoments(units, units, *(ExactSum.of([value]) for value in sums))
