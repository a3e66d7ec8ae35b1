"""A profile of two formats holds what two profiles of one format hold, at less than their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_models import LOGIT, SHARED, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.calibrate import ProbeOptions, ProfiledModel, calibrate, measured_recipes, update
from loka_onnx.calibration.effects.switchable import SwitchableModel
from loka_onnx.core import serde
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.formats import E4M3FN, UINT8, Precision
from loka_onnx.core.plan import Climb, Climbs
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.pipeline.plans import recipes_of
from loka_onnx.planning.policy import PlanOptions, make_plans, open_verdicts

FLOAT, INTEGER = recipes_of(E4M3FN), recipes_of(UINT8)
BOTH = (*FLOAT, *INTEGER)
OPTIONS = ProbeOptions(BOTH, threads=1, error_precision=None, draws=2)
Measure = Callable[..., Profile]


@pytest.fixture
def measure(tmp_path) -> Measure:
    artifact = artifact_of(tmp_path)

    def run(recipes: tuple[Recipe, ...] = BOTH, seed: int = 1, **options) -> Profile:
        data = dataset_of(tmp_path / f"data-{seed}", columns_of(600, seed))
        return calibrate(artifact, (LOGIT,), data, tmp_path, replace(OPTIONS, recipes=recipes, **options))

    return run


def without_times(profile: Profile) -> Profile:
    return replace(profile, seconds=dict.fromkeys(profile.seconds, ExactSum()), scales={})


def test_each_format_is_measured_as_if_alone(measure):
    both = measure()
    assert both.precisions == (Precision.FP8, Precision.INT8)
    assert serde.loads(Profile, serde.dumps(both)) == both
    for recipes, precision in ((FLOAT, Precision.FP8), (INTEGER, Precision.INT8)):
        alone = measure(recipes)
        assert without_times(both.of(precision)) == without_times(alone)
        assert alone.of(precision) == alone
        assert alone.scales.items() <= both.scales.items()
        assert [group.sites for group in both.of(precision).groups] == [SHARED]
    norm = both.site("norm")
    assert [item.recipe for item in norm.sensitivities] == ["bf16"] == [item.recipe for item in norm.errors]


def test_the_exact_model_is_run_once(measure, monkeypatch):
    """Five sites, four of them products, and the two that share a tensor together."""
    runs: list[int] = []
    run = SwitchableModel.run_switched

    def counted(self, inputs, on, outputs=None):
        runs.append(len(on))
        return run(self, inputs, on, outputs)

    monkeypatch.setattr(SwitchableModel, "run_switched", counted)
    measure(draws=1, batch_size=600)
    assert sorted(runs) == [0, *[1] * (1 + 2 * 4), 2, 2]


@pytest.mark.slow
def test_rows_are_added_to_every_format(measure, tmp_path):
    first, second = measure(), measure(seed=2)
    subject = ProfiledModel(artifact_of(tmp_path), (LOGIT,))
    added = update(first, subject, dataset_of(tmp_path / "data-2", columns_of(600, 2)), tmp_path, OPTIONS)
    assert measured_recipes(added) == measured_recipes(first)
    assert added.rows == first.rows + second.rows
    for precision in first.precisions:
        # Scales of the second are its own.
        again = measure(seed=2, scales=first.scales, planned=measured_recipes(first))
        merged = first.of(precision).merge(again.of(precision))
        assert without_times(added.of(precision)) == without_times(merged)


def test_plans_of_each_format_rest_on_what_was_measured_in_it(measure, tmp_path):
    both, artifact = measure(), artifact_of(tmp_path)
    wanted = ("fp32", "fp8-all", "fp8-safe", "int8-all", "int8-safe")
    asked = PlanOptions(plans=wanted)
    plans = make_plans(artifact, both, (LOGIT,), BOTH, asked)
    assert plans.quantized == "FP8 or INT8"
    for recipes, word in ((FLOAT, "fp8"), (INTEGER, "int8")):
        ids = tuple(f"{word}-{which}" for which in ("all", "safe"))
        alone = make_plans(artifact, measure(recipes), (LOGIT,), recipes, replace(asked, plans=ids))
        for plan in alone.plans:
            ours = plans.plan(plan.id)
            assert ours.predicted_kl == plan.predicted_kl
            for one, other in zip(ours.decisions, plan.decisions, strict=True):
                assert replace(one, reason="") == replace(other, reason="")


def test_a_reason_says_which_format_has_the_site_and_by_how_much(measure, tmp_path):
    both, artifact = measure(), artifact_of(tmp_path)

    def climbed(*sites: str) -> Climb:
        return Climb(1, sites, 0.95, 0.9, ())

    safe = Climbs({"fp8": climbed("left"), "int8": climbed("left", "right")})
    assert serde.loads(Climbs, serde.dumps(safe)) == safe
    asked = PlanOptions(plans=("fp8-safe", "int8-safe"), safe=safe)
    plans = make_plans(artifact, both, (LOGIT,), BOTH, asked)
    lost = plans.plan("fp8-safe").decision("right")
    assert (lost.precision, plans.plan("int8-safe").decision("right").precision) == ("bf16", "int8")
    kl = {p: both.of(p).site("right").sensitivities[0].kl.value for p in both.precisions}
    assert f"{100 * kl[Precision.INT8]:.3g} %" in lost.reason.rpartition("int8-safe")[2]
    assert f"{100 * kl[Precision.FP8]:.3g} %" in lost.reason.rpartition("int8-safe")[2]
    assert "fp8-safe" not in plans.plan("int8-safe").decision("right").reason


def test_a_site_is_open_while_it_is_in_any_format(measure, tmp_path):
    both, artifact = measure(), artifact_of(tmp_path)
    alone = [open_verdicts(artifact, both.of(p), (LOGIT,)) for p in both.precisions]
    assert {*open_verdicts(artifact, both, (LOGIT,))} == {*alone[0], *alone[1]}
