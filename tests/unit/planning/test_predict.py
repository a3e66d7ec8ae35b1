"""Times of shapes that were not measured, and the database of kernel times."""

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.timing import PRODUCT, QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.errors import UserError
from loka_onnx.planning.predict import FEWEST, Estimate, KernelModel, TimeTable
from loka_onnx.planning.timings import TimingDatabase, known_timings, read_records, shipped_timings

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


def test_measured_shapes_answer_as_measured_and_more_work_takes_more_time():
    for model in H100.values():
        for known in (t for t in shipped_timings("nvidia-h100") if t.kernel == model.kernel):
            found = model.estimate(known.shape)
            assert (found.us, found.is_measured, found.error_us) == (known.us, True, known.spread_us or 0.0)
    # Monotone but for the little that measured neighbours disagree by.
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


NOTED = Provenance("NVIDIA H100", {"torch": "2.11"}, "1980 MHz", "2026-11-21", "a note with 'quotes'")
MM = Kernel("nvidia-h100", "inductor", "mm", Precision.BF16)
SCALED_MM = Kernel("nvidia-h100", "inductor", "scaled_mm", Precision.FP8, Granularity.PER_TENSOR)
FUSED = replace(SCALED_MM, fused_quantize=True)
TIMINGS = (
    KernelTiming(MM, Shape(2, 3, 5), 2.0, None, NOTED),
    KernelTiming(SCALED_MM, Shape(2, 3, 5), 1.5, 0.25, NOTED, 15, 1e-3),
    KernelTiming(FUSED, Shape(2, 3, 5), 1.75, 0.5, NOTED, 15),
    KernelTiming(replace(MM, device="cpu"), Shape(2, 3, 5), 9.0, 1.0, NOTED, 3),
)


def in_order(timings: Iterable[KernelTiming]) -> tuple[KernelTiming, ...]:
    return tuple(sorted(timings, key=lambda timing: (timing.kernel.key, timing.shape)))


def test_what_is_written_is_read_and_the_last_time_of_a_kernel_on_a_shape_stands(tmp_path):
    later = replace(TIMINGS[0], us=3.0, provenance=replace(NOTED, date="2026-11-22"))
    with TimingDatabase(tmp_path / "sub" / "timings.sqlite") as database:
        database.add(TIMINGS)
    with TimingDatabase(tmp_path / "sub" / "timings.sqlite") as database:
        assert database.read() == in_order(TIMINGS)
        assert database.read("cpu") == (TIMINGS[3],)
        database.add([later])
        assert database.read("nvidia-h100") == in_order([later, *TIMINGS[1:3]])


