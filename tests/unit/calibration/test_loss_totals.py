"""Totals against the same statistics from whole columns, and what they must not depend on."""

import pickle

import numpy as np
import pytest

from loka_onnx.calibration.effects.loss_totals import (
    BUCKETS,
    BucketTotals,
    LossRows,
    OutputTotals,
    RowTotals,
    as_scores,
    buckets_of,
    denominator_of,
    loss_terms,
    sum_batch,
)
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import CalibrationError, InternalError
from loka_onnx.numerics.intervals import ratio_interval

ROWS = 900
NUMBERS = [3503, 3265, 1742, 2424]
STRINGS = [2186]
"""Buckets of 0, 1, 2 and 10**12, and of two strings."""


def made(rows: int = ROWS, seed: int = 0) -> LossRows:
    random = np.random.default_rng(seed)
    weights = random.integers(1, 4, rows).astype(np.float64)
    return LossRows(
        weights,
        weights * random.exponential(1.0, rows),
        random.standard_normal((3, rows)),
        weights * np.stack([random.exponential(0.1, (3, rows)), random.standard_normal((3, rows))]),
    )


def parts(rows: LossRows, size: int) -> list[LossRows]:
    arrays = (rows.weights, rows.denominator, rows.delta, rows.terms)
    return [LossRows(*(a[..., i : i + size] for a in arrays)) for i in range(0, rows.weights.size, size)]


def users(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 40, rows)


def total(rows: LossRows, size: int, groups: np.ndarray | None = None, order: int = 1) -> OutputTotals:
    found: OutputTotals = RowTotals() if groups is None else BucketTotals()
    batches = [
        sum_batch(part, None if groups is None else groups[number * size : (number + 1) * size])
        for number, part in enumerate(parts(rows, size))
    ]
    for batch in batches[::order]:
        # As it comes from another process.
        found.add(pickle.loads(pickle.dumps(batch)))
    return found


