"""A small run: an ONNX ranker and FP8 versions of it that ONNX Runtime answers with, and made-up figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx_text import parsed

from loka_onnx.bundle.writer import BundleContents, BundleEngine, Expectation
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec, Parity, TensorSpec
from loka_onnx.core.digests import digest_file
from loka_onnx.core.engine import BuildStatus, EngineArtifact, SitePrecision
from loka_onnx.core.evaluation import (
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    PairedDifference,
    Rejection,
    TargetChoice,
    TaskMetrics,
    Why,
)
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval, RatioMoments
from loka_onnx.core.lineage import StageRecord
from loka_onnx.core.manifest import BatchRange
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
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
from loka_onnx.core.rewrite import Applied, Declined, RewriteLog, RewriteRecord
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import ErrorStats, RangeStats
from loka_onnx.graph.model_graph import read_model_graph
from loka_onnx.report import DataDescription, ReportData, SplitDescription
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

WIDTHS = (16, 32, 16, 1)
ROWS = 4000
BUDGET = 0.0002
OUTPUT = OutputSpec("ctr", OutputKind.LOGIT, "clicked", budget=BUDGET)
BATCH = BatchRange(1, 4096)


@dataclass(frozen=True)
class SampleRun:
    directory: Path
    report: ReportData
    contents: BundleContents


def build_model(path: Path, sites: tuple[str, ...], fp8: tuple[str, ...]) -> None:
    """Three MatMul layers; the sites named in `fp8` get E4M3FN Q/DQ on both operands."""
    rng = np.random.default_rng(7)
    body, weights, x = "", {}, "dense"
    for index, (site, k, n) in enumerate(zip(sites, WIDTHS, WIDTHS[1:], strict=False)):
        weight = (rng.standard_normal((k, n)) * math.sqrt(2 / k)).astype(np.float32)
        weights[f"w{index}"] = weight
        operands = [x, f"w{index}"]
        for at, amax in enumerate((6.0, float(np.abs(weight).max()))) if site in fp8 else ():
            stem = f"{index}_{at}"
            weights |= {f"s{stem}": np.float32(amax / 448), f"z{stem}": np.zeros((), ml_dtypes.float8_e4m3fn)}
            body += f"q{stem} = QuantizeLinear({operands[at]}, s{stem}, z{stem})"
            body += f"d{stem} = DequantizeLinear(q{stem}, s{stem}, z{stem})"
            operands[at] = f"d{stem}"
        last = index == len(sites) - 1
        body += f"{'ctr' if last else f'm{index}'} = MatMul({', '.join(operands)})"
        body += "" if last else f"r{index} = Relu(m{index})"
        x = f"r{index}"
    model = parsed(body, weights, inputs=f"float[batch,{WIDTHS[0]}] dense", outputs="float[batch,1] ctr")
    # The text form has no quotes in names.
    for node, site in zip(
        [node for node in model.graph.node if node.op_type == "MatMul"], sites, strict=True
    ):
        node.name = site
    onnx.checker.check_model(model)
    onnx.save(model, path)


def make_run(directory: Path, *, prefix: str = "over_arch") -> SampleRun:
    """Builds everything under `directory`."""
    (directory / "model").mkdir(parents=True)
    sites = tuple(f"{prefix}.fc{i}" for i in range(3))
    plans_fp8 = {"fp32": (), "fp8-safe": sites[:1], "fp8-all": sites[:2]}
    rows = np.random.default_rng(11).standard_normal((8, WIDTHS[0])).astype(np.float32)
    source = directory / "model" / "model.onnx"
    build_model(source, sites, ())
    exact = run(source, rows)

    engines, evaluations, answers = [], [REFERENCE], {}
    for plan, fp8 in plans_fp8.items():
        path = Path("engines") / f"cpu-onnxruntime-{plan}" / "engine.onnx"
        (directory / path).parent.mkdir(parents=True)
        build_model(directory / path, sites, fp8)
        answers[plan] = run(directory / path, rows)
        engines.append(ready_engine(directory, path, plan, sites, fp8))
        for split, count in (("selection", 2400), ("certification", 1600)):
            if split == "selection" or plan == "fp32":
                evaluations.append(evaluate(engines[-1], split, count))
    engines.append(DECLINED)
    rtx = Path("engines") / "rtx-tensorrt_rtx-fp8-safe" / "engine.bin"
    (directory / rtx).parent.mkdir(parents=True)
    (directory / rtx).write_bytes(b"not for this host" * 100)
    engines.append(rtx_engine(directory, rtx, sites))

    model = artifact(source, sites)
    plans = PlanSet(tuple(make_plan(name, fp8, sites, model) for name, fp8 in plans_fp8.items()))
    choice = make_choice(tuple(engines))
    report = ReportData(
        title="Ranker, day 07",
        exported=model,
        modified=model,
        profile=make_profile(sites, model),
        plans=plans,
        rewrites={"mods": make_rewrites(sites)},
        engines=tuple(engines),
        evaluations=EvaluationSet(tuple(evaluations)),
        choice=choice,
        data=make_data(),
        versions={"loka-onnx": "0.1.0", "onnxruntime": "1.31.1"},
        lineage=(StageRecord("export", "a" * 64, {"model": "b" * 64}, {"model/model.onnx": "c" * 64}, 1.5),),
        notes=("A note that the reader must know.",),
        graph=read_model_graph(source, sites),
    )
    shipped = (engines[-1], engines[0], engines[1])
    contents = BundleContents(
        root=directory,
        model=model,
        judged=(OUTPUT,),
        batch=BATCH,
        engines=tuple(BundleEngine(e, expectation(answers.get(e.plan, exact))) for e in shipped),
        fallback=expectation(exact),
        sample={"dense": rows},
        plans=plans,
        choice=choice,
        report=(),
        lineage=report.lineage,
        versions=report.versions,
    )
    return SampleRun(directory, report, contents)


def run(model: Path, rows: np.ndarray) -> np.ndarray:
    return OnnxSession(model, SessionOptions(threads=1)).run({"dense": rows})["ctr"][:, 0].astype(np.float64)


def expectation(logits: np.ndarray) -> Expectation:
    return Expectation({"ctr": logits.astype(np.float32)[:, None]}, {"ctr": 1e-4})


def artifact(path: Path, sites: tuple[str, ...]) -> ModelArtifact:
    widths = (("dense", WIDTHS[0]), ("ctr", 1))
    ends = ((TensorSpec(name, "float32", (None, width)),) for name, width in widths)
    found = tuple(
        Site(
            name,
            SiteKind.LINEAR,
            "MatMul",
            (Operand(read, 0, False, 1, (None, k)), Operand(f"w{index}", 1, True, 0, (k, n))),
            *(f"m{index}", k, n, 1),
        )
        for index, (name, read, k, n) in enumerate(
            zip(sites, ("dense", "r0", "r1"), WIDTHS, WIDTHS[1:], strict=False)
        )
    )
    parity = Parity(256, 1.2e-7, 3e-8, 1e-5)
    place = Path("model") / path.name
    return ModelArtifact(place, digest_file(path), 21, *ends, found, "sample_run", parity)


METRICS = TaskMetrics(0.6373443, 0.9414108, 0.6563269, 1.0273056)
REFERENCE = Evaluation(
    "reference", "onnxruntime", "fp32", "cpu", "selection", 2400,
    (OutputEvaluation("ctr", OutputKind.LOGIT, METRICS, None, BUDGET, "within", None),), (), "measured",
)  # fmt: skip
DELTA_NE = {"fp32": 0.0, "fp8-safe": 3.046e-4, "fp8-all": -5.678e-4}
"""Of each plan on both splits."""


def evaluate(engine: EngineArtifact, split: str, rows: int) -> Evaluation:
    change = DELTA_NE[engine.plan]

    def about(value: float, half: float) -> Interval:
        return Interval(value, value - abs(half * change), value + abs(half * change), 0.95, rows)

    kl = abs(change) / 2
    difference = PairedDifference(
        denominator=LOSS,
        delta_ne=about(change, 3.4),
        kl=about(kl, 0.1),
        labelled=about(change - kl, 3.3),
        delta_auc=None,
        delta_prediction_ratio=about(-2 * change, 1.7),
        delta_rmse=122 * kl,
        delta_max=775 * kl,
    )
    known = ("undecided", 123_456) if change else ("within", None)
    output = OutputEvaluation("ctr", OutputKind.LOGIT, METRICS, difference, BUDGET, *known)
    latencies = () if engine.simulated else (Latency(1024, 123.4, 130.1, 171.9, 200, "cpu", True),)
    names = (engine.id, engine.backend, engine.plan, engine.target, split)
    return Evaluation(*names, rows, (output,), latencies, "measured")


DECLINED = EngineArtifact(
    "onnxruntime", "bf16", "cpu", "cpu", BuildStatus.DECLINED, False, None, 0, "", "1.31.1", (), 0.0,
    "the CPU provider has no BF16 products",
)  # fmt: skip


def ready_engine(
    directory: Path, path: Path, plan: str, sites: tuple[str, ...], fp8: tuple[str, ...]
) -> EngineArtifact:
    return replace(
        DECLINED,
        plan=plan,
        status=BuildStatus.READY,
        simulated=bool(fp8),
        path=path,
        bytes=(directory / path).stat().st_size,
        digest=digest_file(directory / path),
        sites=tuple(
            SitePrecision(s, "fp8" if s in fp8 else "fp32", ("float", "float"), True, "the optimized graph")
            for s in sites
        ),
        build_seconds=0.1,
        detail="",
        portability="any host with ONNX Runtime",
    )


def rtx_engine(directory: Path, path: Path, sites: tuple[str, ...]) -> EngineArtifact:
    """Built for a device that this host lacks; its first site does not run as planned."""
    evidence = "layer 3 of the engine inspector"
    return replace(
        ready_engine(directory, path, "fp8-safe", (), ()),
        backend="tensorrt_rtx",
        target="rtx",
        architecture="sm89",
        status=BuildStatus.BUILT_NOT_RUN,
        backend_version="1.5",
        sites=(SitePrecision(sites[0], "fp8", ("BFloat16", "BFloat16"), False, evidence),),
        build_seconds=4.2,
        detail="this host has no GPU",
        portability="sm89 with TensorRT for RTX 1.5",
    )


def make_plan(name: str, fp8: tuple[str, ...], sites: tuple[str, ...], model: ModelArtifact) -> PrecisionPlan:
    kept = (Verdict.NOT_JUDGED, "N = 1 is below 16: nothing to gain")
    unsafe = (Verdict.UNSAFE, "KL alone would take the budget")
    safe = (Verdict.SAFE, "KL is far inside the site's part of the budget", 6.0 / 448, (0.5 / 448,))
    decisions = tuple(
        Decision(site, Precision.FP8, PER_TENSOR, *safe)
        if site in fp8
        else Decision(site, Precision.FP32, None, *(unsafe if index == 1 else kept))
        for index, site in enumerate(sites)
    )
    share = sum(model.site(s).flops_per_example for s in fp8) / model.fp8_able_flops
    return PrecisionPlan(name, model.digest, Precision.FP32, decisions, {"ctr": 1e-5} if fp8 else {}, share)


def make_profile(sites: tuple[str, ...], model: ModelArtifact) -> Profile:
    totals = (ExactSum.of([total]) for total in (-310.5, 64_100.25))
    ranges = RangeStats(ROWS * WIDTHS[0], 4.25, -4.25, 4.125, *totals)
    energies = (ExactSum.of([value]) for value in (250.0, 0.25))
    error = ErrorStats(PER_TENSOR.id, 6.0 / 448, 1000, *energies, 1000, 2, 5)
    delta = DeltaSums(*(ExactSum.of([value]) for value in (4000.0, 0.4, 1.6)))
    name = SensitivityName(PER_TENSOR.id, "ctr", LOSS)
    sensitivity = Sensitivity.of(name, delta, moments(1.2e-5, 5e-7), moments(-3e-6, 4e-5))
    return Profile(
        model_digest=model.digest,
        data_digest="d" * 64,
        rows=ROWS,
        error_rows=ROWS,
        sampling=Sampling(2000, 1, 2000),
        synthetic=True,
        sites=tuple(
            SiteProfile(site, {tensor: ranges}, (error,), (sensitivity,))
            for site, tensor in zip(sites, ("dense", "r0"), strict=False)
        ),
        baseline_loss={"ctr": WeightedMean(ExactSum.of([900.0]), ExactSum.of([2000.0]))},
        scales={PER_TENSOR.activation_id: {"dense": 6.0 / 448, "r0": 6.0 / 448}},
        seconds={"ranges": ExactSum.of([0.5])},
    )


def moments(value: float, error: float, units: int = 2000) -> RatioMoments:
    """Those of a ratio with that value and that standard error: ψ² sums to error²·n·(n − 1) for B = 1."""
    squares = value * value * units + error * error * units * (units - 1)
    sums = (value * units, float(units), squares, value * units, float(units))
    return RatioMoments(units, units, *(ExactSum.of([s]) for s in sums))


def make_rewrites(sites: tuple[str, ...]) -> RewriteLog:
    first, *others = sites
    declined = tuple(Declined(site, "its input has one consumer") for site in others)
    checked = {"max_abs": 2.4e-7, "tolerance": 1e-5, "seconds": 0.01, "check_seconds": 0.2}
    merged = (Applied(first, "merged two products of one input"),)
    fold = RewriteRecord("fold-scale", (Applied(others[0], "folded"),), (), 0.31, 1e-5, rolled_back=True)
    return RewriteLog((RewriteRecord("merge-parallel-linears", merged, declined, **checked), fold))


def make_choice(engines: tuple[EngineArtifact, ...]) -> Choice:
    losers = tuple(
        Rejection(e.id, Why.SIMULATED, "its FP8 is simulated")
        if e.simulated
        else Rejection(e.id, Why.DECLINED, f"{e.status}: {e.detail}")
        for e in engines
        if e.target == "cpu" and e.plan != "fp32"
    )
    reason = "no FP8 engine for this target has a speed that counts"
    cpu = TargetChoice("cpu", engines[0].id, "fp32", reason, "measured on the target", losers)
    rtx = TargetChoice("rtx", engines[-1].id, "fp8-safe", "the only candidate", "not measured", ())
    return Choice((cpu, rtx))


def make_data() -> DataDescription:
    rules = {"calibration": "all rows", "selection": "rows 0 to 2400", "certification": "rows 2400 to 4000"}
    splits = tuple(
        SplitDescription(name, "generated", rows, "d" * 64, rules[name], "day-07.parquet")
        for name, rows in zip(rules, (ROWS, 2400, 1600), strict=True)
    )
    return DataDescription(splits, "a click, drawn from the FP32 model's own probability", True)
