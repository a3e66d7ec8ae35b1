"""Verdicts on an engine against formulas written out, and coverage of the paired interval."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judged_rows import LOGIT, UNLABELLED, entropy_of, kl_of, losses, one, sample, sigmoid
from scipy import stats

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import ConfigError, DataError, EvaluationError, InternalError
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs, evaluate_reference
from loka_onnx.evaluation.budget import budget_status, rows_to_decide


def test_logit_output_against_formulas_written_out():
    z, z_prime, y = sample()
    result = one(z[:, None], z_prime, {"clicked": y})
    before, after = losses(z, y), losses(z_prime, y)
    p, p_prime, delta, kl = sigmoid(z), sigmoid(z_prime), z_prime - z, kl_of(z, z_prime)
    got = result.difference
    assert got.delta_ne.value == pytest.approx(after.mean() / before.mean() - 1, rel=1e-9)
    assert got.kl.value == pytest.approx(kl.mean() / before.mean(), rel=1e-9)
    assert got.labelled.value == pytest.approx(((p - y) * delta).mean() / before.mean(), rel=1e-9)
    assert got.kl.value + got.labelled.value == pytest.approx(got.delta_ne.value, rel=1e-9)
    assert got.kl.lower > 0
    assert got.delta_prediction_ratio.value == pytest.approx((p_prime - p).mean() / y.mean(), rel=1e-9)
    assert got.delta_rmse == pytest.approx(np.sqrt((delta**2).mean()))
    assert got.delta_max == np.abs(delta).max()
    ratio = after.mean() / before.mean()
    residual = after - ratio * before
    half = stats.t.ppf(0.975, 3999) * residual.std() / math.sqrt(3999) / before.mean()
    assert got.delta_ne.upper - got.delta_ne.value == pytest.approx(half, rel=1e-9)
    rate = y.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert result.metrics.loss == pytest.approx(after.mean())
    assert result.metrics.normalized_entropy == pytest.approx(after.mean() / entropy)
    assert result.metrics.prediction_ratio == pytest.approx(p_prime.mean() / rate)
    u = stats.mannwhitneyu(z_prime[y == 1], z_prime[y == 0]).statistic / (y.sum() * (1 - y).sum())
    assert result.metrics.auc == pytest.approx(u)
    assert got.delta_auc.lower < got.delta_auc.value < got.delta_auc.upper


def test_reference_has_no_difference_and_is_within():
    z, _, y = sample(200)
    (result,) = evaluate_reference({"ctr": z}, {"clicked": y}, (LOGIT,))
    found = (result.difference, result.budget_status, result.rows_to_decide)
    assert found == (None, BudgetStatus.WITHIN, None)
    # An engine equal to it is within any budget.
    same = one(z, z.copy(), {"clicked": y}, replace(LOGIT, budget=0.0))
    assert (result.metrics, same.budget_status) == (same.metrics, BudgetStatus.WITHIN)
    assert same.difference.delta_ne == Interval(0.0, 0.0, 0.0, 0.95, 200)


def test_curves_are_means_of_equally_many_counted_rows_and_quantiles_of_the_change():
    z, z_prime, y = sample(1003)
    weights = np.where(np.arange(1003) < 3, 0.0, 1.0 + np.arange(1003) % 3)
    spec = replace(LOGIT, weight="w")
    given = ({"ctr": z_prime}, {"clicked": y, "w": weights}, (spec,), Units(curves=True))
    (result,) = evaluate_outputs({"ctr": z}, *given)
    order = 3 + np.argsort(z_prime[3:])
    for place, found in enumerate(result.calibration):
        rows = order[100 * place : 100 * (place + 1)]
        share = weights[rows] / weights[rows].sum()
        assert found.rows == 100
        assert found.predicted == pytest.approx(share @ sigmoid(z_prime[rows]))
        assert found.observed == pytest.approx(share @ y[rows])
    assert len(result.calibration) == 10
    change = np.sort(z_prime - z)
    assert result.drift["50 %"] == pytest.approx(change[501])
    assert result.drift["0.1 %"] == pytest.approx(np.interp(0.001 * 1002, range(1003), change))
    (reference,) = evaluate_reference({"ctr": z}, given[1], (spec,), curves=True)
    assert reference.calibration[0].predicted == pytest.approx(
        np.average(sigmoid(np.sort(z[3:])[:100]), weights=weights[3 + np.argsort(z[3:])[:100]])
    )


def test_there_is_no_curve_without_labels_and_none_where_nobody_asks():
    z, z_prime, y = sample(200)
    (unlabelled,) = evaluate_outputs({"ctr": z}, {"ctr": z_prime}, {}, (UNLABELLED,), Units(curves=True))
    assert unlabelled.calibration == () and len(unlabelled.drift) == 9
    plain = one(z, z_prime, {"clicked": y})
    assert (plain.calibration, plain.drift) == ((), {})


@pytest.mark.parametrize("drop", [None, 0.01])
def test_without_metrics_the_verdict_is_the_same(drop):
    z, z_prime, y = sample()
    given = ({"ctr": z}, {"ctr": z_prime}, {"clicked": y}, (replace(LOGIT, max_auc_drop=drop),))
    (whole,), (alone,) = evaluate_outputs(*given), evaluate_outputs(*given, Units(metrics=False))
    assert alone.difference.judged == whole.difference.judged and alone.difference.kl == whole.difference.kl
    assert (alone.budget_status, alone.because, alone.guards) == (
        whole.budget_status,
        whole.because,
        whole.guards,
    )
    is_guarded = drop is not None
    assert (alone.difference.delta_auc == whole.difference.delta_auc) is is_guarded
    assert (alone.metrics == whole.metrics) is is_guarded


def test_probability_output_is_judged_as_its_logit_and_clipped():
    z, z_prime, y = sample(500)
    spec = OutputSpec("p", OutputKind.PROBABILITY, "clicked", clip=1e-5)
    p, p_prime = sigmoid(z), sigmoid(z_prime)
    as_logit, as_probability = one(z, z_prime, {"clicked": y}), one(p, p_prime, {"clicked": y}, spec)
    assert as_probability.difference.delta_ne.upper == pytest.approx(as_logit.difference.delta_ne.upper)
    assert as_probability.metrics.auc == as_logit.metrics.auc
    p_prime[0] = float(y[0] == 0)  # certain and wrong: the clip bounds the loss
    clipped = one(p, p_prime, {"clicked": y}, spec)
    bound = math.log((1 - 1e-5) / 1e-5) * (1 if y[0] == 0 else -1)
    assert clipped.difference.delta_max == pytest.approx(abs(bound - z[0]), rel=1e-9)


def test_without_labels_kl_over_the_mean_entropy_is_judged_and_nothing_is_invented():
    z, z_prime, y = sample()
    result = one(z, z_prime, {}, UNLABELLED)
    kl, entropy = kl_of(z, z_prime), entropy_of(z)
    got = result.difference
    ratio = kl.mean() / entropy.mean()
    half = stats.t.ppf(0.975, 3999) * (kl - ratio * entropy).std() / math.sqrt(3999) / entropy.mean()
    # Above, KL is out by one more row like the largest.
    largest = (kl - ratio * entropy).max() / entropy.sum()
    expected = (ratio, ratio - half, ratio + half + largest)
    assert (got.kl.value, got.kl.lower, got.kl.upper) == pytest.approx(expected, rel=1e-9)
    assert (got.denominator, got.judged_name) == ("entropy", "KL over the mean entropy")
    assert got.judged is got.kl
    assert (got.delta_ne, got.labelled, got.delta_auc, got.delta_prediction_ratio) == (None,) * 4
    metrics = result.metrics
    assert (metrics.loss, metrics.normalized_entropy, metrics.auc, metrics.prediction_ratio) == (None,) * 4
    assert got.delta_rmse == pytest.approx(np.sqrt(((z_prime - z) ** 2).mean()))
    labelled = one(z, z_prime, {"clicked": y}).difference
    assert (labelled.denominator, labelled.judged_name) == ("loss", "ΔNE")
    assert labelled.judged is labelled.delta_ne


def test_without_labels_probabilities_weights_and_groups_count_as_with_them():
    z, z_prime, _ = sample(600)
    w = np.random.default_rng(22).integers(1, 4, 600)
    spec = OutputSpec("p", OutputKind.PROBABILITY, None, weight="w")
    weighted = one(sigmoid(z), sigmoid(z_prime), {"w": w}, spec).difference
    users = np.repeat(np.arange(600), w)
    copied = one(np.repeat(z, w), np.repeat(z_prime, w), {}, UNLABELLED, users).difference
    assert (weighted.kl.value, weighted.kl.upper) == pytest.approx((copied.kl.value, copied.kl.upper))


def test_regression_output_uses_squared_error():
    rng = np.random.default_rng(21)
    y = rng.normal(10, 2, 300)
    f = y + rng.normal(size=300)
    f_prime = f + 0.3
    spec = OutputSpec("watch", OutputKind.REGRESSION, "minutes")
    result = one(f, f_prime, {"minutes": y}, spec)
    before, after = ((f - y) ** 2).mean(), ((f_prime - y) ** 2).mean()
    assert result.difference.delta_ne.value == pytest.approx(after / before - 1)
    assert result.difference.kl.value == pytest.approx(0.09 / before)
    assert result.difference.delta_prediction_ratio.value == pytest.approx(0.3 / y.mean())
    assert (result.metrics.auc, result.difference.delta_auc) == (None, None)
    assert result.metrics.normalized_entropy == pytest.approx(after / y.var())


def test_weights_count_rows_and_groups_widen_the_interval():
    z, z_prime, y = sample(600)
    w = np.random.default_rng(22).integers(0, 4, 600)
    weighted = one(z, z_prime, {"clicked": y, "w": w}, WEIGHTED)
    repeated = one(*(np.repeat(a, w) for a in (z, z_prime)), {"clicked": np.repeat(y, w)})
    assert weighted.difference.delta_ne.value == pytest.approx(repeated.difference.delta_ne.value, rel=1e-9)
    assert weighted.difference.delta_auc.value == pytest.approx(repeated.difference.delta_auc.value, rel=1e-9)
    assert weighted.difference.delta_rmse == pytest.approx(repeated.difference.delta_rmse)
    copies = [np.repeat(a, 4) for a in (z, z_prime, y)]
    users = np.repeat(np.array([f"u{i}" for i in range(600)], object), 4)
    grouped = one(copies[0], copies[1], {"clicked": copies[2]}, groups=users).difference
    alone = one(z, z_prime, {"clicked": y}).difference
    assert grouped.delta_ne.upper == pytest.approx(alone.delta_ne.upper)
    assert grouped.delta_prediction_ratio.lower == pytest.approx(alone.delta_prediction_ratio.lower)
    assert grouped.delta_auc.upper == pytest.approx(alone.delta_auc.upper, rel=1e-2)


def test_the_paired_interval_covers_the_true_change():
    """A constant shift of calibrated logits; 400 trials, so a nominal 95 % has a standard error of 1.1 %."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    z_nodes, shift = -1 + 1.2 * nodes, 0.05
    p = sigmoid(z_nodes)
    mean_loss = weights @ (p * np.log1p(np.exp(-z_nodes)) + (1 - p) * np.log1p(np.exp(z_nodes)))
    change = weights @ (np.log1p(np.exp(z_nodes + shift)) - np.log1p(np.exp(z_nodes)) - p * shift)
    truth = change / mean_loss
    covered = 0
    for seed in range(400):
        z, _, y = sample(400, seed=1000 + seed)
        interval = one(z, z + shift, {"clicked": y}).difference.delta_ne
        covered += interval.lower <= truth <= interval.upper
    assert 0.92 <= covered / 400 <= 0.98


