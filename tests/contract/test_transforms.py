"""Every transform through one suite: what it must leave alone, say, and prove."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from mod_models import MOD_MODELS
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import E4M3FN, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis, find_sites
from loka_onnx.numerics.scales import amax_scale, weight_scales
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import DEFAULT_MODS, apply_mods

RANKER = """
    [bottom] h0 = Gemm<transB=1>(dense, w0, b0)
    p0 = Mul(h0, h0) v0 = ReduceMean(p0, axes) e0 = Add(v0, epsilon) r0 = Sqrt(e0) i0 = Reciprocal(r0)
    q0 = Mul(h0, i0) n0 = Mul(q0, gain)
    rows = Gather(table, ids)
    one_row = Unsqueeze(n0, middle)
    z = Concat<axis=1>(rows, one_row)
    zt = Transpose<perm=[0,2,1]>(z)
    [dot] s = MatMul(z, zt)
    flat = Flatten(s)
    top = Concat<axis=1>(flat, n0)
    m1 = ReduceMean(top, axes) d1 = Sub(top, m1) p1 = Pow(d1, two) v1 = ReduceMean(p1, axes)
    e1 = Add(v1, epsilon) r1 = Sqrt(e1) n1 = Div(d1, r1)
    [over] h2 = MatMul(n1, w2)
    a2 = Relu(h2)
    [head] logit = Gemm<transB=1>(a2, w3, b3)
