"""The message for each way to get a run file wrong, and numbers and paths beyond their bounds."""

from typing import Any

import pytest
from run_files import refusal

from loka_onnx.calibration.effects.sensitivity import StoppingSchedule
from loka_onnx.config import load_run_file
from loka_onnx.config.loading import build_run_config
from loka_onnx.errors import ConfigError, SeveralErrors


def test_an_unknown_key_and_a_top_that_is_no_mapping(run_file):
    assert refusal(run_file, old="certification", new="certfication") == (
        "DIR/ranker-fp8.yaml:10: unknown key 'certfication' in `data`\n"
        "  evidence: the keys here are calibration, selection, certification, path, split, inputs, "
        "group, request, null_groups, slices, synthetic\n"
        "  remedy: did you mean 'certification'?"
    )
    run_file.write_text("- model\n")
    assert "a run file is a mapping of keys to values\n  evidence: found a list of 1" in refusal(run_file)


@pytest.mark.parametrize(
    ("old", "new", "line", "what", "evidence"),
    [
        ("max: 4096", "max: lots", 14, "`batch.max` must be a whole number", "found the text 'lots'"),
        ("max: 4096", "max: 4096.5", 14, "`batch.max` must be a whole number", "found the number 4096.5"),
        ("max: 4096", "max: true", 14, "`batch.max` must be a whole number", "found true"),
        ("max: 4096", "max: '4096'", 14, "`batch.max` must be a whole number", "found the text '4096'"),
        ("min: 1", "min: 0", 14, "`batch.min` must be at least 1", "found the number 0"),
        ("2e-4", "0", 6, "`outputs[0].budget` must be greater than 0", "found the number 0"),
        ("2e-4", ".inf", 6, "`outputs[0].budget` must be a finite number", "found the number inf"),
        ("2e-4", "tiny", 6, "`outputs[0].budget` must be a number", "found the text 'tiny'"),
        ("name: ctr", "name: [ctr]", 3, "`outputs[0].name` must be text", "found a list of 1"),
        ("label: clicked", "label: 3", 5, "`outputs[0].label` must be text", "found the number 3"),
        ("name: ctr", "name:", 3, "`outputs[0].name` must be text", "found nothing (null)"),
        ("slices: [country]", "slices: a", 13, "`data.slices` must be a list", "found the text 'a'"),
        ("[age, price]", "[]", 11, "`data.inputs.dense` must be a list with at least one entry", "of 0"),
        ("country_id", "7", 11, "an input is fed from a column or from a list of columns", "found 7"),
        ("{onnx: ranker.onnx}", "x", 1, "`model` must be a mapping of keys to values", "found the text 'x'"),
        ("[256, 1024]", "[256, big]", 14, "`batch.serve[1]` must be a whole number", "'big'"),
    ],
)
def test_a_wrong_value(run_file, old, new, line, what, evidence):
    first, second, _ = refusal(run_file, old=old, new=new).split("\n")
    assert first == f"DIR/ranker-fp8.yaml:{line}: {what}"
    assert second.startswith("  evidence: ") and evidence in second


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("model", {"onnx": "a", "torch": "a:b"}, "`model` needs exactly one of `onnx` and `torch`"),
        ("model", {}, "`model` needs exactly one of `onnx` and `torch`"),
        ("model.checkpoint", "w", "`model.checkpoint` belongs to a torch model"),
        ("outputs.0.clip", 1e-3, "`clip` belongs to an output of kind 'probability'"),
        ("data.path", "x", "`data.path` and `data.calibration` exclude each other"),
        ("data", {"path": "x"}, "`data.path` needs `data.split`"),
        ("data", {"split": {"by": "order"}}, "`data.split` needs `data.path`"),
        (
            "data",
            {"calibration": "x", "selection": "y"},
            "`data` needs three disjoint splits: calibration, selection and certification",
        ),
        (
            "data",
            {"path": "x", "split": {"by": "order", "fractions": {"calibration": 0.5}}},
            "the fractions of a split sum to more than 1",
        ),
        ("data", {"path": "x", "split": {"by": "hash"}}, "a split by hash needs a key column"),
        ("data", {"path": "x", "split": {"by": "order", "seed": 1}}, "`seed` belongs to a split by hash"),
        ("batch.max", 512, "the serving batch 1024 is outside of the range that engines are built for"),
        ("batch.min", 8192, "`batch.min` is larger than `batch.max`"),
        ("batch.serve", [8, 8], "`serve` lists '8' twice"),
        ("calibration.ray_address", "auto", "`ray_address` belongs to the executor 'ray'"),
        ("calibration.confidence", 1.0, "`calibration.confidence` must be at most 0.999999"),
        ("calibration.confidence", 0.5, "`calibration.confidence` must be greater than 0.5"),
        ("calibration.draws", 9, "`calibration.draws` must be at most 8"),
        ("calibration.draws", 0, "`calibration.draws` must be at least 1"),
        ("calibration.error_precision", 0.0, "`calibration.error_precision` must be at least 1e-06"),
        ("calibration.sensitivity_rows", 0, "`calibration.sensitivity_rows` must be at least 1"),
        ("calibration.executor", "dask", "`calibration.executor` must be one of local, ray"),
        ("plan.force", ["a.*", "*.calibrator"], "the pattern '*.calibrator' is both kept and forced"),
        ("plan.plans", ["fp8-safe"], "the plan 'fp32' must compete"),
        ("plan.plans", ["fp32", "bf16", "bf16"], "`plans` lists 'bf16' twice"),
        (
            "plan",
            {"formats": ["fp8"], "plans": ["fp32", "int8-safe"]},
            "the plan 'int8-safe' needs int8 in `formats`",
        ),
        ("plan.formats", ["int8", "int8"], "`formats` lists 'int8' twice"),
        (
            "outputs.0",
            {"name": "spend", "kind": "regression", "label": None},
            "a regression needs a label, and output 'spend' has none",
        ),
        ("data.slices", ["country", "country"], "`slices` lists 'country' twice"),
        ("targets", [{"device": "cpu", "backends": ["onnxruntime"]}] * 2, "the device 'cpu' is given twice"),
        ("outputs", [{"name": "ctr", "kind": "logit", "label": "a"}] * 2, "the name 'ctr' is given twice"),
    ],
)
def test_refused(run_file, key, value, what):
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file, {key: value})
    assert caught.value.what == what
    line = {"data.path": 8, "batch.max": 14}.get(key)
    assert caught.value.where == (f"{run_file}:{line}" if line else f"override '{key}'")
    assert caught.value.evidence and caught.value.remedy


