"""Equal towers become one batched product a layer, and what looks like them is left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from rewrite_models import artifact, evaluate, initializer, named, op_types
from shape_models import Case, Rewrite, assert_same, feeds, match, reasons_of, rewrite, run, weight
from tower_cases import TOWERS, Form

from loka_onnx.core.formats import Float8, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.core.site import SiteKind
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.float8 import fake_quantize
from loka_onnx.numerics.scales import amax_scale, weight_scales
from loka_onnx.transforms.linears.batch_towers import ELEMENTWISE, BatchTowers
from loka_onnx.transforms.linears.merge_parallel_linears import MergeParallelLinears
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import DEFAULT_MODS, apply_mods

PRODUCTS = {"Gemm", "MatMul"}


def products(model: onnx.ModelProto) -> list[str]:
    return [op for op in op_types(model) if op in PRODUCTS]


@pytest.mark.parametrize("case", TOWERS)
def test_every_form_is_batched_and_equal(case: str, tmp_path: Path) -> None:
    done = rewrite(TOWERS[case].model(), BatchTowers(), tmp_path)
    towers = len(named(done.before, "cut").output)
    assert len(products(done.before)) == towers * len(products(done.after))
    assert op_types(done.after).count("Split") == 1
    for function in ELEMENTWISE:
        assert op_types(done.before).count(function) == towers * op_types(done.after).count(function)


def test_the_site_says_where_it_came_from(tmp_path: Path) -> None:
    done = rewrite(TOWERS["three_of_two_layers"].model(), BatchTowers(), tmp_path)
    sites = {site.name: site for site in done.artifact.sites}
    assert list(sites) == ["towers.0.fc0+1.fc0+2.fc0", "towers.0.fc1+1.fc1+2.fc1"]
    first = sites["towers.0.fc0+1.fc0+2.fc0"]
    assert first.merged_from == ("towers.0.fc0", "towers.1.fc0", "towers.2.fc0")
    assert (first.kind, first.k, first.n, first.rows) == (SiteKind.LINEAR, 8, 4, 3)
    assert first.weight is not None and first.weight.shape == (3, 8, 4)
    assert done.record.applied[0].at == "cut"
    assert done.record.applied[0].what == "3 towers of 2 layers → 2 batched"


def test_every_tower_keeps_its_own_weights(tmp_path: Path) -> None:
    done = rewrite(TOWERS["four_of_one_layer"].model(), BatchTowers(), tmp_path)
    site = named(done.after, "towers.0.fc0+1.fc0+2.fc0+3.fc0")
    stored = onnx.numpy_helper.to_array(initializer(done.after, site.input[1]))
    apart = [onnx.numpy_helper.to_array(initializer(done.before, f"w0_{tower}")).T for tower in range(4)]
    np.testing.assert_array_equal(stored, np.stack(apart))
    assert not np.array_equal(apart[0], apart[1])


def test_a_bias_that_only_some_have_is_zero_for_the_others(tmp_path: Path) -> None:
    form = Form(4, (8, 5)).case()
    case = replace(form, body=form.body.replace(", b0_2)", ")"))
    done = rewrite(case.model(), BatchTowers(), tmp_path)
    add = next(node for node in done.after.graph.node if node.op_type == "Add")
    bias = onnx.numpy_helper.to_array(initializer(done.after, add.input[1]))
    assert bias.shape == (4, 1, 5)
    assert (bias[2] == 0).all() and (bias[[0, 1, 3]] != 0).any(axis=(1, 2)).all()


EXPERTS = (
    "[experts__{0}__fc1] h{0} = Gemm(x, u{0}, c{0}) r{0} = Relu(h{0})"
    " [experts__{0}__fc2] y{0} = Gemm(r{0}, v{0})"
)


def test_experts_of_one_tensor_become_two_products(tmp_path: Path) -> None:
    """The first layers read one tensor and are merged; the second ones read its parts."""
    body = " ".join(EXPERTS.format(expert) for expert in range(4))
    constants = {}
    for i in range(4):
        constants |= {
            f"u{i}": weight(8, 6, seed=i),
            f"c{i}": weight(6, seed=i),
            f"v{i}": weight(6, 4, seed=i),
        }
    body += " s0 = Add(y0, y1) s1 = Mul(y2, y3) y = Sub(s0, s1)"
    case = Case(body, constants=constants, outputs="float[batch,4] y")
    source = artifact(case.model(), tmp_path / "before.onnx")
    mods = [MergeParallelLinears(), BatchTowers()]
    result = apply_mods(source, [feeds(case.model())], tmp_path / "after.onnx", mods)
    after = onnx.load(result.model.path)
    assert_same(case.model(), after)
    assert products(after) == ["Gemm", "MatMul"]
    assert [site.merged_from for site in result.model.sites] == [
        tuple(f"experts.{i}.{layer}" for i in range(4)) for layer in ("fc1", "fc2")
    ]


def test_towers_end_where_they_differ(tmp_path: Path) -> None:
    """The last layers have another N each; only what comes before is batched."""
    form = Form(4, (8, 6), tail="{last} y = Concat<axis=1>(z0, z1, z2, z3)", out=10).case()
    last = " ".join(f"[last__{i}] z{i} = MatMul(y{i}, last{i})" for i in range(4))
    constants = {**form.constants, **{f"last{i}": weight(6, i + 1, seed=i) for i in range(4)}}
    case = Case(form.body.replace("{last}", last), {}, constants, form.inputs, form.outputs)
    done = rewrite(case.model(), BatchTowers(), tmp_path)
    assert products(done.after) == ["MatMul"] * 5
    assert [site.name for site in done.artifact.sites][1:] == [f"last.{i}" for i in range(4)]


def test_towers_end_before_heads(tmp_path: Path) -> None:
    outputs = ", ".join(f"float[batch,1] head{i}" for i in range(4))
    heads = " ".join(f"[head__{i}] head{i} = MatMul(y{i}, v{i})" for i in range(4))
    form = Form(4, (8, 6), tail=heads).case()
    constants = {**form.constants, **{f"v{i}": weight(6, 1, seed=i) for i in range(4)}}
    case = Case(form.body, {}, constants, form.inputs, outputs)
    done = rewrite(case.model(), BatchTowers(), tmp_path)
    assert [site.name for site in done.artifact.sites][1:] == [f"head.{i}" for i in range(4)]


def test_a_second_layer_of_another_form_ends_the_towers(tmp_path: Path) -> None:
    form = Form(4, (8, 8, 8)).case()
    case = replace(form, body=form.body.replace("Gemm<transB=1>(a0_1", "Gemm<transB=1,alpha=0.5>(a0_1"))
    done = rewrite(case.model(), BatchTowers(), tmp_path)
    assert products(done.after) == ["MatMul", *["Gemm"] * 4]


def changed(form: Form, old: str = "", new: str = "", **constants: np.ndarray) -> Case:
    case = form.case()
    assert old in case.body
    return Case(case.body.replace(old, new), {}, {**case.constants, **constants}, case.inputs, case.outputs)


FOUR = Form(4, (8, 5))
PLAIN = Form(4, (8, 5), "{h} = MatMul({x}, {w})", "")
LEFT_ALONE: dict[str, tuple[Case, list[str]]] = {
    "three_of_one_layer": (
        Form(3, (8, 5)).case(),
        ["3 towers of 1 layer: 3 products would become 1 and 2 copies"],
    ),
    "two_of_two_layers": (
        Form(2, (8, 5, 5)).case(),
        ["2 towers of 2 layers: 4 products would become 2 and 2 copies"],
    ),
    "wide": (
        Form(4, (8, 1025)).case(),
        ["'towers.0.fc0' of 8 × 1025 fills a device by itself: layers up to 1024 are batched"],
    ),
    "layers_of_other_widths": (
        replace(
            changed(FOUR, w0_1=weight(6, 8), b0_1=weight(6)),
            outputs="float[batch,21] y",
        ),
        ["its towers begin with layers of K × N = 8 × 5, 8 × 6"],
    ),
    "parts_of_other_widths": (
        changed(FOUR, sizes=np.array([8, 8, 7, 9]), w0_2=weight(5, 7), w0_3=weight(5, 9)),
        ["its towers begin with layers of K × N = 7 × 5, 8 × 5, 9 × 5"],
    ),
    "one_part_without_a_layer": (
        replace(
            changed(FOUR, "[towers__3__fc0] h0_3 = Gemm<transB=1>(p3, w0_3, b0_3)", "h0_3 = Softmax(p3)"),
            outputs="float[batch,23] y",
        ),
        ["3 of its 4 parts lead to a linear layer of their own"],
    ),
    "a_part_that_others_read_too": (
        changed(
            FOUR, "y3 = Relu(h0_3)", "more = ReduceMean(p3, axes) y3 = Mul(h0_3, more)", axes=np.array([1])
        ),
        ["3 of its 4 parts lead to a linear layer of their own"],
    ),
    "weights_of_another_range": (
        changed(FOUR, w0_0=np.full((5, 8), 0.001), w0_2=np.full((5, 8), 1.5)),
        [
            "the weights of 'towers.0.fc0' reach 0.001, those of 'towers.2.fc0' 1.5: one scale for both "
            "would cost precision"
        ],
    ),
    "factors": (
        changed(FOUR, "Gemm<transB=1>(p1", "Gemm<transB=1,alpha=0.5>(p1"),
        ["a Gemm with factors alpha or beta, which would round the weight"],
    ),
    "heads": (
        replace(
            changed(PLAIN, "y = Concat<axis=1>(y0, y1, y2, y3)", ""),
            outputs=", ".join(f"float[batch,5] y{i}" for i in range(4)),
        ),
        ["a result of its towers leaves the graph: a head keeps a product of its own"],
    ),
    "tokens": (
        replace(
            changed(PLAIN, "Concat<axis=1>", "Concat<axis=2>"),
            inputs="float[batch,3,32] x",
            outputs="float[batch,3,20] y",
        ),
        ["it splits a tensor of rank 3, not (batch, towers · K) along its last axis"],
    ),
    # No towers at all: nothing is told of them.
    "functions_that_differ": (
        Case(
            "[cut] a, b = Split<axis=1>(x, sizes) c = Relu(a) d = Tanh(b) [fc] e = MatMul(c, w) f = Add(e, d)"
            " y = Concat<axis=1>(f, a)",
            constants={"sizes": np.array([4, 4]), "w": weight(4, 4)},
        ),
        [],
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_near_misses_are_left_alone_with_the_reason(case: str, tmp_path: Path) -> None:
    near_miss, reasons = LEFT_ALONE[case]
    found = match(near_miss.model(), BatchTowers(), tmp_path)
    assert found.matches == ()
    assert list(reasons_of(found).values()) == reasons
    assert set(reasons_of(found)) <= {"cut"}


def test_another_range_or_width_may_be_allowed(tmp_path: Path) -> None:
    wide, _ = LEFT_ALONE["wide"]
    uneven, _ = LEFT_ALONE["weights_of_another_range"]
    for case, mod in ((wide, BatchTowers(widest=1025)), (uneven, BatchTowers(spread=1500.0))):
        assert len(match(case.model(), mod, tmp_path).matches) == 1


def test_it_is_not_a_default() -> None:
    """Its gain is not measured: the docstring says so, and it is for those who ask for it."""
    assert BatchTowers not in DEFAULT_MODS


# FP8 --------------------------------------------------------------------------------------------------


def planned(done: Rewrite, recipe: Recipe, folder: Path) -> tuple[Path, Decision]:
    """The batched model with its one site in FP8."""
    (site,) = done.artifact.sites
    assert site.weight is not None
    stored = values_of(GraphModel.load(done.artifact.path).node(site.name).inputs[site.weight.index])
    scales = weight_scales(stored, recipe.weight.granularity, channel_axis(site.weight), Float8.E4M3FN)
    weights = tuple(float(value) for value in scales.reshape(-1))
    activation = amax_scale(4.0, Float8.E4M3FN)
    decision = Decision(site.name, Precision.FP8, recipe, Verdict.SAFE, "", activation, weights)
    plan = PrecisionPlan("test", done.artifact.digest, Precision.FP32, (decision,), {}, 1.0)
    path = folder / "planned.onnx"
    apply_plan(done.artifact, plan, PlanForm(Precision.FP32), path)
    return path, decision


@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=lambda r: r.weight.granularity)
def test_a_batched_site_runs_in_fp8_with_scales_of_either_kind(recipe: Recipe, tmp_path: Path) -> None:
    """Against products of the towers apart, quantized by ml_dtypes: one scale, or one for each column."""
    done = rewrite(TOWERS["without_bias"].model(), BatchTowers(), tmp_path)
    path, decision = planned(done, recipe, tmp_path)
    rows = feeds(done.before)
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in done.before.graph.initializer}
    weights = np.stack([constants[f"w0_{tower}"] for tower in range(4)])
    per_channel = recipe is PER_CHANNEL_WEIGHT
    assert len(decision.weight_scale) == (4 if per_channel else 1)
    amax = np.abs(weights).max(axis=(0, 1)) if per_channel else np.abs(weights).max()
    scale = np.asarray(decision.weight_scale)
    np.testing.assert_array_less(amax, scale * 448 * (1 + 1e-6))
    narrow = fake_quantize(
        weights, scale if per_channel else scale[0], Float8.E4M3FN, 2 if per_channel else None
    )
    x = fake_quantize(rows["x"], decision.activation_scale or 0.0, Float8.E4M3FN).astype(np.float64)
    towers = [x[:, 8 * i : 8 * i + 8] @ narrow[i].astype(np.float64) for i in range(4)]
    expected = np.concatenate(towers, axis=1)
    # FP32 sums of 8 products.
    np.testing.assert_allclose(run(onnx.load(path), rows)["y"], expected, rtol=0, atol=1e-5)
    exact = evaluate(done.before, rows)["y"]
    assert np.abs(expected - exact).max() > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [PER_TENSOR, PER_CHANNEL_WEIGHT], ids=lambda r: r.weight.granularity)
def test_tensorrt_rtx_multiplies_batched_weights_in_fp8(recipe: Recipe, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt_rtx")
    from loka_onnx.engines.request import BatchRange
    from loka_onnx.engines.tensorrt.build import BuildSettings, build_engine
    from loka_onnx.engines.tensorrt.compiled_graph import read_compiled_graphs
    from loka_onnx.engines.tensorrt.site_precision import site_precisions

    done = rewrite(Form(4, (64, 32)).case().model(), BatchTowers(), tmp_path)
    path, _ = planned(done, recipe, tmp_path)
    engine = tmp_path / "engine.trt"
    build_engine(trt, path, BuildSettings("sm89", BatchRange(1, 8, 16)), engine)
    wanted = [(site, Precision.FP8) for site in done.artifact.sites]
    (site,) = site_precisions(read_compiled_graphs(engine), wanted)
    assert site.engaged, site.evidence
    assert site.operands == ("fp8_e4m3", "fp8_e4m3")
