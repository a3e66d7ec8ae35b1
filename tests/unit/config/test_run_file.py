"""A run file: what it means, the message for each way to get it wrong, and values given beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_files import FILES, RUN_FILE, refusal

from loka_onnx.calibration.effects.sensitivity import StoppingSchedule
from loka_onnx.config import (
    Executor,
    RunConfig,
    SplitBy,
    WeightGranularity,
    build_run_config,
    load_run_file,
    parse_overrides,
    run_file_schema,
)
from loka_onnx.config.fields import Float8Format
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.errors import ConfigError, SeveralErrors


def test_values_and_defaults(run_file):
    config = load_run_file(run_file)
    here = run_file.parent
    assert config.model.onnx == here / "ranker.onnx"
    assert config.data.certification == here / "day-09.parquet"
    assert config.data.inputs == {"dense": ("age", "price"), "country": ("country_id",)}
    assert config.output == here / "runs" / "ranker-fp8"
    assert config.name == "ranker-fp8" and config.directory == here
    assert config.output_specs == (OutputSpec("ctr", OutputKind.LOGIT, "clicked", None, 0.0002, 1e-7),)
    assert config.columns == ("clicked", "request_id", "country")
    assert (config.batch.min, config.batch.serve, config.batch.max) == (1, (256, 1024), 4096)
    assert config.calibration.model_dump() == {
        "batch_size": 512,
        "rows": None,
        "range_rows": None,
        "sensitivity_rows": None,
        "stop_when_decided": True,
        "confidence": 0.95,
        "draws": 4,
        "error_precision": 0.02,
        "seed": 0,
        "executor": Executor.LOCAL,
        "ray_address": None,
    }
    assert config.plan.base is Precision.BF16
    assert config.plan.weight_granularity is WeightGranularity.BEST
    assert (config.plan.format, config.plan.scale) == (Float8Format.E4M3FN, None)
    assert config.plan.plans is None
    assert config.targets[0].backends == ("inductor", "tensorrt")
    assert config.threads is None and not config.data.synthetic


def test_one_file_with_a_split_and_what_was_understood_reads_back(run_file):
    split = {"by": "hash", "column": "user", "fractions": {"calibration": 0.1}, "seed": 3}
    data = load_run_file(run_file, {"data": {"path": "day-07.parquet", "split": split}}).data
    assert data.path == run_file.parent / "day-07.parquet"
    assert data.split is not None and data.split.by is SplitBy.HASH
    assert data.split.fractions.model_dump() == {"calibration": 0.1, "selection": 0.3, "certification": 0.5}
    config = load_run_file(run_file)
    dumped = config.model_dump(mode="json")
    for output in dumped["outputs"]:
        del output["clip"]  # only a probability may name it
    assert build_run_config(json.loads(json.dumps(dumped)), run_file.parent) == config


def test_an_output_without_labels_says_so_and_a_missing_file_is_named(run_file):
    config = load_run_file(run_file, {"outputs.0.label": None})
    assert config.output_specs == (OutputSpec("ctr", OutputKind.LOGIT, None, budget=2e-4),)
    assert config.columns == ("request_id", "country")
    # Left out it may have been forgotten, and the run would be judged on less than was meant.
    assert refusal(run_file, old="    label: clicked\n", new="").startswith(
        "DIR/ranker-fp8.yaml:3: `outputs[0]` lacks the key 'label'\n"
    )
    assert refusal(run_file, old="day-08.parquet", new="day-8.parquet") == (
        "DIR/ranker-fp8.yaml:9: `data.selection` names a file that does not exist\n"
        "  evidence: looked for 'DIR/day-8.parquet'\n"
        "  remedy: did you mean 'day-08.parquet'? a relative path starts at 'DIR'"
    )


def test_only_a_slice_may_hold_nulls_and_a_group_where_they_are_ungrouped(run_file):
    columns = {"data.slices": ["country", "request_id", "clicked"]}
    config = load_run_file(run_file, columns)
    assert config.columns == ("clicked", "request_id", "country")
    assert config.nullable_columns == {"country"}
    ungrouped = load_run_file(run_file, {**columns, "data.null_groups": "ungroup"})
    assert ungrouped.columns == config.columns
    assert ungrouped.nullable_columns == {"country", "request_id"}
    grouped_by_label = {**columns, "data.null_groups": "ungroup", "data.group": "clicked"}
    assert "clicked" not in load_run_file(run_file, grouped_by_label).nullable_columns


def test_guards_belong_to_a_log_loss_and_auc_to_labels(run_file):
    spec = load_run_file(run_file, {"outputs.0.max_auc_drop": 0.001}).output_specs[0]
    assert (spec.kl_limit, spec.max_auc_drop) == (5 * spec.budget, 0.001)
    assert load_run_file(run_file, {"outputs.0.max_kl": 0.01}).output_specs[0].kl_limit == 0.01
    for key in ("max_kl", "max_auc_drop"):
        with pytest.raises(ConfigError) as caught:
            load_run_file(run_file, {"outputs.0.kind": "regression", f"outputs.0.{key}": 0.01})
        assert key in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file, {"outputs.0.label": None, "outputs.0.max_auc_drop": 0.01})
    assert "max_auc_drop" in str(caught.value)
    assert load_run_file(run_file, {"outputs.0.kind": "regression"}).output_specs[0].kl_limit is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the run file is empty"),
        (b"# only a comment\n", "the run file is empty"),
        (b"\xff\xfe\x00", "the run file is not UTF-8 text"),
    ],
)
def test_no_content(run_file, content, what):
    run_file.write_bytes(content)
    assert f"DIR/ranker-fp8.yaml: {what}\n" in refusal(run_file)


def test_the_schema_is_closed_described_and_names_what_is_required():
    schema = run_file_schema()
    assert schema["required"] == ["model", "outputs", "data", "targets"]
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for definition in [schema, *schema["$defs"].values()]:
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False
    assert schema["$defs"]["OutputConfig"]["required"] == ["name", "kind", "label"]
    columns = schema["$defs"]["DataConfig"]["properties"]["inputs"]["additionalProperties"]
    assert [choice["type"] for choice in columns["anyOf"]] == ["string", "array"]
    schema = run_file_schema()
    for definition in [schema, *schema["$defs"].values()]:
        for key, value in definition.get("properties", {}).items():
            assert value.get("description"), f"{definition['title']}.{key}"


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
        "  remedy: remove it, or widen `batch.min` and `batch.max`"
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


def test_values_are_yaml():
    assert parse_overrides(["a.b=null", "c=[1, 2e-1]", "d=text=x", " e =no"]) == {
        "a.b": None,
        "c": [1, 0.2],
        "d": "text=x",
        "e": "no",
    }
    with pytest.raises(ConfigError, match=r"override 'batch.serve':1: the run file is not valid YAML"):
        parse_overrides(["batch.serve=[1"])


@pytest.mark.parametrize(
    ("texts", "code"), [(["batch.max"], "E0118"), (["=3"], "E0118"), (["threads=1", "threads=2"], "E0117")]
)
def test_what_is_no_assignment_or_a_second_one_is_refused(texts, code):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(texts)
    assert caught.value.code == code


def test_they_replace_create_and_name_entries_as_messages_do(run_file):
    config = load_run_file(
        run_file, {"batch.serve": [8], "calibration.rows": 64, "outputs.0.budget": 0.1, "threads": 2}
    )
    assert config.batch.serve == (8,) and config.batch.max == 4096
    assert config.calibration.rows == 64
    assert config.outputs[0].budget == 0.1
    assert config.threads == 2
    config = load_run_file(run_file, {"outputs[0].budget": 0.1, "batch.serve[0]": 7})
    assert config.outputs[0].budget == 0.1 and config.batch.serve[0] == 7
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file, {"outputs[0].budget": "x"})
    assert caught.value.what == "`outputs[0].budget` must be a number"
    with pytest.raises(ConfigError, match=r"there is no `outputs\[3\]` to override"):
        load_run_file(run_file, {"outputs[3].budget": 1})
    assert refusal(run_file, batch__max="many").startswith(
        "override 'batch.max': `batch.max` must be a whole number\n"
    )
    assert refusal(run_file, batch={"max": 1, "mim": 1}).startswith(
        "override 'batch': unknown key 'mim' in `batch`\n"
    )


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("confidence", 1.0, "must be at most 0.999999"),
        ("confidence", 0.5, "must be greater than 0.5"),
        ("draws", 9, "must be at most 8"),
        ("draws", 0, "must be at least 1"),
        ("error_precision", 0.0, "must be at least 1e-06"),
        ("sensitivity_rows", 0, "must be at least 1"),
        ("executor", "dask", "must be one of local, ray"),
    ],
)
def test_limits_of_calibration(run_file, key, value, what):
    with pytest.raises(ConfigError) as caught:
        load_run_file(run_file, {f"calibration.{key}": value})
    assert caught.value.what == f"`calibration.{key}` {what}"


@pytest.mark.parametrize("key", ["outputs.3.budget", "outputs.x.budget", "model.onnx.deep", "outputs.9"])
def test_no_such_place(run_file, key):
    with pytest.raises(ConfigError, match="there is no `") as caught:
        load_run_file(run_file, {key: 1})
    assert caught.value.where == f"override '{key}'"


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *RunConfig.model_fields,
        "model.torch",
        "outputs.0.kind",
        "outputs.0",
        "data.inputs",
        "data.inputs.dense",
        "data.split",
        "batch.serve",
        "batch.serve.1",
        "plan.plans",
        "targets.0.backends",
        "model.arguments",
    ]
)


@given(key=KEYS, value=PLAIN)
def test_whatever_is_put_anywhere_is_taken_or_refused_properly(key, value, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    for name in FILES:
        (directory / name).touch()
    (directory / "run.yaml").write_text(RUN_FILE)
    try:
        config = load_run_file(directory / "run.yaml", {key: value})
    except ConfigError as error:
        assert error.where and error.evidence and error.remedy
    else:
        assert isinstance(config, RunConfig)
