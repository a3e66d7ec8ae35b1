"""What can be compared, which engines are held against one another, and their times."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from compared_deployments import (
    BY,
    Place,
    judged,
    make_place,
    make_weights,
    options,
    write_deployment,
    write_model,
)
from rich.console import Console
from scipy import stats

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.cli.compare import raise_for
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.manifest import BatchRange
from loka_onnx.errors import BundleInvalid, ConfigError, DataError, EngineError, EvaluationError
from loka_onnx.operations.compare.deployment_document import Deployment, DeploymentKind
from loka_onnx.operations.compare.deployment_text import deployments_view
from loka_onnx.operations.compare.deployments import compare
from loka_onnx.operations.compare.difference import print_difference
from loka_onnx.sessions.onnx_session import OnnxSession


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Do not write into its directories."""
    return make_place(tmp_path_factory.mktemp("compare"))


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


@pytest.mark.slow
def test_both_are_timed_in_turns_at_the_sizes_that_they_record(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(latency=True)).latency
    assert found is not None and found.failures == {} and found.says_nothing == ()
    assert [each.batch for each in found.batches] == [8, 32]
    for each in found.batches:
        assert each.a.repeats == each.b.repeats >= 20 and each.a.device == "cpu"
        assert each.ratio is not None
        assert each.ratio.value == pytest.approx(each.b.p50_us / each.a.p50_us)
        # The unit is the load, not the request.
        assert len(each.a.loads_us) == len(each.b.loads_us) == 6
        parts = np.log(each.b.loads_us) - np.log(each.a.loads_us)
        half = stats.t.ppf(0.975, 5) * parts.std(ddof=1) / np.sqrt(6)
        found_interval = each.ratio.interval
        assert found_interval is not None
        lower, upper = np.exp(parts.mean() - half), np.exp(parts.mean() + half)
        assert found_interval.lower == pytest.approx(min(lower, each.ratio.value), rel=1e-9)
        assert found_interval.upper == pytest.approx(max(upper, each.ratio.value), rel=1e-9)
    assert found.overall is not None and found.overall.interval is not None
    assert found.overall.interval.rows == found.loads == 6


def test_one_load_has_no_interval(place: Place) -> None:
    once = dataclasses.replace(options(latency=True, batches=(8,)), loads=1)
    found = compare(place.a, place.b, place.rows, once).latency
    assert found is not None and len(found.batches[0].a.loads_us) == 1
    alone = compare(place.a, place.b, place.rows, dataclasses.replace(once, batches=(8, 32)))
    few = alone.latency
    assert few is not None and few.overall is not None and few.overall.interval is None
    assert [each.ratio.interval for each in few.batches if each.ratio is not None] == [None, None]
    stream = io.StringIO()
    print_difference(Console(file=stream, width=200), deployments_view(alone))
    assert stream.getvalue().count("  too few loads for an interval\n") == 3
    said = f"over all, per row  ×{few.overall.value:.3f}  too few loads for an interval\n"
    assert said in stream.getvalue()
    with pytest.raises(ConfigError, match="to be timed, deployments are loaded"):
        dataclasses.replace(once, loads=0)


def test_more_rows_than_the_data_have_are_filled_up(place: Place) -> None:
    found = compare(place.a, place.b, place.rows, options(latency=True, batches=(64,), rows=20)).latency
    assert found is not None and [each.batch for each in found.batches] == [64]


@pytest.mark.slow
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
    assert found is not None and found.overall is not None and found.overall.interval is not None
    assert found.overall.interval.lower > 1.5
    back = compare(path, fast, place.rows, options(latency=True, batches=(256,))).latency
    assert back is not None and back.overall is not None and back.overall.interval is not None
    assert back.overall.interval.upper < 0.7


@pytest.mark.slow
def test_a_side_that_fails_while_it_is_timed_is_an_error(place: Place, tmp_path: Path) -> None:
    """It answers 3000 rows, which accuracy is judged on, and no 4."""
    import onnx
    from onnx import helper, numpy_helper

    path = write_model(tmp_path / "eights.onnx", make_weights())
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 8, 3]), "eights"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 3]), "rows"))
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    gemm.output[0] = "raw"
    after = list(model.graph.node).index(gemm) + 1
    model.graph.node.insert(after, helper.make_node("Reshape", ["raw", "eights"], ["in8"], "in8"))
    model.graph.node.insert(after + 1, helper.make_node("Reshape", ["in8", "rows"], ["scores"], "out8"))
    onnx.save(model, path)
    found = compare(place.a, path, place.rows, options(latency=True, batches=(4, 8), budget=0.1))
    assert found.latency is not None and set(found.latency.failures) == {"B"}
    with pytest.raises(EngineError, match="B failed while being timed") as error:
        raise_for(found)
    assert error.value.where == str(path)
    assert error.value.evidence == "at batch 4: ONNX Runtime failed on a batch"
    raise_for(compare(place.a, path, place.rows, options(budget=0.1)))


def test_a_bundle_that_is_loaded_again_answers_with_the_same_engines_by_size(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a later load the routed engine does not run, while the main one does."""
    weights = make_weights()
    routed = write_deployment(
        tmp_path / "routed", {"other": weights.moved(BY), "fp32": weights}, {16: "fp32", 512: "other"}
    )
    loads = list[str]()
    opened = OnnxSession.__init__

    def fail_later(self: OnnxSession, path: Path, *args: object, **kwargs: object) -> None:
        if "fp32" in str(path):
            loads.append(str(path))
            if len(loads) > 1:
                raise EngineError("the device is out of memory")
        opened(self, path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(OnnxSession, "__init__", fail_later)
    with pytest.raises(EngineError, match="another engine answers when the bundle is loaded once") as error:
        compare(routed, routed, place.rows, options(latency=True, batches=(8,)))
    assert "'cpu-onnxruntime-cpu-fp32' to 16 rows" in error.value.evidence


def test_the_engine_of_a_request_is_that_of_the_next_larger_size() -> None:
    from loka_onnx.operations.compare.deployment_document import EngineUsed, ServedTo

    used = [EngineUsed(name, *[""] * 6, False, False, "") for name in ("main", "small", "large")]
    side = Deployment(
        "x", DeploymentKind.BUNDLE, "", tuple(used), (ServedTo(8, "small"), ServedTo(64, "large")), (), 1, 100
    )
    assert [side.engine_for(rows) for rows in (1, 8, 9, 64, 65)] == ["small", "small", *["large"] * 3]
    assert side.engine("small").id == "small"
    with pytest.raises(KeyError):
        side.engine("other")
    assert dataclasses.replace(side, routes=()).engine_for(5) == "main"
