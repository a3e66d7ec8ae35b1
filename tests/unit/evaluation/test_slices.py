"""Slices against formulas written out on the masked rows, and the statement that they hold together."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judged_rows import LOGIT, UNLABELLED, entropy_of, kl_of, losses, one, sigmoid
from scipy import stats

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import LEAST_UNITS, BudgetStatus
from loka_onnx.errors import DataError
from loka_onnx.evaluation.accuracy import Units
from loka_onnx.evaluation.slices import LARGEST, LEAST_EVENTS, read_slices

ROWS = 6000
WEIGHTED = replace(LOGIT, weight="w")


def make_rows(seed=3, rows=ROWS):
    """Logits, FP8-like logits, and columns: a third of the rows in each of three countries, four devices."""
    rng = np.random.default_rng(seed)
    z = rng.normal(-1, 1.2, rows)
    columns = {
        "clicked": (rng.random(rows) < sigmoid(z)).astype(np.float32),
        "w": rng.uniform(0.5, 2, rows),
        "user": rng.integers(0, rows // 3, rows),
        "country": rng.choice(np.array(["BR", "DE", "JP"]), rows),
        "device": rng.integers(0, 4, rows),
    }
    return z, z + 0.05 * rng.normal(size=rows), columns


def judge(z, z_prime, columns, slices, spec=LOGIT, group=None, **options):
    return one(z, z_prime, columns, spec, units=Units.of(columns, group, slices), **options)


def parts(z, z_prime, y):
    """KL, labelled part and FP32 loss of each row."""
    return kl_of(z, z_prime), (sigmoid(z) - y) * (z_prime - z), losses(z, y)


def by_hand(numerator, base, units, confidence):
    """Ratio with the cluster-robust delta method: rows of a unit are summed first.

    Of KL, which is never negative, the upper end is further out by the largest unit.
    """
    ratio = numerator.sum() / base.sum()
    influence = {}
    for unit, value in zip(units.tolist(), numerator - ratio * base, strict=True):
        influence[unit] = influence.get(unit, 0.0) + value
    g = len(influence)
    error = math.sqrt(g / (g - 1) * sum(v * v for v in influence.values())) / base.sum()
    half = stats.t.ppf(0.5 + confidence / 2, g - 1) * error
    beyond = max(influence.values()) / base.sum() if (numerator >= 0).all() else 0.0
    return ratio, ratio - half, ratio + half + beyond


@pytest.mark.parametrize(("group", "confidence"), [(None, 0.95), ("user", 0.95), (None, 0.975)])
def test_each_slice_against_its_own_rows_with_a_corrected_quantile(group, confidence):
    z, z_prime, columns = make_rows()
    result = judge(z, z_prime, columns, ("country", "device"), WEIGHTED, group, confidence=confidence)
    units = np.arange(ROWS) if group is None else columns[group]
    kl, labelled, base = (part * columns["w"] for part in parts(z, z_prime, columns["clicked"]))
    got = result.difference.delta_ne
    expected = by_hand(kl + labelled, base, units, confidence)
    assert (got.value, got.lower, got.upper) == pytest.approx(expected, rel=1e-6)
    assert got.confidence == result.difference.kl.confidence == confidence
    # Seven slices of two columns share the error.
    each = 1 - (1 - confidence) / 7
    wanted = {("country", v) for v in ("BR", "DE", "JP")} | {("device", v) for v in "0123"}
    assert {(item.column, item.value) for item in result.slices} == wanted
    for item in result.slices:
        mask = columns[item.column].astype(str) == item.value
        assert (item.rows, item.units) == (mask.sum(), len(set(units[mask].tolist())))
        for got, numerator in ((item.delta_ne, kl + labelled), (item.kl, kl), (item.labelled, labelled)):
            expected = by_hand(numerator[mask], base[mask], units[mask], each)
            assert (got.value, got.lower, got.upper) == pytest.approx(expected, rel=1e-6)
            assert got.confidence == pytest.approx(each, rel=1e-12)
            assert got.rows == mask.sum()


def test_without_labels_a_slice_is_relative_to_its_own_entropy():
    z, z_prime, columns = make_rows()
    del columns["clicked"]
    result = judge(z, z_prime, columns, ("country",), UNLABELLED)
    for item in result.slices:
        mask = columns["country"] == item.value
        kl, entropy = kl_of(z[mask], z_prime[mask]), entropy_of(z[mask])
        expected = by_hand(kl, entropy, np.arange(mask.sum()), 1 - 0.05 / 3)
        assert (item.kl.value, item.kl.lower, item.kl.upper) == pytest.approx(expected, rel=1e-6)
        assert (item.delta_ne, item.labelled) == (None, None)
        assert item.judged is item.kl


def test_harm_to_one_country_is_found_behind_an_average_inside_the_budget():
    z, z_prime, columns = make_rows(rows=60_000)
    hurt = (columns["country"] == "JP") & (columns["device"] == 2)
    columns["place"] = np.where(hurt, "JP-2", columns["country"])
    z_prime = z + np.where(hurt, 0.6, 0.01) * (z_prime - z) / 0.05
    spec = replace(LOGIT, budget=0.03)
    result = judge(z, z_prime, columns, ("place",), spec)
    assert result.budget_status == BudgetStatus.WITHIN
    worst, *others = result.slices
    assert (worst.value, worst.status) == ("JP-2", BudgetStatus.BEYOND)
    assert worst.delta_ne.lower > spec.budget
    assert {item.status for item in others} == {BudgetStatus.WITHIN}
    assert [item.value for item in result.slices_of("beyond")] == ["JP-2"]


def test_the_surest_harm_comes_first_and_what_is_not_judged_last():
    z, z_prime, columns = make_rows()
    rng = np.random.default_rng(0)
    columns["shop"] = rng.choice(12, ROWS, p=[0.4, *[0.05] * 10, 0.1])
    columns["shop"][:5] = 99
    columns["shop"][5:8] = 98
    result = judge(z, z_prime, columns, ("shop",))
    *judged, last_but_one, last = result.slices
    lower = [item.delta_ne.lower for item in judged]
    assert lower == sorted(lower, reverse=True)
    # Neither by estimate nor by upper end, which would put the smallest first.
    assert [item.delta_ne.value for item in judged] != sorted(
        (i.delta_ne.value for i in judged), reverse=True
    )
    assert [(last_but_one.value, last_but_one.rows), (last.value, last.rows)] == [("99", 5), ("98", 3)]
    assert last.status == BudgetStatus.NOT_JUDGED and last.judged is None
    assert last.reason == f"3 rows, an interval needs {LEAST_UNITS} rows"


def test_slices_that_are_not_judged_take_nothing_from_the_others_nor_from_the_whole():
    z, z_prime, columns = make_rows()
    before, without = judge(z, z_prime, columns, ("country",)), judge(z, z_prime, columns, ())
    columns["country"] = np.where(np.arange(ROWS) < 3, "??", columns["country"])
    after = judge(z, z_prime, columns, ("country",))
    assert after.slices[0].delta_ne.confidence == before.slices[0].delta_ne.confidence == 1 - 0.05 / 3
    assert without.slices == () and without.slices_left_out == {}
    assert (before.difference, before.budget_status) == (without.difference, without.budget_status)


def test_few_groups_or_few_events_give_no_interval():
    z, z_prime, columns = make_rows()
    columns["user"] = np.where(columns["country"] == "DE", columns["user"] % 90, columns["user"])
    by_user = {item.value: item for item in judge(z, z_prime, columns, ("country",), group="user").slices}
    german = by_user["DE"]
    assert german.reason == f"{german.rows} rows in 90 groups, an interval needs {LEAST_UNITS} groups"
    assert by_user["BR"].status != BudgetStatus.NOT_JUDGED
    # Rare clicks: thousands of rows say little where some twenty of them are clicked.
    rare = z - 5.5
    expected = sigmoid(rare)[columns["country"] == "DE"].sum()
    assert expected < LEAST_EVENTS
    german = next(i for i in judge(rare, rare, columns, ("country",)).slices if i.value == "DE")
    assert german.reason == (
        f"about {expected:.0f} of {german.rows} rows are expected in the rarer class, an interval needs "
        f"{LEAST_EVENTS}"
    )
    # Few who do not click are as few; a regression has no classes.
    assert judge(-rare, -rare, columns, ("country",)).slices_of("not judged")
    regression = OutputSpec("ctr", OutputKind.REGRESSION, "clicked")
    assert not judge(rare, rare, columns, ("country",), regression).slices_of("not judged")


def test_rows_without_weight_are_no_evidence():
    z, z_prime, columns = make_rows()
    columns["w"] = np.where((columns["country"] == "DE") & (np.arange(ROWS) > 200), 0.0, 1.0)
    german = next(i for i in judge(z, z_prime, columns, ("country",), WEIGHTED).slices if i.value == "DE")
    counted = int(((columns["country"] == "DE") & (columns["w"] > 0)).sum())
    assert (german.rows, german.units) == ((columns["country"] == "DE").sum(), counted)
    assert german.reason == f"{counted} rows, an interval needs {LEAST_UNITS} rows"


def test_a_slice_whose_loss_is_zero_has_nothing_to_be_relative_to():
    rng = np.random.default_rng(5)
    y = rng.normal(size=400)
    half = np.repeat(["exact", "other"], 200)
    f = np.where(half == "exact", y, y + 1)
    spec = OutputSpec("ctr", OutputKind.REGRESSION, "minutes")
    slices = judge(f, f + 0.1, {"minutes": y, "half": half}, ("half",), spec).slices
    assert [item.value for item in slices] == ["other", "exact"]
    assert slices[1].reason == "the loss of the FP32 model is 0 on its 200 rows"


def test_an_id_column_is_cut_to_its_most_frequent_values():
    z, z_prime, columns = make_rows(rows=40_000)
    rng = np.random.default_rng(9)
    columns["ad"] = np.minimum(rng.geometric(0.01, 40_000), 300)
    result = judge(z, z_prime, columns, ("ad", "country"))
    ads = [item for item in result.slices if item.column == "ad"]
    values, counts = np.unique(columns["ad"], return_counts=True)
    assert result.slices_left_out == {"ad": len(values) - LARGEST}
    assert sorted(item.rows for item in ads) == sorted(counts)[-LARGEST:]
    assert len(result.slices) == LARGEST + 3


@pytest.mark.parametrize(
    ("stored", "values", "codes"),
    [
        (np.array(["b", "", "a", "b"]), ("", "a", "b"), [2, 0, 1, 2]),
        (np.array(["b", None, "a", "b"], object), ("a", "b", None), [1, 2, 0, 1]),
        (np.array([7, None, 10, 7], object), ("7", "10", None), [0, 2, 1, 0]),
        (np.array([7, -1, 10, 7], np.int8), ("-1", "7", "10"), [1, 0, 2, 1]),
        (np.array([0.5, np.nan, -np.inf, 0.5]), ("-inf", "0.5", None), [1, 2, 0, 1]),
        (np.array([0.5, np.nan, None, 0.5], object), ("0.5", None), [0, 1, 1, 0]),
        (np.array([True, False, True, True]), ("False", "True"), [1, 0, 1, 1]),
        (np.array([None] * 4, object), (None,), [0, 0, 0, 0]),
        (
            np.array(["2025-01-01", "NaT", "2024-01-01", "2025-01-01"], "datetime64[D]"),
            ("2024-01-01", "2025-01-01", None),
            [1, 2, 0, 1],
        ),
    ],
)
def test_values_of_every_kind(stored, values, codes):
    (column,) = read_slices({"c": stored}, ("c",))
    assert (column.name, column.values, column.codes.tolist()) == ("c", values, codes)


def test_a_missing_slice_column():
    with pytest.raises(DataError) as caught:
        read_slices({"clicked": np.zeros(2)}, ("country",))
    assert caught.value.code == "E1017"


@pytest.mark.slow
def test_all_slices_hold_together():
    """20 countries and 4 devices of a stream with a known change; all 24 statements at once.

    The nominal 95 % has a standard error of 1.3 % over 300 trials. Bonferroni over independent slices is
    hardly conservative; without the correction 24 intervals hold together 0.95²⁴ = 29 % of the time.
    """
    trials, rows, together, alone = 300, 12_000, 0, 0
    rng = np.random.default_rng(7)
    nodes, mass = np.polynomial.hermite_e.hermegauss(60)
    noise, noise_mass = np.polynomial.hermite_e.hermegauss(20)
    mass, noise_mass = mass / mass.sum(), noise_mass / noise_mass.sum()
    z_nodes, moved = -1 + 1.2 * nodes[:, None], 0.3 * noise[None, :]
    p = sigmoid(z_nodes)
    kl = np.log1p(np.exp(z_nodes + moved)) - np.log1p(np.exp(z_nodes)) - p * moved
    base = np.log1p(np.exp(z_nodes)) - p * z_nodes
    truth = (mass @ kl @ noise_mass) / (mass @ base)[0]
    for _ in range(trials):
        z = rng.normal(-1, 1.2, rows)
        columns = {
            "clicked": (rng.random(rows) < sigmoid(z)).astype(np.float64),
            "country": rng.integers(0, 20, rows),
            "device": rng.integers(0, 4, rows),
        }
        found = judge(z, z + 0.3 * rng.normal(size=rows), columns, ("country", "device")).slices
        assert len(found) == 24
        together += all(item.delta_ne.lower <= truth <= item.delta_ne.upper for item in found)
        narrow = stats.norm.ppf(0.975) / stats.norm.ppf(1 - 0.025 / 24)
        alone += all(
            abs(i.delta_ne.value - truth) <= narrow * (i.delta_ne.upper - i.delta_ne.value) for i in found
        )
    assert 0.925 <= together / trials <= 0.98
    assert alone / trials < 0.5
