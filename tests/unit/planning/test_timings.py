"""The database of kernel times."""

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

import pytest

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.timing import PRODUCT, QUANTIZE, Kernel, KernelTiming, Provenance, Shape
from loka_onnx.errors import UserError
from loka_onnx.planning.timings import TimingDatabase, known_timings, read_records, shipped_timings

SOURCE = Provenance("NVIDIA H100", {"torch": "2.11"}, "1980 MHz", "2026-11-21", "a note with 'quotes'")
WIDE = Kernel("nvidia-h100", "inductor", "mm", Precision.BF16)
NARROW = Kernel("nvidia-h100", "inductor", "scaled_mm", Precision.FP8, Granularity.PER_TENSOR)
FUSED = replace(NARROW, fused_quantize=True)
TIMINGS = (
    KernelTiming(WIDE, Shape(2, 3, 5), 2.0, None, SOURCE),
    KernelTiming(NARROW, Shape(2, 3, 5), 1.5, 0.25, SOURCE, 15, 1e-3),
    KernelTiming(FUSED, Shape(2, 3, 5), 1.75, 0.5, SOURCE, 15),
    KernelTiming(replace(WIDE, device="cpu"), Shape(2, 3, 5), 9.0, 1.0, SOURCE, 3),
)


def in_order(timings: Iterable[KernelTiming]) -> tuple[KernelTiming, ...]:
    return tuple(sorted(timings, key=lambda timing: (timing.kernel.key, timing.shape)))


def test_what_is_written_is_read_and_the_last_time_of_a_kernel_on_a_shape_stands(tmp_path):
    later = replace(TIMINGS[0], us=3.0, provenance=replace(SOURCE, date="2026-11-22"))
    with TimingDatabase(tmp_path / "sub" / "timings.sqlite") as database:
        database.add(TIMINGS)
    with TimingDatabase(tmp_path / "sub" / "timings.sqlite") as database:
        assert database.read() == in_order(TIMINGS)
        assert database.read("cpu") == (TIMINGS[3],)
        database.add([later])
        assert database.read("nvidia-h100") == in_order([later, *TIMINGS[1:3]])


def test_a_time_of_another_device_of_that_name_is_measured_again(tmp_path):
    """Run files call both of these nvidia-h100; one has half the memory bandwidth of the other."""
    shape, here = Shape(2, 3, 5), "NVIDIA H100 80GB HBM3"
    of_pcie = replace(TIMINGS[1], provenance=replace(SOURCE, device_name="NVIDIA H100 PCIe"))
    with TimingDatabase(tmp_path / "timings.sqlite") as database:
        database.add([of_pcie])
        assert database.missing([(NARROW, shape)], here) == ((NARROW, shape),)
        assert database.missing([(NARROW, shape)], "NVIDIA H100 PCIe") == ()
        database.add([replace(of_pcie, provenance=replace(SOURCE, device_name=here))])
        assert database.missing([(NARROW, shape)], here) == ()


def test_an_impossible_time_in_a_file_is_refused(tmp_path):
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
    mine = KernelTiming(WIDE, Shape(4096, 4096, 4096), 150.0, 1.0, SOURCE, 15)
    with TimingDatabase(path) as database:
        database.add([mine])
    found = {(t.kernel, t.shape): t for t in known_timings("nvidia-h100", (tmp_path / "none.sqlite", path))}
    assert found[WIDE, Shape(4096, 4096, 4096)] == mine
    assert len(found) == len(shipped_timings("nvidia-h100"))
    assert not (tmp_path / "none.sqlite").exists()
