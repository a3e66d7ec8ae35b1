"""Two deployments on the same rows, against formulas in float64 and against the evaluation stage."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from compared_deployments import (
    BY,
    CTR,
    CVR,
    INPUTS,
    ROWS,
    SPEND,
    Place,
    artifact_of,
    judged,
    make_place,
    make_weights,
    options,
    write_deployment,
    write_model,
    write_rows,
)

from loka_onnx.cli.compare import raise_for
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.evaluation import BudgetStatus
from loka_onnx.core.intervals import Interval
from loka_onnx.data import open_dataset
from loka_onnx.errors import BudgetMissed, ConfigError, DataError
from loka_onnx.evaluation.engines import Split, judge_engine, predict_reference
from loka_onnx.evaluation.predictions import padded
from loka_onnx.operations.compare.deployment_document import Comparison, DeploymentKind
from loka_onnx.operations.compare.deployments import compare
from loka_onnx.operations.compare.rows import ONLY, RowOptions
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

ACCURATE = {"rel": 2e-4, "abs": 1e-9}
"""The engines compute in FP32: on these rows their ΔNE differs from that in float64 by less than 2e-5 of it
(seen), where logits differ by 1e-7 and the deployments by some 1e-2."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Do not write into its directories."""
    return make_place(tmp_path_factory.mktemp("compare"))


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
    return dataclasses.replace(plain, upper=plain.upper + largest)


def close(found: Interval | None, expected: Interval) -> None:
    assert found is not None
    width = expected.upper - expected.lower
    for name in ("value", "lower", "upper"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-3 * width)
    assert (found.confidence, found.rows) == (0.95, expected.rows)


def test_a_known_change_of_the_weights_gives_the_delta_ne_of_a_float64_formula(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(group="request"))
    columns, groups = place.columns, place.columns["request"]
    before, after = make_weights().scores(columns), make_weights().moved(BY).scores(columns)

    w, y = (columns[name].astype(np.float64) for name in ("importance", "clicked"))
    base = log_loss(before[:, 0], y)
    change = judged(found, "ctr").difference
    assert change is not None and change.denominator == "loss"
    close(change.delta_ne, ratio(w * (log_loss(after[:, 0], y) - base), w * base, groups))
    p, shift = 1 / (1 + np.exp(-before[:, 0])), after[:, 0] - before[:, 0]
    labelled = (p - y) * shift
    close(change.labelled, ratio(w * labelled, w * base, groups))
    close(change.kl, of_kl(w * (log_loss(after[:, 0], y) - base - labelled), w * base, groups))
    q = 1 / (1 + np.exp(-after[:, 0]))
    close(change.delta_prediction_ratio, ratio(w * (q - p), w * y, groups))
    rmse = math.sqrt((w * shift**2).sum() / w.sum())
    assert change.delta_rmse == pytest.approx(rmse, **ACCURATE)
    moved = {item.output: item for item in found.accuracy[0].moved}
    assert moved["ctr"].unit == "logit" and moved["ctr"].rmse.value == pytest.approx(rmse, **ACCURATE)
    squares = ratio(w * shift**2, w, groups)
    assert moved["ctr"].rmse.lower == pytest.approx(math.sqrt(squares.lower), rel=1e-3)
    assert moved["ctr"].rmse.upper == pytest.approx(math.sqrt(squares.upper), rel=1e-3)
    assert moved["ctr"].max_abs == pytest.approx(float(np.abs(shift).max()), rel=1e-4)

    y = columns["bought"].astype(np.float64)
    base = log_loss(before[:, 1], y)
    change = judged(found, "cvr").difference
    assert change is not None
    close(change.delta_ne, ratio(log_loss(after[:, 1], y) - base, base, groups))

    y = columns["amount"].astype(np.float64)
    base = (before[:, 2] - y) ** 2
    change = judged(found, "spend").difference
    assert change is not None
    close(change.delta_ne, ratio((after[:, 2] - y) ** 2 - base, base, groups))
    assert moved["spend"].unit == "value"


def test_delta_auc_is_that_of_the_two_float64_areas(place: Place) -> None:
    found = judged(compare(place.a, place.b, place.rows, options(group="request")), "cvr").difference
    assert found is not None and found.delta_auc is not None

    def area(scores: np.ndarray) -> float:
        positive = place.columns["bought"] == 1
        ranks = scipy.stats.rankdata(scores)
        count = positive.sum()
        below = ranks[positive].sum() - count * (count + 1) / 2
        return float(below / (count * (positive.size - count)))

    before, after = make_weights().scores(place.columns), make_weights().moved(BY).scores(place.columns)
    # Ranks of rows whose float32 answers tie may turn: a few pairs of two million.
    assert found.delta_auc.value == pytest.approx(area(after[:, 1]) - area(before[:, 1]), abs=1e-5)


