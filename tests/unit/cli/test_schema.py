"""`loka-onnx schema`: what is published is current, its references resolve, and a real profile fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loka_onnx.cli.main import main
from loka_onnx.cli.schema import Document, schema_text
from loka_onnx.core import serde
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import (
    DeltaSums,
    Draws,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    SiteProfile,
    WeightedMean,
)
from loka_onnx.core.statistics import BatchSpread, BatchSums, ErrorStats, MagnitudeHistogram, RangeStats

DOCS = Path(__file__).parents[3] / "docs"
ONE, NONE = ExactSum.of([1.0]), ExactSum()
DELTA = DeltaSums(ONE, NONE, ONE)
MOMENTS = RatioMoments(50, 50, ONE, ONE, ONE, ONE, ONE)
KL = Sensitivity.of(SensitivityName("r", "logit", "loss"), DELTA, MOMENTS, None, Draws(4, 1.0, 2.0, 2.0))
PROFILE = Profile(
    "m",
    "d",
    100,
    80,
    Sampling(50, 1, 16384, ("fc1",), may_stop_early=True),
    False,
    (
        SiteProfile(
            "fc1",
            {
                "x": RangeStats(
                    3,
                    2.0,
                    -2.0,
                    2.0,
                    NONE,
                    ExactSum.of([5.0]),
                    MagnitudeHistogram(1, 1016, (1, 0, 1)),
                    (2.0, 1.0),
                    BatchSpread(1, 3, {"amax": BatchSums(ONE, ONE)}),
                )
            },
            (ErrorStats("r", None, 3, ONE, ONE, ONE, 3, 0, 0, 1),),
            (KL,),
            ("fc1a", "fc1b"),
        ),
    ),
    {"logit": WeightedMean(ONE, ONE)},
    {"e4m3fn/amax": {"x": 0.5}},
    {"ranges": ExactSum.of([0.25])},
    (SiteGroup("x", ("fc1", "fc2"), (KL,)),),
    ("w",),
)


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


def test_a_profile_fits_its_schema_and_nothing_strange_does() -> None:
    schema = jsonschema.Draft202012Validator(json.loads(schema_text(Document.PROFILE)))
    schema.validate(json.loads(serde.dumps(PROFILE)))

    def broken(change: Any) -> dict[str, Any]:
        other = json.loads(serde.dumps(PROFILE))
        change(other)
        return other

    for change in (
        lambda d: d.update(schema="loka-onnx/profile/2"),
        lambda d: d["value"].pop("rows"),
        lambda d: d["value"].update(colour="red"),
        lambda d: d["value"]["sampling"].update(looks="often"),
        lambda d: d["value"]["groups"][0]["sensitivities"][0].pop("kl_moments"),
        lambda d: d["value"]["scales"]["e4m3fn/amax"].update(x="large"),
        lambda d: d["value"]["sites"][0]["operands"]["x"]["histogram"].update(counts=[0.5]),
        lambda d: d["value"]["sites"][0]["errors"][0].update(noise="much"),
    ):
        assert not schema.is_valid(broken(change))