"""
WIDTH = 3 * 3 + 16


def ranker(folder: Path) -> ModelArtifact:
    """A DLRM in small: bottom layer, RMSNorm, two lookups, dot interaction, LayerNorm, over layers."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[batch,8] dense, int64[batch,2] ids)'
        f" => (float[batch,1] logit) {{ {RANKER} }}"
    )
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    shapes = {"w0": (16, 8), "b0": (16,), "table": (50, 16), "w2": (WIDTH, 32), "w3": (1, 32), "b3": (1,)}
    constants: dict[str, Any] = {
        name: (random.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }
    constants |= {"gain": np.linspace(0.5, 1.5, 16, dtype=np.float32)}
    constants |= {"epsilon": np.float32(1e-5), "two": np.float32(2)}
    constants |= {"axes": np.array([-1]), "middle": np.array([1])}
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for node in proto.graph.node:
        node.name = node.name or f"{'norm0' if node.output[0].endswith('0') else 'norm1'}/{node.output[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ranker.onnx"
    onnx.save(proto, path)
    graph = GraphModel.load(path)
    return ModelArtifact(path, graph.save(path), 21, (), (), find_sites(graph), "test")


def batch(rows: int = 12) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(1)
    return {
        "dense": random.normal(size=(rows, 8)).astype(np.float32),
        "ids": random.integers(0, 50, size=(rows, 2)),
    }


def rows_for(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of `batch`, or of the inputs of a model that is not the ranker."""
    rows: dict[str, np.ndarray[Any, Any]] = {}
    random = np.random.default_rng(2)
    for tensor in onnx.load(path).graph.input:
        shape = [d.dim_value or 12 for d in tensor.type.tensor_type.shape.dim]
        is_float = tensor.type.tensor_type.elem_type == TensorProto.FLOAT
        rows[tensor.name] = (
            random.normal(size=shape).astype(np.float32) if is_float else random.integers(0, 10, size=shape)
        )
    return rows | {name: values for name, values in batch().items() if name in rows and len(rows) > 1}


def outputs(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(ReferenceEvaluator(onnx.load(path)).run(None, rows_for(path))[0])


def saved(graph: GraphModel, folder: Path) -> str:
    return graph.copy().save(folder / "copy.onnx")


# Mods -------------------------------------------------------------------------------------------------


@pytest.fixture(params=DEFAULT_MODS, ids=lambda kind: kind.name)
def mod(request: pytest.FixtureRequest) -> Mod[Any]:
    made: Mod[Any] = request.param()
    return made


def source_of(mod: Mod[Any], folder: Path) -> ModelArtifact:
    """A model in which the mod finds something: the ranker, or one of its own."""
    return MOD_MODELS[mod.name].write(folder) if mod.name in MOD_MODELS else ranker(folder)


def test_names_are_unique() -> None:
    assert len({kind.name for kind in DEFAULT_MODS}) == len(DEFAULT_MODS)


def test_matching_changes_nothing(mod: Mod[Any], tmp_path: Path) -> None:
    graph = GraphModel.load(source_of(mod, tmp_path).path)
    before = saved(graph, tmp_path)
    assert len(mod.match(graph).matches) == 1
    assert saved(graph, tmp_path) == before


def test_rewriting_a_copy_leaves_the_original(mod: Mod[Any], tmp_path: Path) -> None:
    graph = GraphModel.load(source_of(mod, tmp_path).path)
    before = saved(graph, tmp_path)
    candidate = graph.copy()
    for match in mod.match(candidate).matches:
        mod.rewrite(candidate, match)
    assert saved(candidate, tmp_path) != before
    assert saved(graph, tmp_path) == before


def test_what_was_applied_is_there(mod: Mod[Any], tmp_path: Path) -> None:
    source = source_of(mod, tmp_path)
    result = apply_mods(source, [rows_for(source.path)], tmp_path / "after.onnx", [mod])
    record = result.log.records[0]
    # What a mod takes out has its name in the model before.
    graphs = [onnx.load(path).graph for path in (source.path, result.model.path)]
    names = {part.name for graph in graphs for part in (*graph.node, *graph.initializer)}
    assert record.transform == mod.name
    assert record.applied
    assert {applied.at for applied in record.applied} <= names
    assert record.max_abs is not None
    assert record.tolerance is not None
    assert record.max_abs <= record.tolerance
    assert serde.loads(RewriteLog, serde.dumps(result.log)) == result.log


def test_the_model_stays_valid_equal_and_has_the_same_interface(mod: Mod[Any], tmp_path: Path) -> None:
    source = source_of(mod, tmp_path)
    result = apply_mods(source, [rows_for(source.path)], tmp_path / "after.onnx", [mod])
    before, after = onnx.load(source.path), onnx.load(result.model.path)
    onnx.checker.check_model(after, full_check=True)
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    # No site is lost or renamed, but for those that a new one says it replaces.
    replaced = {name for site in result.model.sites for name in site.merged_from}
    assert {site.name for site in source.sites} <= {site.name for site in result.model.sites} | replaced
    # FP32 sums in another order: 3e-7 of the largest seen.
    expected = outputs(source.path)
    atol = 2e-6 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(outputs(result.model.path), expected, rtol=0, atol=atol)


def test_a_second_run_finds_nothing(mod: Mod[Any], tmp_path: Path) -> None:
    source = source_of(mod, tmp_path)
    rows = [rows_for(source.path)]
    first = apply_mods(source, rows, tmp_path / "once.onnx", [mod])
    second = apply_mods(first.model, rows, tmp_path / "twice.onnx", [mod])
    assert second.log.records[0].applied == ()
    assert second.model.digest == first.model.digest


# Precision --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    """The ranker after every mod; plans are applied to copies."""
    folder = tmp_path_factory.mktemp("rewritten")
    return apply_mods(ranker(folder), [batch()], folder / "after.onnx").model


def fp8_plan(model: ModelArtifact, recipe: Recipe, base: Precision) -> PrecisionPlan:
    """Every product in FP8, interactions too, with ample activation scales; norms in the base."""
    graph = GraphModel.load(model.path)
    decisions = []
    for site in model.sites:
        if site.kind is SiteKind.NORM:
            decisions.append(Decision(site.name, base, None, Verdict.SAFE, ""))
            continue
        scale = amax_scale(20.0, recipe.format)
        other: tuple[float, ...] = (scale,)
        if site.weight is not None:
            values = values_of(graph.node(site.name).inputs[site.weight.index])
            found = weight_scales(values, recipe.weight, channel_axis(site.weight), E4M3FN)
            other = tuple(float(s) for s in found.reshape(-1))
        decisions.append(Decision(site.name, Precision.FP8, recipe, Verdict.SAFE, "", scale, other))
    return PrecisionPlan("fp8-all", model.digest, base, tuple(decisions), {}, 1.0)


CHANGES = {Precision.FP32: 0.15, Precision.BF16: 0.15, Precision.FP16: 0.15}
"""Logits up to 1.9 with every product in FP8 under ample scales: at most 0.074, 0.060 and 0.069 seen."""


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=lambda r: r.weight)
@pytest.mark.parametrize("base", list(CHANGES))
def test_a_planned_model_is_valid_typed_and_close(
    base: Precision, recipe: Recipe, rewritten: ModelArtifact, tmp_path: Path
) -> None:
    model = rewritten
    planned = apply_plan(model, fp8_plan(model, recipe, base), PlanForm(base), tmp_path / "planned.onnx")
    proto = onnx.load(planned.path)
    onnx.checker.check_model(proto, full_check=True)
    source = onnx.load(model.path)
    assert list(proto.graph.input) == list(source.graph.input)
    assert list(proto.graph.output) == list(source.graph.output)
    operators = {node.name: node.op_type for node in proto.graph.node}
    assert all(operators[site.name] == site.op_type for site in model.sites)
    for site in model.sites:
        if site.kind is not SiteKind.NORM:
            node = next(node for node in proto.graph.node if node.name == site.name)
            makers = {output: n.op_type for n in proto.graph.node for output in n.output}
            assert [makers[name] for name in node.input[:2]] == ["DequantizeLinear"] * 2
    change = np.abs(outputs(planned.path) - outputs(model.path)).max()
    assert 1e-3 < change < CHANGES[base]
    assert serde.loads(RewriteLog, serde.dumps(planned.log)) == planned.log


@pytest.mark.parametrize("base", list(CHANGES))
def test_applying_a_plan_twice_gives_the_same_bytes(
    base: Precision, rewritten: ModelArtifact, tmp_path: Path
) -> None:
    model = rewritten
    plan = fp8_plan(model, PER_CHANNEL_WEIGHT, base)
    digests = [apply_plan(model, plan, PlanForm(base), tmp_path / str(i) / "m.onnx").digest for i in range(2)]
    assert digests[0] == digests[1]
    # The source is not written to.
    assert GraphModel.load(model.path).save(tmp_path / "again.onnx") == model.digest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "base",
    [Precision.BF16, *(pytest.param(p, marks=pytest.mark.slow) for p in CHANGES if p is not Precision.BF16)],
)
def test_nvidias_parser_accepts_every_planned_model(
    base: Precision, rewritten: ModelArtifact, tmp_path: Path
) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    model = rewritten
    plan = fp8_plan(model, PER_CHANNEL_WEIGHT, base)
    planned = apply_plan(model, plan, PlanForm(base), tmp_path / "planned.onnx")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(planned.path)), parser.get_error(0).desc()


def test_fp8_weights_take_one_byte(rewritten: ModelArtifact, tmp_path: Path) -> None:
    model = rewritten
    plan = fp8_plan(model, PER_TENSOR, Precision.BF16)
    proto = onnx.load(apply_plan(model, plan, PlanForm(Precision.BF16), tmp_path / "planned.onnx").path)
    stored = {t.name: t for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FN}
    for site in model.linear_sites:
        assert len(stored[f"{site.name}/weight/fp8"].raw_data) == site.k * site.n