def test_a_deployment_against_itself_differs_by_exactly_nothing(place: Place) -> None:
    found = compare(place.a, place.a, place.rows, options(latency=True, batches=(8,), slices=("country",)))
    for output in found.accuracy[0].outputs:
        change = output.difference
        assert change is not None
        for interval in (change.delta_ne, change.kl, change.labelled, change.delta_prediction_ratio):
            assert interval is not None
            assert (interval.value, interval.lower, interval.upper) == (0.0, 0.0, 0.0)
        assert change.delta_rmse == change.delta_max == 0.0
        assert all(item.judged is not None and item.judged.upper == 0.0 for item in output.slices)
    assert judged(found, "ctr").difference.delta_auc.value == 0.0  # type: ignore[union-attr]
    assert [(item.rmse.value, item.rmse.upper, item.max_abs) for item in found.accuracy[0].moved] == (
        [(0.0, 0.0, 0.0)] * 3
    )
    assert found.notes == ()
    assert found.latency is not None and len(found.latency.batches) == 1
    (timed,) = found.latency.batches
    assert timed.ratio is not None and timed.ratio.interval is not None
    assert timed.ratio.interval.lower <= timed.ratio.value <= timed.ratio.interval.upper


def test_exchanged_arguments_mirror_the_sign(place: Place) -> None:
    one = compare(place.a, place.b, place.rows, options())
    other = compare(place.b, place.a, place.rows, options())
    for name, label in (("ctr", "clicked"), ("cvr", "bought"), ("spend", "amount")):
        ours, theirs = judged(one, name), judged(other, name)
        there, back = ours.difference, theirs.difference
        assert there is not None and back is not None and label
        assert there.delta_ne is not None and back.delta_ne is not None
        # Relative to A's loss and to B's: the absolute change is the same but for its sign.
        loss_a, loss_b = theirs.metrics.loss, ours.metrics.loss
        assert loss_a is not None and loss_b is not None
        assert there.delta_ne.value * loss_a == pytest.approx(-back.delta_ne.value * loss_b, rel=1e-9)
        assert there.delta_ne.value * back.delta_ne.value < 0
        assert there.delta_rmse == pytest.approx(back.delta_rmse, rel=1e-12)
        if there.delta_auc is not None and back.delta_auc is not None:
            assert there.delta_auc.value == pytest.approx(-back.delta_auc.value, abs=1e-15)
            assert there.delta_auc.upper == pytest.approx(-back.delta_auc.lower, abs=1e-12)


def test_everything_is_equal_to_what_the_evaluation_stage_gives_for_the_pair(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(group="request", slices=("country",)))
    root = place.b.parent
    data = open_dataset(
        place.rows,
        [*_bindings()],
        ("clicked", "importance", "bought", "amount", "request", "country"),
        None,
        ("country",),
    )
    # As `pipeline.judging` judges: requests of up to `REQUEST_ROWS`, as many as engines take.
    split = Split("data", data, data.layout.columns, "request", ("country",), 512)
    session = partial(OnnxSession, options=SessionOptions(threads=1))
    specs = (CTR, CVR, SPEND)
    reference = predict_reference(split, session(root / "model.onnx").run, specs)
    engine = session(root / "engines" / "other.onnx")
    evaluation = judge_engine(
        artifact_of(root, "other"), split, reference, specs, lambda: padded(engine.run, 1)
    )
    assert evaluation.status == "measured"
    assert found.accuracy[0].outputs == evaluation.outputs
    assert len(found.accuracy[0].outputs[0].slices) == 2
    assert found.accuracy[0].request_rows == 512


def _bindings() -> list[object]:
    from loka_onnx.data import InputBinding

    return [InputBinding("dense", INPUTS["dense"], "float32", 2), InputBinding("item", ("item",), "int64", 1)]


