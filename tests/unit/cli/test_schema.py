"""`loka-onnx schema`: what is published is current, its references resolve, and a real profile fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich_run import rich
from sample_run import SampleRun

from loka_onnx.cli.main import main
from loka_onnx.cli.schema import Document, schema_text
from loka_onnx.core import serde

DOCS = Path(__file__).parents[3] / "docs"


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("document", ["profile", "report", "run-comparison"])
def test_the_published_schema_is_current(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Write it anew with `loka-onnx schema profile > docs/profile-schema.json`, and likewise the others."""
    text = printed(["schema", document], capsys)
    assert text == (DOCS / f"{document}-schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_the_run_file_is_what_is_asked_for_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["schema"], capsys) == printed(["schema", "run"], capsys)


def test_a_profile_fits_its_schema_and_nothing_strange_does(sample: SampleRun) -> None:
    schema = jsonschema.Draft202012Validator(json.loads(schema_text(Document.PROFILE)))
    profile = serde.dumps(rich(sample.report, sequential=True).profile)
    schema.validate(json.loads(profile))

    def broken(change: Any) -> dict[str, Any]:
        other = json.loads(profile)
        change(other)
        return other

    for change in (
        lambda d: d.update(schema="loka-onnx/profile/2"),
        lambda d: d["value"].pop("rows"),
        lambda d: d["value"].update(colour="red"),
        lambda d: d["value"]["sampling"].update(looks="often"),
        lambda d: d["value"]["groups"][0]["sensitivities"][0].pop("kl_moments"),
        lambda d: d["value"]["scales"]["e4m3fn/amax"].update(dense="large"),
        lambda d: d["value"]["sites"][0]["operands"]["dense"]["histogram"].update(counts=[0.5]),
        lambda d: d["value"]["sites"][0]["errors"][0].update(noise="much"),
    ):
        assert not schema.is_valid(broken(change))
