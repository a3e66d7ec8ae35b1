"""INT8 engines of ONNX Runtime's CPU provider, and mixed ones of every backend, against NumPy."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_text import parsed
from tiny_models import TinyModel, request_for

from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.formats import E4M3FN, INT8, UINT8, NumberFormat, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.engines.base import Backend
from loka_onnx.engines.onnxruntime import backend as module
from loka_onnx.engines.onnxruntime.backend import TIME_PRODUCTS, OnnxRuntimeBackend
from loka_onnx.engines.registry import get_backend
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.sessions.host_devices import integer_instructions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

pytest.importorskip("onnxruntime")
needs_integers = pytest.mark.skipif(not integer_instructions(), reason="needs VNNI, AMX or ARM's dot product")

BODY = """
    [fc1] h1 = Gemm(x, w1, b1)
    r1 = Relu(h1)
    [fc2] h2 = MatMul(r1, w2)
    a2 = Add(h2, b2)
    t2 = Tanh(a2)
    [fc3] h3 = MatMul(t2, w3)
    r3 = Relu(h3)
    [fc4] y = Gemm(r3, w4, b4)
"""
SHAPES = {"w1": (512, 64), "w2": (64, 48), "w3": (48, 32), "w4": (32, 16)}
ACTIVATIONS = {
    UINT8: {"fc1": (0.031, 97), "fc2": (0.4, 0), "fc3": (2 / 255, 128)},
    INT8: {"fc1": (0.0625, 0), "fc2": (0.796875, 0), "fc3": (2.0**-7, 0)},
}
"""Scale and zero point of each planned site."""
TINY = np.float32(1e-7)


@dataclass(frozen=True)
class Planned:
    model: ModelArtifact
    plan: PrecisionPlan
    weights: dict[str, np.ndarray]
    format: NumberFormat = UINT8

    def build(self, folder: Path, **options: int) -> EngineArtifact:
        """Every product in INT8, unless the options say otherwise."""
        written = apply_plan(self.model, self.plan, PlanForm(Precision.FP32), folder / "planned" / "m.onnx")
        np.savez(folder / "sample.npz", x=rows(8))
        model = TinyModel(written.path, self.plan, written.sites, folder / "sample.npz")
        batch = BatchSizes(1, 8, 64, (8,))
        options = {TIME_PRODUCTS: 0} | options
        return OnnxRuntimeBackend().build(request_for(model, folder / "engine", batch=batch, options=options))

    def reference(self, x: np.ndarray) -> np.ndarray:
        w = self.weights
        h = np.maximum(self.product("fc1", x) + w["b1"], 0)
        h = np.tanh(self.product("fc2", h) + w["b2"])
        h = np.maximum(self.product("fc3", h), 0)
        return np.asarray(h @ w["w4"].astype(np.float64) + w["b4"])

    def product(self, site: str, x: np.ndarray) -> np.ndarray:
        scale, zero = ACTIVATIONS[self.format][site]
        low, high = int(self.format.min), int(self.format.max)
        columns = np.array(self.plan.decision(site).weight_scale)
        a = np.clip(np.rint(np.float32(x) / np.float32(scale)).astype(np.int64) + zero, low, high) - zero
        b = np.clip(np.rint(self.weights[f"w{site[-1]}"] / np.float32(columns)), -128, 127).astype(np.int64)
        return np.asarray((a @ b) * (scale * columns))


def rows(count: int) -> np.ndarray:
    """Half of the values at either end of the range: pairs of their products exceed 16 bits."""
    random = np.random.default_rng(1)
    x = random.standard_normal((count, 512)).astype(np.float32)
    x[:, ::2] = np.sign(x[:, ::2]) * 9
    return x


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    return plan_of(tmp_path)


def plan_of(
    folder: Path, largest_bias: float = 1.0, body: str = BODY, format: NumberFormat = UINT8
) -> Planned:
    random = np.random.default_rng(0)
    weights = {n: (random.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for n, s in SHAPES.items()}
    # Of one sign, as large as each other: sums are as large as they can be.
    weights["w1"] = np.sign(weights["w1"][:1]) * np.full(SHAPES["w1"], 0.25, np.float32)
    for name, n in (("b1", 64), ("b2", 48), ("b4", 16)):
        scale = largest_bias if name == "b1" else 1.0
        weights[name] = (random.standard_normal(n) * scale).astype(np.float32)
    constants = {**weights, "sizes": np.array((40, 24)), "halves": np.array((16, 32)), "tiny": TINY}
    onnx.save(
        parsed(body, constants, inputs="float[b,512] x", outputs="float[b,16] y"), folder / "source.onnx"
    )
    spec = OutputSpec("y", OutputKind.REGRESSION, "label")
    model = import_onnx(folder / "source.onnx", folder / "model.onnx", (spec,))
    decisions = []
    for site in model.sites:
        if site.name not in ACTIVATIONS[format]:
            decisions.append(Decision(site.name, Precision.FP32, None, Verdict.NOT_JUDGED, ""))
            continue
        scale, zero = ACTIVATIONS[format][site.name]
        columns = np.abs(weights[f"w{site.name[-1]}"]).max(axis=0) / 127
        # Scales of plans are BF16 numbers.
        columns = columns.astype(ml_dtypes.bfloat16).astype(np.float32) if format is INT8 else columns
        recipe = Recipe.of(format, Granularity.PER_CHANNEL, "mse")
        made = Decision(site.name, Precision.INT8, recipe, Verdict.SAFE, "", scale, tuple(columns.tolist()))
        decisions.append(replace(made, activation_zero_point=zero))
    plan = PrecisionPlan("int8-safe", model.digest, Precision.FP32, tuple(decisions), {}, 1.0)
    return Planned(model, plan, weights, format)


@needs_integers
@pytest.mark.parametrize("format", [UINT8, pytest.param(INT8, marks=pytest.mark.slow)], ids=str)
def test_every_planned_site_runs_in_integers_and_sums_exactly(format: NumberFormat, tmp_path: Path) -> None:
    planned = plan_of(tmp_path, format=format)
    engine = planned.build(tmp_path)
    assert engine.status is BuildStatus.READY
    assert not engine.simulated
    assert engine.instructions == integer_instructions()[0]
    kernels = {site.site: site.evidence.split()[0] for site in engine.sites}
    assert kernels == {"fc1": "QGemm", "fc2": "QGemm", "fc3": "MatMulIntegerToFloat", "fc4": "Gemm"}
    assert [site.operands for site in engine.sites[3:]] == [("float", "float")]
    # ONNX Runtime may make UINT8 of INT8 factors for instructions that multiply no others.
    integers = {kind for site in engine.sites[:3] for kind in site.operands}
    assert integers == {"uint8", "int8"} if format is UINT8 else integers <= {"uint8", "int8"}
    assert engine.fallbacks == ()
    path = tmp_path / "engine" / str(engine.path)
    with OnnxRuntimeBackend().load(path, "cpu") as runner:
        x = rows(64)
        got = runner.run({"x": x})["y"]
    want = planned.reference(x)
    # A step of fc3's input, the largest change that a tie which falls the other way makes.
    step = (
        ACTIVATIONS[format]["fc3"][0]
        * np.abs(planned.weights["w3"]).max()
        * np.abs(planned.weights["w4"]).sum(axis=0).max()
    )
    assert np.abs(got - want).max() <= step
    # Seen: in 3 of 64 rows, with INT8 in 17.
    assert (np.abs(got - want) > 1e-5 * np.abs(want).max()).any(axis=1).mean() < 0.3


@pytest.mark.slow
@needs_integers
@pytest.mark.parametrize("format", [UINT8, INT8], ids=str)
def test_a_bias_beyond_the_range_of_the_sum_is_added_in_fp32(format: NumberFormat, tmp_path: Path) -> None:
    """In INT32 it would saturate three orders of magnitude below itself."""
    body = BODY.replace("r1 = Relu(h1)", "s1 = Mul(h1, tiny) r1 = Relu(s1)")
    planned = plan_of(tmp_path, largest_bias=1e8, body=body, format=format)
    engine = planned.build(tmp_path)
    assert engine.fallbacks == ()
    with OnnxRuntimeBackend().load(tmp_path / "engine" / str(engine.path), "cpu") as runner:
        got = runner.run({"x": rows(64)})["y"]
    w, x = planned.weights, rows(64)
    h = np.maximum((planned.product("fc1", x) + w["b1"]) * float(TINY), 0)
    h = np.tanh(planned.product("fc2", h) + w["b2"])
    want = np.maximum(planned.product("fc3", h), 0) @ w["w4"].astype(np.float64) + w["b4"]
    close = np.abs(got - want) <= 1e-5 * np.abs(want).max()
    # Ties in the rounding of an activation, as above.
    assert close.all(axis=1).mean() > 0.7


@pytest.mark.slow
@needs_integers
def test_what_is_added_to_a_product_keeps_it_from_no_kernel(tmp_path: Path) -> None:
    body = BODY.replace("r3 = Relu(h3)", "s3 = Add(h3, h3) r3 = Relu(s3)")
    assert plan_of(tmp_path, body=body).build(tmp_path).fallbacks == ()


@pytest.mark.slow
@needs_integers
def test_what_is_not_fused_is_a_reported_fallback(planned: Planned, tmp_path: Path) -> None:
    engine = plan_of(tmp_path, body=BODY.replace("Relu(h3)", "Clip(h3)")).build(tmp_path)
    assert [site.site for site in engine.fallbacks] == ["fc3"]
    assert engine.fallbacks[0].evidence.startswith("not INT8: ")


SPLIT = """
    [fc1] h1 = Gemm(x, w1, b1)
    p, q = Split<axis = -1>(h1, sizes)
    r1 = Relu(p)
    r2 = Concat<axis = -1>(r1, q)
    [fc2] h2 = MatMul(r2, w2)
    a2 = Add(h2, b2)
    s, t = Split<axis = -1>(a2, halves)
    t2 = Concat<axis = -1>(s, t)
    [fc3] h3 = MatMul(t2, w3)
    r3 = Relu(h3)
    [fc4] y = Gemm(r3, w4, b4)
