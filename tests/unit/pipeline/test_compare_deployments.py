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
    CTR,
    CVR,
    INPUTS,
    ROWS,
    SPEND,
    artifact_of,
    make_rows,
    make_weights,
    write_deployment,
    write_model,
    write_rows,
)

from loka_onnx.bundle import BatchRange
from loka_onnx.bundle.packing import pack_bundle
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation
from loka_onnx.core.intervals import Interval
from loka_onnx.data import open_dataset
from loka_onnx.errors import BundleInvalid, ConfigError, DataError, EvaluationError
from loka_onnx.evaluation.engines import Split, judge_engine, predict_reference
from loka_onnx.evaluation.predictions import padded
from loka_onnx.numerics.medians import median_interval
from loka_onnx.pipeline.compare import CompareOptions, compare
from loka_onnx.pipeline.compare_rows import ONLY, RowOptions
from loka_onnx.pipeline.compare_sides import Opening
from loka_onnx.pipeline.comparison import Comparison, Deployment, DeploymentKind
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

BY = 0.02
"""How far the weights of the other deployment lie."""
ACCURATE = {"rel": 2e-4, "abs": 1e-9}
"""The engines compute in FP32: on these rows their ΔNE differs from that in float64 by less than 2e-5 of it
(seen), where logits differ by 1e-7 and the deployments by some 1e-2."""


