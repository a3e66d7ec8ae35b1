"""Refining, choosing by batch size and throughput in a whole run.

On a CPU FP8 is simulated and slower. Here its engines pass for real ones, and their times are made up; plans,
engines, their outputs, what they are judged on and the load are real.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from run_findings import resumed
from synthetic_runs import RUN_VALUES, Workplace, make_workplace

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Choice, Latency
from loka_onnx.core.refinement import Origin, RefinedRun, Refinement
from loka_onnx.core.throughput import CHOSEN, HIGH_PRECISION, ThroughputSet
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.run import RunResult, run

FP8 = "cpu-onnxruntime-cpu-fp8-all"


def made_up(self: Judging, engines: Sequence[EngineArtifact], beyond: object = ()) -> Interleaved:
    """FP8 costs a fifth at 8 rows and saves two fifths at 64, in proportion to the sites that have it."""

    def latency(batch: int, us: float) -> Latency:
        return Latency(batch, us, us, us, 100, "cpu", True, loads_us=(us,) * 10)

    found = {}
    for engine in engines:
        if engine.status is BuildStatus.READY:
            part = {"fp32": 0.0, "fp8-all": 1.0}.get(engine.plan, 0.6)
            found[engine.id] = (latency(8, 100 * (1 + 0.2 * part)), latency(64, 800 * (1 - 0.4 * part)))
    return Interleaved(found, {})


@pytest.fixture(scope="module")
def refined(finished: RunResult, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, RunResult]:
    """A run in which blanket FP8 just misses the budget of one output."""
    missed = finished.report.evaluation(FP8, "selection")
    difference = missed.outputs[0].difference
    place = make_workplace(tmp_path_factory.mktemp("refined"))
    ctr, cvr, spend = RUN_VALUES["outputs"]
    budget = 0.8 * difference.judged.upper
    place.write_run_file(
        outputs=[{**ctr, "budget": budget}, {**cvr, "budget": 0.5}, {**spend, "budget": 0.5}],
        plan={"plans": ["fp32", "fp8-all"]},
        mods={"split_channels": False},
        # An engine of the other run would come with its mark.
        build={"cache_gb": 0.0},
        refine={"rounds": 3, "plans": 1},
        serving={"p99_ms": 1000.0, "streams": 2, "trial_seconds": 0.02},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(get_backend("onnxruntime")), "is_simulated", lambda self, plan, architecture: False
        )
        patch.setattr(Judging, "time_engines", made_up)
        return place, run(place.run_file)


@pytest.mark.slow
def test_sites_are_given_back_until_the_budget_holds(refined):
    place, result = refined
    (hardware,) = serde.read(Refinement, place.output / "refinement.json").hardware
    first, *later = [step for step in hardware.steps if step.origin is Origin.GIVEN_BACK]
    assert (first.round, first.parent, first.status) == (1, "fp8-all", "built and run here")
    assert first.returned and first.fp8_sites == 3 - sum(len(each.sites) for each in first.returned)
    missed = next(step for step in hardware.steps if step.plan == "fp8-all")
    assert (missed.is_within, missed.is_on_front) == (False, True)
    assert missed.upper is not None and first.upper is not None and first.upper < missed.upper
    assert hardware.best == (later or [first])[-1].plan
    added = serde.read(RefinedRun, place.output / "refined.json")
    assert [plan.id for plan in added.plans] == [step.plan for step in (first, *later)]
    # What was given back is not quantized in the engine; the rest is.
    (engine,) = (e for e in added.engines if e.plan == first.plan)
    gone = {site for each in first.returned for site in each.sites}
    assert {site.site for site in engine.sites if site.engaged and site.planned == "fp8"} == {
        "fc1",
        "fc2",
        "heads",
    } - gone
    assert added.corrections.plans[0].plan == first.plan
    assert result.report.plans.plan(first.plan) == added.plans[0]


@pytest.mark.slow
def test_each_batch_size_has_its_engine_in_the_bundle(refined):
    _, result = refined
    (choice,) = result.choice.targets
    assert [route.batch for route in choice.routes] == [8, 64]
    assert choice.routes[0].plan == "fp32"
    best = choice.routes[1].plan
    assert best.startswith("refined-")
    engine = loka_onnx.load(result.bundle)
    health = engine.health()
    assert health.ready, health.detail
    assert set(health.routes.values()) == {route.engine for route in choice.routes}
    # The same rows alone and among 40: FP32 and FP8 answer, which is not the same.
    sample = np.random.default_rng(0)
    request = {
        "dense": sample.standard_normal((40, 16)).astype(np.float32),
        "item": sample.integers(0, 40, 40),
    }
    few = engine.infer({name: value[:8] for name, value in request.items()})["ctr"]
    many = engine.infer(request)["ctr"][:8]
    assert 1e-5 < np.abs(few - many).max() < 0.5


@pytest.mark.slow
def test_throughput_is_measured_for_the_chosen_and_for_high_precision(refined):
    place, result = refined
    found = serde.read(ThroughputSet, place.output / "throughput.json").measurements
    (choice,) = result.choice.targets
    assert [(m.batch, m.role, m.plan) for m in found] == [
        (8, CHOSEN, "fp32"),
        (64, CHOSEN, choice.routes[1].plan),
        (64, HIGH_PRECISION, "fp32"),
    ]
    for measured in found:
        assert (measured.failure, measured.streams, measured.p99_limit_us) == ("", 2, 1e6)
        assert measured.best is not None and measured.best.p99_us < 1e6
        assert 0 < measured.requests_per_s <= measured.capacity_per_s


@pytest.mark.slow
def test_a_finished_refinement_is_taken_over(refined, monkeypatch):
    place, result = refined
    told = resumed(place)
    assert told["refine"] and told["evaluate"] and told["throughput"] and told["bundle"]
    assert serde.read(Choice, place.output / "choice.json") == result.choice


def test_a_run_without_fp8_that_counts_is_not_refined(finished):
    assert not (finished.directory / "refinement.json").exists()
    assert not (finished.directory / "throughput.json").exists()
    assert "## Refinement" not in Path(finished.directory / "report.md").read_text(encoding="utf-8")
