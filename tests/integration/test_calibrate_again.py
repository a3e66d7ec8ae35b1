"""Some sites calibrated again; a plan in another FP8 format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_runs import Workplace, call

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.pipeline.run import RunOptions, Stage, run


def profile_at(place: Workplace, name: str = "calibration/exported.json") -> Profile:
    return serde.read(Profile, place.output / name)


def falsified(entry: SiteProfile) -> SiteProfile:
    return replace(entry, errors=tuple(replace(error, noise=ExactSum.of([7.0])) for error in entry.errors))


def test_only_the_sites_asked_for_are_measured_again(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    run(place.run_file, RunOptions(until=Stage.PLAN))
    first = profile_at(place)
    assert [entry.site for entry in first.sites] == ["fc1", "fc2", "heads"]
    wrong = replace(first, sites=tuple(map(falsified, first.sites)))
    serde.write(wrong, place.output / "calibration/exported.json")

    done = call(
        capsys, "calibrate", place.run_file, "--only", "fc*", "--set", "plan.weight_granularity=per_tensor"
    )
    assert done.code == 0, done.err
    again = profile_at(place)
    for name in ("fc1", "fc2"):
        assert (again.site(name).operands, again.site(name).errors) == (
            first.site(name).operands,
            first.site(name).errors,
        )
        assert "/per_tensor/per_tensor/" in again.site(name).sensitivities[0].recipe
    assert again.site("heads") == falsified(first.site("heads"))
    assert again.seconds["errors"].value > first.seconds["errors"].value

    # What follows is built on it, and the calibration itself is not done again.
    done = call(capsys, "plan", place.run_file, "--set", "plan.weight_granularity=per_tensor")
    assert done.code == 0, done.err
    assert profile_at(place) == again
    assert profile_at(place, "profile.json").sites == again.sites


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tower.*"], "pattern 'tower.*' matches no site"),
        (["--only", "fc1", "--set", "calibration.rows=1000"], "was measured with other number of rows"),
        (["--only", "fc1", "--set", "plan.format=E5M2"], "was measured with other recipes"),
        (["--only", "fc1", "--set", "data.split.seed=9"], "was measured with other calibration rows"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_profile_stays(
    place: Workplace, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run(place.run_file, RunOptions(until=Stage.CALIBRATE))
    before = (place.output / "calibration/exported.json").read_bytes()
    done = call(capsys, "calibrate", place.run_file, *arguments)
    assert done.code == 2 and message in done.err, done.err
    assert (place.output / "calibration/exported.json").read_bytes() == before


def test_without_a_profile_there_is_nothing_to_do_again(
    place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "calibrate", place.run_file, "--only", "fc1")
    assert done.code == 2 and "there is no profile whose sites could be done again" in done.err
    assert "remedy: calibrate every site: the same command without --only" in done.err


@pytest.mark.parametrize("format", ["E4M3FNUZ", "E5M2"])
def test_a_plan_in_another_format_is_built_and_run(place: Workplace, format: str) -> None:
    place.write_run_file(plan={"format": format, "scale": "best"})
    run(place.run_file, RunOptions(until=Stage.BUILD))
    plan = serde.read(PlanSet, place.output / "plan.json").plans[1]
    recipes = [decision.recipe for decision in plan.decisions]
    assert plan.id == "fp8-all" and {recipe.format for recipe in recipes if recipe is not None} == {format}
    engines = serde.read(EngineSet, place.output / "engines.json").engines
    assert {engine.plan: engine.status for engine in engines}["fp8-all"] is BuildStatus.READY, engines
    assert Path(place.output / "planned").is_dir()
