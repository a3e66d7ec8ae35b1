"""What TensorRT for RTX does with FP8 and INT8 sites, read from its compiled graphs: the backend's table."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import GraphWriter, TinyModel, make_plan, mlp, request_for, write_sample

from loka_onnx.core.engine import EngineArtifact, SitePrecision
from loka_onnx.core.formats import E4M3FN, INT8, NumberFormat, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.tensorrt.backend import TensorRtRtxBackend
from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine
from loka_onnx.engines.tensorrt.compiled_graph import CompiledGraph, read_compiled_graphs
from loka_onnx.engines.tensorrt.first_opening import check_opens
from loka_onnx.engines.tensorrt.site_precision import site_precisions
from loka_onnx.engines.tensorrt.spec import TENSORRT_RTX
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.sessions import cuda
from loka_onnx.sessions.cuda import CudaDevice, list_cuda_devices

trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx: its claims are not tested")

Shape = tuple[int, ...]
Body = Callable[[GraphWriter, str], str]
ONE_SITE = Site("fc", SiteKind.LINEAR, "MatMul", (), "fc:0", 64, 64, 1)


@dataclass(frozen=True)
class Compiled:
    graphs: tuple[CompiledGraph, ...]
    sites: dict[str, SitePrecision]


def compile_body(
    folder: Path,
    body: Body,
    shape: Shape,
    base: Precision = Precision.BF16,
    architecture: str = "sm89",
    format: NumberFormat = E4M3FN,
) -> Compiled:
    """Build a model of one input in this process; every site is planned in the format."""
    w = GraphWriter(base, format=format)
    w.leave(body(w, w.enter("x")))
    model = w.save(folder / "model.onnx", {"x": shape})
    engine = folder / "engine.trt"
    build_engine(trt, model, BuildSettings(architecture, BatchSizes(1, 64, 256)), engine)
    graphs = read_compiled_graphs(engine)
    found = site_precisions(graphs, [(site, format.precision) for site in w.sites])
    return Compiled(graphs, {site.site: site for site in found})


def request_of(output: Path, model: TinyModel) -> BuildRequest:
    return request_for(model, output, "nvidia-rtx-ada", architecture="sm89")


def build(output: Path, model: TinyModel) -> EngineArtifact:
    artifact = TensorRtRtxBackend().build(request_of(output, model))
    assert artifact.is_built, artifact.detail
    return artifact


def gemm(k: int, n: int, *, axis: int | None = None, trans_b: bool = True) -> Body:
    def body(w: GraphWriter, x: str) -> str:
        weight = w.narrow_weight("fc", (n, k) if trans_b else (k, n), axis)
        bias = w.constant("fc/b", np.ones(n))
        y = w.op("Gemm", [w.quantized(x, "fc/x"), weight, bias], "fc", transB=int(trans_b))
        w.site("fc", SiteKind.LINEAR, k, n, y)
        return w.op("Relu", [y], "relu")

    return body


def matmul(
    k: int, n: int, *, axis: int | None = None, between: tuple[str, dict[str, Any]] | None = None
) -> Body:
    def body(w: GraphWriter, x: str) -> str:
        left = w.quantized(x, "fc/x")
        if between is not None:
            left = w.op(between[0], [left], "between", **between[1])
        y = w.op("MatMul", [left, w.narrow_weight("fc", (k, n), axis)], "fc")
        w.site("fc", SiteKind.LINEAR, k, n, y)
        return y

    return body


def constant_on_the_left(axis: int | None) -> Body:
    def body(w: GraphWriter, x: str) -> str:
        y = w.op("MatMul", [w.narrow_weight("fc", (8, 10), axis), w.quantized(x, "fc/x")], "fc")
        w.site("fc", SiteKind.LINEAR, 10, 8, y)
        return y

    return body


def interaction(w: GraphWriter, x: str) -> str:
    q = w.quantized(x, "dot/x")
    y = w.op("MatMul", [q, w.op("Transpose", [q], "transposed", perm=[0, 2, 1])], "fc")
    w.site("fc", SiteKind.INTERACTION, 64, 10, y)
    return y


ENGAGED: dict[str, tuple[Body, Shape]] = {
    "gemm_transb": (gemm(64, 128), (64,)),
    "gemm_transb_per_channel": (gemm(64, 128, axis=0), (64,)),
    "matmul_per_channel": (matmul(64, 128, axis=1), (64,)),
    "rank3_per_channel": (matmul(64, 32, axis=1), (10, 64)),
    "left_per_channel": (constant_on_the_left(0), (10, 64)),
    "interaction": (interaction, (10, 64)),
    "n1": (gemm(64, 1), (64,)),
    "k13_n7": (gemm(13, 7), (13,)),
}
BASES = [
    (Precision.FP32, "sm120"),
    (Precision.FP16, "sm120"),
    (Precision.FP16, "sm89"),
    (Precision.FP32, "sm89"),
]


def test_fp32_products_are_refused_for_turing_alone(tmp_path):
    with pytest.raises(EngineError) as refused:
        compile_body(tmp_path, gemm(64, 128, axis=0), (64,), Precision.FP32, "sm75", INT8)
    assert "FP32 GEMM is not supported" in refused.value.evidence
    assert (
        compile_body(tmp_path, gemm(64, 128, axis=0), (64,), Precision.FP32, "sm86", INT8).sites["fc"].engaged
    )


def test_int8_weights_are_no_int8_product(tmp_path):
    """Scales along K: the weights stay in INT8 in the engine, and are converted for a product of the base."""
    found = compile_body(tmp_path, matmul(64, 128, axis=0), (64,), Precision.FP16, "sm75", INT8)
    assert any(tensor.type == "int8" and tensor.constant_bytes for tensor in found.graphs[0].tensors.values())
    assert (found.sites["fc"].engaged, found.sites["fc"].operands) == (False, ("half", "half"))


def test_fp8_and_int8_sites_of_one_engine(tmp_path):
    def body(w: GraphWriter, x: str) -> str:
        for name, format in (("eight", E4M3FN), ("int", INT8)):
            w.format = format
            left = w.quantized(x, f"{name}/x")
            x = w.op("MatMul", [left, w.narrow_weight(name, (64, 64), 1)], name)
            w.site(name, SiteKind.LINEAR, 64, 64, x)
        return x

    graphs, sites = (compiled := compile_body(tmp_path, body, (64,))).graphs, compiled.sites
    assert [sites[name].operands for name in ("eight", "int")] == [("fp8_e4m3",) * 2, ("int8",) * 2]
    kinds = {"eight": Precision.INT8, "int": Precision.FP8}
    planned = [(replace(ONE_SITE, name=name), precision) for name, precision in kinds.items()]
    assert not any(site.engaged for site in site_precisions(graphs, planned))


BUILDS = [
    *((case, E4M3FN, Precision.BF16, "sm89") for case in ENGAGED),
    *((case, INT8, Precision.FP16, "sm75") for case in ENGAGED),
    *((case, INT8, Precision.BF16, architecture) for case in ENGAGED for architecture in ("sm86", "sm89")),
    *(("gemm_transb_per_channel", E4M3FN, base, architecture) for base, architecture in BASES),
]


@pytest.mark.parametrize(("case", "format", "base", "architecture"), BUILDS)
def test_a_site_is_engaged(case, format, base, architecture, tmp_path):
    compiled = compile_body(tmp_path, *ENGAGED[case], base, architecture, format)
    assert compiled.graphs[0].architectures == (architecture,)
    site = compiled.sites["fc"]
    assert site.engaged, site.evidence
    assert site.operands == ("fp8_e4m3" if format is E4M3FN else "int8",) * 2


@pytest.mark.parametrize(
    ("body", "shape"),
    [(gemm(64, 128, axis=1), (64,)), (matmul(64, 128, axis=0), (64,)), (constant_on_the_left(1), (10, 64))],
)
def test_weight_scales_along_k_force_a_fallback(body, shape, tmp_path):
    site = compile_body(tmp_path, body, shape).sites["fc"]
    assert not site.engaged
    assert site.operands == ("bf16", "bf16")
    assert "multiplies bf16 by bf16 where the plan says fp8_e4m3" in site.evidence


def test_sites_on_one_qdq_are_merged_and_engaged(tmp_path):
    def body(w: GraphWriter, x: str) -> str:
        q = w.quantized(x, "shared")
        for name in ("a", "b"):
            w.site(name, SiteKind.LINEAR, 64, 32, w.op("MatMul", [q, w.narrow_weight(name, (64, 32))], name))
        return w.op("Add", ["a:0", "b:0"], "sum")

    compiled = compile_body(tmp_path, body, (64,))
    assert all(site.engaged for site in compiled.sites.values())
    products = [o for o in compiled.graphs[0].operations if o.kind == "fully_connected"]
    assert len(products) == 1
    assert {"a", "b"} <= set(products[0].layers)


@pytest.mark.slow
def test_an_fp32_engine_does_not_use_tf32(tmp_path):
    model = mlp(tmp_path, Precision.FP32, Precision.FP32, fp8=False)
    artifact = build(tmp_path / "e", model)
    assert artifact.path is not None
    assert read_compiled_graphs(tmp_path / "e" / artifact.path)[0].settings["tf32"] == "0"
    assert not artifact.fallbacks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("also_in_base", "stored"), [(False, ["fp8_e4m3"]), (True, ["bf16"])], ids=["alone", "shared"]
)
def test_where_an_embedding_table_is_stored(tmp_path, also_in_base, stored):
    w = GraphWriter(Precision.BF16)
    table = w.constant("table", np.random.default_rng(0).normal(size=(1000, 16)))
    index = w.op("Cast", ["ids"], "to_index", to=7)
    rows = w.op("Flatten", [w.op("Gather", [table, index], "lookup")], "rows", axis=1)
    joined = w.op("Concat", [w.enter("x"), rows], "joined", axis=1)
    y = gemm(64 + 48, 48)(w, joined)
    w.leave(w.op("Add", [y, rows], "residual") if also_in_base else y)
    inputs = {"x": (64,), "ids": (3,)}
    path = w.save(tmp_path / "model.onnx", inputs)
    sites = tuple(w.sites)
    plan = make_plan(sites, base=Precision.BF16, fp8=("fc",))
    sample = write_sample(tmp_path / "sample.npz", inputs)
    artifact = build(tmp_path / "e", TinyModel(path, plan, sites, sample))
    assert not artifact.fallbacks
    assert artifact.path is not None
    tensors = read_compiled_graphs(tmp_path / "e" / artifact.path)[0].tensors.values()
    assert sorted(t.type for t in tensors if t.constant_bytes >= 1000 * 16) == stored


def test_a_second_dynamic_axis_is_refused(tmp_path):
    w = GraphWriter(Precision.FP32)
    w.leave(w.op("Relu", ["x"], "relu"))
    path = w.save(tmp_path / "model.onnx", {"x": ("tokens",)})  # type: ignore[dict-item]
    with pytest.raises(ModelError, match="input 'x' has a dynamic axis besides the batch"):
        build_engine(trt, path, BuildSettings("sm89", BatchSizes(1, 1, 1)), tmp_path / "engine.trt")


def test_a_second_rounding_of_merged_projections_is_told(tmp_path):
    """Q directly behind sites that share an input: the merged sum is rounded before it is rescaled."""

    def body(w: GraphWriter, x: str) -> str:
        q = w.quantized(x, "shared")
        for name in ("q", "k"):
            w.site(name, SiteKind.LINEAR, 64, 64, w.op("MatMul", [q, w.narrow_weight(name, (64, 64))], name))
        k = w.op("Transpose", ["k:0"], "kt", perm=[0, 2, 1])
        y = w.op("MatMul", [w.quantized("q:0", "dot/q"), w.quantized(k, "dot/k")], "dot")
        w.site("dot", SiteKind.INTERACTION, 64, 10, y)
        return y

    compiled = compile_body(tmp_path, body, (10, 64))
    assert all(site.engaged for site in compiled.sites.values())
    told = {
        name: "rounded to eight bits before the scales" in site.evidence
        for name, site in compiled.sites.items()
    }
    assert told == {"q": True, "k": True, "dot": False}


def test_a_profile_for_each_size_is_built(tmp_path):
    """What TensorRT is asked for; its own engines are inspected where it is installed."""
    model = mlp(tmp_path, Precision.BF16, Precision.BF16, fp8=True)
    settings = BuildSettings("sm89", BatchSizes(1, 8, 16, (4, 8)), profile_each_size=True)
    build_engine(trt, model.path, settings, tmp_path / "engine.trt")
    found = site_precisions(
        read_compiled_graphs(tmp_path / "engine.trt"), [(site, Precision.FP8) for site in model.sites]
    )
    assert all(site.engaged for site in found), found


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops in TensorRT-RTX")
def test_the_calls_of_the_timing_cache(tmp_path, capsys):
    """TensorRT for RTX times nothing, so the cache stays empty; the calls are those of TensorRT."""
    model = mlp(tmp_path, Precision.BF16, Precision.BF16, fp8=False)
    file = tmp_path / "cache" / "rtx.cache"
    for content in (None, None, b"damaged"):
        if content is not None:
            file.write_bytes(content)
        settings = BuildSettings("sm89", BatchSizes(1, 8, 16), timing_cache=file)
        build_engine(trt, model.path, settings, tmp_path / "engine.trt")
        assert file.is_file()
    assert "timing cache" in capsys.readouterr().out


@pytest.mark.slow
def test_without_a_driver_an_engine_is_refused_and_the_process_goes_on(tmp_path, monkeypatch):
    """The library itself: refused before it is asked, and where the driver only seems to be there."""
    if list_cuda_devices():
        pytest.skip("needs a host without an NVIDIA GPU")
    compile_body(tmp_path, gemm(32, 32), (32,))
    engine, version = tmp_path / "engine.trt", str(trt.__version__)
    with pytest.raises(EngineError, match="no NVIDIA GPU"):
        TENSORRT_RTX.open(engine, "sm89", version, None)
    check_opens("tensorrt_rtx", version, engine, CudaDevice(0, "NVIDIA L4", "sm89"))
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "unit" / "sessions")
    driver = importlib.import_module("fake_cuda_driver").FakeDriver
    monkeypatch.setattr(cuda, "_load_library", lambda: driver(("NVIDIA L4", 8, 9)))
    with pytest.raises(EngineError, match="does not load the engine"):
        TENSORRT_RTX.open(engine, "sm89", version, None)