def test_the_whole_interval_is_held_against_the_budget():
    cases = {(-1.0, 0.1): "within", (0.05, 0.2): "undecided", (0.1, 0.2): "undecided", (0.11, 0.2): "beyond"}
    for (lower, upper), status in cases.items():
        assert budget_status(Interval((lower + upper) / 2, lower, upper, 0.95, 100), 0.1) == status


@pytest.mark.parametrize(
    ("interval", "budget", "rows", "within"),
    [
        # Half the distance to the budget needs four times the rows.
        ((0.0, -0.2, 0.2), 0.1, 4000, 1),
        ((0.0, -0.1, 0.1), 0.1, None, 0),
        ((0.1, 0.0, 0.2), 0.1, None, 0),
        ((0.0, -math.inf, math.inf), 0.1, None, 0),
        # The lower end on the budget: undecided, though the rows needed come out as the rows there are.
        ((0.375, 0.25, 0.5), 0.25, 1001, 0),
        # Nearer than a tenth of the half width it would take more than a hundred times the rows.
        ((0.0, -1.0, 1.0), 0.1001, 99_800, 100),
        ((0.0, -1.0, 1.0), 0.0999, None, 0),
        ((0.0, -1.0, 1.0), -0.0999, None, 0),
    ],
)
def test_rows_to_decide(interval, budget, rows, within):
    found = rows_to_decide(Interval(*interval, 0.95, 1000), budget)
    assert found is rows is None or abs(found - rows) <= within


