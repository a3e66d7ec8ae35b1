"""What each provider is told and declines, and what sites really run in, by ONNX Runtime's own graph."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx_text import parsed
from planned import plan_of_one

from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.manifest import BatchRange, EngineEntry
from loka_onnx.core.recipe import Recipe
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.io_binding_settings import settings_for, why_declined, without_graphs
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, MIGRAPHX, TENSORRT, PlacedNode, Provider
from loka_onnx.engines.onnxruntime.site_precision import Graphs, NodePlacement, dump_optimized, site_precision
from loka_onnx.engines.onnxruntime.triton import DISABLE_ALL, triton_form
from loka_onnx.engines.request import BuildRequest
from loka_onnx.engines.triton.forms import BundledEngine, Form
from loka_onnx.errors import ModelError

ON_CUDA, ON_CPU = CUDA.name, CPU.name


def product_model(folder: Path, kind: str, *, between_casts: bool = False) -> Path:
    """``fc``: x · w of one type, or FP32 between casts as ONNX Runtime runs what it has no kernel for."""
    number, weight = {"float": (1, "f4"), "float16": (10, "f2"), "bfloat16": (16, ml_dtypes.bfloat16)}[kind]
    product = "[fc] p = MatMul(h, w)"
    if between_casts:
        product = "a = Cast<to=1>(h)  c = Cast<to=1>(w) [fc] p = MatMul(a, c)"
    body, constants = f"h = Cast<to={number}>(x) {product} y = Cast<to=1>(p)", {"w": np.ones((4, 2), weight)}
    onnx.save(parsed(body, constants, inputs="float[b,4] x", outputs="float[b,2] y"), folder / "m.onnx")
    return folder / "m.onnx"


def graphs_of(path: Path, *, is_fp32: bool = False) -> Graphs:
    reader = OperandReader(path)
    return Graphs(reader, reader, is_fp32)


def placed(provider: str) -> NodePlacement:
    return NodePlacement(CUDA, [PlacedNode("fc", "MatMul", provider), PlacedNode("", "Cast", ON_CUDA)])


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_a_product_in_the_planned_type_on_the_gpu(kind: str, tmp_path: Path) -> None:
    planned = {"float": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}[kind]
    found = site_precision("fc", planned, graphs_of(product_model(tmp_path, kind)), placed(ON_CUDA))
    assert (found.engaged, found.operands) == (True, (kind, kind))
    graph = "the graph as ONNX Runtime optimized it (BASIC)"
    assert found.evidence == f"MatMul 'fc' of {graph}; on CUDAExecutionProvider"


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (placed(ON_CPU), "MatMul 'fc' runs on CPUExecutionProvider: CUDAExecutionProvider does not take it"),
        (NodePlacement(CUDA, []), "ONNX Runtime does not say which provider runs MatMul 'fc'"),
    ],
)
def test_a_product_elsewhere_is_a_fallback(placement: NodePlacement, said: str, tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "float16"))
    found = site_precision("fc", Precision.FP16, graphs, placement)
    assert (found.engaged, found.evidence) == (False, said)


def test_products_between_casts_are_what_they_multiply(tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "bfloat16", between_casts=True))
    found = site_precision("fc", Precision.BF16, graphs, placed(ON_CUDA))
    assert (found.engaged, found.operands) == (False, ("float", "float"))
    # Its CPU provider has no FP16 MatMul: it casts, and the graph it dumps is what gives that away.
    pytest.importorskip("onnxruntime")
    path = product_model(tmp_path, "float16")
    dump_optimized(path, tmp_path / "optimized.onnx", CPU)
    graphs = Graphs(OperandReader(path), OperandReader(tmp_path / "optimized.onnx"), False)
    assert site_precision("fc", Precision.FP16, graphs_of(path)).engaged
    found = site_precision("fc", Precision.FP16, graphs)
    assert (found.engaged, found.operands) == (False, ("float", "float"))


def test_sites_that_are_gone_or_simulated(tmp_path: Path) -> None:
    graphs = graphs_of(product_model(tmp_path, "float"), is_fp32=True)
    assert site_precision("gone", Precision.FP32, graphs).engaged
    found = site_precision("gone", Precision.FP32, graphs, placed(ON_CUDA))
    assert not found.engaged
    assert found.evidence == "no node of that name in the graph as ONNX Runtime optimized it (BASIC)"
    graphs = graphs_of(product_model(tmp_path, "float"), is_fp32=True)
    found = site_precision("fc", Precision.BF16, graphs, placed(ON_CUDA))
    assert found.engaged
    assert "stands for BF16, run in FP32; on CUDAExecutionProvider" in found.evidence


def test_a_log_says_where_nodes_went_and_a_refusal_why(tmp_path: Path) -> None:
    nodes = [PlacedNode(f"n{i}", "MatMul", ON_CUDA) for i in range(3)] + [
        PlacedNode(f"c{i}", "NonZero", ON_CPU) for i in range(25)
    ]
    lines = NodePlacement(CUDA, nodes).describe().splitlines()
    assert lines[:2] == ["25 nodes on CPUExecutionProvider", "3 nodes on CUDAExecutionProvider"]
    assert lines[2] == "not on CUDAExecutionProvider: NonZero 'c0'"
    assert len(lines) == 22
    pytest.importorskip("onnxruntime")
    model = onnx.load(product_model(tmp_path, "float"))
    model.graph.node[1].op_type = "Frobnicate"
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime refuses '.*bad\.onnx' on CPU(?s:.*)Frobnicate"):
        dump_optimized(tmp_path / "bad.onnx", tmp_path / "o.onnx", CPU)


HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


ROWS = "g (float[b,13] x, int64[b,26] ids) => (float[b,13] y) { y = Relu(x) }"


def request_for(tmp_path: Path, text: str = ROWS, **options: int) -> BuildRequest:
    model, batch = tmp_path / "m.onnx", BatchSizes(2, 64, 512, (32, 64, 128))
    onnx.save(onnx.parser.parse_model(f"{HEADER} {text}"), model)
    plan, where = plan_of_one(Precision.FP16), ("nvidia-h100", "sm90")
    return BuildRequest(model, plan, (), *where, batch, tmp_path / "e", model, options=options)


@pytest.mark.parametrize(
    ("provider", "accepted"),
    [
        (CPU, {"fp32", "fp8"}),
        (CUDA, {"fp32", "fp16", "bf16", "fp8"}),
        (TENSORRT, {"fp16", "bf16"}),
        (MIGRAPHX, {"fp32", "fp16", "bf16"}),
    ],
)
def test_the_plans_that_a_provider_takes(provider: Provider, accepted: set[str]) -> None:
    plans = {base.value: plan_of_one(base) for base in (Precision.FP32, Precision.FP16, Precision.BF16)}
    plans["fp8"] = plan_of_one(Precision.BF16, Recipe.of(E4M3FN))
    assert {name for name, plan in plans.items() if why_declined(provider, plan) is None} == accepted


def test_settings_of_providers(tmp_path: Path) -> None:
    settings = settings_for(CUDA, request_for(tmp_path), "1.31.1")
    arena = {"arena_extend_strategy": "kSameAsRequested"}
    assert settings.options == {**arena, "enable_cuda_graph": "1", "use_tf32": "0"}
    assert (settings.provider, settings.version) == ("cuda", "1.31.1")
    assert (settings.sizes, settings.programs) == ((32, 64, 128), False)
    options = settings_for(TENSORRT, request_for(tmp_path, optimization_level=5), "1").options
    assert options == {
        "trt_builder_optimization_level": "5",
        "trt_cuda_graph_enable": "1",
        "trt_profile_min_shapes": "x:2x13,ids:2x26",
        "trt_profile_opt_shapes": "x:64x13,ids:64x26",
        "trt_profile_max_shapes": "x:512x13,ids:512x26",
    }
    text = "g (float[b,n] x) => (float[b,n] y) { y = Relu(x) }"
    with pytest.raises(ModelError, match=r"'x' has an open axis beside the batch(?s:.*)\[b, n\]"):
        settings_for(TENSORRT, request_for(tmp_path, text=text), "1")
    reason = why_declined(CUDA, plan_of_one(Precision.BF16, Recipe.of(E4M3FNUZ)))
    assert reason is not None and reason.startswith("site 'fc' asks for E4M3FNUZ")


@pytest.mark.parametrize("provider", [CUDA, TENSORRT, MIGRAPHX])
def test_an_engine_without_graphs_says_nothing_of_them(provider: Provider, tmp_path: Path) -> None:
    asked = settings_for(provider, request_for(tmp_path, cuda_graph=0), "1.31.1")
    assert not [name for name in asked.options if "graph" in name and "migraphx" not in name]
    assert asked == without_graphs(settings_for(provider, request_for(tmp_path), "1.31.1"))
    # What compiles for shapes keeps its sizes; CUDA then needs none.
    assert asked.sizes == ((32, 64, 128) if provider.compiles else ())
    assert without_graphs(asked) == asked


@pytest.mark.parametrize("tune", [0, 1])
def test_migraphx_keeps_a_program_a_size(tune: int, tmp_path: Path) -> None:
    settings = settings_for(MIGRAPHX, request_for(tmp_path, exhaustive_tune=tune), "1")
    assert settings.options == {"migraphx_exhaustive_tune": str(tune)}
    assert (settings.sizes, settings.programs) == ((32, 64, 128), True)


@pytest.mark.parametrize(("backend", "level"), [("onnxruntime", None), ("onnxruntime_tensorrt", DISABLE_ALL)])
def test_triton_does_not_optimize_graphs_for_a_compiler(
    backend: str, level: int | None, tmp_path: Path
) -> None:
    model = product_model(tmp_path, "float")
    engine = ("e", backend, "1.31.1", "gpu", "sm90", "any", "p", False, BatchRange(1, 8), model.name, 1, "")
    source = BundledEngine(tmp_path, EngineEntry(*engine, {}, None), "m", (), (), {}, {}, 1)
    form = triton_form(source)
    assert isinstance(form, Form)
    assert dict(form.model.optimization).get("graph") == (level and (("level", level),))
