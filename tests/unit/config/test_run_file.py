"""The run file: what it means, and the message for each way to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.config import (
    Backend,
    Executor,
    RunConfig,
    ScaleRule,
    SplitBy,
    WeightGranularity,
    build_run_config,
    load_run_file,
    parse_overrides,
)
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.formats import Float8, Precision
from loka_onnx.errors import ConfigError

RUN_FILE = """\
model: {onnx: ranker.onnx}
outputs:
  - name: ctr
    kind: logit
    label: clicked
    budget: 2e-4
data:
  calibration: day-07.parquet
  selection: day-08.parquet
  certification: day-09.parquet
  inputs: {dense: [age, price], country: country_id}
  group: request_id
  slices: [country]
batch: {min: 1, serve: [256, 1024], max: 4096}
plan: {keep: ["*.calibrator"]}
targets:
  - {device: nvidia-h100, backends: [inductor, tensorrt]}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for name in ("ranker.onnx", "day-07.parquet", "day-08.parquet", "day-09.parquet"):
        (tmp_path / name).touch()
    path = tmp_path / "ranker-fp8.yaml"
    path.write_text(RUN_FILE)
    return path


def refusal(path: Path, *, old: str = "", new: str = "", **overrides: object) -> str:
    """The message, with the directory shortened to DIR."""
    if old:
        assert old in RUN_FILE
        path.write_text(RUN_FILE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_run_file(path, {key.replace("__", "."): value for key, value in overrides.items()})
    assert caught.value.exit_code == 2
    assert caught.value.remedy and caught.value.evidence
    return str(caught.value).replace(str(path.parent), "DIR")


class TestMeaning:
    def test_values_and_defaults(self, run_file: Path) -> None:
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
        assert (config.plan.format, config.plan.scale) == (Float8.E4M3FN, ScaleRule.AMAX)
        assert config.plan.plans is None
        assert config.targets[0].backends == (Backend.INDUCTOR, Backend.TENSORRT)
        assert config.threads is None and not config.data.synthetic

    def test_relative_paths_do_not_depend_on_the_working_directory(
        self, run_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = load_run_file(run_file)
        monkeypatch.chdir(run_file.parent.parent)
        again = load_run_file(Path(run_file.parent.name, run_file.name))
        assert again == expected
        assert again.output.is_absolute()

    def test_an_absolute_output_stays(self, run_file: Path, tmp_path: Path) -> None:
        assert load_run_file(run_file, {"output": str(tmp_path / "x")}).output == tmp_path / "x"

    def test_the_name_names_the_run_directory(self, run_file: Path) -> None:
        assert load_run_file(run_file, {"name": "nightly"}).output == run_file.parent / "runs" / "nightly"

    def test_a_file_name_that_is_no_run_name_is_made_one(self, run_file: Path) -> None:
        odd = run_file.rename(run_file.with_name("my run (2).yaml"))
        assert load_run_file(odd).name == "my-run--2-"

    def test_one_file_with_a_split(self, run_file: Path) -> None:
        split = {"by": "hash", "column": "user", "fractions": {"calibration": 0.1}, "seed": 3}
        data = load_run_file(run_file, {"data": {"path": "day-07.parquet", "split": split}}).data
        assert data.path == run_file.parent / "day-07.parquet"
        assert data.split is not None and data.split.by is SplitBy.HASH
        assert data.split.fractions.model_dump() == {
            "calibration": 0.1,
            "selection": 0.3,
            "certification": 0.5,
        }

    def test_a_torch_model(self, run_file: Path) -> None:
        model = load_run_file(
            run_file, {"model": {"torch": "mymodels.ranker:build", "arguments": {"width": 8}}}
        ).model
        assert (model.torch, model.onnx, model.arguments) == ("mymodels.ranker:build", None, {"width": 8})

    def test_an_output_without_labels_says_so(self, run_file: Path) -> None:
        config = load_run_file(run_file, {"outputs.0.label": None})
        assert config.output_specs == (OutputSpec("ctr", OutputKind.LOGIT, None, budget=2e-4),)
        assert config.columns == ("request_id", "country")
        # Left out it may have been forgotten, and the run would be judged on less than was meant.
        assert refusal(run_file, old="    label: clicked\n", new="").startswith(
            "DIR/ranker-fp8.yaml:3: `outputs[0]` lacks the key 'label'\n"
        )

    def test_only_a_slice_may_hold_nulls(self, run_file: Path) -> None:
        config = load_run_file(run_file, {"data.slices": ["country", "request_id", "clicked"]})
        assert config.columns == ("clicked", "request_id", "country")
        assert config.nullable_columns == {"country"}

    def test_a_run_configuration_is_frozen(self, run_file: Path) -> None:
        config = load_run_file(run_file)
        with pytest.raises(ValueError, match="frozen"):
            config.threads = 3  # type: ignore[misc]

    def test_what_was_understood_reads_back_the_same(self, run_file: Path) -> None:
        config = load_run_file(run_file)
        dumped = config.model_dump(mode="json")
        for output in dumped["outputs"]:
            del output["clip"]  # only a probability may name it
        assert build_run_config(json.loads(json.dumps(dumped)), run_file.parent) == config


class TestSchemaMessages:
    def test_unknown_key(self, run_file: Path) -> None:
        assert refusal(run_file, old="certification", new="certfication") == (
            "DIR/ranker-fp8.yaml:10: unknown key 'certfication' in `data`\n"
            "  evidence: the keys here are calibration, selection, certification, path, split, inputs, "
            "group, slices, synthetic\n"
            "  remedy: did you mean 'certification'?"
        )

    def test_unknown_key_at_the_top_that_has_a_home(self, run_file: Path) -> None:
        text = refusal(run_file, old="plan: {keep", new="keep: []\nplan: {keep")
        assert text.startswith("DIR/ranker-fp8.yaml:15: unknown key 'keep'\n")
        assert text.endswith("remedy: 'keep' belongs under `plan`")

    def test_unknown_key_in_a_list(self, run_file: Path) -> None:
        text = refusal(run_file, old="    label: clicked", new="    label: clicked\n    wieght: w")
        assert text.startswith("DIR/ranker-fp8.yaml:6: unknown key 'wieght' in `outputs[0]`\n")
        assert text.endswith("did you mean 'weight'?")

    def test_unknown_key_far_from_any(self, run_file: Path) -> None:
        assert refusal(run_file, batch__zzz=1).endswith("remedy: remove it, or correct its spelling")

    def test_an_undeclared_output_kind(self, run_file: Path) -> None:
        assert refusal(run_file, old="    kind: logit\n", new="") == (
            "DIR/ranker-fp8.yaml:3: `outputs[0]` lacks the key 'kind'\n"
            "  evidence: it has the keys name, label, budget\n"
            "  remedy: add `kind`: logit, probability or regression; it decides the loss and is never "
            "guessed, because a logit read as a probability gives a loss that looks plausible and is wrong"
        )

    def test_a_missing_key_at_the_top(self, run_file: Path) -> None:
        assert refusal(run_file, old="model: {onnx: ranker.onnx}\n", new="") == (
            "DIR/ranker-fp8.yaml: the run file lacks the key 'model'\n"
            "  evidence: it has the keys outputs, data, batch, plan, targets\n"
            "  remedy: add `model`: the model, as ONNX or as a torch module"
        )

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
            (
                "{onnx: ranker.onnx}",
                "x",
                1,
                "`model` must be a mapping of keys to values",
                "found the text 'x'",
            ),
            ("[256, 1024]", "[256, big]", 14, "`batch.serve[1]` must be a whole number", "'big'"),
        ],
    )
    def test_a_wrong_value(
        self, run_file: Path, old: str, new: str, line: int, what: str, evidence: str
    ) -> None:
        first, second, _ = refusal(run_file, old=old, new=new).split("\n")
        assert first == f"DIR/ranker-fp8.yaml:{line}: {what}"
        assert second.startswith("  evidence: ") and evidence in second

    @pytest.mark.parametrize(
        ("old", "new", "what", "remedy"),
        [
            (
                "kind: logit",
                "kind: logits",
                "`outputs[0].kind` must be one of logit, probability, regression",
                "did you mean 'logit'?",
            ),
            (
                "tensorrt]",
                "tensor_rt]",
                "`targets[0].backends[1]` must be one of "
                "onnxruntime, onnxruntime_tensorrt, tensorrt, tensorrt_rtx, migraphx, inductor",
                "did you mean 'tensorrt'?",
            ),
            (
                "plan: {",
                "plan: {base: fp8, ",
                "`plan.base` must be one of bf16, fp16, fp32, auto",
                "`plan.base`: bf16, fp16, fp32 or auto: precision of everything that does not run in FP8; "
                "auto takes fp16 where the calibration rows show that it fits with a factor of 8 to spare, "
                "else bf16",
            ),
            (
                "nvidia-h100",
                "../etc",
                "`targets[0].device` has the wrong form",
                "`targets[0].device`: name of the device, for example cpu, nvidia-h100 or nvidia-rtx-ada; "
                "lower-case letters, digits and hyphens, because it names a directory",
            ),
        ],
    )
    def test_a_wrong_word(self, run_file: Path, old: str, new: str, what: str, remedy: str) -> None:
        text = refusal(run_file, old=old, new=new)
        assert f": {what}\n" in text
        assert text.endswith(f"  remedy: {remedy}")

    def test_the_top_is_not_a_mapping(self, run_file: Path) -> None:
        run_file.write_text("- model\n")
        assert "a run file is a mapping of keys to values\n  evidence: found a list of 1" in refusal(run_file)


