"""ONNX Runtime's FP8 graphs against the ONNX reference evaluator: whole models, single sites, the known trap.

Two correct evaluators may differ: an activation that lies on the tie between two FP8 numbers falls to either
side with its last bit, and the rest of its row follows. Every row that differs is traced to such a tie.
"""

import functools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "calibration"))

from zoo_runs import BATCH, EACH_MODEL, OUTPUTS, ROWS, zoo_run

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.planning.policy import PlanOptions, make_plans
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

pytest.importorskip("torch", reason="needs torch")
ort = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow

RECIPES = (PER_TENSOR, PER_CHANNEL_WEIGHT)
AGREEMENT = 1e-5
"""Seen: 6e-8 to 6e-6 on rows without a flipped tie, at outputs of order 0.1."""
DEVIATING_ROWS = 0.005
"""Largest accepted share of rows with a flipped tie. Seen: 4 of 1500 (DLRM)."""
TIE_ULPS = 24
"""How far from the tie, in FP32 ulps of its tensor's largest magnitude, a flipped input may lie: what two
orders of summation leave of sums of some 20 terms that may be larger than their sum. Seen: 13."""

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Quantizer:
    """One activation's Q/DQ in a planned graph."""

    source: str
    result: str
    scale: float


@dataclass(frozen=True)
class Planned:
    """A model with every linear site in FP8, and its rows."""

    model: onnx.ModelProto
    path: Path
    plan: PrecisionPlan
    inputs: Arrays

    def quantizers(self) -> list[Quantizer]:
        """In topological order."""
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in self.model.graph.initializer}
        results = {n.input[0]: n.output[0] for n in self.model.graph.node if n.op_type == "DequantizeLinear"}
        return [
            Quantizer(n.input[0], results[n.output[0]], float(constants[n.input[1]]))
            for n in self.model.graph.node
            if n.op_type == "QuantizeLinear"
        ]


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loka-tests-") as folder:
        yield Path(folder)
    planned.cache_clear()


@functools.cache
def planned(name: str, recipe: Recipe, scratch: Path) -> Planned:
    run = zoo_run(name)
    options = ProbeOptions(batch_size=BATCH, threads=1, weight=recipe.weight, draws=1)
    profile = calibrate(run.artifact, OUTPUTS, run.data, scratch, options)
    chosen = PlanOptions(base=Precision.FP32, plans=("fp8-all",))
    plan = make_plans(run.artifact, profile, OUTPUTS, RECIPES, chosen).plan("fp8-all")
    assert plan.fp8_sites == tuple(site.name for site in run.artifact.linear_sites)
    path = scratch / f"{name}-{recipe.weight}.onnx"
    apply_plan(run.artifact, plan, PlanForm(Precision.FP32), path)
    return Planned(onnx.load(path), path, plan, run.inputs())


def exposing(model: onnx.ModelProto, tensors: list[str]) -> onnx.ModelProto:
    """The model with inner tensors among its outputs."""
    wider = onnx.ModelProto()
    wider.CopyFrom(model)
    for name in tensors:
        wider.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return wider


@pytest.mark.parametrize(
    "recipe",
    [PER_TENSOR, PER_CHANNEL_WEIGHT],
    ids=lambda recipe: str(recipe.weight),
)
@pytest.mark.parametrize("name", EACH_MODEL)
def test_whole_models_agree_but_for_flipped_ties(name, recipe, scratch):
    case = planned(name, recipe, scratch)
    got = OnnxSession(case.path, SessionOptions(threads=1)).run(case.inputs)["logit"]
    (want,) = ReferenceEvaluator(case.model).run(["logit"], case.inputs)
    assert got.shape == want.shape == (ROWS,)
    exact = OnnxSession(zoo_run(name).artifact.path, SessionOptions(threads=1)).run(case.inputs)["logit"]
    # FP8 itself moves the outputs hundreds of times as far as the agreement that is asked for.
    assert np.abs(want - exact).max() > 100 * AGREEMENT
    deviating = np.flatnonzero(~(np.abs(got - want) <= AGREEMENT))
    assert len(deviating) <= DEVIATING_ROWS * ROWS
    if not len(deviating):
        return
    quantizers = case.quantizers()
    names = list(dict.fromkeys(t for q in quantizers for t in (q.source, q.result)))
    wider = exposing(case.model, names)
    path = scratch / "wider.onnx"
    onnx.save(wider, path)
    ours = OnnxSession(path, SessionOptions(threads=1)).run(case.inputs)
    np.testing.assert_array_equal(ours["logit"], got)
    reference = dict(zip(names, ReferenceEvaluator(wider).run(names, case.inputs), strict=True))
    for row in deviating:
        assert_first_flip_is_a_tie(quantizers, ours, reference, row)


def assert_first_flip_is_a_tie(
    quantizers: list[Quantizer], ours: Arrays, reference: Arrays, row: int
) -> None:
    """In the first Q/DQ whose codes differ, every input that fell differently lies on a tie."""
    for q in quantizers:
        mine, theirs = ours[q.result][row], reference[q.result][row]
        flipped = mine != theirs
        if not flipped.any():
            continue
        middle = (mine[flipped].astype(np.float64) + theirs[flipped]) / 2 / q.scale
        ulp = float(np.spacing(np.abs(reference[q.source]).max())) / q.scale
        for values in (ours[q.source][row], reference[q.source][row]):
            distance = np.abs(values[flipped].astype(np.float64) / q.scale - middle) / ulp
            assert distance.max() <= TIE_ULPS, (
                f"row {row} of '{q.source}' is {distance.max():.1f} ulps from the tie"
            )
        return
    raise AssertionError(f"row {row} deviates, and no activation was quantized differently")


@pytest.mark.parametrize("name", ["wukong", "dcnv2"])
def test_full_optimization_is_a_trap_for_fp8_graphs(name, scratch):
    """Why `OnnxSession` loads FP8 graphs at BASIC only, whatever it is asked."""
    case = planned(name, PER_TENSOR, scratch)
    (want,) = ReferenceEvaluator(case.model).run(["logit"], case.inputs)
    outcomes = [full_optimization(case, quantization_fusions=fusions) for fusions in (True, False)]
    errors = [None if got is None else float(np.abs(got - want).max()) for got in outcomes]
    # None: refused to load. FP8 itself moves these outputs by 0.04.
    if all(error is not None and error < 2e-3 for error in errors):
        pytest.fail(
            f"ONNX Runtime {ort.__version__} now runs the FP8 graph of '{name}' correctly at ORT_ENABLE_ALL "
            f"(largest differences {errors}): the cap in sessions/onnx_session.py can be lifted from this "
            "version on, and this test with it"
        )
    got = OnnxSession(case.path, SessionOptions(threads=1, optimize=True)).run(case.inputs)["logit"]
    assert (np.abs(got - want) > AGREEMENT).mean() <= DEVIATING_ROWS


def full_optimization(case: Planned, *, quantization_fusions: bool) -> Any:
    """Output at ORT_ENABLE_ALL; None where ONNX Runtime refuses the model."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    if not quantization_fusions:
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        session = ort.InferenceSession(str(case.path), settings, providers=["CPUExecutionProvider"])
    except Exception:
        # its exceptions share no base.
        return None
    return session.run(["logit"], case.inputs)[0]
