"""Valid models that are unusual go through the pipeline with their outputs, or are refused in words."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from trap_models import TRAPS
from trap_runs import pass_through, rows_of

from loka_onnx.pipeline.run import Stage

LIMIT_SECONDS = 30.0
FAST = ("gru-over-some-rows", "softmax-over-rows")
"""Those of the fast tier: one that goes through, one that does not."""
TO_THE_END = ("fp16", "inputs-", "names-not-ascii", "output-", "sequence-between", "width-")
"""Traps whose ends are unusual go on into a bundle."""
NOT_EVALUATED = {
    "loop-that-scans-and-captures",  # It joins what ONNX stacks.
    "scan-over-fields",  # Other axes than 0 are not implemented.
    "optional",  # Neither is an Optional of a tensor.
    "function-with-an-attribute",  # Nor an attribute that a function hands on.
    "sparse-initializer",  # It reads a field that there is not.
    "opset-12-softmax",  # It has Softmax of opset 13 alone.
    "batchnorm-opset-11",  # It takes the statistics of the batch.
}
"""Traps that onnx 1.23's evaluator does not run, or runs by another rule."""
HALF = 1e-3
"""A float16 has a unit roundoff of 2⁻¹¹."""
EACH_TRAP = tuple(pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TRAPS)


@pytest.mark.parametrize("name", EACH_TRAP)
def test_a_trap_goes_through_or_is_refused(name, tmp_path):
    trap = TRAPS[name]()
    passage = pass_through(trap, tmp_path, Stage.BUNDLE if name.startswith(TO_THE_END) else Stage.BUILD)
    assert passage.seconds < LIMIT_SECONDS
    if trap.refused is None:
        assert passage.refusal is None, passage.refusal
        assert passage.moved <= trap.tolerance
        return
    assert passage.refusal is not None
    assert passage.refusal.evidence
    code, _, named = trap.refused.rpartition(" ")
    assert named in f"{passage.refusal.where} {passage.refusal.what}"
    assert not code or (passage.refusal.code == code and not (tmp_path / "run").exists())


@pytest.mark.slow
def test_the_traps_are_valid():
    """And ONNX Runtime computes what ONNX's own evaluator does, where that follows the standard."""
    assert len(TRAPS) >= 60
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, make in TRAPS.items():
        trap = make()
        # Shape inference of onnx 1.23 does not know sparse initializers.
        onnx.checker.check_model(trap.model, full_check=not trap.model.graph.sparse_initializer)
        if trap.refused == "BF16":
            continue
        session = onnxruntime.InferenceSession(trap.model.SerializeToString(), settings)
        if trap.refused is not None or name in NOT_EVALUATED:
            continue
        feeds = rows_of(trap, 12)
        (computed,), (expected,) = (
            runner.run(["y"], feeds) for runner in (session, ReferenceEvaluator(trap.model))
        )
        bound = max(trap.tolerance, HALF if "half" in name else 0.0) * np.abs(expected).max()
        np.testing.assert_allclose(computed, expected, rtol=0, atol=bound, err_msg=name)
