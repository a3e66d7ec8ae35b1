"""What the report says of constants that were fitted to a plan."""

from __future__ import annotations

import dataclasses

import pytest
from test_report import NASTY

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import (
    BiasCorrection,
    CorrectionSet,
    OutputCorrection,
    PlanCorrections,
    Trial,
    Variant,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.report import ReportData
from loka_onnx.report.sections import build_document


def a_trial(variant, value, kl, constant=0.0):
    wide = Interval(value, value - 0.0002, value + 0.0002, 0.95, 1000)
    return Trial(variant, constant, 10 * value, wide, Interval(kl, kl, kl, 0.95, 1000), wide)


TRIALS = (
    a_trial(Variant.NONE, 0.0029, 0.0021),
    a_trial(Variant.CONSTANT, 0.0012, 0.0020, 0.0625),
    a_trial(Variant.BIAS, 0.0013, 0.0019),
)
BIAS = BiasCorrection("over_arch.fc1", (1, 2), (0.0123, -0.0456), 0.0789, 0.00321)


@pytest.fixture
def corrected(sample) -> ReportData:
    output = OutputCorrection("ctr", OutputKind.LOGIT, TRIALS, Variant.CONSTANT, f"{NASTY} helps most")
    unlabelled = tuple(dataclasses.replace(trial, delta_ne=None, labelled=None) for trial in TRIALS[:1])
    other = OutputCorrection("cvr", OutputKind.LOGIT, unlabelled, Variant.NONE, "nothing helps")
    plans = (
        PlanCorrections("fp8-all", 32_768, (BIAS,), {"dot": "a product of two activations"}, (output,)),
        PlanCorrections("fp8-safe", 32_768, (), {}, (other,)),
    )
    return dataclasses.replace(sample.report, corrections=CorrectionSet(plans))


def test_the_section_shows_every_trial_and_what_was_kept(corrected, tmp_path):
    (section,) = [s for s in build_document(corrected).sections if s.anchor == "corrections"]
    variants, biases = section.tables
    rows = [[cell.text for cell in row] for row in variants.rows]
    assert [row[:4] for row in rows] == [
        ["fp8-all", "ctr", "none", "no"],
        ["fp8-all", "ctr", "output constant", "yes"],
        ["fp8-all", "ctr", "biases", "no"],
        ["fp8-safe", "cvr", "none", "yes"],
    ]
    assert variants.emphasized == {1, 3}
    assert rows[0][4:] == [
        "–", "+0.029", "+0.290 % [+0.270 %, +0.310 %]", "+0.21 % [+0.21 %, +0.21 %]", f"{NASTY} helps most"
    ]  # fmt: skip
    assert rows[1][4] == "+0.0625" and rows[1][8] == ""
    assert rows[3][6] == "–"
    assert [cell.text for cell in biases.rows[0]] == [
        "fp8-all", "over_arch.fc1", "2", "0.0456", "0.0789", "0.00321", "no"
    ]  # fmt: skip
    assert section.items == ("fp8-all: dot has no corrected bias: a product of two activations",)