def test_who_answered_and_on_what_is_said(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(rows=700, group="request"))
    assert found.a.kind is DeploymentKind.BUNDLE and found.a.path == str(place.a)
    assert [engine.id for engine in found.b.engines] == ["cpu-onnxruntime-cpu-other"]
    (used,) = found.b.engines
    assert (used.plan, used.architecture, used.device, used.simulated) == ("other", "cpu", "cpu", False)
    assert not used.is_fallback and used.digest == artifact_of(place.b.parent, "other").digest
    assert (found.rows.rows, found.rows.group, found.rows.source) == (700, "request", "as asked for")
    assert found.rows.inputs == {**INPUTS, "item": ("item",)}
    assert found.accuracy[0].outputs[0].difference.delta_ne.rows == 700  # type: ignore[union-attr]
    assert found.latency is None
    # Both ship the same exported model, so that nothing else than the engines differs.
    assert found.notes == ()
    assert serde.loads(Comparison, serde.dumps(found)) == found


# Labels --------------------------------------------------------------------------------------------


def test_without_labels_only_kl_is_judged_and_a_regression_only_measured(
    place: Place, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "live.npz", place.columns, drop=("clicked", "bought", "amount"))
    found = compare(place.a, place.b, rows, options())
    assert [output.output for output in found.accuracy[0].outputs] == ["ctr", "cvr"]
    change = judged(found, "cvr").difference
    assert change is not None and change.delta_ne is None and change.delta_auc is None
    before = make_weights().scores(place.columns)[:, 1]
    after = make_weights().moved(BY).scores(place.columns)[:, 1]
    p = 1 / (1 + np.exp(-before))
    kl = np.logaddexp(0, after) - np.logaddexp(0, before) - p * (after - before)
    entropy = np.logaddexp(0, before) - p * before
    close(change.kl, of_kl(kl, entropy, np.arange(ROWS)))
    spend = next(item for item in found.accuracy[0].moved if item.output == "spend")
    assert spend.reason == "a regression is judged by its label, and there is none"
    shift = make_weights().moved(BY).scores(place.columns)[:, 2] - make_weights().scores(place.columns)[:, 2]
    assert spend.rmse.value == pytest.approx(float(np.sqrt((shift**2).mean())), rel=1e-4)
    assert [note.partition(":")[0] for note in found.notes] == [
        "output 'ctr' is judged without its label",
        "output 'cvr' is judged without its label",
        "output 'spend' is not judged",
    ]
    assert "column 'clicked' of 'live.npz' does not exist" in found.notes[0]


def test_a_label_that_was_asked_for_must_be_there(place: Place) -> None:
    with pytest.raises(DataError, match=r"column 'clickd' of 'rows\.npz' does not exist"):
        compare(place.a, place.b, place.rows, options(labels={"ctr": "clickd"}))


