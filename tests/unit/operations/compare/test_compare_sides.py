"""What can be compared, which engines are held against one another, and their times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from compared_deployments import BY, ends, make_weights, options, refused, write_deployment, write_model
from onnx import helper, numpy_helper
from scipy import stats

from loka_onnx.cli.compare import raise_for
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.intervals import Interval
from loka_onnx.core.manifest import BatchRange
from loka_onnx.errors import BundleInvalid, ConfigError, DataError, EngineError, EvaluationError
from loka_onnx.operations.compare import deployments
from loka_onnx.operations.compare.deployments import compare
from loka_onnx.operations.compare.difference import Difference
from loka_onnx.sessions.onnx_session import OnnxSession


def sizes(found: Difference) -> list[tuple[str, str]]:
    """Rows of the judged requests, and of those that a pair of engines answers."""
    return [
        (section.title.rpartition(", ")[2], section.text.rpartition(" of ")[2])
        for section in found.sections
        if section.name == "accuracy"
    ]


def write_fixed(path: Path) -> Path:
    """A model that takes 16 rows."""
    model = onnx.load(write_model(path, make_weights()))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 16
    onnx.save(model, path)
    return path


# Models --------------------------------------------------------------------------------------------


def test_plain_models_are_compared_by_how_far_they_move_until_kinds_are_known(place, tmp_path):
    a = write_model(tmp_path / "a.onnx", make_weights())
    b = write_model(tmp_path / "b.onnx", make_weights().moved(BY))
    found = compare(a, b, place.rows, options())
    assert [item.what for item in found.rows("accuracy")] == [
        "ctr: value RMSE", "cvr: value RMSE", "spend: value RMSE"
    ]  # fmt: skip
    unknown = "not judged: its kind is not known: give it with `--output NAME=logit`"
    assert all(item.note.endswith(unknown) for item in found.rows("accuracy"))
    assert found.a.facts[0] == "ONNX model" and "plan" not in found.a.facts[1]
    assert "A and B are of different exported models" in found.notes[0]
    kinds = {"ctr": OutputKind.LOGIT, "cvr": OutputKind.PROBABILITY, "spend": OutputKind.REGRESSION}
    labels = {"ctr": "clicked", "cvr": "bought", "spend": "amount"}
    given = options(kinds=kinds, labels=labels, weights={"ctr": "importance"})
    plain, bundled = compare(a, b, place.rows, given), compare(place.a, place.b, place.rows, options())
    for name, kind in kinds.items():
        what = f"{name}: NE ({kind})"
        assert ends(plain, what) == pytest.approx(ends(bundled, what))


def test_a_model_with_a_fixed_batch_is_asked_for_so_many_rows(place, tmp_path):
    path = write_fixed(tmp_path / "fixed.onnx")
    found = compare(path, place.b, place.rows, options(rows=50))
    assert sizes(found) == [("in requests of 16 rows", "16 to 16 rows.")]
    assert found.basis.startswith("50 rows of")
    error = refused(ConfigError, path, place.b, place.rows, options(batches=(32,)))
    assert (error.code, error.evidence) == ("E1603", "both take requests of 16 to 16 rows")


# Refusals ------------------------------------------------------------------------------------------


def test_other_inputs_and_outputs_are_refused_by_name(place, tmp_path):
    wide = write_model(tmp_path / "wide.onnx", make_weights(), width=6)
    error = refused(ConfigError, place.a, wide, place.rows, options())
    assert (error.code, error.where) == ("E1615", "input 'dense'")
    assert error.evidence == f"A ('{place.a}') has float32[?, 4], B ('{wide}') has float32[?, 6]"
    fewer = write_model(tmp_path / "fewer.onnx", make_weights(), outputs=("ctr", "cvr"))
    error = refused(ConfigError, place.a, fewer, place.rows, options())
    assert (error.code, error.where) == ("E1615", "output 'spend'")
    assert "has float32[?], B" in error.evidence and error.evidence.endswith("has none")


def test_batch_ranges_without_a_size_in_common_are_refused(place, tmp_path):
    large = write_deployment(tmp_path / "c", {"fp32": make_weights()}, batch=BatchRange(2, 4))
    few = write_deployment(tmp_path / "d", {"fp32": make_weights()}, batch=BatchRange(2, 512))
    assert compare(place.a, few, place.rows, options(rows=9)).sections[0].text.endswith("2 to 512 rows.")
    error = refused(ConfigError, large, write_fixed(tmp_path / "fixed.onnx"), place.rows, options())
    assert (error.code, error.evidence) == ("E1602", "A takes 2 to 4 rows, B 16 to 16")


def test_an_error_says_which_side_it_is(place, tmp_path):
    broken = write_deployment(tmp_path / "broken", {"fp32": make_weights()})
    (broken / "plans.json").write_text("{}")
    (tmp_path / "some.loka").write_bytes(b"not a bundle")
    smaller = write_model(tmp_path / "small.onnx", make_weights(items=6))
    for kind, pair, what in (
        (ConfigError, (place.a, tmp_path / "nowhere"), "B is not there"),
        (BundleInvalid, (place.a, broken), "B: file 'plans.json' has another size"),
        (BundleInvalid, (tmp_path / "some.loka", place.b), "A: "),
        # Ids must be in the tables of both.
        (DataError, (place.a, smaller), "column 'item'"),
        (DataError, (smaller, place.a), "column 'item'"),
    ):
        error = refused(kind, *pair, place.rows, options())
        assert what in str(error) and error.code
    programs = write_deployment(tmp_path / "c", {"fp32": make_weights()}, backend="tensorrt")
    _, engine, passed = compare(place.a, programs, place.rows, options()).b.facts
    assert "the FP32 fallback" in engine and passed.startswith("not used: cpu-tensorrt")


def test_answers_that_are_not_finite_name_the_side(place, tmp_path):
    weights = make_weights()
    weights.bias[0] = np.nan
    nan = write_model(tmp_path / "nan.onnx", weights)
    plain = write_model(tmp_path / "a.onnx", make_weights())
    assert refused(EvaluationError, plain, nan, place.rows, options()).code == "E1604"
    error = refused(EvaluationError, place.a, nan, place.rows, options())
    assert error.where == f"B ('{nan}') as the candidate, A ('{place.a}') as the reference"


# Engines by the rows of a request ------------------------------------------------------------------


def test_each_pair_of_engines_is_judged_in_requests_that_it_answers(place, tmp_path):
    weights = make_weights()
    routed = write_deployment(
        tmp_path / "routed",
        {"other": weights.moved(BY), "fp32": weights},
        {16: "fp32", 512: "other"},
        exported=weights,
    )
    found = compare(place.a, routed, place.rows, options())
    small, large = found.sections
    assert small.title.startswith("cpu-onnxruntime-cpu-fp32 from ")
    assert large.title.startswith("cpu-onnxruntime-cpu-other from ")
    assert sizes(found) == [
        ("in requests of 16 rows", "1 to 16 rows."), ("in requests of 256 rows", "17 to 512 rows.")
    ]  # fmt: skip
    # 3000 rows leave a rest of 440 rows in the one and of 8 in the other, which the same engine answers.
    assert ends(found, "ctr: NE (logit)", 0) == (0.0, 0.0, 0.0)
    plain = compare(place.a, place.b, place.rows, options())
    assert ends(found, "ctr: NE (logit)", 1) == pytest.approx(ends(plain, "ctr: NE (logit)"), rel=1e-6)
    only = compare(place.a, routed, place.rows, options(batches=(8,)))
    assert [section.title for section in only.sections] == [small.title]
    # A budget is held against every pair.
    held = compare(place.a, routed, place.rows, options(budget=1e-9))
    assert held.beyond and all(" of cpu-onnxruntime-cpu-other: " in text for text in held.beyond)


# Latency -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_both_are_timed_in_turns_at_the_sizes_that_they_record(place, monkeypatch):
    loads, measure = [], deployments.measure_interleaved

    def recorded(*args: object, **kwargs: object) -> object:
        loads.append(measure(*args, **kwargs))  # type: ignore[arg-type]
        return loads[-1]

    monkeypatch.setattr(deployments, "measure_interleaved", recorded)
    found = compare(place.a, place.b, place.rows, options(latency=True))
    assert found.failures == {} and len(loads) == 6
    *rows, overall = found.rows("latency")
    assert [item.what for item in (*rows, overall)] == ["batch 8", "batch 32", "over all, per row"]
    for place_, item in enumerate(rows):
        both = [[load.latencies[side][place_] for load in loads] for side in "AB"]
        assert {latency.device for side in both for latency in side} == {"cpu"}
        # The unit is the load, by its least time.
        a_us, b_us = (np.array([latency.least_us[0] for latency in side]) for side in both)
        parts = np.log(b_us) - np.log(a_us)
        half = stats.t.ppf(0.975, 5) * parts.std(ddof=1) / np.sqrt(6)
        expected = np.exp([parts.mean(), parts.mean() - half, parts.mean() + half])
        assert item.verdict.numbers == pytest.approx(expected, rel=1e-9)
    assert len(overall.verdict.numbers) == 3


@pytest.mark.parametrize(
    ("lower", "upper", "pace"),
    [
        (0.8, 0.98, "B is faster"),
        (0.8, 0.995, "no difference beyond noise"),
        (0.9, 1.2, "no difference beyond noise"),
        (1.005, 1.2, "no difference beyond noise"),
        (1.02, 1.2, "B is slower"),
    ],
)
def test_a_side_is_faster_or_slower_beyond_noise_only(lower, upper, pace):
    value = (lower + upper) / 2
    item = deployments._latency_row("batch 8", Interval(value, lower, upper, 0.95, 6))
    assert item.verdict.text == f"×{value:.3f} [{lower:.3f}, {upper:.3f}]; {pace}"


def test_one_load_has_no_interval(place):
    once = replace(options(latency=True, batches=(8, 32)), loads=1)
    few = [item for item in compare(place.a, place.b, place.rows, once).rows("latency") if item.verdict]
    assert [item.what for item in few] == ["batch 8", "batch 32", "over all, per row"]
    for item in few:
        assert len(item.verdict.numbers) == 1
        assert item.verdict.text.endswith("; too few loads for an interval")
    with pytest.raises(ConfigError, match="to be timed, deployments are loaded"):
        replace(once, loads=0)


@pytest.mark.slow
def test_a_side_that_fails_while_it_is_timed_is_an_error(place, tmp_path):
    """It answers 3000 rows, which accuracy is judged on, and no 4."""
    path = write_model(tmp_path / "eights.onnx", make_weights())
    model = onnx.load(path)
    for name, shape in (("eights", [-1, 8, 3]), ("rows", [-1, 3])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(shape), name))
    gemm = next(place for place, node in enumerate(model.graph.node) if node.op_type == "Gemm")
    model.graph.node[gemm].output[0] = "raw"
    model.graph.node.insert(gemm + 1, helper.make_node("Reshape", ["raw", "eights"], ["in8"]))
    model.graph.node.insert(gemm + 2, helper.make_node("Reshape", ["in8", "rows"], ["scores"]))
    onnx.save(model, path)
    found = compare(place.a, path, place.rows, options(latency=True, batches=(4, 8), budget=0.1))
    assert set(found.failures) == {"B"}
    with pytest.raises(EngineError, match="B failed while being timed") as error:
        raise_for(found)
    assert error.value.where == str(path)
    assert error.value.evidence == "at batch 4: ONNX Runtime failed on a batch"
    raise_for(compare(place.a, path, place.rows, options(budget=0.1)))


def test_a_bundle_that_is_loaded_again_answers_with_the_same_engines_by_size(place, tmp_path, monkeypatch):
    """On a later load the routed engine does not run, while the main one does."""
    weights = make_weights()
    routed = write_deployment(
        tmp_path / "routed", {"other": weights.moved(BY), "fp32": weights}, {16: "fp32", 512: "other"}
    )
    loads, opened = list[Path](), OnnxSession.__init__

    def fail_later(self: OnnxSession, path: Path, *args: object, **kwargs: object) -> None:
        if "fp32" in str(path):
            loads.append(path)
            if len(loads) > 1:
                raise EngineError("the device is out of memory")
        opened(self, path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(OnnxSession, "__init__", fail_later)
    error = refused(EngineError, routed, routed, place.rows, options(latency=True, batches=(8,)))
    assert error.code == "E1616" and "'cpu-onnxruntime-cpu-fp32' to 16 rows" in error.evidence
