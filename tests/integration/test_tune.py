"""`loka-onnx tune`, and plans by the times that it leaves."""

from collections.abc import Collection
from pathlib import Path

import pytest
from synthetic_runs import Workplace

pytest.importorskip("torch", reason="needs torch: kernels are timed with it")

from loka_onnx.core import serde
from loka_onnx.core.evaluation import EvaluationSet
from loka_onnx.core.plan import PlanSet, SpeedVerdict
from loka_onnx.core.timing import QUANTIZE, Kernel, KernelTiming, Provenance, Shape, TimingRecords
from loka_onnx.engines.tuned_kernels import Operands, kernels_of
from loka_onnx.engines.tuning import KernelTimer, Tuned, device_name
from loka_onnx.errors import EngineError
from loka_onnx.planning.timings import TimingDatabase

SHAPES = (Shape(8, 32, 32), Shape(64, 32, 32))
"""Of fc1 and fc2, at the batch sizes of the run file; heads has too few columns."""


def tune_model(place: Workplace, *arguments: object) -> tuple[object, ...]:
    """Arguments that time the ranker on the CPU."""
    model = ("--model", place.path / "ranker.onnx", "--batch", 8, "--batch", 64)
    how = ("--device", "cpu", "--rounds", 2, "--database", place.path / "t.sqlite")
    return ("tune", *model, *how, *arguments)


def written(path: Path) -> tuple[KernelTiming, ...]:
    with TimingDatabase(path) as database:
        return database.read()


def test_every_kernel_of_a_model_is_timed_once(place, command):
    done = command(*tune_model(place))
    assert done.code == 0
    assert done.err.startswith("✓ tune ")
    assert "12 kernels timed on cpu\n" in done.out
    found = written(place.path / "t.sqlite")
    casts = [Shape(shape.m, 0, shape.k) for shape in SHAPES]
    assert {(t.kernel, t.shape) for t in found} == {
        (kernel, shape)
        for kernel in kernels_of("cpu")
        for shape in (casts if kernel.name == QUANTIZE else SHAPES)
    }
    again = command(*tune_model(place, "--batch", 16))
    assert "6 kernels timed on cpu, 12 known before\n" in again.out
    later = written(place.path / "t.sqlite")
    assert [t for t in later if t.shape in (*SHAPES, *casts)] == list(found)
    assert "18 kernels timed" in command(*tune_model(place, "--batch", 16, "--again")).out


def test_what_was_timed_before_a_failure_is_kept(place, command, monkeypatch):
    real, shapes = KernelTimer.measure, list[Shape]()

    def measure(self: KernelTimer, kernels: Collection[Kernel], operands: Operands) -> Tuned:
        if len(shapes) == 2:
            raise EngineError("the device failed")
        shapes.append(operands.shape)
        return real(self, kernels, operands)

    monkeypatch.setattr(KernelTimer, "measure", measure)
    done = command(*tune_model(place))
    assert (done.code, "the device failed" in done.err) == (1, True)
    assert {t.shape for t in written(place.path / "t.sqlite")} == {*shapes}
    monkeypatch.setattr(KernelTimer, "measure", real)
    assert "6 kernels timed on cpu, 6 known before" in command(*tune_model(place)).out


def test_times_travel(place, command):
    records, there = place.path / "times.json", place.path / "there.sqlite"
    assert "12 times written to" in command(*tune_model(place, "--export", records)).out
    done = command("tune", "--import", records, "--database", there)
    assert (done.code, "12 times taken in from" in done.out) == (0, True)
    assert written(there) == written(place.path / "t.sqlite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune"], "`tune` was given nothing to time"),
        (["tune", "--model", "ranker.onnx"], "--model needs a batch size"),
        (["tune", "--model", "ranker.onnx", "--batch", "0"], "--batch: a batch size is at least 1"),
        (["tune", "RUN.yaml", "--batch", "8"], "a run file and --model exclude each other"),
        (
            ["tune", "--model", "ranker.onnx", "--batch", "8", "--rounds", "0"],
            "kernels are timed at least once",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused(place, command, monkeypatch, arguments, message):
    monkeypatch.chdir(place.path)
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}")
    assert not (place.path / "timings.sqlite").exists()


def records_of(path: Path, float8_us: float) -> Path:
    """Times of the CPU for both shapes: 10 µs in BF16, 1 for a cast."""

    def us(kernel: Kernel) -> float:
        return {"mm": 10.0, QUANTIZE: 1.0}.get(kernel.name, float8_us)

    # Times of another device of that name would be measured again.
    source = Provenance(device_name("cpu"), {}, "", "2026-11-21")
    timings = [
        KernelTiming(kernel, Shape(s.m, 0, s.k) if kernel.name == QUANTIZE else s, us(kernel), 0.0, source)
        for kernel in kernels_of("cpu")
        for s in SHAPES
    ]
    serde.write(TimingRecords.of(timings), path)
    return path


@pytest.mark.slow
def test_the_plan_of_a_run_follows_its_kernel_times(place, command):
    place.write_run_file(
        plan={"plans": ["fp32", "bf16", "fp8-safe", "fp8-fast"]}, mods={"split_channels": False}
    )
    assert command("plan", place.run_file).code == 0
    plans = serde.read(PlanSet, place.output / "plan.json")
    assert [plan.id for plan in plans.plans] == ["fp32", "bf16", "fp8-safe"]
    assert plans.notes == (
        "plan fp8-fast is left out: no kernel timings for device cpu; run `loka-onnx tune`",
    )

    # Everything is known beforehand, so that nothing is timed.
    fast = records_of(place.path / "fast.json", 4.0)
    done = command("tune", place.run_file, "--device", "cpu", "--import", fast)
    assert (done.code, "0 kernels timed on cpu, 12 known before" in done.out) == (0, True), done.err
    assert command("plan", place.run_file).code == 0
    plans = serde.read(PlanSet, place.output / "plan.json")
    chosen = plans.plan("fp8-fast")
    assert set(chosen.fp8_sites) == {"fc1", "fc2"}
    # Both casts are counted: ONNX Runtime, which the times stand for, quantizes in no kernel.
    assert chosen.predicted_us == {"cpu": {"8": 10.0, "64": 10.0}}
    assert plans.plan("bf16").predicted_us == {"cpu": {"8": 20.0, "64": 20.0}}
    assert "(measured on cpu with kernels of inductor)" in chosen.decision("fc1").reason
    assert {speed.verdict for speed in plans.speeds} == {SpeedVerdict.FAST}

    done = command("run", place.run_file, "--resume")
    assert done.code == 0, done.err
    evaluated = serde.read(EvaluationSet, place.output / "evaluation.json").evaluations
    assert "cpu-onnxruntime-cpu-fp8-fast" in {evaluation.engine for evaluation in evaluated}
    report = (place.output / "report.md").read_text(encoding="utf-8")
    assert "| safe | fast |" in report

    # Other times, another plan: the stage is not taken over.
    slow = records_of(place.path / "slow.json", 9.5)
    assert command("tune", place.run_file, "--device", "cpu", "--import", slow).code == 0
    assert command("plan", place.run_file).code == 0
    plans = serde.read(PlanSet, place.output / "plan.json")
    assert "fp8-fast" not in [plan.id for plan in plans.plans]
    assert {speed.verdict for speed in plans.speeds} == {SpeedVerdict.SLOW}
    assert "no set of sites inside of the budget saves time on cpu" in plans.notes[0]
