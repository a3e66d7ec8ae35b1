"""Kernel times as values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.timing import Kernel, KernelTiming, Provenance, Shape, TimingRecords
from loka_onnx.errors import UserError

SOURCE = Provenance("NVIDIA H100", {"torch": "2.11"}, "1980 MHz", "2026-11-21")
WIDE = Kernel("nvidia-h100", "inductor", "mm", Precision.BF16)
NARROW = Kernel("nvidia-h100", "inductor", "scaled_mm", Precision.FP8, Granularity.PER_TENSOR)


def test_a_shape_counts_its_operations() -> None:
    assert Shape(2, 3, 5).flops == 60
    assert (str(Shape(2, 3, 5)), str(Shape(2, 0, 5))) == ("2×3×5", "2×5")


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


def test_records_survive_their_file_and_refuse_other_keys() -> None:
    records = TimingRecords.of([KernelTiming(NARROW, Shape(2, 3, 5), 1.5, 0.25, SOURCE, 15, 1e-3)])
    text = serde.dumps(records)
    assert serde.loads(TimingRecords, text) == records
    with pytest.raises(UserError, match="not a valid loka-onnx/kernel-timings/1 document"):
        serde.loads(TimingRecords, text.replace('"us"', '"ms"'))