def test_rows_to_decide_does_decide():
    z, z_prime, y = sample(2000)
    interval = one(z, z_prime, {"clicked": y}).difference.delta_ne
    budget = interval.value + 0.4 * (interval.upper - interval.value)
    spec = replace(LOGIT, budget=budget)
    few = one(z, z_prime, {"clicked": y}, spec)
    assert few.budget_status == BudgetStatus.UNDECIDED
    assert few.rows_to_decide == pytest.approx(2000 / 0.4**2, rel=0.01)
    times = math.ceil(few.rows_to_decide / 2000)
    many = one(np.tile(z, times), np.tile(z_prime, times), {"clicked": np.tile(y, times)}, spec)
    assert many.budget_status == BudgetStatus.WITHIN


def test_a_probability_may_be_a_little_above_1():
    above = np.array([np.nextafter(np.float32(1), np.float32(2)), 0.5])
    spec = OutputSpec("ctr", OutputKind.PROBABILITY, "clicked")
    found = one(np.array([0.5, 0.5]), above, {"clicked": np.array([0.0, 1.0])}, spec)
    assert math.isfinite(found.difference.delta_ne.value)


def test_a_single_class_label_has_no_auc():
    z, z_prime, _ = sample(50)
    zeros = one(z, z_prime, {"clicked": np.zeros(50, bool)})
    assert (zeros.metrics.auc, zeros.difference.delta_auc) == (None, None)
    assert math.isnan(zeros.metrics.normalized_entropy)
    assert math.isnan(zeros.metrics.prediction_ratio)
    assert zeros.difference.delta_prediction_ratio.upper == math.inf
    assert math.isfinite(zeros.difference.delta_ne.upper)


