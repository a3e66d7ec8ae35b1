"""Values that are given beside a run file, any of them anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_files import FILES, RUN_FILE, refusal

from loka_onnx.config import RunConfig, load_run_file, parse_overrides
from loka_onnx.errors import ConfigError


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
