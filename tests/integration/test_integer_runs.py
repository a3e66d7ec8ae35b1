"""A run in INT8 on the CPU: from rows to a loaded bundle."""

import numpy as np
import pytest
import synthetic_runs
from synthetic_runs import ROWS, Workplace, make_columns, make_workplace, write_rows

from loka_onnx.core import serde
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Climbs
from loka_onnx.core.profile import Profile
from loka_onnx.operations.drift.run import open_run
from loka_onnx.pipeline.run import RunOptions, RunResult, Stage, run
from loka_onnx.runtime import Cause, load, loading
from loka_onnx.sessions.host_devices import integer_instructions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not integer_instructions(), reason="needs VNNI, AMX or ARM's dot product"),
]
BUILT_BY_CHILDREN = True


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
    assert plan.precisions == (Precision.INT8,)
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
    monkeypatch.setattr(loading, "integer_instructions", tuple)
    fallback = load(result.bundle)
    (skipped,) = fallback.skipped
    assert skipped.cause is Cause.DEVICE
    assert integer_instructions()[0] in skipped.reason
    exact = fallback.infer(inputs)
    assert 0 < np.abs(answers["ctr"] - exact["ctr"]).max() < 0.2


def test_a_value_that_no_calibration_row_has_is_inside_the_ranges(tmp_path):
    """Three in a hundred rows of the other splits hold the lowest value of an input, far below the rest."""
    place, columns = make_workplace(tmp_path / "place"), make_columns()
    d0 = np.random.default_rng(2).integers(0, 3, ROWS).astype(np.float32)
    d0[ROWS // 5 :: 33] = -9.0
    write_rows(place.path / "rows.parquet", columns | {"d0": d0})
    split = {"by": "order", "fractions": {"calibration": 0.2, "selection": 0.3, "certification": 0.5}}
    place.write_run_file(
        plan={"plans": ["fp32", "int8-all"], "formats": ["int8"]}, data={"split": split, "group": None}
    )
    run(place.run_file, RunOptions(until=Stage.PLAN))
    profile = serde.read(Profile, place.output / "profile.json")
    joined = profile.site("fc1").operands["joined"]
    assert joined.minimum == -9.0
    scale, zero = (profile.scales[name]["joined"] for name in ("uint8/mse", "uint8/mse/zero_point"))
    assert -(zero + 0.5) * scale <= -9.0


def test_two_formats_compete_in_one_run(tmp_path):
    """FP8 plans are made; none of their engines could be chosen on a CPU that multiplies INT8."""
    place = make_workplace(tmp_path / "place")
    place.write_run_file(
        plan={"plans": None, "formats": ["fp8", "int8"]}, calibration={"rows": 1000, "draws": 1}
    )
    result = run(place.run_file)
    plans = result.report.plans
    assert [plan.id for plan in plans.plans] == [
        "fp32",
        "bf16",
        "fp8-all",
        "fp8-safe",
        "int8-all",
        "int8-safe",
    ]
    assert plans.plan("fp8-all").kind == "fp8" and plans.plan("int8-all").kind == "int8"
    assert plans.notes == ("FP8 plans are not built for cpu, which multiplies INT8",)
    assert {engine.plan for engine in result.report.engines} == {"fp32", "bf16", "int8-all", "int8-safe"}
    climbs = serde.read(Climbs, place.output / "ladder.json").by_kind
    for precision, climb in climbs.items():
        assert set(plans.plan(f"{precision}-safe").quantized_sites) == set(climb.sites)
    fitted = serde.read(CorrectionSet, place.output / "corrections.json").plans
    assert {each.plan for each in fitted} == {"fp8-all", "fp8-safe", "int8-all", "int8-safe"}
    text = (result.directory / "report.md").read_text(encoding="utf-8")
    for heading in ("Eight-bit share of FLOPs", "Sites in plan fp8-safe", "Sites in plan int8-"):
        assert heading in text

    # The profile takes rows in both formats; later runs go on from it.
    write_rows(place.path / "more.parquet", make_columns(500, seed=7))
    run(place.run_file, RunOptions(resume=True, until=Stage.CALIBRATE, added=place.path / "more.parquet"))
    added = serde.read(Profile, place.output / "calibration" / "exported.json")
    assert added.precisions == (Precision.FP8, Precision.INT8) and "+" in added.data_digest
    drift = open_run(place.output / "profile.json")
    assert drift.baseline.profile.precisions == (plans.plan(result.choice.targets[0].plan).kind or "fp8",)