class TestRulesBetweenKeys:
    @pytest.mark.parametrize(
        ("key", "value", "where", "what"),
        [
            ("model", {"onnx": "a", "torch": "a:b"}, "", "`model` needs exactly one of `onnx` and `torch`"),
            ("model", {}, "", "`model` needs exactly one of `onnx` and `torch`"),
            ("model.checkpoint", "w", "", "`model.checkpoint` belongs to a torch model"),
            ("outputs.0.clip", 1e-3, "", "`clip` belongs to an output of kind 'probability'"),
            ("data.path", "x", "8", "`data.path` and `data.calibration` exclude each other"),
            ("data", {"path": "x"}, "", "`data.path` needs `data.split`"),
            ("data", {"split": {"by": "order"}}, "", "`data.split` needs `data.path`"),
            (
                "data",
                {"calibration": "x", "selection": "y"},
                "",
                "`data` needs three disjoint splits: calibration, selection and certification",
            ),
            (
                "data",
                {"path": "x", "split": {"by": "order", "fractions": {"calibration": 0.5}}},
                "",
                "the fractions of a split sum to more than 1",
            ),
            ("data", {"path": "x", "split": {"by": "hash"}}, "", "a split by hash needs a key column"),
            (
                "data",
                {"path": "x", "split": {"by": "order", "seed": 1}},
                "",
                "`seed` belongs to a split by hash",
            ),
            (
                "batch.max",
                512,
                "14",
                "the serving batch 1024 is outside of the range that engines are built for",
            ),
            ("batch.min", 8192, "", "`batch.min` is larger than `batch.max`"),
            ("batch.serve", [8, 8], "", "the serving batch 8 is listed twice"),
            ("calibration.ray_address", "auto", "", "`ray_address` belongs to the executor 'ray'"),
            ("plan.force", ["a.*", "*.calibrator"], "", "the pattern '*.calibrator' is both kept and forced"),
            ("plan.plans", ["fp8-safe"], "", "the plan 'fp32' must compete"),
            ("plan.plans", ["fp32", "bf16", "bf16"], "", "the plan 'bf16' is listed twice"),
            (
                "outputs.0",
                {"name": "spend", "kind": "regression", "label": None},
                "",
                "a regression needs a label, and output 'spend' has none",
            ),
            ("data.slices", ["country", "country"], "", "the slice column 'country' is listed twice"),
            (
                "targets",
                [{"device": "cpu", "backends": ["onnxruntime"]}] * 2,
                "",
                "the device 'cpu' is given twice",
            ),
            (
                "outputs",
                [{"name": "ctr", "kind": "logit", "label": "a"}] * 2,
                "",
                "the name 'ctr' is given twice",
            ),
        ],
    )
    def test_refused(self, run_file: Path, key: str, value: object, where: str, what: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_run_file(run_file, {key: value})
        assert caught.value.what == what
        assert caught.value.where == (f"{run_file}:{where}" if where else f"override '{key}'")
        assert caught.value.evidence and caught.value.remedy

    def test_the_line_is_that_of_the_entry_at_fault(self, run_file: Path) -> None:
        batch = "batch: {min: 1, serve: [256, 1024], max: 4096}"
        new = "batch:\n  serve:\n    - 256\n    - 8192\n  max: 4096"
        assert refusal(run_file, old=batch, new=new) == (
            "DIR/ranker-fp8.yaml:17: the serving batch 8192 is outside of the range that engines are "
            "built for\n  evidence: min is 1, max is 4096\n"
            "  remedy: remove it, or widen `batch.min` and `batch.max`"
        )


class TestFiles:
    def test_a_named_file_is_missing(self, run_file: Path) -> None:
        assert refusal(run_file, old="day-08.parquet", new="day-8.parquet") == (
            "DIR/ranker-fp8.yaml:9: `data.selection` names a file that does not exist\n"
            "  evidence: looked for 'DIR/day-8.parquet'\n"
            "  remedy: did you mean 'day-08.parquet'? a relative path starts at 'DIR'"
        )

    def test_a_named_file_is_a_directory(self, run_file: Path) -> None:
        (run_file.parent / "shards").mkdir()
        text = refusal(run_file, old="day-07.parquet", new="shards")
        assert "evidence: 'DIR/shards' is a directory" in text

    def test_its_directory_is_missing_too(self, run_file: Path) -> None:
        text = refusal(run_file, old="ranker.onnx", new="models/ranker.onnx")
        assert text.startswith("DIR/ranker-fp8.yaml:1: `model.onnx` names a file that does not exist")

    def test_the_run_file_is_missing(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "no.yaml") == (
            "DIR/no.yaml: cannot read the run file\n"
            "  evidence: No such file or directory\n"
            "  remedy: give the path of a YAML file; `loka-onnx demo` writes one to start from"
        )

    @pytest.mark.parametrize(
        ("content", "what"),
        [
            (b"", "the run file is empty"),
            (b"# only a comment\n", "the run file is empty"),
            (b"\xff\xfe\x00", "the run file is not UTF-8 text"),
        ],
    )
    def test_no_content(self, run_file: Path, content: bytes, what: str) -> None:
        run_file.write_bytes(content)
        assert f"DIR/ranker-fp8.yaml: {what}\n" in refusal(run_file)


class TestOverrides:
    def test_values_are_yaml(self) -> None:
        assert parse_overrides(["a.b=null", "c=[1, 2e-1]", "d=text=x", " e =no"]) == {
            "a.b": None,
            "c": [1, 0.2],
            "d": "text=x",
            "e": "no",
        }

    @pytest.mark.parametrize("text", ["batch.max", "=3"])
    def test_no_assignment(self, text: str) -> None:
        with pytest.raises(ConfigError, match="an override is `key=value`"):
            parse_overrides([text])

    def test_twice(self) -> None:
        with pytest.raises(ConfigError, match="the override 'threads' is given twice"):
            parse_overrides(["threads=1", "threads=2"])

    def test_a_value_that_is_not_yaml(self) -> None:
        with pytest.raises(ConfigError, match=r"override 'batch.serve':1: the run file is not valid YAML"):
            parse_overrides(["batch.serve=[1"])

    def test_they_replace_and_create(self, run_file: Path) -> None:
        config = load_run_file(
            run_file, {"batch.serve": [8], "calibration.rows": 64, "outputs.0.budget": 0.1, "threads": 2}
        )
        assert config.batch.serve == (8,) and config.batch.max == 4096
        assert config.calibration.rows == 64
        assert config.outputs[0].budget == 0.1
        assert config.threads == 2

    def test_a_ray_cluster(self, run_file: Path) -> None:
        config = load_run_file(
            run_file, {"calibration.executor": "ray", "calibration.ray_address": "10.0.0.5:6379"}
        )
        assert (config.calibration.executor, config.calibration.ray_address) == ("ray", "10.0.0.5:6379")

    @pytest.mark.parametrize(
        ("key", "value", "what"),
        [
            ("confidence", 1.0, "must be less than 1"),
            ("confidence", 0.5, "must be greater than 0.5"),
            ("draws", 9, "must be at most 8"),
            ("draws", 0, "must be at least 1"),
            ("error_precision", 0.0, "must be greater than 0"),
            ("sensitivity_rows", 0, "must be at least 1"),
            ("executor", "dask", "must be one of local, ray"),
        ],
    )
    def test_limits_of_calibration(self, run_file: Path, key: str, value: object, what: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load_run_file(run_file, {f"calibration.{key}": value})
        assert caught.value.what == f"`calibration.{key}` {what}"

    def test_the_message_names_the_override_and_not_a_line(self, run_file: Path) -> None:
        assert refusal(run_file, batch__max="many").startswith(
            "override 'batch.max': `batch.max` must be a whole number\n"
        )
        assert refusal(run_file, batch={"max": 1, "mim": 1}).startswith(
            "override 'batch': unknown key 'mim' in `batch`\n"
        )

    @pytest.mark.parametrize("key", ["outputs.3.budget", "outputs.x.budget", "model.onnx.deep", "outputs.9"])
    def test_no_such_place(self, run_file: Path, key: str) -> None:
        with pytest.raises(ConfigError, match="there is no `") as caught:
            load_run_file(run_file, {key: 1})
        assert caught.value.where == f"override '{key}'"


class TestBuiltInMemory:
    def test_paths_are_taken(self, run_file: Path) -> None:
        values = yaml.safe_load(RUN_FILE.replace("2e-4", "0.0002"))
        values["output"] = run_file.parent / "there"
        config = build_run_config(values, run_file.parent)
        assert config.output == run_file.parent / "there" and config.name == "run"

    def test_the_message_names_the_source(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^the demo: the run file lacks the key 'model'"):
            build_run_config({}, tmp_path, source="the demo")


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
def test_whatever_is_put_anywhere_is_taken_or_refused_properly(
    key: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    for name in ("ranker.onnx", "day-07.parquet", "day-08.parquet", "day-09.parquet"):
        (directory / name).touch()
    (directory / "run.yaml").write_text(RUN_FILE)
    try:
        config = load_run_file(directory / "run.yaml", {key: value})
    except ConfigError as error:
        assert error.where and error.evidence and error.remedy
    else:
        assert isinstance(config, RunConfig)