@dataclasses.dataclass(frozen=True)
class Place:
    a: Path
    b: Path
    rows: Path
    columns: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Do not write into its directories."""
    root = tmp_path_factory.mktemp("compare")
    weights, columns = make_weights(), make_rows()
    a = write_deployment(root / "a", {"fp32": weights})
    b = write_deployment(root / "b", {"other": weights.moved(BY)}, exported=weights)
    return Place(a, b, write_rows(root / "rows.npz", columns), columns)


def options(*, latency: bool = False, batches: tuple[int, ...] = (), **rows: object) -> CompareOptions:
    return CompareOptions(
        RowOptions(**{"inputs": INPUTS, **rows}),  # type: ignore[arg-type]
        Opening(threads=1),
        batches,
        latency,
        seconds=0.05,
    )


def judged(found: Comparison, name: str, pair: int = 0) -> OutputEvaluation:
    return next(output for output in found.accuracy[pair].outputs if output.output == name)


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
    close(change.kl, ratio(w * (log_loss(after[:, 0], y) - base - labelled), w * base, groups))
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
    assert timed.ratio is not None and timed.ratio.lower <= timed.ratio.value <= timed.ratio.upper


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
    # As `pipeline.steps` judges: requests of up to 4096 rows, as many as engines take.
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
    close(change.kl, ratio(kl, entropy, np.arange(ROWS)))
    spend = next(item for item in found.accuracy[0].moved if item.output == "spend")
    assert spend.reason == "a regression is judged by its label, and there is none"
    shift = make_weights().moved(BY).scores(place.columns)[:, 2] - make_weights().scores(place.columns)[:, 2]
    assert spend.rmse.value == pytest.approx(float(np.sqrt((shift**2).mean())), rel=1e-4)
    assert [note.partition(":")[0] for note in found.notes] == [
        f"output '{name}' is judged without its label" for name in ("ctr", "cvr", "spend")
    ]
    assert "column 'clicked' of 'live.npz' does not exist" in found.notes[0]


def test_a_label_that_was_asked_for_must_be_there(place: Place) -> None:
    with pytest.raises(DataError, match=r"column 'clickd' of 'rows\.npz' does not exist"):
        compare(place.a, place.b, place.rows, options(labels={"ctr": "clickd"}))


def test_a_label_without_its_output_needs_exactly_one(place: Place) -> None:
    with pytest.raises(ConfigError, match="needs exactly one judged output") as error:
        compare(place.a, place.b, place.rows, options(labels={ONLY: "clicked"}))
    assert "judged are ctr, cvr, spend" in error.value.evidence
    kinds = {"ctr": OutputKind.LOGIT}
    found = compare(place.a, place.b, place.rows, options(kinds=kinds, labels={ONLY: "clicked"}))
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
    assert "--output ctr=logit" in error.value.remedy


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


# Models --------------------------------------------------------------------------------------------


def test_plain_models_are_compared_by_how_far_they_move_until_kinds_are_known(
    place: Place, tmp_path: Path
) -> None:
    a = write_model(tmp_path / "a.onnx", make_weights())
    b = write_model(tmp_path / "b.onnx", make_weights().moved(BY))
    found = compare(a, b, place.rows, options())
    assert found.accuracy[0].outputs == ()
    assert {item.reason for item in found.accuracy[0].moved} == {
        "its kind is not known: give it with `--output NAME=logit`"
    }
    assert [item.output for item in found.accuracy[0].moved] == ["ctr", "cvr", "spend"]
    assert found.a.kind is DeploymentKind.MODEL and found.a.engines[0].plan == ""
    assert "A and B are of different exported models" in found.notes[0]
    kinds = {"ctr": OutputKind.LOGIT, "cvr": OutputKind.PROBABILITY, "spend": OutputKind.REGRESSION}
    labels = {"ctr": "clicked", "cvr": "bought", "spend": "amount"}
    given = options(kinds=kinds, labels=labels, weights={"ctr": "importance"}, budget=0.01)
    plain = compare(a, b, place.rows, given).accuracy[0].outputs
    bundled = compare(place.a, place.b, place.rows, options()).accuracy[0].outputs
    assert [o.difference.delta_ne.value for o in plain if o.difference and o.difference.delta_ne] == (
        pytest.approx(
            [o.difference.delta_ne.value for o in bundled if o.difference and o.difference.delta_ne]
        )
    )


def test_a_bundle_in_a_single_file_is_the_bundle(place: Place, tmp_path: Path) -> None:
    packed = pack_bundle(place.b, tmp_path / "b.loka")
    # It is timed after it was judged, and loaded anew for that.
    found = compare(place.a, packed, place.rows, options(latency=True, batches=(8,)))
    assert found.b.kind is DeploymentKind.ARCHIVE
    assert found.latency is not None and found.latency.failures == {} and len(found.latency.batches) == 1
    assert found.accuracy == compare(place.a, place.b, place.rows, options()).accuracy


def test_a_model_with_a_fixed_batch_is_asked_for_so_many_rows(place: Place, tmp_path: Path) -> None:
    import onnx

    path = write_model(tmp_path / "fixed.onnx", make_weights())
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 16
    onnx.save(model, path)
    found = compare(path, place.b, place.rows, options(rows=50))
    assert (found.accuracy[0].request_rows, found.accuracy[0].least_rows) == (16, 16)
    assert found.accuracy[0].outputs[0].difference.delta_ne.rows == 50  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="A and B do not both take 32 rows") as error:
        compare(path, place.b, place.rows, options(batches=(32,)))
    assert error.value.evidence == "both take requests of 16 to 16 rows"


# Refusals ------------------------------------------------------------------------------------------


def test_other_inputs_and_outputs_are_refused_by_name(place: Place, tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide.onnx", make_weights(), width=6)
    with pytest.raises(ConfigError) as error:
        compare(place.a, wide, place.rows, options())
    assert str(error.value) == (
        "input 'dense': A and B do not have the same inputs, so no request can be put to both\n"
        f"  evidence: A ('{place.a}') has float32[?, 4], B ('{wide}') has float32[?, 6]\n"
        "  remedy: compare deployments of models that take and give the same tensors"
    )
    fewer = write_model(tmp_path / "fewer.onnx", make_weights(), outputs=("ctr", "cvr"))
    with pytest.raises(ConfigError, match="output 'spend': A and B do not have the same outputs") as error:
        compare(place.a, fewer, place.rows, options())
    assert "has float32[?], B" in error.value.evidence and error.value.evidence.endswith("has none")


def test_batch_ranges_without_a_size_in_common_are_refused(place: Place, tmp_path: Path) -> None:
    large = write_deployment(tmp_path / "c", {"fp32": make_weights()}, batch=BatchRange(2, 4))
    few = write_deployment(tmp_path / "d", {"fp32": make_weights()}, batch=BatchRange(2, 512))
    assert compare(place.a, few, place.rows, options(rows=9)).accuracy[0].least_rows == 2
    import onnx

    path = write_model(tmp_path / "fixed.onnx", make_weights())
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    onnx.save(model, path)
    with pytest.raises(ConfigError, match="A and B take no request of the same size") as error:
        compare(large, path, place.rows, options())
    assert error.value.evidence == "A takes 2 to 4 rows, B 16 to 16"


def test_an_error_says_which_side_it_is(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="B is not there"):
        compare(place.a, tmp_path / "nowhere", place.rows, options())
    broken = write_deployment(tmp_path / "broken", {"fp32": make_weights()})
    (broken / "plans.json").write_text("{}")
    with pytest.raises(BundleInvalid, match=r"B: file 'plans\.json' has another size"):
        compare(place.a, broken, place.rows, options())
    (tmp_path / "some.loka").write_bytes(b"not a bundle")
    with pytest.raises(BundleInvalid, match=r"A: "):
        compare(tmp_path / "some.loka", place.b, place.rows, options())


def test_answers_that_are_not_finite_name_the_side(place: Place, tmp_path: Path) -> None:
    weights = make_weights()
    weights.bias[0] = np.nan
    nan = write_model(tmp_path / "nan.onnx", weights)
    with pytest.raises(EvaluationError, match="output 'ctr' of B is not finite"):
        compare(write_model(tmp_path / "a.onnx", make_weights()), nan, place.rows, options())
    with pytest.raises(EvaluationError, match="output 'ctr' of the candidate is not finite") as error:
        compare(place.a, nan, place.rows, options())
    assert error.value.where == f"B ('{nan}') as the candidate, A ('{place.a}') as the reference"


def test_ids_must_be_in_the_tables_of_both(place: Place, tmp_path: Path) -> None:
    smaller = write_model(tmp_path / "small.onnx", make_weights(items=6))
    for pair in ((place.a, smaller), (smaller, place.a)):
        with pytest.raises(DataError, match="column 'item'"):
            compare(*pair, place.rows, options())


def test_programs_that_nobody_vouches_for_are_passed_over_and_that_is_said(
    place: Place, tmp_path: Path
) -> None:
    programs = write_deployment(tmp_path / "c", {"fp32": make_weights()}, backend="tensorrt")
    found = compare(place.a, programs, place.rows, options()).b
    assert [engine.is_fallback for engine in found.engines] == [True]
    (passed,) = found.passed_over
    assert passed.engine.startswith("cpu-tensorrt") and passed.reason


# Engines by the rows of a request ------------------------------------------------------------------


def test_each_pair_of_engines_is_judged_in_requests_that_it_answers(place: Place, tmp_path: Path) -> None:
    weights = make_weights()
    routed = write_deployment(
        tmp_path / "routed",
        {"other": weights.moved(BY), "fp32": weights},
        {16: "fp32", 512: "other"},
        exported=weights,
    )
    found = compare(place.a, routed, place.rows, options())
    small, large = found.accuracy
    assert (small.engine_b, small.least_rows, small.most_rows) == ("cpu-onnxruntime-cpu-fp32", 1, 16)
    assert (large.engine_b, large.least_rows, large.most_rows) == ("cpu-onnxruntime-cpu-other", 17, 512)
    assert (small.request_rows, large.request_rows) == (16, 512)
    # 3000 rows leave a rest of 440 rows in the one and of 8 in the other, which the same engine answers.
    assert judged(found, "ctr", 0).difference.judged.value == 0.0  # type: ignore[union-attr]
    plain = compare(place.a, place.b, place.rows, options())
    assert judged(found, "ctr", 1).difference.judged.value == pytest.approx(  # type: ignore[union-attr]
        judged(plain, "ctr").difference.judged.value,  # type: ignore[union-attr]
        rel=1e-6,
    )
    only = compare(place.a, routed, place.rows, options(batches=(8,)))
    assert [pair.engine_b for pair in only.accuracy] == ["cpu-onnxruntime-cpu-fp32"]
    # A budget is held against every pair.
    held = compare(place.a, routed, place.rows, options(budget=1e-9))
    assert {item.engine_b for item in held.beyond_budget()} == {"cpu-onnxruntime-cpu-other"}


# Latency -------------------------------------------------------------------------------------------


def test_both_are_timed_in_turns_at_the_sizes_that_they_record(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(latency=True)).latency
    assert found is not None and found.failures == {} and found.says_nothing == ()
    assert [each.batch for each in found.batches] == [8, 32]
    for each in found.batches:
        assert each.a.repeats == each.b.repeats >= 20 and each.a.device == "cpu"
        assert each.ratio is not None
        assert each.ratio.value == pytest.approx(each.b.p50_us / each.a.p50_us)
        # The unit is the load, not the request.
        assert len(each.a.parts_us) == len(each.b.parts_us) == 6
        parts = [b / a for a, b in zip(each.a.parts_us, each.b.parts_us, strict=True)]
        expected = median_interval(parts)
        assert expected is not None
        assert each.ratio.lower == min(expected.lower, each.ratio.value)
        assert each.ratio.upper == max(expected.upper, each.ratio.value)
    assert found.overall is not None and found.overall.rows == found.loads == 6


def test_one_load_has_its_own_parts_and_a_few_have_no_interval(place: Place) -> None:
    once = dataclasses.replace(options(latency=True, batches=(8,)), loads=1)
    found = compare(place.a, place.b, place.rows, once).latency
    assert found is not None and len(found.batches[0].a.parts_us) == 10
    few = compare(place.a, place.b, place.rows, dataclasses.replace(once, loads=2)).latency
    assert few is not None and few.overall is not None and few.overall.rows == 0
    assert few.overall.lower == few.overall.value == few.overall.upper
    with pytest.raises(ConfigError, match="to be timed, deployments are loaded"):
        dataclasses.replace(once, loads=0)


def test_more_rows_than_the_data_have_are_filled_up(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(latency=True, batches=(64,), rows=20)).latency
    assert found is not None and [each.batch for each in found.batches] == [64]


def test_a_slower_engine_is_slower(place: Place, tmp_path: Path) -> None:
    """A batch 64 times as large through the same engine, as two deployments, would be; here a heavy one."""
    import onnx
    from onnx import helper, numpy_helper

    path = write_model(tmp_path / "slow.onnx", make_weights())
    model = onnx.load(path)
    heavy = np.eye(3, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(heavy, "eye"))
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    gemm.output[0] = "raw"
    place_of = list(model.graph.node).index(gemm) + 1
    for index in range(400):
        names = ["raw" if index == 0 else f"m{index}", "eye"], ["scores" if index == 399 else f"m{index + 1}"]
        model.graph.node.insert(place_of + index, helper.make_node("MatMul", *names, f"heavy{index}"))
    onnx.save(model, path)
    fast = write_model(tmp_path / "fast.onnx", make_weights())
    found = compare(fast, path, place.rows, options(latency=True, batches=(256,))).latency
    assert found is not None and found.overall is not None and found.overall.lower > 1.5
    back = compare(path, fast, place.rows, options(latency=True, batches=(256,))).latency
    assert back is not None and back.overall is not None and back.overall.upper < 0.7


def test_the_engine_of_a_request_is_that_of_the_next_larger_size() -> None:
    from loka_onnx.pipeline.comparison import EngineUsed, ServedTo

    used = [EngineUsed(name, *[""] * 6, False, False, "") for name in ("main", "small", "large")]
    side = Deployment(
        "x", DeploymentKind.BUNDLE, "", tuple(used), (ServedTo(8, "small"), ServedTo(64, "large")), (), 1, 100
    )
    assert [side.engine_for(rows) for rows in (1, 8, 9, 64, 65)] == ["small", "small", *["large"] * 3]
    assert side.engine("small").id == "small"
    with pytest.raises(KeyError):
        side.engine("other")
    assert dataclasses.replace(side, routes=()).engine_for(5) == "main"
