"""A run in INT8 on the CPU: from rows to a loaded bundle."""

from __future__ import annotations

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import ROWS, Workplace, make_columns, make_workplace, write_rows

from loka_onnx.core.formats import Precision
from loka_onnx.pipeline.run import RunResult, run
from loka_onnx.runtime import Cause, load, selection
from loka_onnx.sessions.host_devices import integer_instructions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not integer_instructions(), reason="needs VNNI, AMX or ARM's dot product"),
]


def columns_of(count: int = ROWS, seed: int = 1) -> dict[str, np.ndarray]:
    """Rows in which one input is constant, and one is 0."""
    columns = make_columns(count, seed)
    return columns | {"d3": columns["d3"] * 0, "d4": columns["d4"] * 0 + 7}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, RunResult]:
    """Wide enough for INT8 to be twice as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic_runs, "HIDDEN", 512)
        of_narrow = synthetic_runs.weights()
        weights = {name: w / 4 if name in {"fc2.w", "heads.w"} else w for name, w in of_narrow.items()}
        patch.setattr(synthetic_runs, "weights", lambda: weights)
        place = make_workplace(tmp_path_factory.mktemp("integers") / "place")
        write_rows(place.path / "rows.parquet", columns_of())
    place.write_run_file(
        plan={"plans": ["fp32", "int8-all", "int8-safe"], "formats": ["int8"]},
        calibration={"rows": 1000, "draws": 1},
    )
    return place, run(place.run_file)


def test_a_faster_engine_inside_the_budget_is_emitted(finished):
    _, result = finished
    (chosen,) = result.choice.targets
    assert chosen.plan in {"int8-all", "int8-safe"}
    assert chosen.basis == "measured on the target"
    plan = result.report.plans.plan("int8-safe")
    assert plan.quantized is Precision.INT8
    assert plan.fp8_share == 1.0
    assert plan.decision("fc2").recipe.id == "uint8/per_tensor/per_channel/mse"
    assert "INT8 kernels want both to be at least 16" in plan.decision("heads").reason
    engine = next(e for e in result.report.engines if e.id == chosen.engine)
    assert not engine.simulated
    assert all(site.evidence.startswith("not INT8, which is slower") for site in engine.fallbacks)
    of_fc2 = next(site for site in engine.sites if site.site == "fc2")
    assert of_fc2.operands == ("uint8", "int8")
    text = (result.directory / "report.md").read_text(encoding="utf-8")
    assert "Sites in INT8" in text and "Sites in FP8" not in text


def test_a_fleet_host_loads_it_where_it_has_the_instructions(finished, monkeypatch):
    _, result = finished
    rows = columns_of(64, seed=5)
    inputs = {"dense": np.stack([rows[f"d{i}"] for i in range(16)], axis=1), "item": rows["item_id"]}
    engine = load(result.bundle)
    assert engine.skipped == ()
    answers = engine.infer(inputs)
    monkeypatch.setattr(selection, "integer_instructions", tuple)
    fallback = load(result.bundle)
    (skipped,) = fallback.skipped
    assert skipped.cause is Cause.DEVICE
    assert integer_instructions()[0] in skipped.reason
    exact = fallback.infer(inputs)
    assert 0 < np.abs(answers["ctr"] - exact["ctr"]).max() < 0.2
