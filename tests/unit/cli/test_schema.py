"""`loka-onnx schema`: what is published is current, its references resolve, and a real profile fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loka_onnx.cli.main import main
from loka_onnx.cli.schema import Document, schema_text
from loka_onnx.core import serde
from loka_onnx.core.histogram import MagnitudeHistogram
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import Profile, SiteProfile
from loka_onnx.core.sensitivity import Sensitivity
from loka_onnx.core.statistics import ErrorStats, RangeStats

DOCS = Path(__file__).parents[3] / "docs"
KL = Interval(1e-5, 0.0, 2e-5, 0.95, 50)
PROFILE = Profile(
    "m",
    "d",
    100,
    50,
    False,
    (
        SiteProfile(
            "fc1",
            {
                "x": RangeStats(
                    3, 2.0, -2.0, 2.0, 0.0, 5.0, MagnitudeHistogram(1, 1016, (1, 0, 1)), (2.0, 1.0)
                )
            },
            (ErrorStats("r", None, 3, 1.0, 0.5, 1.0, 1.5, 3, 0, 0, 1),),
            (Sensitivity("r", "logit", "loss", 0.1, -0.1, KL, None),),
            ("fc1a", "fc1b"),
        ),
    ),
    {"logit": 0.69},
    {"ranges": 0.25},
)


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


SCALARS = {"string": str, "boolean": bool, "null": type(None), "integer": int, "number": (int, float)}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """The part of JSON Schema that these documents need, read by the specification and not by pydantic."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(fits(value, choice, root) for choice in schema["anyOf"])
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema["items"], root) for item in value)
    if kind != "object":
        return isinstance(value, SCALARS[kind]) and (kind == "boolean" or not isinstance(value, bool))
    known, rest = schema.get("properties", {}), schema["additionalProperties"]
    return (
        isinstance(value, dict)
        and set(schema.get("required", ())) <= set(value)
        and all(
            fits(item, known[key], root) if key in known else bool(rest) and fits(item, rest, root)
            for key, item in value.items()
        )
    )


def test_the_published_schema_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Write it anew with `loka-onnx schema profile > docs/profile-schema.json`."""
    assert printed(["schema", "profile"], capsys) == (DOCS / "profile-schema.json").read_text()


def test_the_run_file_is_what_is_asked_for_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["schema"], capsys) == printed(["schema", "run"], capsys)


def test_a_profile_fits_its_schema_and_nothing_strange_does() -> None:
    schema, document = json.loads(schema_text(Document.PROFILE)), json.loads(serde.dumps(PROFILE))
    assert fits(document, schema, schema)

    def broken(change: Any) -> dict[str, Any]:
        other = json.loads(serde.dumps(PROFILE))
        change(other)
        return other

    for change in (
        lambda d: d.update(schema="loka-onnx/profile/1"),
        lambda d: d["value"].pop("rows"),
        lambda d: d["value"].update(colour="red"),
        lambda d: d["value"]["sites"][0]["operands"]["x"]["histogram"].update(counts=[0.5]),
        lambda d: d["value"]["sites"][0]["errors"][0].update(noise="much"),
    ):
        assert not fits(broken(change), schema, schema)