def test_a_time_of_another_device_is_measured_again_and_an_impossible_one_refused(tmp_path):
    """Run files call both of these nvidia-h100; one has half the memory bandwidth of the other."""
    shape, here = Shape(2, 3, 5), "NVIDIA H100 80GB HBM3"
    of_pcie = replace(TIMINGS[1], provenance=replace(NOTED, device_name="NVIDIA H100 PCIe"))
    with TimingDatabase(tmp_path / "timings.sqlite") as database:
        database.add([of_pcie])
        assert database.missing([(SCALED_MM, shape)], here) == ((SCALED_MM, shape),)
        assert database.missing([(SCALED_MM, shape)], "NVIDIA H100 PCIe") == ()
        database.add([replace(of_pcie, provenance=replace(NOTED, device_name=here))])
        assert database.missing([(SCALED_MM, shape)], here) == ()
    with TimingDatabase(tmp_path / "a.sqlite") as database:
        database.add(TIMINGS[:1])
        database.export(tmp_path / "timings.json")
    text = (tmp_path / "timings.json").read_text().replace('"us": 2.0', '"us": -2.0')
    (tmp_path / "timings.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_records(tmp_path / "timings.json")
    assert caught.value.code == "E0715" and "-2.0 µs is no time of" in caught.value.evidence


@pytest.mark.parametrize(("statement", "code", "evidence"), [
    ("PRAGMA application_id = 0", "E0714", "its application id is 0x0, not 0x4c4f4b41"),
    ("PRAGMA user_version = 7", "E0711", "its version is 7, this loka-onnx reads 1"),
    # A precision that this version does not know.
    ("UPDATE timings SET precision = 'fp4'", "E0710", "'fp4' is not a valid Precision"),
])  # fmt: skip
def test_what_is_no_such_database_is_refused(statement, code, evidence, tmp_path):
    path = tmp_path / "timings.sqlite"
    with TimingDatabase(path) as database:
        database.add(TIMINGS[:1])
    with closing(sqlite3.connect(path)) as raw:
        raw.execute(statement)
        raw.commit()
    with pytest.raises(UserError) as caught, TimingDatabase(path) as database:
        database.read()
    assert (caught.value.code, caught.value.evidence) == (code, evidence)
    (tmp_path / "text").write_text("not a database, but long enough that SQLite looks for its header" * 20)
    with pytest.raises(UserError) as caught:
        TimingDatabase(tmp_path / "text")
    assert (caught.value.code, caught.value.evidence) == ("E0714", "file is not a database")


WRITER = """
import sys
from pathlib import Path
from loka_onnx.core.formats import Precision
from loka_onnx.core.timing import Kernel, KernelTiming, Provenance, Shape
from loka_onnx.planning.timings import TimingDatabase

path, who, go = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
kernel = Kernel("cpu", "inductor", who, Precision.BF16)
print("ready", flush=True)
while not go.exists():
    pass
for number in range(1, 61):
    # A connection for each: creation and the switch to WAL race as well.
    with TimingDatabase(path) as database:
        timing = KernelTiming(kernel, Shape(number, 1, 1), 1.0, None, Provenance(who, {}, "", "today"))
        database.add([timing, KernelTiming(kernel, Shape(number, 2, 1), 1.0, None, timing.provenance)])
"""


@pytest.mark.slow
def test_writers_of_several_processes_lose_nothing(tmp_path):
    path, go = tmp_path / "timings.sqlite", tmp_path / "go"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), who, str(go)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for who in ("a", "b", "c")
    ]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    go.touch()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert (writer.returncode, errors) == (0, "")
    with TimingDatabase(path) as database:
        found = [(timing.kernel.name, timing.shape.m, timing.shape.n) for timing in database.read()]
        mode = database._connection.execute("PRAGMA journal_mode").fetchone()[0]
    assert sorted(found) == [(who, m, n) for who in "abc" for m in range(1, 61) for n in (1, 2)]
    assert mode == "wal"


def test_shipped_times_of_the_h100_say_where_they_come_from():
    timings = shipped_timings("nvidia-h100")
    of_kernel = Counter((timing.kernel.name, timing.kernel.precision) for timing in timings)
    assert of_kernel["mm", Precision.BF16] == of_kernel["scaled_mm-row_wise", Precision.FP8] == 77
    assert (of_kernel[QUANTIZE, Precision.FP8], of_kernel[PRODUCT, Precision.FP8]) == (15, 44)
    assert {timing.provenance.device_name for timing in timings} == {"NVIDIA H100 80GB HBM3"}
    assert {timing.provenance.versions["torch"].split("+")[0] for timing in timings} == {"2.11.0"}
    wide = next(t for t in timings if t.kernel.name == "mm" and t.shape == Shape(4096, 4096, 4096))
    assert (round(wide.us, 2), wide.kernel.precision) == (184.41, Precision.BF16)
    built = next(t for t in timings if t.kernel.name == PRODUCT and t.shape == Shape(2048, 3456, 512))
    assert (built.us, built.provenance.date) == (32.343, "2026-11-22")
    assert all("large weights from memory" in each.provenance.note for each in (wide, built))


def test_measured_times_stand_before_shipped_ones(tmp_path):
    path = tmp_path / "timings.sqlite"
    mine = KernelTiming(MM, Shape(4096, 4096, 4096), 150.0, 1.0, NOTED, 15)
    with TimingDatabase(path) as database:
        database.add([mine])
    found = {(t.kernel, t.shape): t for t in known_timings("nvidia-h100", (tmp_path / "none.sqlite", path))}
    assert found[MM, Shape(4096, 4096, 4096)] == mine
    assert len(found) == len(shipped_timings("nvidia-h100"))
    assert not (tmp_path / "none.sqlite").exists()
