"""Every transform through one suite: what it must leave alone, say, and prove."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from planned import quantized_model
from rewrite_models import Arrays, artifact, evaluate, parse
from shape_cases import (
    BAGS,
    CONVOLUTIONS,
    EINSUMS,
    FOLDED,
    JOINED,
    LOOKED_UP,
    MASKED,
    MERGED,
    PADDED,
    ROWS_OF_IDS,
    SHARED,
    TAKEN_APART,
)
from shape_models import Case, feeds

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.rewrite import RewriteLog
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel
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
    random = np.random.default_rng(0)
    shapes = {"w0": (16, 8), "b0": (16,), "table": (50, 16), "w2": (WIDTH, 32), "w3": (1, 32), "b3": (1,)}
    constants: dict[str, Any] = {n: random.normal(size=s) / np.sqrt(s[-1]) for n, s in shapes.items()}
    constants |= {"gain": np.linspace(0.5, 1.5, 16), "epsilon": 1e-5, "two": 2.0, "axes": [-1], "middle": [1]}
    inputs = "float[batch,8] dense, int64[batch,2] ids"
    model = parse(RANKER, constants, inputs=inputs, outputs="float[batch,1] logit")
    return artifact(model, folder / "ranker.onnx")


LAYER = {"w": (8, 8), "gain": (8,), "shift": (8,)}
CASES = {
    "fold-batch-norm": Case(
        "[fc] h = MatMul(x, w) [bn] n = BatchNormalization(h, gain, shift, mean, variance) y = Relu(n)",
        {**LAYER, "mean": (8,), "variance": np.linspace(0.25, 4, 8)},
    ),
    "fold-norm-affine": Case("[norm] n = LayerNormalization(x, gain, shift) [fc] y = MatMul(n, w)", LAYER),
    "einsum-to-matmul": EINSUMS["interaction"],
    "conv-to-matmul": CONVOLUTIONS["of_positions"],
    "column-to-row": Case(
        "[fc] h = MatMul(w, x) b = Add(h, bias) y = Tanh(b)",
        {"w": (8, 16), "bias": (8, 1)},
        "float[batch,16,1] x",
    ),
    "outer-to-mul": Case("[fc] y = Gemm(x, w, b)", {"w": (1, 16), "b": (16,)}, "float[batch,1] x"),
    "split-concat": TAKEN_APART["a_learned_row"],
    "masks-to-where": MASKED["rows"],
    "bags-to-sums": BAGS["three_ids_a_row"],
    "split-to-rows": ROWS_OF_IDS["turned"],
    "fold-constants": FOLDED["a_transposed_weight"],
    "remove-no-ops": Case("i = Identity(x) [fc] y = MatMul(i, w)", {"w": (8, 8)}),
    "share-duplicates": SHARED["transposes"],
    "reassociate-interaction": Case(
        "t = Transpose<perm=[0,2,1]>(x) [dot] s = MatMul(x, t) [mix] y = MatMul(s, w)",
        {"w": (160, 4)},
        "float[batch,160,64] x",
    ),
    "merge-gathers": LOOKED_UP["one_table"],
    "sum-experts": Case(
        "[fc1] a = MatMul(x, w1) c = Unsqueeze(a, last) [fc2] b = MatMul(x, w2) d = Unsqueeze(b, last)"
        " s = Concat<axis=2>(c, d) e = Unsqueeze(x, last) t = Slice(e, zero, two, one)"
        " g = Softmax<axis=1>(t) y = MatMul(s, g)",
        {"w1": (8, 8), "w2": (8, 8), "last": [-1], "zero": [0], "one": [1], "two": [2]},
    ),
    "merge-parallel-linears": MERGED["gemms"],
    "join-parts": JOINED["nothing_else"],
    "pad-sites": PADDED["absorbed_by_the_next_layer"],
}
"""A model for each mod that finds nothing in the ranker."""


def batch(rows: int = 12) -> Arrays:
    random = np.random.default_rng(1)
    dense, ids = random.normal(size=(rows, 8)), random.integers(0, 50, size=(rows, 2))
    return {"dense": dense.astype(np.float32), "ids": ids}


def saved(graph: GraphModel, folder: Path) -> str:
    return graph.copy().save(folder / "copy.onnx")


# Mods -------------------------------------------------------------------------------------------------


@pytest.fixture(params=DEFAULT_MODS, ids=lambda kind: kind.name)
def mod(request: pytest.FixtureRequest) -> Mod[Any]:
    made: Mod[Any] = request.param()
    return made


@pytest.fixture
def source(mod: Mod[Any], tmp_path: Path) -> ModelArtifact:
    case = CASES.get(mod.name)
    return ranker(tmp_path) if case is None else artifact(case.model(), tmp_path / "model.onnx")


def test_names_are_unique():
    assert len({kind.name for kind in DEFAULT_MODS}) == len(DEFAULT_MODS)


def test_matching_changes_nothing_and_rewriting_a_copy_leaves_the_original(mod, source, tmp_path):
    graph = GraphModel.load(source.path)
    before = saved(graph, tmp_path)
    assert len(mod.match(graph).matches) == 1
    assert saved(graph, tmp_path) == before
    candidate = graph.copy()
    for match in mod.match(candidate).matches:
        mod.rewrite(candidate, match)
    assert saved(candidate, tmp_path) != before
    assert saved(graph, tmp_path) == before


def test_what_was_applied_is_there_and_the_model_stays_valid_and_equal(mod, source, tmp_path):
    before = onnx.load(source.path)
    rows = feeds(before)
    result = apply_mods(source, [rows], tmp_path / "after.onnx", [mod])
    after, record = onnx.load(result.model.path), result.log.records[0]
    # What a mod takes out has its name in the model before.
    names = {part.name for m in (before, after) for part in (*m.graph.node, *m.graph.initializer)}
    assert record.transform == mod.name
    assert record.applied and {applied.at for applied in record.applied} <= names
    assert record.max_abs is not None and record.tolerance is not None
    assert record.max_abs <= record.tolerance
    assert serde.loads(RewriteLog, serde.dumps(result.log)) == result.log
    onnx.checker.check_model(after, full_check=True)
    assert list(after.graph.input) == list(before.graph.input)
    assert list(after.graph.output) == list(before.graph.output)
    # No site is lost or renamed, but for those that a new one says it replaces, and products without a sum.
    replaced = {name for site in result.model.sites for name in site.merged_from}
    assert {site.name for site in source.sites if site.k != 1} <= {
        site.name for site in result.model.sites
    } | replaced
    # FP32 sums in another order: 3e-7 of the largest seen.
    (expected,), (found,) = (evaluate(model, rows).values() for model in (before, after))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * max(1.0, float(np.abs(expected).max())))
    # A second run finds nothing.
    second = apply_mods(result.model, [rows], tmp_path / "twice.onnx", [mod])
    assert second.log.records[0].applied == ()
    assert second.model.digest == result.model.digest


# Precision --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    """The ranker after every mod; plans are applied to copies."""
    folder = tmp_path_factory.mktemp("rewritten")
    return apply_mods(ranker(folder), [batch()], folder / "after.onnx").model


def fp8_plan(model: ModelArtifact, recipe: Recipe, base: Precision) -> PrecisionPlan:
    return quantized_model(model, recipe, base, amax=20.0)


CHANGES = {Precision.FP32: 0.15, Precision.BF16: 0.15, Precision.FP16: 0.15}
"""Logits up to 1.9 with every product in FP8 under ample scales: at most 0.074, 0.060 and 0.069 seen."""


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=lambda r: r.weight)
@pytest.mark.parametrize("base", list(CHANGES))
def test_a_planned_model_is_valid_typed_and_close(base, recipe, rewritten, tmp_path):
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
    change = np.abs(evaluate(proto, batch())["logit"] - evaluate(source, batch())["logit"]).max()
    assert 1e-3 < change < CHANGES[base]
    assert serde.loads(RewriteLog, serde.dumps(planned.log)) == planned.log


@pytest.mark.parametrize("base", list(CHANGES))
def test_applying_a_plan_twice_gives_the_same_bytes(base, rewritten, tmp_path):
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
def test_nvidias_parser_accepts_every_planned_model(base, rewritten, tmp_path):
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    model = rewritten
    plan = fp8_plan(model, PER_CHANNEL_WEIGHT, base)
    planned = apply_plan(model, plan, PlanForm(base), tmp_path / "planned.onnx")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(planned.path)), parser.get_error(0).desc()
