"""Live rows against a profile: statistics against NumPy and against calibration, and what alarms."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from drift_models import BATCH, LIVE_ROWS, OPTIONS, PROFILE_ROWS, baseline, drift_of, live_columns, live_data
from small_models import LOGIT, columns_of, dataset_of

from loka_onnx.calibration.calibrate import calibrate
from loka_onnx.core import serde
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.statistics import NO_BATCHES
from loka_onnx.errors import CalibrationError, ConfigError, UserError
from loka_onnx.numerics.two_sample import exceedance_probability, holm
from loka_onnx.operations.drift.live import Baseline, measure_live
from loka_onnx.operations.drift.report import (
    DriftOptions,
    DriftReport,
    Measure,
    RangeShift,
    Relevance,
    Shift,
    TensorDrift,
)


def full_batches(x: np.ndarray) -> np.ndarray:
    """(batches, rows, columns) without what does not fill one."""
    return x[: len(x) // BATCH * BATCH].reshape(-1, BATCH, x.shape[1])


def only_x(report: DriftReport) -> TensorDrift:
    """Drift of the input."""
    return next(tensor for tensor in report.tensors if tensor.tensor == "x")


@pytest.fixture(scope="module")
def same() -> DriftReport:
    """Fresh rows of the same distribution."""
    return drift_of(live_columns())


def test_fresh_rows_of_the_same_distribution_do_not_alarm(same):
    assert same.is_judged and same.alarms == () and same.changed == ()
    assert (same.profile_batches, same.live_batches, same.batch_rows) == (24, 16, BATCH)
    assert (same.profile_rows, same.live_rows) == (PROFILE_ROWS, LIVE_ROWS)
    assert serde.loads(DriftReport, serde.dumps(same)) == same


def test_statistics_are_those_of_the_rows(same):
    """Of the input itself, from float64 over whole batches; of 64 rows every one is sampled."""
    before, after = columns_of(PROFILE_ROWS, seed=1)["x"], live_columns()
    tensor = only_x(same)
    assert tensor.sites == ("left", "right")
    for side, x in (("profile", before), ("live", after)):
        batches = full_batches(x.astype(np.float64))
        octave = (np.abs(batches) >= 2.0) & (np.abs(batches) < 4.0)
        for name, values in (
            ("mean", batches.mean(axis=(1, 2))),
            ("rms", np.sqrt(np.square(batches).mean(axis=(1, 2)))),
            ("column.3.rms", np.sqrt(np.square(batches[:, :, 3]).mean(axis=1))),
            ("column.15.mean", batches[:, :, 15].mean(axis=1)),
            ("log2.1", octave.mean(axis=(1, 2))),
        ):
            found = getattr(tensor.shift(name), side)
            assert found == pytest.approx(values.mean(), rel=1e-6, abs=1e-9), name
    assert (tensor.range.profile_amax, tensor.range.live_amax) == (np.abs(before).max(), np.abs(after).max())
    units = [tensor.shift(name).unit for name in ("mean", "column.3.mean")]
    assert units == pytest.approx([before.std(), full_batches(before)[:, :, 3].std()], rel=1e-6)


def test_batches_beyond_the_range_are_counted(same):
    x = live_columns() * np.float32(1.2)
    wanted = np.abs(full_batches(x)).max(axis=(1, 2)) > np.abs(columns_of(PROFILE_ROWS, seed=1)["x"]).max()
    tensor = only_x(drift_of(x))
    assert 0 < tensor.range.beyond == wanted.sum() < 16
    assert tensor.range.p_value == exceedance_probability(int(wanted.sum()), 16, 24)


def test_p_values_are_adjusted_for_every_test_of_every_tensor(same):
    every = [p for t in same.tensors for p in (t.range.p_value, *(s.p_value for s in t.shifts))]
    adjusted = [p for t in same.tensors for p in (t.range.adjusted, *(s.adjusted for s in t.shifts))]
    assert len(every) == same.tests > 100
    assert tuple(adjusted) == holm(every)


def test_errors_and_kl_are_those_of_a_calibration_of_the_same_rows_under_the_same_scales(tmp_path):
    columns = columns_of(LIVE_ROWS, seed=5)
    columns["x"] = columns["x"] * np.float32(1.5)
    options = replace(OPTIONS, scales=baseline().profile.scales)
    wanted = calibrate(baseline().model, (LOGIT,), dataset_of(tmp_path, columns), tmp_path, options)
    found = measure_live(baseline(), live_data(columns["x"]), tmp_path, DriftOptions(threads=1))
    assert set(found.errors) == {"left", "right", "deep", "head"}
    for site, errors in found.errors.items():
        other = wanted.site(site).error(PER_TENSOR.id)
        assert errors.noise.value == pytest.approx(other.noise.value, rel=1e-9)
        assert errors.saturated == other.saturated
    assert found.errors["left"].saturated > 0
    # K and N of at least 16: the head has one output.
    assert set(found.kl["y"].by_site) == {"left", "right", "deep"}
    for site, kl in found.kl["y"].by_site.items():
        relative = wanted.site(site).sensitivity(PER_TENSOR.id, "y").kl.value
        assert kl == pytest.approx(relative * wanted.baseline_loss["y"].value, rel=1e-9)


def test_the_predicted_change_of_delta_ne_is_relative_to_the_profiles_loss(tmp_path):
    x = live_columns() * np.float32(3)
    report = drift_of(x)
    live = measure_live(baseline(), live_data(x), tmp_path, DriftOptions(threads=1))
    profile = baseline().profile
    loss = profile.baseline_loss["y"].value
    own = sum(profile.site(s).sensitivity(PER_TENSOR.id, "y").kl.value for s in ("left", "right", "deep"))
    (output,) = report.outputs
    assert output.kl == pytest.approx(own)
    assert output.predicted == pytest.approx(sum(live.kl["y"].by_site.values()) / loss - own)
    assert output.predicted == pytest.approx(sum(s.predicted.get("y", 0.0) for s in report.sites))
    assert [s.site for s in report.sites if not s.is_counted] == ["head"]


@pytest.mark.slow
def test_the_family_wise_level_holds():
    """By certainty alone, without any threshold: at 1 % a hundred samples give 1 ± 1 false alarms."""
    found = [bool(drift_of(live_columns(seed=100 + i), DriftOptions(kl_rows=64)).changed) for i in range(100)]
    assert sum(found) <= 5


@pytest.mark.slow
def test_rows_that_stand_together_do_not_pass_for_drift():
    """Eight rows in a row are one user's: rows are no unit, and rare octaves may be missing altogether."""
    found = []
    for seed in range(100, 160):
        x = np.repeat(live_columns(LIVE_ROWS // 8, seed), 8, axis=0)
        found.append(bool(drift_of(x, DriftOptions(kl_rows=64)).changed))
    assert sum(found) <= 3


@pytest.mark.parametrize(("factor", "times"), [(2.0, "1.99"), (0.0, "0.00")])
def test_one_of_sixteen_features_doubled_or_silent_alarms_by_its_name(factor, times):
    x = live_columns()
    x[:, 11] *= factor
    report = drift_of(x)
    (named,) = [alarm for alarm in report.alarms if alarm.measure is Measure.COLUMN and alarm.where == "x"]
    assert named.sentence.startswith(f"the rms of 'feature 11' (column 11 of 'x') is {times} times")
    assert named.adjusted < 1e-6 and named.value == pytest.approx(1.0, abs=0.1)
    # The tensor as a whole hardly moved.
    assert not [a for a in report.alarms if a.measure is Measure.RMS and a.where == "x"]


def test_a_scale_that_grows_alarms_in_every_way():
    report = drift_of(live_columns() * np.float32(3))
    measures = {alarm.measure for alarm in report.alarms}
    assert measures == set(Measure) - {Measure.MEAN, Measure.ZEROS}
    ranges = next(a for a in report.alarms if a.measure is Measure.RANGE and a.where == "x")
    assert "times the profile's" in ranges.sentence and "16 of 16 batches go beyond it" in ranges.sentence
    saturated = next(a for a in report.alarms if a.measure is Measure.SATURATION)
    assert "are clipped under its FP8 scale, 0.000% in the profile" in saturated.sentence
    first = report.alarms[0]
    assert first.measure is Measure.DELTA_NE and first.where == "y"
    assert first.sentence.startswith("FP8's share of ΔNE on 'y' is predicted to grow by ")
    assert "budget 0.0200%" in first.sentence
    assert report.tensors[0].smallest_adjusted <= 0.01


def test_mean_and_zeros_alarm():
    x = live_columns() + np.float32(1)
    x[::2, ::4] = 0.0
    found = {alarm.measure: alarm.sentence for alarm in drift_of(x).alarms if alarm.where == "x"}
    assert "the mean of 'x' (read by 'left' and 'right') moved by +0." in found[Measure.MEAN]
    assert "12.5% of 'x' (read by 'left' and 'right') are zero, 0.0% in the profile" in found[Measure.ZEROS]


@pytest.mark.slow
def test_what_is_certain_but_small_does_not_alarm_unless_asked_for():
    """Two percent, seen on 64 times as many rows."""
    x = live_columns(64 * LIVE_ROWS, seed=3) * np.float32(1.02)
    options = DriftOptions(kl_rows=256)
    report = drift_of(x, options)
    assert report.changed and not report.alarms
    assert drift_of(x, replace(options, relevance=Relevance(*[0.0] * 8))).alarms


def test_the_largest_accepted_growth_of_delta_ne_replaces_the_share_of_the_budget():
    x = live_columns() * np.float32(3)
    growth = drift_of(x).outputs[0].predicted
    for most, is_alarm in ((0.5 * growth, True), (2.0 * growth, False)):
        alarms = drift_of(x, DriftOptions(most_delta_ne=most)).alarms
        assert (Measure.DELTA_NE in {alarm.measure for alarm in alarms}) is is_alarm


def test_too_few_batches_are_not_judged(monkeypatch):
    report = drift_of(live_columns(7 * BATCH + 20) * np.float32(4))
    assert not report.is_judged and report.alarms == () and report.tests == 0
    assert report.not_judged.startswith("the live rows fill 7 batches of 64 rows")
    # What can be said without a test is said.
    assert report.tensors[0].range.growth > 2.0 and report.outputs[0].predicted > 0.0
    known = baseline()
    sites = tuple(
        replace(site, operands={name: replace(s, spread=NO_BATCHES) for name, s in site.operands.items()})
        for site in known.profile.sites
    )
    bare = replace(known, profile=replace(known.profile, sites=sites))
    monkeypatch.setattr("drift_models.baseline", lambda: bare)
    report = drift_of(live_columns())
    assert report.not_judged.startswith("the profile holds no full batch, and 8 are needed")


def test_rows_options_and_models_that_do_not_fit_are_refused():
    x = live_columns()
    x[700, 2] = 3e38
    with pytest.raises(CalibrationError, match=r"is not finite in batch 11 of 17 of 'clicks-0412\.npz'"):
        drift_of(x)
    for wrong, where in (
        ({"family_wise": 0.0}, "family-wise"),
        ({"family_wise": 1.0}, "family-wise"),
        ({"most_delta_ne": -1.0}, "max-predicted-delta-ne"),
    ):
        with pytest.raises(ConfigError) as refused:
            DriftOptions(**wrong)
        assert refused.value.where == where
    known = baseline()
    with pytest.raises(UserError, match=r"the profile is not that of 'model\.onnx'"):
        Baseline(replace(known.model, digest="f" * 64), known.profile)


def test_shifts_are_in_their_unit_and_in_standard_errors_and_ranges_grow_by_a_factor():
    for values, effect, deviation in (
        ((1.0, 1.5, 2.0, 0.1), 0.25, 5.0),
        ((1.0, 1.0, 0.0, 0.0), 0.0, 0.0),
        ((0.0, 1.0, 0.0, 0.0), inf, inf),
        ((1.0, 0.0, 0.0, 0.0), -inf, -inf),
    ):
        shift = Shift("mean", *values, 0.5)
        assert (shift.effect, shift.deviation) == pytest.approx((effect, deviation))
    for before, after, growth in ((2.0, 3.0, 1.5), (0.0, 0.0, 1.0), (0.0, 1.0, inf)):
        assert RangeShift(before, after, 0, 8, 1.0).growth == growth
