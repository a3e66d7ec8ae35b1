"""report.json fits the schema that is published for it, and what is broken does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich_run import rich
from sample_run import SampleRun

from loka_onnx.core import serde
from loka_onnx.errors import UserError
from loka_onnx.report import ReportData

PUBLISHED = Path(__file__).parents[3] / "docs" / "report-schema.json"


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(PUBLISHED.read_text(encoding="utf-8")))


@pytest.mark.parametrize("is_sequential", [False, True])
def test_the_report_of_a_run_fits(
    sample: SampleRun, validator: jsonschema.Draft202012Validator, is_sequential: bool
) -> None:
    validator.validate(json.loads(serde.dumps(sample.report)))
    validator.validate(json.loads(serde.dumps(rich(sample.report, sequential=is_sequential))))


def output_of(document: dict[str, Any]) -> dict[str, Any]:
    return document["value"]["evaluations"]["evaluations"][1]["outputs"][0]


Break = Callable[[dict[str, Any]], object]
BREAKS: dict[str, Break] = {
    "another version": lambda d: d.update(schema="loka-onnx/report/6"),
    "no value": lambda d: d.pop("value"),
    "a key beside the value": lambda d: d.update(more=1),
    "a field is missing": lambda d: d["value"].pop("title"),
    "an unknown key": lambda d: d["value"].update(colour="red"),
    "a field of an engine is missing": lambda d: d["value"]["engines"][0].pop("digest"),
    "a status that there is not": lambda d: d["value"]["engines"][0].update(status="fine"),
    "text for a number": lambda d: d["value"]["plans"]["plans"][0].update(fp8_share="half"),
    "a fraction for a count": lambda d: d["value"]["profile"].update(rows=0.5),
    "a number for a flag": lambda d: d["value"]["data"].update(synthetic=2),
    "an interval without its end": lambda d: output_of(d)["difference"]["kl"].pop("upper"),
    "a mapping for a list": lambda d: d["value"].update(lineage={}),
    "an unknown key in a slice": lambda d: output_of(d)["slices"][0].update(p=0.5),
    "null for a rewrite": lambda d: d["value"]["rewrites"].update(mods=None),
    "a wrong saving": lambda d: d["value"]["plans"]["speeds"][0]["saved_us"].update({"64": "much"}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_does_not_fit(
    sample: SampleRun, validator: jsonschema.Draft202012Validator, name: str
) -> None:
    """Nor is it read: the schema and the reader agree."""
    document = json.loads(serde.dumps(rich(sample.report)))
    BREAKS[name](document)
    assert not validator.is_valid(document)
    with pytest.raises(UserError):
        serde.loads(ReportData, json.dumps(document))