def test_the_line_is_that_of_the_entry_at_fault(run_file):
    batch = "batch: {min: 1, serve: [256, 1024], max: 4096}"
    new = "batch:\n  serve:\n    - 256\n    - 8192\n  max: 4096"
    assert refusal(run_file, old=batch, new=new) == (
        "DIR/ranker-fp8.yaml:17: the serving batch 8192 is outside of the range that engines are "
        "built for\n  evidence: min is 1, max is 4096\n"
        "  remedy: write `batch.serve` without it, or widen `batch.min` and `batch.max`"
    )


VALUES: dict[str, Any] = {
    "model": {"torch": "a:b"},
    "outputs": [{"name": "y", "kind": "logit", "label": "l"}],
    "data": {"path": __file__, "split": {"by": "hash", "column": "u"}},
    "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threads", 1000000),
        ("batch.max", 100000000),
        ("batch.max", 10**400),
        ("calibration.batch_size", 100000000),
        ("calibration.rows", 10**400),
        ("calibration.confidence", 0.9999999999999999),
        ("calibration.error_precision", 5e-324),
        ("build.memory_gb", 1e300),
        ("build.cache_gb", 1e300),
        ("build.timeout_seconds", 1e300),
        ("build.timeout_seconds", 1e-300),
        ("build.parallel", 1000000),
        ("refine.plans", 100000000),
        ("serving.trial_seconds", 1e300),
        ("outputs.0.budget", 1e300),
        ("data.split.fractions.calibration", 5e-324),
        ("output", "x" * 256),
        ("output", "/".join(["x" * 200] * 30)),
        ("output", "a\0b"),
        ("build.cache", "é" * 200),
        ("name", "x" * 300),
    ],
)
def test_a_value_beyond_its_bound_is_refused_at_its_key(key, value, tmp_path):
    build_run_config(VALUES, tmp_path)
    with pytest.raises(ConfigError) as caught:
        build_run_config(VALUES, tmp_path, overrides={key: value})
    named = f"{caught.value.what} {caught.value.where}"
    assert key.rsplit(".", maxsplit=1)[-1] in named and len(str(caught.value)) < 4000


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_looks_end_at_every_limit(limit):
    looks = StoppingSchedule(limit, may_stop=True)
    for done in range(1, limit + 2):
        if looks.is_due(done):
            looks.take(done)
    assert looks.taken >= 1


def test_many_errors_at_once_stay_readable():
    errors = [ConfigError(f"E0101 key {i} is wrong", evidence="x" * 900) for i in range(50)]
    several = SeveralErrors(errors)
    for text in (str(several), several.message):
        assert len(text) < 6000
        assert "key 0 " in text
        assert text.endswith("more: mend these first")
    assert len(several.errors) == 50