def test_a_label_without_its_output_needs_exactly_one(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs exactly one judged output") as error:
        compare(place.a, place.b, place.rows, options(labels={ONLY: "clicked"}))
    assert "judged are ctr, cvr, spend" in error.value.evidence
    a, b = (write_model(tmp_path / f"{by}.onnx", make_weights().moved(by)) for by in (0.0, BY))
    kinds = {"ctr": OutputKind.LOGIT}
    found = compare(a, b, place.rows, options(kinds=kinds, labels={ONLY: "clicked"}))
    (output,) = found.accuracy[0].outputs
    base = log_loss(make_weights().scores(place.columns)[:, 0], place.columns["clicked"])
    other = log_loss(make_weights().moved(BY).scores(place.columns)[:, 0], place.columns["clicked"])
    assert output.difference is not None and output.difference.delta_ne is not None
    expected = (other - base).mean() / base.mean()
    assert output.difference.delta_ne.value == pytest.approx(float(expected), rel=1e-3)
    assert found.budget_source == "the default"


def test_bundles_that_judge_an_output_differently_are_refused(place: Place, tmp_path: Path) -> None:
    other = dataclasses.replace(CTR, kind=OutputKind.PROBABILITY)
    c = write_deployment(tmp_path / "c", {"fp32": make_weights()}, judged=(other,))
    with pytest.raises(ConfigError, match="A and B judge output 'ctr' differently") as error:
        compare(place.a, c, place.rows, options())
    assert "A: logit, label clicked, weight importance" in error.value.evidence
    assert error.value.remedy == "say what holds: `--output ctr=logit`"
    # What the remedy says settles it, and only it.
    settled = compare(place.a, c, place.rows, options(kinds={"ctr": OutputKind.LOGIT}))
    assert settled.accuracy[0].outputs == compare(place.a, place.a, place.rows, options()).accuracy[0].outputs


def test_an_option_for_an_output_changes_just_what_it_says(place: Place) -> None:
    """The weight, the label and the budget of `ctr` are recorded, and so are the other two outputs."""
    whole = compare(place.a, place.b, place.rows, options())
    same = compare(place.a, place.b, place.rows, options(kinds={"ctr": OutputKind.LOGIT}))
    assert same.accuracy == whole.accuracy and same.budget_source == "as recorded"
    other = compare(place.a, place.b, place.rows, options(kinds={"cvr": OutputKind.LOGIT}))
    assert [(output.output, output.kind) for output in other.accuracy[0].outputs] == [
        ("ctr", "logit"),
        ("cvr", "logit"),
        ("spend", "regression"),
    ]
    assert judged(other, "ctr") == judged(whole, "ctr")
    assert judged(other, "cvr").difference.delta_ne is not None  # type: ignore[union-attr]
    assert judged(other, "cvr").budget == CVR.budget


def test_a_label_settles_which_of_two_holds(place: Place, tmp_path: Path) -> None:
    other = dataclasses.replace(CTR, label="bought", weight=None, clip=1e-6)
    c = write_deployment(tmp_path / "c", {"fp32": make_weights()}, judged=(other, CVR, SPEND))
    with pytest.raises(ConfigError, match="A and B judge output 'ctr' differently") as error:
        compare(place.a, c, place.rows, options())
    assert error.value.remedy == (
        "say what holds: `--label ctr=COLUMN` and `--weight ctr=COLUMN`; build both bundles with one `clip`"
    )
    d = write_deployment(
        tmp_path / "d",
        {"fp32": make_weights()},
        judged=(dataclasses.replace(other, clip=CTR.clip), CVR, SPEND),
    )
    given = options(labels={"ctr": "clicked"}, weights={"ctr": "importance"})
    found = compare(place.a, d, place.rows, given).accuracy[0].outputs
    assert found == compare(place.a, place.a, place.rows, options()).accuracy[0].outputs


# Budgets -------------------------------------------------------------------------------------------


def test_a_budget_is_held_against_the_upper_end(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options())
    assert found.budget is None and list(found.beyond_budget()) == []
    upper = {o.output: o.difference.judged.upper for o in found.accuracy[0].outputs if o.difference}
    worst = max(upper, key=lambda name: upper[name])
    exactly = compare(place.a, place.b, place.rows, options(budget=upper[worst]))
    assert list(exactly.beyond_budget()) == [] and exactly.budget_source == "as asked for"
    below = compare(place.a, place.b, place.rows, options(budget=upper[worst] * (1 - 1e-9)))
    assert [item.output for item in below.beyond_budget()] == [worst]
    assert judged(below, worst).budget_status in {BudgetStatus.UNDECIDED, BudgetStatus.BEYOND}


def test_a_budget_needs_something_that_is_judged(place: Place, tmp_path: Path) -> None:
    a, b = (write_model(tmp_path / f"{name}.onnx", make_weights()) for name in "ab")
    with pytest.raises(ConfigError, match="a budget needs an output that is judged"):
        compare(a, b, place.rows, options(budget=0.1))


def test_an_output_that_cannot_be_judged_does_not_pass_a_budget(place: Place, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "live.npz", place.columns, drop=("amount",))
    found = compare(place.a, place.a, rows, options(budget=0.1))
    (beyond,) = found.beyond_budget()
    assert (beyond.output, beyond.judged, beyond.engine_b) == ("spend", None, "cpu-onnxruntime-cpu-fp32")
    assert beyond.reason == "a regression is judged by its label, and there is none"
    assert found.unjudged == {"spend": beyond.reason}
    assert found.notes == ("output 'spend' is not judged: column 'amount' of 'live.npz' does not exist",)
    with pytest.raises(BudgetMissed) as error:
        raise_for(found)
    assert f"output 'spend' of {beyond.engine_b} is not judged: {beyond.reason}" == error.value.evidence
    assert "`--label OUTPUT=COLUMN`" in error.value.remedy
    # Without a budget nothing was asked for that could not be done.
    raise_for(compare(place.a, place.a, rows, options()))
    # An output that nobody asked for is no reason.
    a, b = (write_model(tmp_path / f"{name}.onnx", make_weights()) for name in "ab")
    kinds = {"ctr": OutputKind.LOGIT}
    assert list(compare(a, b, rows, options(kinds=kinds, budget=0.1)).beyond_budget()) == []


@pytest.mark.parametrize("budget", [math.nan, -1.0, math.inf])
def test_a_budget_is_a_number_that_a_change_can_be_held_against(budget: float) -> None:
    with pytest.raises(ConfigError, match=r"--budget: a budget of .* cannot be held"):
        RowOptions(budget=budget)