"""


@pytest.mark.slow
@needs_integers
def test_products_are_split_in_place_of_their_results(tmp_path: Path) -> None:
    planned = plan_of(tmp_path, body=SPLIT)
    engine = planned.build(tmp_path)
    assert engine.fallbacks == ()
    path = tmp_path / "engine" / str(engine.path)
    proto = onnx.load(path)
    splits = [node for node in proto.graph.node if node.op_type == "Split"]
    assert {node.input[0] for node in splits} == {"fc1/weight/int8", "fc2/weight/int8"}
    x, w = rows(64), planned.weights
    with OnnxRuntimeBackend().load(path, "cpu") as runner:
        got = runner.run({"x": x})["y"]
    h = planned.product("fc1", x) + w["b1"]
    h[:, :40] = np.maximum(h[:, :40], 0)
    h = np.maximum(planned.product("fc3", planned.product("fc2", h) + w["b2"]), 0)
    want = h @ w["w4"].astype(np.float64) + w["b4"]
    close = np.abs(got - want) <= 1e-5 * np.abs(want).max()
    # Ties in the rounding of an activation: as above.
    assert close.all(axis=1).mean() > 0.9


@pytest.mark.slow
@needs_integers
def test_a_product_in_fp32_says_its_times_and_has_the_values_of_the_plan(
    planned: Planned, tmp_path: Path
) -> None:
    engine = planned.build(tmp_path, **{TIME_PRODUCTS: 1})
    assert engine.status is BuildStatus.READY
    for site in engine.fallbacks:
        assert site.operands == ("float", "float")
        assert re.search(r"slower: .+ µs at batch 8 with it in INT8, .+ µs at batch 8 without", site.evidence)
    # A product in FP32 does not saturate: rows inside the range of its activation.
    x = np.clip(rows(64), -3.0, 4.8)
    with OnnxRuntimeBackend().load(tmp_path / "engine" / str(engine.path), "cpu") as runner:
        got = runner.run({"x": x})["y"]
    # The error of the rounded activations, measured: 0.004.
    want = planned.reference(x)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


def test_a_processor_that_saturates_declines(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "integer_instructions", lambda: ())
    assert "in 16 bits, which saturate" in str(OnnxRuntimeBackend().decline(planned.plan, "cpu"))


NO_INT8 = {"sm90": "onnxruntime inductor tensorrt", "sm89": "tensorrt_rtx", "cpu": "inductor migraphx"}


@pytest.mark.parametrize(("architecture", "names"), NO_INT8.items())
def test_a_backend_without_int8_declines(architecture: str, names: str, planned: Planned) -> None:
    for name in names.split():
        assert "site 'fc1' asks for UINT8" in str(get_backend(name).decline(planned.plan, architecture))


def test_a_zero_point_that_a_format_lacks_is_declined(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "integer_instructions", lambda: ("avx512_vnni",))

    def with_zero(plan: PrecisionPlan, zero: int) -> PrecisionPlan:
        first, *others = plan.decisions
        return replace(plan, decisions=(replace(first, activation_zero_point=zero), *others))

    symmetric = plan_of(tmp_path, format=INT8).plan
    takers = "onnxruntime cpu", "inductor cpu", "inductor sm80", "migraphx gfx942", "migraphx cpu"
    for name, architecture in map(str.split, takers):
        assert get_backend(name).decline(symmetric, architecture) is None
        reason = str(get_backend(name).decline(with_zero(symmetric, 3), architecture))
        assert reason == "site 'fc1' has the zero point 3, which INT8 has not"
    assert "the zero point 256" in str(
        get_backend("onnxruntime").decline(with_zero(planned.plan, 256), "cpu")
    )


def mixed_plan(planned: Planned, *sites: str) -> tuple[PrecisionPlan, np.ndarray]:
    """An INT8 plan with some sites in FP8, and the scales of the columns of the last one."""
    recipe, decisions = (
        Recipe.of(E4M3FN, Granularity.PER_CHANNEL),
        {d.site: d for d in planned.plan.decisions},
    )
    for site in sites:
        columns = np.abs(planned.weights[site.replace("fc", "w")]).max(axis=0) / 448
        scales = columns.astype(ml_dtypes.bfloat16).astype(np.float32)
        parts = (recipe, Verdict.SAFE, "", 0.25, tuple(scales.tolist()))
        decisions[site] = Decision(site, Precision.FP8, *parts)
    mixed = replace(planned.plan, id="mixed", base=Precision.FP16, decisions=tuple(decisions.values()))
    return mixed, scales


def built_mixed(
    backend: Backend, planned: Planned, mixed: PrecisionPlan, architecture: str, into: Path
) -> tuple[EngineArtifact, dict[str, str]]:
    """The engine of a plan, and the formats of the sites that run in theirs."""
    form = PlanForm(backend.base_precision(mixed), backend.spec.fusions)
    written = apply_plan(planned.model, mixed, form, into / "planned" / "m.onnx")
    np.savez(into / "sample.npz", x=rows(8))
    model = TinyModel(written.path, mixed, written.sites, into / "sample.npz")
    options = {TIME_PRODUCTS: 0} if backend.name == "onnxruntime" else {}
    batch = BatchSizes(1, 8, 64, (8,))
    engine = backend.build(request_for(model, into / "engine", architecture, batch=batch, options=options))
    assert engine.is_built, engine.detail
    return engine, {site.site: site.planned for site in engine.sites if site.engaged and site.site != "fc4"}


@pytest.mark.slow
@needs_integers
def test_products_in_fp8_behind_each_other_are_read_beside_one_in_int8(tmp_path: Path) -> None:
    """ONNX Runtime would join fc1, its FP8 pairs and the Q of fc2 into an operator of INT8, and refuse it."""
    planned = plan_of(tmp_path, format=UINT8)
    mixed, _ = mixed_plan(planned, "fc1", "fc2")
    engine, engaged = built_mixed(get_backend("onnxruntime"), planned, mixed, "cpu", tmp_path)
    assert engaged == {"fc1": "fp8", "fc2": "fp8", "fc3": "int8"}
    assert [path.name for path in (tmp_path / "engine").glob("*.onnx")] == [str(engine.path)]


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param("onnxruntime", "cpu", marks=needs_integers),
        pytest.param("inductor", "cpu", marks=pytest.mark.slow),
        pytest.param("tensorrt_rtx", "sm89", marks=pytest.mark.slow),
        ("migraphx", "cpu"),
    ],
)
def test_a_mixed_plan_runs_each_site_in_its_format(name: str, architecture: str, tmp_path: Path) -> None:
    """fc1 and fc3 in INT8, fc2 in FP8; the values are those of each format's own arithmetic."""
    backend, planned = get_backend(name), plan_of(tmp_path, format=INT8)
    if not backend.availability().installed:
        pytest.skip(f"needs {'torch: inductor is a part of it' if name == 'inductor' else name}")
    mixed, scales = mixed_plan(planned, "fc2")
    # The reference target of MIGraphX declines FP16.
    mixed = replace(mixed, base=Precision.FP32) if name == "migraphx" else mixed
    assert (mixed.kind, mixed.precisions) == ("mixed", (Precision.FP8, Precision.INT8))
    engine, engaged = built_mixed(backend, planned, mixed, architecture, tmp_path)
    assert engaged == {"fc1": "int8", "fc2": "fp8", "fc3": "int8"}
    assert engine.simulated is (architecture == "cpu")
    if architecture != "cpu":
        return
    with backend.load(tmp_path / "engine" / str(engine.path), "cpu") as runner:
        got = runner.run({"x": rows(64)})["y"]
    w = planned.weights
    h = np.maximum(planned.product("fc1", rows(64)) + w["b1"], 0)
    a = np.clip(h.astype(np.float32) / np.float32(0.25), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    b = np.clip(w["w2"] / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    h = np.tanh(a.astype(np.float64) @ b.astype(np.float64) * (0.25 * scales) + w["b2"])
    want = np.maximum(planned.product("fc3", h), 0) @ w["w4"].astype(np.float64) + w["b4"]
    # FP16 between the products of Inductor; ties of INT8 that fall the other way.
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
