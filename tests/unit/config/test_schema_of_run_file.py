"""The JSON Schema says the same as the loader."""

from __future__ import annotations

from loka_onnx.config import RunConfig, run_file_schema


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
