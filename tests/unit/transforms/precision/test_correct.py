"""Constants written into a planned graph: where they go, what they add, and that nothing is left of them."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from qdq_models import K, N, quantizing_plan, weight
from rewrite_models import Arrays, artifact, evaluate, named, op_types, parse, random_rows

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import BiasCorrection, Corrections, OutputConstant
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Wide
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.rewrite import RewriteRecord
from loka_onnx.errors import InternalError
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.precision.correct import correct

LOGIT, PROBABILITY, REGRESSION = OutputKind.LOGIT, OutputKind.PROBABILITY, OutputKind.REGRESSION
STEPS = np.linspace(-0.5, 0.75, N)
"""A correction of every channel; its float32 sums with a bias are not exact."""


def bias(values: Any, site: str = "fc") -> BiasCorrection:
    array = np.asarray(values, np.float64)
    return BiasCorrection(site, array.shape, tuple(array.reshape(-1).tolist()), 0.1, 0.01)


@dataclass(frozen=True)
class Case:
    """A graph, what is added to it, how many nodes that takes, what is said of it, and how outputs move."""

    body: str
    corrections: Corrections
    nodes: int
    what: str
    moved: dict[str, Any]
    shape: tuple[int, ...] = (K,)


def on_site(body: str, nodes: int, what: str, values: Any = STEPS[None], **other: Any) -> Case:
    return Case(body, Corrections((bias(values),)), nodes, what, {"y": np.asarray(values)}, **other)


def on_output(body: str, nodes: int, what: str, kind: OutputKind = LOGIT, **moved: float) -> Case:
    corrections = Corrections((), (OutputConstant("y", kind, 0.625),))
    return Case(body, corrections, nodes, what, moved or {"y": 0.625})


HEAD = "h = MatMul(x, w1) "
CASES = {
    "gemm": on_site("[fc] y = Gemm(x, w, b)", 0, "in the constant of Gemm 'fc'"),
    "gemm_beta": on_site("[fc] y = Gemm<beta=0.25>(x, w, b)", 0, "in the constant of Gemm 'fc'"),
    "gemm_one_bias": on_site("[fc] y = Gemm(x, w, one)", 0, "in the constant of Gemm 'fc'"),
    "gemm_without": on_site("[fc] y = Gemm<transB=1>(x, wt)", 0, "as the constant of Gemm 'fc'"),
    "gemm_beta_0": on_site("[fc] y = Gemm<beta=0.0>(x, w, b)", 1, "in an Add of their own"),
    "gemm_computed": on_site("c = Abs(b) [fc] y = Gemm(x, w, c)", 1, "in an Add of their own"),
    "matmul": on_site("[fc] y = MatMul(x, w)", 1, "in an Add of their own"),
    "matmul_read_twice": on_site("[fc] p = MatMul(x, w) q = Add(p, b) y = Sub(q, zero) r = Identity(p)", 1,
        "in an Add of their own"),
    "matmul_add": on_site("[fc] p = MatMul(x, w) y = Add(p, b)", 0, "in the constant of Add"),
    "add_from_the_left": on_site("[fc] p = MatMul(x, w) y = Add(b, p)", 0, "in the constant of Add"),
    "add_of_an_activation": on_site("s = MatMul(x, w1) [fc] p = MatMul(x, w) y = Add(p, s)", 1,
        "in an Add of their own"),
    "shared_bias": Case("[fc] y = Gemm(x, w, b) other = Gemm(x, w, b)", Corrections((bias(STEPS[None]),)), 0,
        "in the constant of Gemm 'fc'", {"y": STEPS, "other": 0.0}),
    "on_the_left": on_site("[fc] y = MatMul(wt, x)", 1, "in an Add of their own", STEPS[:, None],
        shape=(K, 3)),
    "on_the_left_of_a_narrow_bias": on_site("[fc] p = MatMul(wt, x) y = Add(p, three)", 1,
        "in an Add of their own", STEPS[:, None], shape=(K, 3)),
    "experts": on_site("e = Transpose<perm=[1,0,2]>(x) [fc] p = MatMul(e, we) y = Transpose<perm=[1,0,2]>(p)",
        1, "in an Add of their own", np.stack([STEPS, 2 * STEPS])[:, None], shape=(2, K)),
    "last_gemm": on_output("[head] y = Gemm(x, w1, one)", 0, "in the constant of Gemm 'head'"),
    "last_gemm_squeezed": on_output("[head] h = Gemm(x, w1, one) y = Squeeze(h, last)", 0,
        "in the constant of Gemm 'head'"),
    "last_add": on_output(HEAD + "h2 = Add(one, h) y = Flatten(h2)", 0, "in the constant of Add"),
    "no_bias": on_output(HEAD + "y = Flatten(h)", 1, "the constant +0.625 on its logit in an Add of its own"),
    "regression": on_output(HEAD + "y = Flatten(h)", 1, "+0.625 on its value", REGRESSION),
    "logit_read_in_the_graph": on_output("[head] y = Gemm(x, w1, one) p = Sigmoid(y)", 1,
        "in an Add of its own", y=0.625, p=0.0),
    "sigmoid": on_output("[head] z = Gemm(x, w1, one) y = Sigmoid(z)", 0, "on its logit in the constant of",
        PROBABILITY),
    "sigmoid_squeezed": on_output(HEAD + "s = Sigmoid(h) y = Squeeze(s, last)", 1, "in an Add of its own",
        PROBABILITY),
    "sigmoid_of_a_logit_read_twice": on_output("[head] z = Gemm(x, w1, one) y = Sigmoid(z) other = Tanh(z)",
        1, "in an Add of its own", PROBABILITY, y=0.625, other=0.0),
    "site_and_output": Case("[fc] y = Gemm(x, w1, one)",
        Corrections((bias([[0.5]]),), (OutputConstant("y", LOGIT, 0.25),)), 0, "in the constant of Gemm 'fc'",
        {"y": 0.75}),
}  # fmt: skip


def model_of(case: Case) -> onnx.ModelProto:
    constants = {
        "w": weight(K, N), "wt": weight(N, K), "we": weight(2, K, N), "w1": weight(K, 1),
        "b": np.linspace(-1, 1.1, N), "one": np.array([0.3]), "zero": np.zeros(1),
        "three": np.array([0.1, 0.2, 0.3]), "last": np.array([-1]),
    }  # fmt: skip
    shape = ",".join(map(str, case.shape))
    names = [name for name in ("y", "p", "other", "r") if f" {name} = " in f" {case.body}"]
    outputs = ", ".join(name for name in names if name in case.moved or name == "r")
    return parse(case.body, constants, inputs=f"float[batch,{shape}] x", outputs=outputs)


def as_scores(case: Case, outputs: Arrays) -> Arrays:
    """Outputs in the unit of what is added."""
    is_probability = any(c.kind is PROBABILITY for c in case.corrections.constants)
    p = outputs["y"].astype(np.float64)
    return {**outputs, "y": np.log(p / (1 - p))} if is_probability else outputs


@pytest.mark.parametrize("name", CASES)
def test_outputs_move_by_what_is_added(name, tmp_path):
    case = CASES[name]
    before = model_of(case)
    graph = GraphModel.load(artifact(before, tmp_path / "before.onnx").path)
    done = correct(graph, case.corrections)
    graph.save(tmp_path / "after.onnx")
    after = onnx.load(tmp_path / "after.onnx")
    onnx.checker.check_model(after, full_check=True)
    x = {"x": random_rows(5, *case.shape) / 4}
    was, now = as_scores(case, evaluate(before, x)), as_scores(case, evaluate(after, x))
    for output, moved in case.moved.items():
        # Sums of 24 terms in FP32, and a logit that comes back from a probability.
        wanted = (
            np.broadcast_to(np.asarray(moved), was[output].shape)
            if np.ndim(moved) < 3
            else (np.swapaxes(np.broadcast_to(moved, (2, 5, N)), 0, 1))
        )
        np.testing.assert_allclose(now[output] - was[output], wanted, rtol=0, atol=2e-6)
    assert len(after.graph.node) - len(before.graph.node) == case.nodes
    assert case.what in done.record.applied[0].what
    assert done.record.applied[0].at == ("fc" if case.corrections.bias else "y")
    assert [tensor.name for tensor in after.graph.output] == [tensor.name for tensor in before.graph.output]
    OnnxSession(tmp_path / "after.onnx").run(x)


@pytest.mark.parametrize("base", [Precision.FP32, Precision.BF16])
def test_a_plan_is_written_with_its_corrections(base, tmp_path):
    body = "[fc] h = Gemm(x, w, b) r = Relu(h) [head] s = MatMul(r, w2) y = Squeeze(s, last)"
    constants = {"w": weight(K, N), "b": np.linspace(-1, 1.1, N), "w2": weight(N, 1), "last": np.array([-1])}
    source = artifact(
        parse(body, constants, inputs=f"float[batch,{K}] x", outputs="float[batch] y"), tmp_path / "m.onnx"
    )
    rows = {"x": random_rows(64, K), "r": np.abs(random_rows(64, N)) * 4}
    plan = quantizing_plan(source, rows, PER_TENSOR, base=base)
    corrections = Corrections((bias(STEPS[None]),), (OutputConstant("y", LOGIT, 0.0123),))
    plain = apply_plan(source, plan, PlanForm(base), tmp_path / "plain.onnx")
    done = apply_plan(source, plan, PlanForm(base, corrections=corrections), tmp_path / "corrected.onnx")
    order = [record.transform for record in done.log.records]
    assert order.index("insert-qdq") < order.index("correct")
    assert "correct" not in [record.transform for record in plain.log.records]
    assert done.digest != plain.digest
    model = onnx.load(done.path)
    onnx.checker.check_model(model, full_check=True)
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    folded = onnx.numpy_helper.to_array(held[named(model, "fc").input[2]]).astype(np.float64)
    exact = constants["b"].astype(np.float32) + STEPS
    np.testing.assert_allclose(folded, exact, rtol=2**-8 if base is Precision.BF16 else 2**-24, atol=0)
    # What an output is moved by is not rounded to the base.
    added = onnx.numpy_helper.to_array(held[named(model, "y/correct").input[1]])
    assert added.dtype == np.float32
    assert added == np.float32(0.0123)
    # FP8 is where it was, and nothing is in its way.
    assert op_types(model).count("QuantizeLinear") == 2
    assert all(named(model, site).input[0].endswith("dq.out") for site in ("fc", "head"))
    if base is Precision.FP32:
        empty = apply_plan(source, plan, PlanForm(base, corrections=Corrections()), tmp_path / "empty.onnx")
        assert empty.digest == plain.digest
        moved = [OnnxSession(p.path).run({"x": rows["x"]})["y"] for p in (plain, done)]
        assert np.abs(moved[1] - moved[0]).max() > 0.1


@dataclass(frozen=True)
class Typed:
    """A small model in a base precision, without corrections and with them."""

    plain: onnx.ModelProto
    corrected: onnx.ModelProto
    record: RewriteRecord

    def moved(self, *, is_probability: bool = False) -> np.ndarray[Any, Any]:
        rows = {"x": random_rows(64, K)}
        was, now = (
            evaluate(m, rows)["y"].astype(np.float64).reshape(-1) for m in (self.plain, self.corrected)
        )
        if is_probability:
            was, now = (np.log(p / (1 - p)) for p in (was, now))
        return np.asarray(now - was)


def typed(body, base, corrections, folder, *, b=(-2.3,), wide=(), fp32=()):  # fmt: skip
    n = len(b)
    constants = {"w": weight(K, n) / 8, "b": np.array(b), "last": np.array([-1])}
    outputs = "float[batch] y" if "y = Squeeze" in body else f"float[batch,{n}] y"
    model = parse(body, constants, inputs=f"float[batch,{K}] x", outputs=outputs)
    source = artifact(model, folder / "m.onnx")
    plan = quantizing_plan(source, {}, PER_TENSOR, base=base, fp8=(), fp32=fp32)
    plan = replace(plan, wide=tuple(Wide(node, "test") for node in wide))
    # Sigmoids that are protected would not show what the correction itself keeps.
    plain_plan = plan
    if "Sigmoid" in body:
        behind = re.findall(r"(\w+) = (?:Sigmoid|Squeeze)\(", body)
        plain_plan = replace(plan, wide=tuple(Wide(f"block/{name}", "test") for name in behind))
    plain = apply_plan(source, plain_plan, PlanForm(base), folder / "plain.onnx")
    done = apply_plan(source, plan, PlanForm(base, corrections=corrections), folder / "corrected.onnx")
    proto = onnx.load(done.path)
    onnx.checker.check_model(proto, full_check=True)
    record = next(record for record in done.log.records if record.transform == "correct")
    return Typed(onnx.load(plain.path), proto, record)


HEADS = {
    "gemm": "[fc] y = Gemm(x, w, b)",
    "squeezed": "[fc] h = Gemm(x, w, b) y = Squeeze(h, last)",
    "add": "[fc] h = MatMul(x, w) [add] y = Add(h, b)",
    "probability": "[fc] z = Gemm(x, w, b) s = Sigmoid(z) y = Squeeze(s, last)",
}

NARROW = [
    (head, base, value, (), (), False)
    for head in HEADS
    for value in (0.002, 0.004, 0.01)
    for base in (Precision.BF16, Precision.FP16)
]
FOLDING = [
    ("gemm", Precision.BF16, 0.002, (), ("fc",), True),
    ("add", Precision.BF16, 0.002, ("add",), (), True),
    ("add", Precision.BF16, 0.002, (), ("fc",), False),
    ("squeezed", Precision.BF16, 0.002, ("block/y",), ("fc",), True),
    # The Squeeze would round what the Gemm in FP32 adds.
    ("squeezed", Precision.BF16, 0.002, (), ("fc",), False),
    ("probability", Precision.BF16, 0.002, (), ("fc",), True),
]


@pytest.mark.parametrize("case", NARROW + FOLDING)
def test_outputs_move_by_their_constant_which_goes_into_a_bias_that_stays_in_fp32(case, tmp_path):
    head, base, value, wide, fp32, folds = case
    kind = PROBABILITY if head == "probability" else LOGIT
    constant = Corrections((), (OutputConstant("y", kind, value),))
    done = typed(HEADS[head], base, constant, tmp_path, wide=wide, fp32=fp32)
    assert ("in the constant of" if folds else "in an Add of its own") in done.record.applied[0].what
    assert op_types(done.corrected).count("Add") == (head == "add") + (not folds)
    # One sum in FP32 of numbers below 8; a probability comes back to its logit with 2⁻²⁴ / (p (1 − p)).
    atol = 2e-6 if kind is PROBABILITY else 2**-20
    np.testing.assert_allclose(done.moved(is_probability=kind is PROBABILITY), value, rtol=0, atol=atol)


def test_a_site_bias_that_rounding_takes_is_left_out_by_the_sum_over_channels(tmp_path):
    # −2.3 + .002 is −2.296875 in BF16, as −2.3 is: all is lost. At 1.25 BF16 numbers are 2⁻⁷ apart, and
    # 3 · 2⁻⁹ becomes 2⁻⁷: an error of a third, 1/9 of the energy.
    lost = typed(HEADS["gemm"], Precision.BF16, Corrections((bias([[0.002]]),)), tmp_path / "lost")
    assert lost.record.applied == ()
    (declined,) = lost.record.declined
    assert declined.at == "fc"
    assert declined.reason == (
        "1 constants, up to 0.002, are lost in the constant of Gemm 'fc': "
        "rounding to bf16 takes 100% of their energy, more than 25%"
    )
    assert not lost.moved().any()
    kept = typed(
        HEADS["gemm"], Precision.BF16, Corrections((bias([[3 * 2**-9]]),)), tmp_path / "kept", b=(1.25,)
    )
    assert kept.record.declined == ()
    assert "in the constant of Gemm 'fc'" in kept.record.applied[0].what
    stored = [
        onnx.numpy_helper.to_array(next(t for t in m.graph.initializer if t.name == named(m, "fc").input[2]))
        for m in (kept.plain, kept.corrected)
    ]
    assert float(stored[1][0]) - float(stored[0][0]) == 2**-7
    # The same correction in a site that stays in FP32, or in a base of FP32, is not rounded.
    for name, base, fp32 in (("wide", Precision.BF16, ("fc",)), ("fp32", Precision.FP32, ())):
        done = typed(HEADS["gemm"], base, Corrections((bias([[0.002]]),)), tmp_path / name, fp32=fp32)
        assert done.record.declined == ()
        np.testing.assert_allclose(done.moved(), 0.002, rtol=0, atol=2**-20)
    # All of .002 is lost on −2.3, and almost nothing of .25 on 1: .002² of .25² + .002².
    both = Corrections((bias([[0.002, 0.25]]),))
    done = typed(HEADS["gemm"], Precision.BF16, both, tmp_path / "both", b=(-2.3, 1.0))
    assert done.record.declined == ()
    # Beyond the largest FP16 number nothing can be stored.
    beyond = Corrections((bias([[1e3]]),))
    done = typed(HEADS["gemm"], Precision.FP16, beyond, tmp_path / "beyond", b=(65000.0,))
    assert done.record.declined[0].reason == (
        "1 constants, up to 1e+03, do not fit fp16 in the constant of Gemm 'fc'"
    )


def test_corrections_of_another_model_are_refused(tmp_path):
    case = CASES["sigmoid"]
    model = model_of(replace(case, body=case.body.replace("Sigmoid", "Tanh")))
    graph = GraphModel.load(artifact(model, tmp_path / "m.onnx").path)
    with pytest.raises(InternalError) as caught:
        correct(graph, case.corrections)
    assert caught.value.what == "output 'y' has a constant, and no logit to add it to"
    with pytest.raises(InternalError, match="the graph has no node named 'fc7'"):
        correct(graph, Corrections((bias(STEPS[None], "fc7"),)))
