"""What kernel times say of plans, beside what engines took, on a model of the zoo."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

from benchmarks.engines.cases import CASES, export_case
from benchmarks.engines.plans import NAMES, Wanted, engines_of
from benchmarks.engines.prediction import held_against

DEVICE = "nvidia-h100"


@pytest.mark.slow
def test_blanket_fp8_across_fused_kernels_is_not_predicted(tmp_path: Path) -> None:
    case = CASES["rehearsal"]
    made = engines_of(case, export_case(case, tmp_path), tmp_path, Wanted(today=("bf16",)))
    ours = [engine for engine in made if engine.name in NAMES.values()]
    names = {engine.name for engine in ours if engine.plan.fp8_sites}
    assert names >= {NAMES["fp8-all"], NAMES["fp8-outside"]}
    measured = {16: {engine.name: 50.0 for engine in ours}}
    found = held_against(ours, measured, DEVICE)
    assert set(found["not_predicted"]) == {NAMES["fp8-all"]}
    assert "'token-residual-norm'" in found["not_predicted"][NAMES["fp8-all"]]
    assert set(found["batches"]["16"]) == names - {NAMES["fp8-all"]}
    # Nothing but what cannot be predicted: no median, and the reason stands.
    few = [engine for engine in ours if engine.name in (NAMES["fp8-all"], NAMES["bf16"])]
    assert held_against(few, measured, DEVICE) == {
        "batches": {},
        "median_relative_error": None,
        "not_predicted": found["not_predicted"],
    }
    assert held_against(ours, measured, DEVICE, ()) == {}
    assert held_against(few[:1], measured, DEVICE) == {}
