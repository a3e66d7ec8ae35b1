"""Recipes, kernel times and corrections as values and documents; caches; the cyclic collector."""

import gc
from dataclasses import replace
from pathlib import Path

import ml_dtypes
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
from loka_onnx.core.formats import E4M3FN, E4M3FNUZ, E5M2, INT8, UINT8, NumberFormat, Precision
from loka_onnx.core.installation import cache_directory
from loka_onnx.core.intervals import Interval
from loka_onnx.core.progress import collector_paused
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Granularity, Recipe
from loka_onnx.core.timing import Kernel, KernelTiming, Provenance, Shape, TimingRecords
from loka_onnx.errors import UserError


@pytest.mark.parametrize(
    "recipe",
    [
        PER_TENSOR,
        PER_CHANNEL_WEIGHT,
        Recipe.of(scale="percentile-99.9"),
        Recipe.of(INT8),
        Recipe.of(UINT8, scale="mse"),
    ],
)
def test_a_recipe_is_read_from_its_id(recipe: Recipe) -> None:
    assert Recipe.of_id(recipe.id) == recipe


def test_weights_beside_asymmetric_activations_are_symmetric() -> None:
    recipe = Recipe.of(UINT8, scale="mse")
    assert (recipe.id, recipe.format.of_weights) == ("uint8/per_tensor/per_tensor/mse", INT8)


@pytest.mark.parametrize(
    "text", ["bf16", "e4m3fn/per_tensor/per_row/amax", "e9m9/per_tensor/per_tensor/amax"]
)
def test_what_is_no_id_of_a_recipe(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no id of a recipe|is not a valid"):
        Recipe.of_id(text)


@pytest.mark.parametrize("format", [E4M3FN, E4M3FNUZ, E5M2])
def test_limits_of_fp8_are_those_of_ml_dtypes(format: NumberFormat) -> None:
    limits = ml_dtypes.finfo(format.storage)
    assert (format.min, format.max) == (float(limits.min), float(limits.max))
    assert format.min_normal == float(limits.smallest_normal)
    assert format.smallest == float(limits.smallest_subnormal)


SOURCE = Provenance("NVIDIA H100", {"torch": "2.11"}, "1980 MHz", "2026-11-21")
WIDE = Kernel("nvidia-h100", "inductor", "mm", Precision.BF16)
NARROW = Kernel("nvidia-h100", "inductor", "scaled_mm", Precision.FP8, Granularity.PER_TENSOR)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_what_is_no_shape_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is no shape of a product: M and K are at least 1, N at least 0"):
        Shape(*sizes)


@pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_is_positive_and_finite(us: float) -> None:
    with pytest.raises(ValueError, match="µs is no time of inductor:mm/bf16 on 2×3×5"):
        KernelTiming(WIDE, Shape(2, 3, 5), us, None, SOURCE)


def test_records_gather_times_by_kernel_and_source_and_give_them_back() -> None:
    other = replace(SOURCE, date="2026-11-22")
    timings = (
        KernelTiming(NARROW, Shape(2, 3, 5), 1.5, 0.25, SOURCE, 15, 1e-3),
        KernelTiming(WIDE, Shape(4, 3, 5), 3.0, None, other),
        KernelTiming(WIDE, Shape(2, 3, 5), 2.0, None, SOURCE),
        KernelTiming(WIDE, Shape(1, 3, 5), 1.0, None, SOURCE),
    )
    records = TimingRecords.of(timings)
    assert [(s.kernel.name, s.provenance.date, len(s.shapes)) for s in records.series] == [
        ("mm", "2026-11-21", 2),
        ("mm", "2026-11-22", 1),
        ("scaled_mm", "2026-11-21", 1),
    ]
    assert records.timings == (timings[3], timings[2], timings[1], timings[0])
    assert TimingRecords.of(reversed(timings)) == records


def test_documents_come_back_and_refuse_other_keys() -> None:
    records = TimingRecords.of([KernelTiming(NARROW, Shape(2, 3, 5), 1.5, 0.25, SOURCE, 15, 1e-3)])
    text = serde.dumps(records)
    assert serde.loads(TimingRecords, text) == records
    with pytest.raises(UserError, match="not a valid loka-onnx/kernel-timings/1 document"):
        serde.loads(TimingRecords, text.replace('"us"', '"ms"'))
    document = CorrectionSet((plan(Variant.BOTH, Variant.BIAS),))
    text = serde.dumps(document)
    assert serde.loads(CorrectionSet, text) == document
    assert '"schema": "loka-onnx/corrections/1"' in text
    with pytest.raises(UserError, match="unknown schema"):
        serde.loads(CorrectionSet, text.replace("corrections/1", "corrections/0"))


INTERVAL = Interval(1e-4, -1e-4, 3e-4, 0.95, 1000)
BIAS = BiasCorrection("over.fc1", (1, 2), (1e-3, -2e-3), 4e-3, 1e-4)


def output(name: str, accepted: Variant) -> OutputCorrection:
    trials = tuple(Trial(v, 0.25 if v.has_constant else 0.0, 0.1, INTERVAL, INTERVAL, None) for v in Variant)
    return OutputCorrection(name, OutputKind.LOGIT, trials, accepted, "because")


def plan(*accepted: Variant) -> PlanCorrections:
    outputs = tuple(output(f"y{number}", variant) for number, variant in enumerate(accepted))
    return PlanCorrections("fp8-all", 32_768, (BIAS,), {"dot": "two activations"}, outputs)


def test_what_is_accepted_of_the_trials_of_an_output() -> None:
    constant = OutputConstant("y0", OutputKind.LOGIT, 0.25)
    assert plan(Variant.BOTH, Variant.BIAS).accepted == Corrections((BIAS,), (constant,))
    assert plan(Variant.CONSTANT, Variant.NONE).accepted == Corrections((), (constant,))
    assert plan(Variant.BIAS).accepted == Corrections((BIAS,), ())
    assert plan(Variant.NONE).accepted.is_empty
    found = CorrectionSet((plan(Variant.BIAS), replace(plan(Variant.NONE), plan="fp8-safe")))
    assert not found.accepted("fp8-all").is_empty
    assert found.accepted("fp8-safe").is_empty
    assert found.accepted("bf16").is_empty
    found = output("y", Variant.CONSTANT)
    assert found.before.variant is Variant.NONE
    assert found.after.constant == 0.25
    assert BIAS.largest == 2e-3
    with pytest.raises(KeyError):
        replace(found, trials=found.trials[:1]).trial(Variant.BIAS)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LOKA_ONNX_CACHE": "/fast/cache", "XDG_CACHE_HOME": "/xdg"}, "/fast/cache"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/loka-onnx"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/loka-onnx"),
        ({}, "/home/someone/.cache/loka-onnx"),
    ],
)
def test_the_first_that_is_set_counts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("LOKA_ONNX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_what_it_was(was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError), collector_paused():
            with collector_paused():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