Y = np.array([0.0, 1.0])
NAN = np.array([np.nan, 1.0])
WEIGHTED = replace(LOGIT, weight="w")
PROBABILITY = OutputSpec("ctr", OutputKind.PROBABILITY, "clicked")
REGRESSION = OutputSpec("ctr", OutputKind.REGRESSION, "clicked")


@pytest.mark.parametrize(
    ("spec", "columns", "code", "column"),
    [
        (WEIGHTED, {}, "E1008", "clicked"),
        (WEIGHTED, {"clicked": np.array(["a", "b"]), "w": Y}, "E1009", "clicked"),
        (WEIGHTED, {"clicked": NAN, "w": Y}, "E1010", "clicked"),
        (WEIGHTED, {"clicked": Y, "w": -Y}, "E1010", "w"),
        (WEIGHTED, {"clicked": Y, "w": 0 * Y}, "E1002", "w"),
        (WEIGHTED, {"clicked": Y[:0], "w": Y[:0]}, "E1003", "ctr"),
        (replace(UNLABELLED, weight="w"), {"w": Y[:0]}, "E1003", "ctr"),
        (LOGIT, {"clicked": 5 * Y}, "E1010", "clicked"),
        (LOGIT, {"clicked": -Y}, "E1010", "clicked"),
    ],
)
def test_bad_columns_are_refused(spec, columns, code, column):
    with pytest.raises(DataError) as caught:
        one(Y, Y, columns, spec)
    assert caught.value.code == code and f"'{column}'" in caught.value.what
    if columns.get("clicked") is not None and spec == LOGIT:
        assert caught.value.evidence.startswith("1 of 2 rows, the first is row 1: ")


@pytest.mark.parametrize(
    ("spec", "reference", "candidate", "error", "code"),
    [
        (LOGIT, Y, np.zeros(3), EvaluationError, "E1006"),
        (LOGIT, np.zeros((2, 3)), Y, ConfigError, "E1005"),
        (LOGIT, Y, NAN, EvaluationError, "E1007"),
        (LOGIT, NAN, Y, EvaluationError, "E1007"),
        (PROBABILITY, 3.7 * Y, Y, ConfigError, "E1018"),
        (PROBABILITY, Y, 3.7 * Y, EvaluationError, "E1019"),
        (REGRESSION, Y, Y, EvaluationError, "E1001"),
        (UNLABELLED, Y, np.zeros(3), EvaluationError, "E1006"),
        (UNLABELLED, Y[:0], Y[:0], DataError, "E1003"),
        (UNLABELLED, 1e4 * (Y + 1), Y, EvaluationError, "E1001"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(spec, reference, candidate, error, code):
    with pytest.raises(error) as caught:
        one(reference, candidate, {"clicked": Y}, spec)
    assert caught.value.code == code


def test_missing_outputs_and_groups_of_other_rows_are_refused():
    with pytest.raises(EvaluationError) as caught:
        evaluate_outputs({"ctr": Y}, {"cvr": Y}, {"clicked": Y}, (LOGIT,))
    assert caught.value.code == "E1004"
    with pytest.raises(InternalError):
        one(Y, Y, {"clicked": Y}, groups=np.arange(3))
    with pytest.raises(ConfigError):
        OutputSpec("spend", OutputKind.REGRESSION, None)
