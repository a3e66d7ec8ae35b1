"""What a run file means: values, defaults, the files that it names; the JSON Schema says the same."""

import json

import pytest
from run_files import refusal

from loka_onnx.config import (
    Executor,
    RunConfig,
    SplitBy,
    WeightGranularity,
    build_run_config,
    load_run_file,
    run_file_schema,
)
from loka_onnx.config.fields import Float8Format
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ConfigError


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
    assert config.plan.base is None
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


def test_who_gives_a_model_in_place_of_a_run_file_learns_how_to_get_one(run_file):
    run_file.write_bytes(b"\x08\x0a\x12\x07pytorch\xba\x01")
    assert "`loka-onnx init`" in refusal(run_file)


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
    for definition in [schema, *schema["$defs"].values()]:
        for key, value in definition.get("properties", {}).items():
            assert value.get("description"), f"{definition['title']}.{key}"