@pytest.mark.parametrize("grouped", [False, True])
def test_moments_are_those_of_the_columns(grouped):
    rows, groups = made(), users() if grouped else None
    found = total(rows, 128, groups)
    assert found.rows == ROWS and found.units == 3
    other = total(rows, 128, groups, order=-1)
    for term in (0, 1):
        for unit in range(3):
            mine = found.moments(term, unit).interval()
            reference = ratio_interval(rows.terms[term, unit], rows.denominator, groups=groups)
            assert mine.value == pytest.approx(reference.value, rel=1e-12)
            # The quantile of Student's t is an expansion here.
            assert mine.lower == pytest.approx(reference.lower, rel=1e-6) and mine.rows == ROWS
            assert found.relative()[term, unit] == pytest.approx(reference.value, rel=1e-12)
            # The order of batches does not show to the last bit.
            assert grouped or found.moments(term, unit) == other.moments(term, unit)
    assert found.moments(0, 0).units == (40 if grouped else ROWS)
    delta, w = found.delta(1), rows.weights
    assert (delta, found.mean_denominator) == (other.delta(1), other.mean_denominator)
    assert delta.mean == pytest.approx(np.average(rows.delta[1], weights=w), rel=1e-12)
    assert delta.rmse == pytest.approx(np.sqrt(np.average(rows.delta[1] ** 2, weights=w)), rel=1e-12)
    assert found.mean_denominator.value == pytest.approx(rows.denominator.sum() / w.sum(), rel=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_batches_of_the_other_unit_are_refused(grouped):
    found: OutputTotals = BucketTotals() if grouped else RowTotals()
    with pytest.raises(InternalError):
        found.add(sum_batch(made(), None if grouped else users()))
    assert found.rows == 0


@pytest.mark.parametrize("names", [
    users(),
    users().astype(np.uint16),
    users() / 8.0 - 2.0,
    np.char.add("user ", users().astype(str)),
    users().astype("datetime64[s]"),
    users().astype(str).astype(object),
])  # fmt: skip
def test_buckets_hold_whole_groups_whatever_names_them(names):
    buckets = buckets_of(names)
    assert buckets.min() >= 0 and buckets.max() < BUCKETS
    pairs = {(user, bucket) for user, bucket in zip(users(), buckets, strict=True)}
    # Forty names fall into forty of 4096 buckets five times in six; these do.
    assert len(pairs) == len(np.unique(buckets)) == 40


@pytest.mark.parametrize("groups", [
    np.array([None, 7, None, 7, 7], dtype=object),
    np.array([np.nan, 7.0, np.nan, 7.0, 7.0]),
    np.array(["", "7", "", "7", "7"]),
    np.array(["NaT", "2026-01-01", "NaT", "2026-01-01", "2026-01-01"], dtype="datetime64[D]"),
])  # fmt: skip
def test_rows_without_a_group_are_units_of_their_own(groups):
    buckets = buckets_of(groups)
    known = buckets_of(groups[1:2] if groups.dtype != object else np.array([7]))
    assert set(buckets[[1, 3, 4]]) == set(known)
    assert buckets[0] != buckets[2]


def test_buckets_are_the_same_everywhere_and_more_groups_than_buckets_keep_the_interval():
    assert buckets_of(np.array([0, 1, 2, 10**12])).tolist() == NUMBERS
    assert buckets_of(np.array(["user 1"])).tolist() == STRINGS
    assert buckets_of(np.array([0.0])).tolist() == buckets_of(np.array([-0.0])).tolist()
    counts = np.bincount(buckets_of(np.arange(400_000)), minlength=BUCKETS)
    assert counts.min() > 50 and counts.max() < 160
    # 20,000 users of five rows that move together: 4096 buckets see it, rows do not.
    random = np.random.default_rng(3)
    names = np.repeat(np.arange(20_000), 5)
    moved = np.repeat(random.standard_normal(20_000), 5) + random.standard_normal(100_000)
    rows = LossRows(np.ones(100_000), random.exponential(1, 100_000), moved[None], moved[None, None])
    by_bucket, by_row = total(rows, 4096, names).moments(0, 0), total(rows, 4096).moments(0, 0)
    exact = ratio_interval(moved, rows.denominator, groups=names)
    half = (exact.upper - exact.lower) / 2
    assert by_bucket.units == np.unique(buckets_of(names)).size > 4000
    found = by_bucket.interval()
    # A variance from 4096 sums is known to √(2/4096) = 2 %.
    assert (found.upper - found.lower) / 2 == pytest.approx(half, rel=0.06)
    assert by_row.standard_error * 1.96 < 0.7 * half


@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_kept_does_not_grow_with_the_rows(grouped):
    def kept(batches: int) -> int:
        found: OutputTotals = BucketTotals() if grouped else RowTotals()
        batch = sum_batch(made(64), users(64) if grouped else None)
        for _ in range(batches):
            found.add(batch)
        found.moments(0, 0)
        return len(pickle.dumps(found))

    # Batches that wait to be added up: 20 of either.
    assert kept(20 + 5 * 128) < kept(20) + 1000


# Terms and denominators of rows; `test_sensitivity_pass` holds them against the losses themselves


LOGIT = OutputSpec("ctr", OutputKind.LOGIT, "click", "value")
UNLABELLED = OutputSpec("ctr", OutputKind.LOGIT, None)


def world(rows: int = 500):
    random = np.random.default_rng(0)
    z = random.standard_normal(rows) * 2
    changed = [z + random.standard_normal(rows) * size for size in (1e-4, 0.3)]
    columns = {"click": (random.random(rows) < 0.3).astype(np.int8), "value": random.integers(1, 9, rows)}
    return z, changed, columns


def test_probabilities_become_logits_and_without_labels_there_is_kl_over_entropy():
    z, changed, columns = world()
    found, labelled = (
        loss_terms(UNLABELLED, z, changed, {}),
        loss_terms(LOGIT, z, changed, columns),
    )
    np.testing.assert_array_equal(labelled.weights, columns["value"])
    np.testing.assert_array_equal(labelled.delta, [after - z for after in changed])
    assert found.terms.shape == (1, 2, 500)
    np.testing.assert_allclose(found.terms[0] * columns["value"], labelled.terms[0], rtol=1e-12)
    p = 1 / (1 + np.exp(-z.astype(np.longdouble)))
    np.testing.assert_allclose(found.denominator, -p * np.log(p) - (1 - p) * np.log(1 - p), rtol=1e-12)
    assert (denominator_of(UNLABELLED), denominator_of(LOGIT)) == ("entropy", "loss")
    spec = OutputSpec("p", OutputKind.PROBABILITY, None, clip=1e-3)
    scores = as_scores(spec, np.array([[0.5], [0.0], [0.75]], dtype=np.float32))
    assert scores.tolist() == pytest.approx([0.0, np.log(1e-3 / (1 - 1e-3)), np.log(3.0)])


@pytest.mark.parametrize(("where", "what", "count"), [
    ("exact", "output 'ctr'", 500),
    ("click", "column 'click'", 500),
    ("value", "column 'value'", 500),
    ("changed", "with a site in low precision, output 'ctr'", 1000),
])  # fmt: skip
def test_what_is_not_finite_is_refused(where, what, count):
    z, changed, columns = world()
    columns = {name: values.astype(np.float64) for name, values in columns.items()}
    {"exact": z, "changed": changed[1], **columns}[where][7] = np.inf
    with pytest.raises(CalibrationError) as caught:
        loss_terms(LOGIT, z, changed, columns)
    assert caught.value.code == "E0502" and caught.value.what.startswith(what)
    assert caught.value.evidence == f"1 of {count} values, in a batch of 500 rows"
