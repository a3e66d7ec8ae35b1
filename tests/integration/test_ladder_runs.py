"""Ladder and base precision in whole runs: a miss of the rung that was measured goes one rung back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
import pytest
from run_findings import resumed
from synthetic_runs import RUN_VALUES, make_workplace

from loka_onnx.core import serde
from loka_onnx.core.correction import CorrectionSet, Variant
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Choice, Evaluation, EvaluationSet, Latency
from loka_onnx.core.formats import Precision
from loka_onnx.core.manifest import Manifest
from loka_onnx.core.plan import Climbs, PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import RefinedRun
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.engines import Split, judge_engine
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline import judging
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.run import RunOptions, Stage, run

pytestmark = pytest.mark.slow

BUDGET = 0.02
OUTPUTS = [{**output, "budget": BUDGET} for output in RUN_VALUES["outputs"]]


def test_the_plan_is_the_rung_that_was_measured(tmp_path):
    """With the constants that its plan gets. The planned model is another graph than the ladder's."""
    place = make_workplace(tmp_path / "place")
    place.write_run_file(
        outputs=OUTPUTS,
        plan={"plans": ["fp32", "fp8-safe"], "corrections": True},
        calibration={"rows": 1000, "draws": 1},
    )
    run(place.run_file, RunOptions(until=Stage.BUILD))
    climb = serde.read(Climbs, place.output / "ladder.json").by_kind["fp8"]
    taken = climb.taken
    assert climb.judged and taken is not None and taken.change is not None
    assert taken.fits and taken.chance >= climb.chance == 0.9
    assert all(not each.fits or each.rung <= climb.rung for each in climb.judged)
    safe = serde.read(PlanSet, place.output / "plan.json").plan("fp8-safe")
    assert set(safe.fp8_sites) == set(climb.sites)
    assert safe.fp8_share == pytest.approx(taken.fp8_share)
    (plan,) = serde.read(CorrectionSet, place.output / "corrections.json").plans
    (output,) = [each for each in plan.outputs if each.output == taken.output]
    tried = {trial.variant: trial.judged for trial in output.trials}
    expected = min((tried[v] for v in (Variant.BIAS, Variant.BOTH) if v in tried), key=lambda i: i.upper)
    assert taken.change.value == pytest.approx(expected.value, abs=2e-6)
    assert abs(expected.value - tried[Variant.NONE].value) > 1e-5


def fast_in_fp8(self: Judging, engines: Sequence[EngineArtifact], beyond: Any = ()) -> Interleaved:
    """FP8 takes half of the time at every batch size."""
    found = {}
    for engine in engines:
        if engine.status is BuildStatus.READY:
            us = 1.0 if engine.plan == "fp32" else 0.5
            found[engine.id] = tuple(
                Latency(
                    batch, us * batch, us * batch, us * batch, 100, "cpu", True, loads_us=(us * batch,) * 10
                )
                for batch in (8, 64)
            )
    return Interleaved(found, {})


def test_a_miss_on_certification_goes_one_rung_back(tmp_path, monkeypatch):
    """The first plan is held to a budget on certification that nothing in FP8 is inside of."""

    def strict(artifact: EngineArtifact, split: Split, reference: Any, specs: Any, *rest: Any) -> Evaluation:
        if (artifact.plan, split.name) == ("fp8-safe", "certification"):
            specs = tuple(replace(spec, budget=1e-9) for spec in specs)
        return judge_engine(artifact, split, reference, specs, *rest)

    monkeypatch.setattr(judging, "judge_engine", strict)
    monkeypatch.setattr(Judging, "time_engines", fast_in_fp8)
    backend = type(get_backend("onnxruntime"))
    monkeypatch.setattr(backend, "is_simulated", lambda self, plan, architecture: False)
    place = make_workplace(tmp_path / "place")
    place.write_run_file(
        outputs=OUTPUTS,
        plan={"plans": ["fp32", "fp8-safe"], "corrections": False},
        calibration={"rows": 1000, "draws": 1},
        build={"cache_gb": 0.0},
        refine={"rounds": 0},
    )
    result = run(place.run_file)
    (target,) = serde.read(Choice, place.output / "choice.json").targets
    assert target.plan == "fp8-safe-attempt-2"
    assert target.missed == ("cpu-onnxruntime-cpu-fp8-safe",)
    added = serde.read(RefinedRun, place.output / "attempt-2.json")
    (lower,) = added.plans
    upper = serde.read(PlanSet, place.output / "plan.json").plan("fp8-safe")
    assert lower.instead_of == "fp8-safe"
    assert set() < set(lower.fp8_sites) < set(upper.fp8_sites)
    assert all(lower.decision(s).precision is Precision.BF16 for s in {*upper.fp8_sites} - {*lower.fp8_sites})
    certified = {e.engine: e for e in added.evaluations.evaluations if e.split == "certification"}
    (judged,) = certified.values()
    assert all(
        o.difference and o.difference.judged.confidence == pytest.approx(0.9925) for o in judged.outputs
    )
    first = serde.read(EvaluationSet, place.output / "evaluation.json")
    assert not first.of("cpu-onnxruntime-cpu-fp8-safe", "certification").is_within_budget
    manifest = serde.read(Manifest, result.bundle / "manifest.json")
    assert [engine.plan for engine in manifest.engines] == ["fp8-safe-attempt-2"]
    stages = resumed(place)
    assert stages["attempt 2"] and all(stages.values())


def test_fp16_where_the_rows_show_that_it_fits(tmp_path, finished):
    place = make_workplace(tmp_path / "place")
    settings = {"rows": 1000, "draws": 1}
    plan = {"base": "auto", "plans": ["fp32", "bf16", "fp16", "fp8-all"], "keep": ["relu2"]}
    place.write_run_file(plan={**plan, "protect": ["logits"]}, calibration=settings)
    run(place.run_file, RunOptions(until=Stage.PLAN))
    profile = serde.read(Profile, place.output / "profile.json")
    model = onnx.load(place.output / "model" / "modified.onnx")
    floats = {
        i.name for i in (*model.graph.input, *model.graph.value_info) if i.type.tensor_type.elem_type == 1
    }
    assert floats <= profile.tensors.keys() and "cvr" in profile.tensors
    assert 0.1 < profile.tensors["cvr"].amax < 1.0 and profile.tensors["dense"].amax > 3
    assert profile.seconds["magnitudes"].value > 0
    plans = serde.read(PlanSet, place.output / "plan.json")
    assert [p.base for p in plans.plans] == [Precision.FP32, Precision.BF16, Precision.FP16, Precision.FP16]
    assert plans.plan("fp8-all").base_reason == "8 times what was measured fits fp16"
    for name in ("bf16", "fp16", "fp8-all"):
        assert {wide.node: wide.reason for wide in plans.plan(name).wide} == {
            "relu2/relu": "kept by 'relu2'",
            "sigmoid/sigmoid": "is computed behind the last product of output 'cvr'",
        }
    # Nothing of it is measured where nothing asks for it.
    assert serde.read(Profile, finished.directory / "profile.json").tensors == {}
