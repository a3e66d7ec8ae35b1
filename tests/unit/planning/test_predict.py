"""Times of shapes that were not measured."""

from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.timing import PRODUCT, QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.planning.predict import FEWEST, Estimate, KernelModel, TimeTable
from loka_onnx.planning.timings import shipped_timings

SOURCE = Provenance("a device", {}, "", "2026-11-21")
WIDE = Kernel("d", "inductor", "mm", Precision.BF16)
NARROW = Kernel("d", "inductor", "scaled_mm", Precision.FP8, Granularity.PER_TENSOR)
ROW_WISE = replace(NARROW, name="scaled_mm-row_wise", scales=Granularity.PER_CHANNEL)
PER_TENSOR, PER_CHANNEL = Granularity.PER_TENSOR, Granularity.PER_CHANNEL

LAUNCH_US, FLOPS_PER_US, BYTES_PER_US = 2.0, 800e6, 3e6


def roofline(shape: Shape) -> float:
    """What a kernel in BF16 takes that overlaps nothing."""
    moved = 2 * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n)
    return LAUNCH_US + 2 * shape.m * shape.n * shape.k / FLOPS_PER_US + moved / BYTES_PER_US


def timing(kernel: Kernel, shape: Shape, us: float, spread: float | None = None) -> KernelTiming:
    return KernelTiming(kernel, shape, us, spread, SOURCE)


GRID = [Shape(m, n, k) for m in (256, 1024, 4096) for n in (64, 512, 4096) for k in (64, 512, 4096)]
ALONE = [timing for timing in shipped_timings("nvidia-h100") if timing.kernel.name != PRODUCT]
"""Times of `PRODUCT` answer for the shapes that were measured only."""
H100 = {model.kernel.name: model for model in TimeTable(ALONE).models.values()}


def test_measured_shapes_answer_with_what_was_measured():
    for model in H100.values():
        for known in (t for t in shipped_timings("nvidia-h100") if t.kernel == model.kernel):
            found = model.estimate(known.shape)
            assert (found.us, found.is_measured, found.error_us) == (known.us, True, known.spread_us or 0.0)


def test_a_roofline_is_found_again_and_what_it_misses_is_carried_to_neighbours_only():
    model = KernelModel([timing(WIDE, shape, roofline(shape)) for shape in GRID])
    for shape in (Shape(2048, 2048, 2048), Shape(512, 100, 3000), Shape(16384, 8192, 8192)):
        found = model.estimate(shape)
        assert not found.is_measured
        assert found.us == pytest.approx(roofline(shape), rel=1e-3)
        assert found.error_us < 0.01 * found.us
    # A kernel that is slow where N is small: near it the prediction follows, far away it does not.
    slow = [timing(WIDE, s, roofline(s) * (2.0 if s.n == 64 else 1.0)) for s in GRID]
    model = KernelModel(slow)
    near, far = model.estimate(Shape(2048, 72, 1024)), model.estimate(Shape(2048, 3000, 3000))
    assert near.us / roofline(Shape(2048, 72, 1024)) > 1.6
    assert far.us / roofline(Shape(2048, 3000, 3000)) < 1.15
    # Too few shapes predict nothing.
    few = [timing(WIDE, shape, roofline(shape)) for shape in GRID[: FEWEST - 1]]
    assert KernelModel(few).estimate(Shape(3, 3, 3)) is None
    enough = [timing(WIDE, shape, roofline(shape)) for shape in GRID[:FEWEST]]
    assert KernelModel(enough).estimate(Shape(3, 3, 3)) is not None


def leave_one_out(model: KernelModel) -> list[tuple[Estimate, float]]:
    """Each measured time as predicted when everything is fitted again without it, and as measured."""
    found = []
    for shape, known in model._measured.items():
        rest = KernelModel([other for other in model._measured.values() if other.shape != shape])
        estimate = rest.estimate(shape)
        assert not estimate.is_measured
        found.append((estimate, known.us))
    return found


@pytest.mark.parametrize(
    ("name", "most_median", "most"),
    [("mm", 0.1, 0.45), ("scaled_mm", 0.1, 0.45), ("scaled_mm-row_wise", 0.12, 0.75), (QUANTIZE, 0.1, 0.45)],
)
def test_leave_one_out_on_the_shipped_records(name, most_median, most):
    errors = [abs(found.us / us - 1.0) for found, us in leave_one_out(H100[name])]
    assert median(errors) < most_median
    assert max(errors) < most


