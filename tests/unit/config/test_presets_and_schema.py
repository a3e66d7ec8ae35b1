"""Presets fit the schema; the JSON Schema says the same as the loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka_onnx.config import Backend, RunConfig, load_preset, preset_names, run_file_schema
from loka_onnx.errors import ConfigError


@pytest.fixture
def prepared(tmp_path: Path) -> dict[str, object]:
    names = ("calibration", "selection", "certification")
    for name in names:
        (tmp_path / f"{name}.parquet").touch()
    return {
        "model": {"torch": "package.module:build"},
        "data": {name: tmp_path / f"{name}.parquet" for name in names},
    }


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_fits_the_schema(name: str, prepared: dict[str, object], tmp_path: Path) -> None:
    config = load_preset(name).run_config(prepared, tmp_path)
    assert config.name == name and config.output == tmp_path / "runs" / name


def test_the_demo(prepared: dict[str, object], tmp_path: Path) -> None:
    preset = load_preset("demo")
    assert (preset.prepare.dataset, preset.prepare.architecture) == ("movielens-100k", "wukong")
    config = preset.run_config(prepared, tmp_path)
    assert config.outputs[0].budget == 0.001
    assert {target.device: target.backends for target in config.targets} == {
        "cpu": (Backend.ONNXRUNTIME,),
        "nvidia-rtx-ada": (Backend.TENSORRT_RTX,),
        "nvidia-rtx-blackwell": (Backend.TENSORRT_RTX,),
    }


def test_values_replace_those_of_the_preset(prepared: dict[str, object], tmp_path: Path) -> None:
    config = load_preset("demo").run_config({**prepared, "output": tmp_path / "mine"}, tmp_path)
    assert config.output == tmp_path / "mine"


def test_no_such_preset() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'dmeo'\n  evidence: the presets are demo"):
        load_preset("dmeo")


def test_every_key_is_described() -> None:
    schema = run_file_schema()
    for definition in [schema, *schema["$defs"].values()]:
        for key, value in definition.get("properties", {}).items():
            assert value.get("description"), f"{definition['title']}.{key}"


def test_the_schema_is_closed_and_names_what_is_required() -> None:
    schema = run_file_schema()
    assert schema["required"] == ["model", "outputs", "data", "targets"]
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    for definition in [schema, *schema["$defs"].values()]:
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False
    assert schema["$defs"]["OutputConfig"]["required"] == ["name", "kind", "label"]
    columns = schema["$defs"]["DataConfig"]["properties"]["inputs"]["additionalProperties"]
    assert [choice["type"] for choice in columns["anyOf"]] == ["string", "array"]
