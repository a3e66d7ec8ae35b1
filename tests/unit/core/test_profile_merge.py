"""Profiles merge: neither the order of the rows nor how they are cut into parts shows in a single bit."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from loka_onnx.core import serde
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import (
    DeltaSums,
    Draws,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    SiteProfile,
    WeightedMean,
)
from loka_onnx.core.statistics import (
    NO_BATCHES,
    NOTHING_COUNTED,
    BatchSpread,
    BatchSums,
    ErrorStats,
    MagnitudeHistogram,
    RangeStats,
    TensorRange,
)

numbers = st.floats(-1e30, 1e30, allow_subnormal=False)
natural = st.integers(0, 2**40)
exact = st.lists(numbers, max_size=3).map(ExactSum.of)
positive = st.floats(1e-3, 1e6).map(lambda x: ExactSum.of([x]))

histograms = st.builds(
    MagnitudeHistogram,
    natural,
    st.integers(1, 2000),
    st.lists(st.integers(1, 2**40), min_size=1, max_size=4).map(tuple),
)
sums = st.builds(BatchSums, exact, exact)
spreads = st.one_of(
    st.just(NO_BATCHES),
    st.builds(
        BatchSpread,
        st.integers(1, 1000),
        st.just(512),
        st.dictionaries(st.sampled_from(["mean", "rms", "zeros", "log2.-3"]), sums),
    ),
)
channels = st.one_of(st.just(()), st.tuples(numbers, numbers))
ranges = st.builds(
    RangeStats, natural, numbers, numbers, numbers, exact, exact, histograms, channels, spreads
)
counts = (natural,) * 4
errors = st.builds(ErrorStats, st.just("e4m3fn"), st.just(0.5), natural, exact, exact, *counts)
deltas = st.builds(DeltaSums, positive, exact, exact)
moments = st.builds(RatioMoments, natural, st.integers(0, 2**20), exact, positive, positive, exact, positive)
draws = st.builds(Draws, st.integers(1, 8), numbers, numbers, numbers, numbers, numbers)
sensitivities = st.builds(
    Sensitivity.of,
    st.just(SensitivityName("e4m3fn", "logit", "loss")),
    deltas,
    moments,
    moments,
    st.one_of(st.none(), draws),
)
groups = st.builds(SiteGroup, st.just("h"), st.just(("fc1", "fc2")), st.tuples(sensitivities))
means = st.builds(WeightedMean, exact, positive)
samplings = st.builds(
    Sampling,
    natural,
    st.integers(1, 20),
    st.integers(1, 2**20),
    st.sets(st.sampled_from("abc")).map(lambda names: tuple(sorted(names))),
    st.booleans(),
)
WEIGHT = RangeStats(16, 1.0, -1.0, 0.5, ExactSum.of([0.1]), ExactSum.of([3.0]))
entries = st.builds(
    SiteProfile,
    st.just("fc1"),
    st.fixed_dictionaries({"x": ranges, "w": st.just(WEIGHT)}),
    st.tuples(errors),
    st.tuples(sensitivities),
)
tensors = st.builds(TensorRange, st.floats(0, 3e38), st.one_of(st.none(), st.floats(1e-38, 3e38)))
profiles = st.builds(
    Profile,
    model_digest=st.just("m"),
    data_digest=st.text("0123456789abcdef", min_size=4, max_size=4),
    rows=natural,
    error_rows=natural,
    sampling=samplings,
    synthetic=st.booleans(),
    sites=st.tuples(entries),
    baseline_loss=st.fixed_dictionaries({"logit": means}),
    scales=st.just({"e4m3fn/amax": {"x": 0.5}}),
    seconds=st.dictionaries(st.sampled_from(["ranges", "errors"]), exact),
    groups=st.tuples(groups),
    weights=st.just(("w",)),
    tensors=st.dictionaries(st.sampled_from("xyz"), tensors),
)
# A whole profile takes long to draw.
few = settings(max_examples=15)
NO_ERRORS = ErrorStats("e4m3fn", 0.5, 0, ExactSum(), ExactSum(), 0, 0, 0)

KINDS = {
    "sums of a batch": sums,
    "spread": spreads,
    "histogram": histograms,
    "range": ranges,
    "error": errors,
    "delta": deltas,
    "moments": moments,
    "draws": draws,
    "sensitivity": sensitivities,
    "group": groups,
    "mean": means,
    "sampling": samplings,
    "magnitudes": tensors,
}


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_associative_and_commutative(kind):
    @given(KINDS[kind], KINDS[kind], KINDS[kind])
    def check(a: Any, b: Any, c: Any) -> None:
        assert a.merge(b) == b.merge(a)
        assert a.merge(b).merge(c) == a.merge(b.merge(c))

    check()


EMPTY = {
    "sums of a batch": BatchSums(),
    "spread": NO_BATCHES,
    "histogram": NOTHING_COUNTED,
    "error": NO_ERRORS,
    "delta": DeltaSums(),
    "moments": RatioMoments(),
    "mean": WeightedMean(ExactSum(), ExactSum()),
}


@pytest.mark.parametrize("kind", EMPTY)
def test_no_rows_change_nothing(kind):
    @given(KINDS[kind])
    def check(a: Any) -> None:
        assert a.merge(EMPTY[kind]) == EMPTY[kind].merge(a) == a

    check()


@few
@given(profiles, profiles, profiles)
def test_profiles_merge_associatively_and_only_the_digest_keeps_the_order(a, b, c):
    whole = a.merge(b).merge(c)
    assert whole == a.merge(b.merge(c))
    assert serde.dumps(whole) == serde.dumps(a.merge(b.merge(c)))
    assert dataclasses.replace(b.merge(a), data_digest="") == dataclasses.replace(a.merge(b), data_digest="")
    assert whole.data_digest == f"{a.data_digest}+{b.data_digest}+{c.data_digest}"
    # Weights are the same in every part: they are not added up.
    assert whole.site("fc1").operands["w"] == WEIGHT
    assert whole.rows == a.rows + b.rows + c.rows
    # What one part knows nothing of is not known of the whole.
    assert whole.tensors.keys() == a.tensors.keys() & b.tensors.keys() & c.tensors.keys()
    assert all(known.amax >= b.tensors[name].amax for name, known in whole.tensors.items())


@few
@given(profiles)
def test_a_document_keeps_every_bit_and_entries_are_found_by_name(profile):
    assert serde.loads(Profile, serde.dumps(profile)) == profile
    site, group = profile.site("fc1"), profile.groups[0]
    assert site is profile.sites[0] and site.error("e4m3fn") is site.errors[0]
    assert site.sensitivity("e4m3fn", "logit") is site.sensitivities[0]
    assert group.sensitivity("logit") is group.sensitivities[0]
    quarter = dataclasses.replace(error_of(np.ones(2), np.full(2, 1.25)), recipe="e4m3fn")
    sites = (dataclasses.replace(site, errors=(quarter,)),)
    (row,) = dataclasses.replace(profile, sites=sites).records()
    assert (row["site"], row["recipe"], row["relative_error"]) == ("fc1", "e4m3fn", 0.25)
    assert row["kl"] == site.sensitivities[0].kl.value
    for find in (profile.site, site.error, group.sensitivity, lambda name: site.sensitivity("e4m3fn", name)):
        with pytest.raises(KeyError):
            find("x")


def test_infinite_intervals_and_ratios_of_zero():
    # Seven units are too few for one.
    few_units = RatioMoments(50, 7, *map(ExactSum.of, ([1e-5], [1.0], [1e-10], [1e-5], [1.0])))
    delta = DeltaSums(*map(ExactSum.of, ([100.0], [-10.0], [1.0])))
    found = Sensitivity.of(SensitivityName("r", "logit", "loss"), delta, few_units, None)
    assert (found.kl.upper, found.delta.rmse, found.delta.mean) == (math.inf, 0.1, -0.1)
    adapter = TypeAdapter(Sensitivity)
    assert adapter.validate_python(serde.to_plain(found)) == found
    zero = error_of(np.zeros(3), np.zeros(3))
    beyond = error_of(np.zeros(3), np.ones(3))
    assert (zero.relative_error, zero.sqnr_db) == (0.0, math.inf)
    assert (beyond.relative_error, beyond.sqnr_db) == (math.inf, -math.inf)


def range_of(values: np.ndarray) -> RangeStats:
    """Squares of FP32 numbers are float64 numbers: nothing is rounded."""
    wide = values.astype(np.float64)
    return RangeStats(
        wide.size,
        float(np.abs(wide).max()),
        float(wide.min()),
        float(wide.max()),
        ExactSum.of(wide),
        ExactSum.of(np.square(wide)),
    )


def error_of(exact: np.ndarray, low: np.ndarray) -> ErrorStats:
    wide = [array.astype(np.float64) for array in (exact, low - exact)]
    signal, noise = (ExactSum.of(np.square(array)) for array in wide)
    beyond = int((exact > 1).sum())
    return ErrorStats("r", 0.25, exact.size, signal, noise, exact.size, beyond, 0)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60),
    st.lists(st.integers(1, 59), max_size=4, unique=True),
    st.randoms(use_true_random=False),
)
def test_neither_cutting_rows_into_parts_nor_their_order_changes_a_bit(values, cuts, random):
    x = np.array(values, np.float32)
    parts = [p for p in np.split(x, sorted(c for c in cuts if c < len(x))) if p.size]
    random.shuffle(parts)
    merged = functools.reduce(RangeStats.merge, map(range_of, parts))
    assert merged == range_of(x)
    low = x.astype(np.float16).astype(np.float32)
    errors = (error_of(p, p.astype(np.float16).astype(np.float32)) for p in parts)
    assert functools.reduce(ErrorStats.merge, errors) == error_of(x, low)
    wide = x.astype(np.float64)
    assert merged.mean == pytest.approx(wide.mean(), abs=1e-9)
    assert merged.variance == pytest.approx(wide.var(), abs=1e-7 * max(merged.amax, 1e-30) ** 2)


def test_channels_and_error_ratios_are_those_of_all_rows():
    known = dataclasses.replace(range_of(np.ones(2)), channel_amax=(3.0, 1.0))
    other = dataclasses.replace(known, channel_amax=(0.5, 2.0))
    assert known.merge(other).channel_amax == (3.0, 2.0)
    assert known.merge(dataclasses.replace(other, channel_amax=())).channel_amax == ()
    with pytest.raises(ValueError, match="different numbers of channels do not merge"):
        known.merge(dataclasses.replace(other, channel_amax=(1.0,)))
    with pytest.raises(ValueError, match="batches of different sizes do not merge"):
        BatchSpread(1, 512).merge(BatchSpread(1, 256))
    random = np.random.default_rng(0)
    exact = random.standard_normal(1000)
    low = exact + 0.01 * random.standard_normal(1000)
    parts = (error_of(exact[i : i + 300], low[i : i + 300]) for i in range(0, 1000, 300))
    merged = functools.reduce(ErrorStats.merge, parts)
    assert merged.count == 1000 and merged.saturated == int((exact > 1).sum())
    ratio = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert merged.relative_error == pytest.approx(ratio, rel=1e-12)
    assert merged.sqnr_db == pytest.approx(-20 * np.log10(ratio))


@pytest.mark.parametrize(
    "change", [{"activation_scale": 0.5}, {"activation_scale": None}, {"recipe": "other"}]
)
def test_statistics_of_different_scales_or_recipes_refuse_to_merge(change):
    one = error_of(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="different recipe or activation_scale do not merge"):
        one.merge(dataclasses.replace(one, **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_digest": "n"}, "profiles of different models"),
        ({"weights": ()}, "profiles of different sites"),
        ({"sites": ()}, "profiles of different sites"),
        ({"scales": {"e4m3fn/amax": {"x": 0.25}}}, "profiles of different scales"),
        ({"groups": ()}, "profiles of different groups or outputs"),
        ({"baseline_loss": {}}, "profiles of different groups or outputs"),
    ],
)
def test_profiles_of_different_things_refuse_to_merge(change, said):
    @settings(max_examples=3)
    @given(profiles)
    def check(profile: Profile) -> None:
        with pytest.raises(ValueError, match=f"{said} do not merge"):
            profile.merge(dataclasses.replace(profile, **change))

    check()


@given(sensitivities)
def test_sensitivities_of_different_things_refuse_to_merge(item):
    with pytest.raises(ValueError, match="do not merge"):
        item.merge(dataclasses.replace(item, denominator="entropy"))
    with pytest.raises(ValueError, match="do not merge"):
        item.merge(dataclasses.replace(item, labelled_moments=None))
    group = SiteGroup("h", ("fc1", "fc2"), (item,))
    with pytest.raises(ValueError, match=r"the groups \('fc1', 'fc2'\) and \('fc1', 'fc3'\) do not merge"):
        group.merge(dataclasses.replace(group, sites=("fc1", "fc3")))
    with pytest.raises(ValueError, match="sensitivities of different recipes or outputs do not merge"):
        group.merge(dataclasses.replace(group, sensitivities=()))
