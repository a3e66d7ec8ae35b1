"""Two deployments on the same rows, against formulas in float64 and against the evaluation stage."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from compared_deployments import (
    BY,
    CTR,
    CVR,
    ROWS,
    SPEND,
    ends,
    make_weights,
    named,
    options,
    refused,
    write_deployment,
    write_model,
    write_rows,
)

from loka_onnx.cli.compare import raise_for
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import BudgetMissed, ConfigError
from loka_onnx.operations.compare.deployments import compare
from loka_onnx.operations.compare.rows import ONLY
from loka_onnx.report.document import Tone

ACCURATE = {"rel": 2e-4, "abs": 1e-9}
"""The engines compute in FP32: on these rows their ΔNE differs from that in float64 by less than 2e-5 of it
(seen), where logits differ by 1e-7 and the deployments by some 1e-2."""


# Formulas in float64 --------------------------------------------------------------------------------


def log_loss(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, logits) - labels * logits


def ratio(top: np.ndarray, bottom: np.ndarray, groups: np.ndarray) -> Interval:
    """Σtop / Σbottom with the interval of the delta method over groups, written out."""
    value = top.sum() / bottom.sum()
    sums = np.array([(top - value * bottom)[groups == g].sum() for g in np.unique(groups)]) / bottom.sum()
    half = scipy.stats.t.ppf(0.975, sums.size - 1) * math.sqrt(
        sums.size / (sums.size - 1) * float((sums**2).sum())
    )
    return Interval(value, value - half, value + half, 0.95, top.size)


def of_kl(top: np.ndarray, bottom: np.ndarray, groups: np.ndarray) -> Interval:
    """The same of what is never negative: the largest influence of a group is added to the upper end."""
    plain = ratio(top, bottom, groups)
    largest = max((top - plain.value * bottom)[groups == g].sum() for g in np.unique(groups)) / bottom.sum()
    return replace(plain, upper=plain.upper + largest)


def close(found: tuple[float, ...], expected: Interval) -> None:
    width = expected.upper - expected.lower
    values = (expected.value, expected.lower, expected.upper)
    assert found == pytest.approx(values, rel=1e-3, abs=1e-3 * width)


def test_a_known_change_of_the_weights_gives_the_delta_ne_of_a_float64_formula(place):
    found = compare(place.a, place.b, place.rows, options(group="request"))
    columns, groups = place.columns, place.columns["request"]
    before, after = make_weights().scores(columns), make_weights().moved(BY).scores(columns)

    w, y = (columns[name].astype(np.float64) for name in ("importance", "clicked"))
    base = log_loss(before[:, 0], y)
    close(ends(found, "ctr: NE (logit)"), ratio(w * (log_loss(after[:, 0], y) - base), w * base, groups))
    p, shift = 1 / (1 + np.exp(-before[:, 0])), after[:, 0] - before[:, 0]
    labelled = (p - y) * shift
    close(ends(found, "ctr: labelled part"), ratio(w * labelled, w * base, groups))
    kl = w * (log_loss(after[:, 0], y) - base - labelled)
    close(ends(found, "ctr: KL, label-free"), of_kl(kl, w * base, groups))
    q = 1 / (1 + np.exp(-after[:, 0]))
    close(ends(found, "ctr: prediction ratio"), ratio(w * (q - p), w * y, groups))
    rmse = math.sqrt((w * shift**2).sum() / w.sum())
    squares = ratio(w * shift**2, w, groups)
    value, lower, upper = ends(found, "ctr: logit RMSE")
    assert value == pytest.approx(rmse, **ACCURATE)
    assert (lower, upper) == pytest.approx((math.sqrt(squares.lower), math.sqrt(squares.upper)), rel=1e-3)
    assert named(found, "ctr: logit RMSE").note == f"largest {np.abs(shift).max():.3g}"

    y = columns["bought"].astype(np.float64)
    base = log_loss(before[:, 1], y)
    close(ends(found, "cvr: NE (probability)"), ratio(log_loss(after[:, 1], y) - base, base, groups))

    y = columns["amount"].astype(np.float64)
    base = (before[:, 2] - y) ** 2
    close(ends(found, "spend: NE (regression)"), ratio((after[:, 2] - y) ** 2 - base, base, groups))
    assert named(found, "spend: value RMSE")


def test_delta_auc_is_that_of_the_two_float64_areas(place):
    found = named(compare(place.a, place.b, place.rows, options(group="request")), "cvr: AUC")

    def area(scores: np.ndarray) -> float:
        positive = place.columns["bought"] == 1
        ranks = scipy.stats.rankdata(scores)
        count = positive.sum()
        below = ranks[positive].sum() - count * (count + 1) / 2
        return float(below / (count * (positive.size - count)))

    before, after = (
        area(weights.scores(place.columns)[:, 1]) for weights in (make_weights(), make_weights().moved(BY))
    )
    assert found.before is not None and found.after is not None and found.verdict is not None
    # Ranks of rows whose float32 answers tie may turn: a few pairs of two million.
    shown = (found.before.numbers[0], found.after.numbers[0], found.verdict.numbers[0])
    assert shown == pytest.approx((before, after, after - before), abs=1e-5)


def test_a_deployment_against_itself_differs_by_exactly_nothing(place):
    found = compare(place.a, place.a, place.rows, options(latency=True, batches=(8,), slices=("country",)))
    rows = found.rows("accuracy")
    assert len(rows) > 15
    assert sum(": country = " in item.what for item in rows) == 6, "two values of each output"
    for item in rows:
        assert item.verdict is not None and item.verdict.numbers == (0.0, 0.0, 0.0), item
    assert not found.is_different and found.notes == ()
    (timed,) = found.rows("latency")
    assert timed.verdict is not None
    value, lower, upper = timed.verdict.numbers
    assert lower <= value <= upper


# Labels --------------------------------------------------------------------------------------------


def test_without_labels_only_kl_is_judged_and_a_regression_only_measured(place, tmp_path):
    rows = write_rows(tmp_path / "live.npz", place.columns, drop=("clicked", "bought", "amount"))
    found = compare(place.a, place.b, rows, options())
    assert {item.what.partition(": ")[2] for item in found.rows("accuracy")} == {
        "KL (logit)", "KL (probability)", "logit RMSE", "value RMSE"
    }  # fmt: skip
    _, before, spent = make_weights().scores(place.columns).T
    _, after, spends = make_weights().moved(BY).scores(place.columns).T
    p = 1 / (1 + np.exp(-before))
    kl = np.logaddexp(0, after) - np.logaddexp(0, before) - p * (after - before)
    entropy = np.logaddexp(0, before) - p * before
    close(ends(found, "cvr: KL (probability)"), of_kl(kl, entropy, np.arange(ROWS)))
    spend = named(found, "spend: value RMSE").note
    assert spend.endswith("not judged: a regression is judged by its label, and there is none")
    rmse = float(np.sqrt(((spends - spent) ** 2).mean()))
    assert ends(found, "spend: value RMSE")[0] == pytest.approx(rmse, rel=1e-4)
    assert [note.partition(":")[0] for note in found.notes] == [
        "output 'ctr' is judged without its label",
        "output 'cvr' is judged without its label",
        "output 'spend' is not judged",
    ]
    assert "column 'clicked' of 'live.npz' does not exist" in found.notes[0]


def test_a_label_without_its_output_needs_exactly_one(place, tmp_path):
    error = refused(ConfigError, place.a, place.b, place.rows, options(labels={ONLY: "clicked"}))
    assert "judged are ctr, cvr, spend" in error.evidence
    a, b = (write_model(tmp_path / f"{by}.onnx", make_weights().moved(by)) for by in (0.0, BY))
    kinds = {"ctr": OutputKind.LOGIT}
    found = compare(a, b, place.rows, options(kinds=kinds, labels={ONLY: "clicked"}))
    base = log_loss(make_weights().scores(place.columns)[:, 0], place.columns["clicked"])
    other = log_loss(make_weights().moved(BY).scores(place.columns)[:, 0], place.columns["clicked"])
    expected = float((other - base).mean() / base.mean())
    assert ends(found, "ctr: NE (logit)")[0] == pytest.approx(expected, rel=1e-3)
    assert named(found, "ctr: NE (logit)").note.startswith("budget 0.02 %, the default")


def test_bundles_that_judge_an_output_differently_are_refused_until_it_is_said_what_holds(place, tmp_path):
    plain = compare(place.a, place.a, place.rows, options()).rows("accuracy")
    other = replace(CTR, kind=OutputKind.PROBABILITY)
    c = write_deployment(tmp_path / "c", {"fp32": make_weights()}, judged=(other,))
    error = refused(ConfigError, place.a, c, place.rows, options())
    assert error.code == "E1608" and "A: logit, label clicked, weight importance" in error.evidence
    assert error.remedy == "say what holds: `--output ctr=logit`"
    given = options(kinds={"ctr": OutputKind.LOGIT})
    assert compare(place.a, c, place.rows, given).rows("accuracy") == plain
    other = replace(CTR, label="bought", weight=None, clip=1e-6)
    c = write_deployment(tmp_path / "c", {"fp32": make_weights()}, judged=(other, CVR, SPEND))
    assert refused(ConfigError, place.a, c, place.rows, options()).remedy == (
        "say what holds: `--label ctr=COLUMN` and `--weight ctr=COLUMN`; build both bundles with one `clip`"
    )
    judged = (replace(other, clip=CTR.clip), CVR, SPEND)
    d = write_deployment(tmp_path / "d", {"fp32": make_weights()}, judged=judged)
    given = options(labels={"ctr": "clicked"}, weights={"ctr": "importance"})
    assert compare(place.a, d, place.rows, given).rows("accuracy") == plain


# Budgets -------------------------------------------------------------------------------------------


def test_a_budget_is_held_against_the_upper_end(place):
    found = compare(place.a, place.b, place.rows, options())
    assert found.beyond == ()
    upper = {item.what: ends(found, item.what)[2] for item in found.rows("accuracy") if ": NE" in item.what}
    worst = max(upper, key=lambda name: upper[name])
    exactly = compare(place.a, place.b, place.rows, options(budget=upper[worst]))
    assert exactly.beyond == () and named(exactly, worst).note.endswith(", as asked for")
    below = compare(place.a, place.b, place.rows, options(budget=upper[worst] * (1 - 1e-9)))
    (beyond,) = below.beyond
    assert beyond.startswith(f"output '{worst.partition(':')[0]}' of cpu-onnxruntime-cpu-other: ΔNE ")
    assert named(below, worst).tone in {Tone.WARN, Tone.BAD}


def test_an_output_that_cannot_be_judged_does_not_pass_a_budget(place, tmp_path):
    rows = write_rows(tmp_path / "live.npz", place.columns, drop=("amount",))
    found = compare(place.a, place.a, rows, options(budget=0.1))
    (beyond,) = found.beyond
    reason = "a regression is judged by its label, and there is none"
    assert beyond == f"output 'spend' of cpu-onnxruntime-cpu-fp32 is not judged: {reason}"
    assert found.notes == ("output 'spend' is not judged: column 'amount' of 'live.npz' does not exist",)
    with pytest.raises(BudgetMissed) as error:
        raise_for(found)
    assert error.value.evidence == beyond and "`--label OUTPUT=COLUMN`" in error.value.remedy
    # Without a budget nothing was asked for that could not be done.
    raise_for(compare(place.a, place.a, rows, options()))
    # An output that nobody asked for is no reason.
    a, b = (write_model(tmp_path / f"{name}.onnx", make_weights()) for name in "ab")
    kinds = {"ctr": OutputKind.LOGIT}
    assert compare(a, b, rows, options(kinds=kinds, budget=0.1)).beyond == ()
