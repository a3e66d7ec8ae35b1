"""Corrections as a document, and what of them is written into a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import (
    BiasCorrection,
    Corrections,
    CorrectionSet,
    OutputConstant,
    OutputCorrection,
    PlanCorrections,
    Trial,
    Variant,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import UserError

INTERVAL = Interval(1e-4, -1e-4, 3e-4, 0.95, 1000)
BIAS = BiasCorrection("over.fc1", (1, 2), (1e-3, -2e-3), 4e-3, 1e-4)


def output(name: str, accepted: Variant) -> OutputCorrection:
    trials = tuple(Trial(v, 0.25 if v.has_constant else 0.0, 0.1, INTERVAL, INTERVAL, None) for v in Variant)
    return OutputCorrection(name, OutputKind.LOGIT, trials, accepted, "because")


def plan(*accepted: Variant) -> PlanCorrections:
    outputs = tuple(output(f"y{number}", variant) for number, variant in enumerate(accepted))
    return PlanCorrections("fp8-all", 32_768, (BIAS,), {"dot": "two activations"}, outputs)


def test_the_document_comes_back() -> None:
    document = CorrectionSet((plan(Variant.BOTH, Variant.BIAS),))
    text = serde.dumps(document)
    assert serde.loads(CorrectionSet, text) == document
    assert '"schema": "loka-onnx/corrections/1"' in text
    with pytest.raises(UserError, match="unknown schema"):
        serde.loads(CorrectionSet, text.replace("corrections/1", "corrections/0"))


def test_what_is_accepted() -> None:
    constant = OutputConstant("y0", OutputKind.LOGIT, 0.25)
    assert plan(Variant.BOTH, Variant.BIAS).accepted == Corrections((BIAS,), (constant,))
    assert plan(Variant.CONSTANT, Variant.NONE).accepted == Corrections((), (constant,))
    assert plan(Variant.BIAS).accepted == Corrections((BIAS,), ())
    assert plan(Variant.NONE).accepted.is_empty
    found = CorrectionSet((plan(Variant.BIAS), replace(plan(Variant.NONE), plan="fp8-safe")))
    assert not found.accepted("fp8-all").is_empty
    assert found.accepted("fp8-safe").is_empty
    assert found.accepted("bf16").is_empty


def test_an_output_knows_its_trials() -> None:
    found = output("y", Variant.CONSTANT)
    assert found.before.variant is Variant.NONE
    assert found.after.constant == 0.25
    assert BIAS.largest == 2e-3
    with pytest.raises(KeyError):
        replace(found, trials=found.trials[:1]).trial(Variant.BIAS)