@pytest.mark.slow
def test_the_standard_error_is_the_size_of_the_errors_that_are_seen():
    """Left out one by one, about two thirds of the times lie inside one standard error."""
    pairs = [pair for model in H100.values() for pair in leave_one_out(model)]
    inside = [abs(found.us - us) <= found.error_us for found, us in pairs]
    assert 0.5 < np.mean(inside) < 0.95


def test_more_work_takes_more_time():
    """Monotone but for the little that measured neighbours disagree by."""
    for model in H100.values():
        is_cast = model.kernel.name == QUANTIZE
        for axis in range(3):
            if is_cast and axis == 1:
                continue
            for fixed in (256, 1024, 4096):
                sizes = [[fixed, 0 if is_cast else fixed, fixed] for _ in range(25)]
                for size, value in zip(sizes, np.geomspace(256, 4096, 25), strict=True):
                    size[axis] = round(value)
                found = [model.estimate(Shape(*size)) for size in sizes]
                us = np.array([estimate.us for estimate in found if estimate is not None])
                assert len(us) == 25
                assert (us >= 0.93 * np.maximum.accumulate(us)).all()
                if fixed == 4096:
                    assert us[-1] > 3.0 * us[0]


def table(*timings: KernelTiming) -> TimeTable:
    grid = [timing(ROW_WISE, shape, 2.0 * roofline(shape)) for shape in GRID]
    return TimeTable([*grid, *timings])


def test_the_fastest_kernel_counts_of_those_that_take_the_scales():
    shape = GRID[0]
    known = table(timing(NARROW, shape, 7.0), timing(replace(NARROW, name="fast"), shape, 6.0))
    found = known.product("inductor", Precision.FP8, shape, PER_TENSOR)
    assert (found.kernel.name, found.us) == ("scaled_mm-row_wise", 2.0 * roofline(shape))
    slower = table(timing(NARROW, shape, 0.7), timing(replace(NARROW, name="fast"), shape, 0.6))
    found = slower.product("inductor", Precision.FP8, shape, PER_TENSOR)
    assert (found.kernel.name, found.us) == ("fast", 0.6)
    # One scale for each channel needs a kernel that takes it.
    shape = GRID[0]
    found = table(timing(NARROW, shape, 0.5)).product("inductor", Precision.FP8, shape, PER_CHANNEL)
    assert found.kernel == ROW_WISE


BUILT = Kernel("d", "inductor", PRODUCT, Precision.BF16)
BUILT8 = Kernel("d", "inductor", PRODUCT, Precision.FP8, PER_TENSOR)
HERE = Shape(100, 64, 32)
ALONE_HERE = (timing(WIDE, HERE, 5.0), timing(NARROW, HERE, 3.0))


def compared(*timings, shape=HERE, scales=PER_TENSOR):
    found = TimeTable(timings).compared("inductor", Precision.BF16, shape, Recipe.of(weight=scales))
    return None if found is None else (found[0].us, found[1].us)


def test_what_engines_run_is_held_against_what_engines_run():
    assert compared(*ALONE_HERE) == (5.0, 3.0)
    assert compared(*ALONE_HERE, timing(BUILT, HERE, 7.0), timing(BUILT8, HERE, 6.0)) == (7.0, 6.0)
    # A time with what follows the product says nothing beside one without.
    assert compared(*ALONE_HERE, timing(BUILT8, HERE, 6.0)) == (5.0, 3.0)
    assert compared(*ALONE_HERE, timing(BUILT, HERE, 2.0)) == (5.0, 3.0)
    assert compared(timing(WIDE, HERE, 5.0), timing(BUILT8, HERE, 6.0)) is None
    # It was measured under one scale, and says nothing of one for each channel.
    row_wise = timing(ROW_WISE, HERE, 4.0)
    both = (timing(BUILT, HERE, 7.0), timing(BUILT8, HERE, 6.0))
    assert compared(*ALONE_HERE, row_wise, *both, scales=PER_CHANNEL) == (5.0, 4.0)
