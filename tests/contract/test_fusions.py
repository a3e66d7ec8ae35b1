"""Claims of `core.backends`, read from compiled graphs: what shares a kernel with a Q, what moves in FP8."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_text import parsed
from tiny_models import GraphWriter

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.backends import Fusions, backend_names
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.compiled_graph import CompiledGraph, read_compiled_graphs
from loka_onnx.engines.tensorrt.site_precision import site_precisions
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

WIDTH = 64
RTX = fusions_of("tensorrt_rtx")


def test_every_backend_is_described_and_an_unknown_one_fuses_nothing() -> None:
    assert all(fusions_of(name).evidence != "not known" for name in backend_names())
    assert fusions_of("another").quantized_in_place == frozenset()
    assert fusions_of("another").evidence == "not known"


def operator(w: GraphWriter, kind: str, tensor: str, other: str, name: str = "op") -> str:
    """The operator under test of a tensor and, where it takes two, another."""
    attributes: dict[str, Any] = {"axis": -1} if kind in {"Softmax", "RMSNormalization"} else {}
    if kind in {"Add", "Sub", "Mul", "Div", "Max"}:
        return w.op(kind, [tensor, other], name)
    if kind == "Clip":
        return w.op(kind, [tensor, w.constant("low", 0.0), w.constant("high", 6.0)], name)
    if kind.endswith("Normalization"):
        return w.op(kind, [tensor, w.constant("gain", np.ones(WIDTH))], name, **attributes)
    return w.op(kind, [tensor], name, **attributes)


def kernels(folder: Path, kind: str, *, residual: bool) -> list[tuple[str, ...]]:
    """ONNX nodes behind each kernel of: product, residual sum if asked for, operator, Q, product."""
    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    h = product(w, x, "fc0")
    h = w.op("Add", [h, x], "residual") if residual else h
    w.leave(product(w, operator(w, kind, h, x), "fc"))
    return [operation.layers for operation in compiled(folder, written(w))[0].operations]


def compiled(folder: Path, model: onnx.ModelProto, *, dialect: bool = True) -> tuple[CompiledGraph, ...]:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine

    path = folder / "model.onnx"
    onnx.save(model, path)
    settings = BuildSettings("sm89", BatchSizes(1, 64, 256), rtx_dialect=dialect)
    build_engine(trt, path, settings, folder / "engine.trt")
    return read_compiled_graphs(folder / "engine.trt")


def written(
    w: GraphWriter, output: Sequence[str | int] = ("batch", WIDTH), *, opset: int = 23
) -> onnx.ModelProto:
    """The model, at the operator set of RMSNormalization unless said otherwise."""
    shapes = {"x": ("batch", WIDTH), "out": output}
    x, out = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in shapes.items())
    graph = onnx.helper.make_graph(w.nodes, "tiny", [x], [out], list(w.initializers.values()))
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=11)


def product(w: GraphWriter, x: str, name: str) -> str:
    weight, bias = w.narrow_weight(name, (WIDTH, WIDTH)), w.constant("b", np.ones(WIDTH))
    inputs = [w.quantized(x, f"{name}/x"), weight, bias]
    y = w.op("Gemm", inputs, name, transB=1)
    w.site(name, SiteKind.LINEAR, WIDTH, WIDTH, y)
    return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(RTX.quantized_in_place))
def test_an_operator_and_the_quantization_behind_it_are_one_kernel(kind: str, tmp_path: Path) -> None:
    found = kernels(tmp_path, kind, residual=False)
    quantizing = [layers for layers in found if "fc/x/q" in layers]
    assert len(quantizing) == 1
    # The compiler forgets the name of some operators, but not the bias in front of them.
    assert "fc0" in quantizing[0]
    assert [layers for layers in found if "op" in layers] in ([], quantizing)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(RTX.residual_norms))
def test_a_residual_sum_and_the_norm_behind_it_are_one_kernel(kind: str, tmp_path: Path) -> None:
    found = kernels(tmp_path, kind, residual=True)
    assert any({"fc0", "residual", "op", "fc/x/q"} <= set(layers) for layers in found), found


def movement(w: GraphWriter, kind: str, x: str) -> str:
    """The operator under test behind a DQ of (batch, WIDTH); what it gives ends with an axis of WIDTH."""

    def ints(name: str, *values: int) -> str:
        return w.constant(name, np.array(values), onnx.TensorProto.INT64)

    match kind:
        case "Concat":
            # The other part is of another producer; else there would be nothing to join.
            other = w.quantized(w.op("Tanh", ["fc0:0"], "tanh"), "fc/x/other")
            joined = w.op(kind, [x, other], "op", axis=1)
            y = w.op("Reshape", [joined, ints("shape", -1, 2, WIDTH)], "after")
        case "Expand" | "Tile":
            middle = w.op("Unsqueeze", [x, ints("one", 1)], "before")
            y = w.op(kind, [middle, ints("count", 1, 3, 1)], "op")
        case "Gather":
            y = w.op(kind, [x, ints("chosen", *range(WIDTH - 1, -1, -1))], "op", axis=1)
        case "Reshape":
            y = w.op(kind, [x, ints("shape", -1, 1, WIDTH)], "op")
        case "Slice":
            rows = w.op("Reshape", [x, ints("shape", -1, 2, WIDTH // 2)], "before")
            row = w.op(kind, [rows, ints("from", 1), ints("to", 2), ints("along", 1)], "op")
            y = w.op("Concat", [row, row], "after", axis=2)
        case "Split":
            parts, sizes = ["left", "right"], ints("sizes", 16, WIDTH - 16)
            w.nodes.append(onnx.helper.make_node(kind, [x, sizes], parts, "op", axis=1))
            y = w.op("Concat", ["right", "left"], "after", axis=1)
        case "Squeeze":
            y = w.op(kind, [w.op("Unsqueeze", [x, ints("one", 1)], "before"), ints("one", 1)], "op")
        case "Transpose":
            rows = w.op("Reshape", [x, ints("shape", -1, 8, WIDTH // 8)], "before")
            y = w.op("Flatten", [w.op(kind, [rows], "op", perm=[0, 2, 1])], "after", axis=1)
        case "Unsqueeze":
            y = w.op(kind, [x, ints("one", 1)], "op")
        case _:
            y = w.op(kind, [x], "op")
    return y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(RTX.moved_in_float8))
def test_what_stands_between_a_dq_and_a_product_moves_fp8(kind: str, tmp_path: Path) -> None:
    w = GraphWriter(Precision.BF16)
    h = w.op("Relu", [product(w, w.enter("x"), "fc0")], "relu")
    moved = movement(w, kind, w.quantized(h, "fc/x"))
    y = w.op("MatMul", [moved, w.narrow_weight("fc", (WIDTH, WIDTH))], "fc")
    w.leave(w.op("ReduceMax", [y], "pool", keepdims=0))
    model = written(w, [], opset=21)
    onnx.checker.check_model(model, full_check=True)
    (found,) = compiled(tmp_path, model)
    (multiplied,) = (o for o in found.operations if o.kind == "fully_connected" and "fc" in o.layers)
    assert [found.type_of(tensor) for tensor in multiplied.inputs[:2]] == ["fp8_e4m3", "fp8_e4m3"]
    makers = {found.base_of(tensor): o for o in found.operations for tensor in o.outputs}
    # From the product back to the kernel of the Q, everything is FP8.
    maker = makers[found.base_of(multiplied.inputs[0])]
    while not any(layer.startswith("fc/x/") and layer.endswith("/q") for layer in maker.layers):
        moving = [t for t in maker.inputs if found.type_of(t) in {"bf16", "fp8_e4m3"}]
        assert {found.type_of(t) for t in moving} == {"fp8_e4m3"}, maker
        maker = makers[found.base_of(moving[0])]
    assert "fc0" in maker.layers or "relu" in maker.layers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantization_beside_a_norm_does_not_split_its_kernel(tmp_path: Path) -> None:
    """The norm reads the sum of a residual stream, and another site reads it in FP8: one kernel for all."""
    w = GraphWriter(Precision.BF16)
    x = w.enter("x")
    total = w.op("Add", [product(w, x, "fc0"), x], "residual")
    norm = operator(w, "LayerNormalization", total, x)
    w.leave(w.op("Add", [product(w, norm, "fc"), product(w, total, "fc2")], "sum"))
    found = [o.layers for o in compiled(tmp_path, written(w))[0].operations]
    assert any({"residual", "op", "fc/x/q", "fc2/x/q"} <= set(layers) for layers in found), found


def attention() -> onnx.ModelProto:
    """A merged query, key and value as `merge_parallel_linears` leaves it, four heads, in FP32."""
    body = """
      [qkv] p = MatMul(x, w)
      [split] q, k, v = Split<axis=-1>(p, sizes)
      [hq] a = Reshape(q, heads) [hk] b = Reshape(k, heads) [hv] c = Reshape(v, heads)
      [tq] d = Transpose<perm=[0,2,1,3]>(a) [tk] e = Transpose<perm=[0,2,3,1]>(b)
      [tv] f = Transpose<perm=[0,2,1,3]>(c)
      [dot] s = MatMul(d, e)
      [soft] r = Softmax<axis=-1>(s)
      [mix] out = MatMul(r, f)
    """
    w = np.random.default_rng(0).normal(size=(64, 192)) / 8
    constants = {"w": w, "sizes": [64, 64, 64], "heads": [-1, 10, 4, 16]}
    model = parsed(body, constants, inputs="float[batch,10,64] x", outputs="float[batch,4,10,16] out")
    onnx.checker.check_model(model)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dialect", [True, False])
@pytest.mark.parametrize(
    ("fp8", "placed", "without"),
    [
        (("qkv", "dot"), False, {"qkv": False, "dot": True}),
        (("qkv", "dot"), True, {"qkv": True, "dot": True}),
        (("qkv",), True, {"qkv": False}),
    ],
    ids=["behind_the_heads", "placed", "exact_attention"],
)
def test_a_merged_query_key_and_value(fp8, placed, without, dialect, tmp_path):
    """With a scale for each channel, heads directly behind the Split cost the merged product its FP8.

    The compiler cuts the weight apart there. Q in front of the heads keep it whole; where attention is exact
    there are none, and the `dialect` keeps it.
    """
    graphs, sites = attention_engine(tmp_path, fp8, placed=placed, dialect=dialect)
    expected = dict.fromkeys(without, True) if dialect else without
    assert {site.site: site.engaged for site in site_precisions(graphs, sites)} == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [PER_CHANNEL_WEIGHT, PER_TENSOR])
def test_exact_attention_behind_a_merged_product_stays_one_kernel(recipe: Recipe, tmp_path: Path) -> None:
    graphs, sites = attention_engine(tmp_path, ("qkv",), recipe=recipe)
    assert [site.engaged for site in site_precisions(graphs, sites)] == [True]
    operations = [o for o in graphs[0].operations if o.kind in {"fully_connected", "function"}]
    assert [o.kind for o in operations if "qkv" in o.layers].count("fully_connected") == 1
    assert len([o for o in operations if {"dot", "soft", "mix"} & set(o.layers)]) == 1


def attention_engine(
    folder: Path,
    fp8: tuple[str, ...],
    *,
    placed: bool = True,
    dialect: bool = True,
    recipe: Recipe = PER_CHANNEL_WEIGHT,
) -> tuple[tuple[CompiledGraph, ...], list[tuple[Site, Precision]]]:
    graph = GraphModel.from_proto(attention(), folder)
    model = ModelArtifact(folder / "f.onnx", graph.save(folder / "f.onnx"), 21, (), (), find_sites(graph), "")
    plan = fp8_plan(model, fp8, recipe)
    form = PlanForm(Precision.BF16, RTX if placed else Fusions())
    planned = apply_plan(model, plan, form, folder / "planned.onnx")
    graphs = compiled(folder, onnx.load(planned.path), dialect=dialect)
    return graphs, [(site, Precision.FP8) for site in model.sites if site.name in fp8]


def fp8_plan(model: ModelArtifact, fp8: tuple[str, ...], recipe: Recipe) -> PrecisionPlan:
    """Scales of 1/64 for activations and weights."""

    def decide(site: Site) -> Decision:
        if site.name not in fp8:
            return Decision(site.name, Precision.BF16, None, Verdict.NOT_JUDGED, "test")
        scales = (0.015625,) * (site.n if site.weight is not None and recipe == PER_CHANNEL_WEIGHT else 1)
        return Decision(site.name, Precision.FP8, recipe, Verdict.SAFE, "test", 0.015625, scales)

    decisions = tuple(decide(site) for site in model.sites)
    return PrecisionPlan("test", model.digest, Precision.BF16, decisions, {}, 1.0)
