"""Corrections in whole small runs: what is left of them, and that engines carry what was accepted."""

from pathlib import Path
from typing import Any

import pytest
from run_findings import resumed

from loka_onnx.core import serde
from loka_onnx.core.correction import CorrectionSet, Variant
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.errors import CalibrationError
from loka_onnx.pipeline.run import RunOptions, run

pytestmark = pytest.mark.slow

FP8 = ("fp8-all", "fp8-safe")


def test_every_plan_with_fp8_is_tried_on_every_output(finished):
    found = serde.read(CorrectionSet, finished.directory / "corrections.json")
    assert [plan.plan for plan in found.plans] == [*FP8]
    for plan in found.plans:
        assert [output.output for output in plan.outputs] == ["ctr", "cvr", "spend"]
        for output in plan.outputs:
            assert [trial.variant for trial in output.trials] == list(Variant)
            assert output.after.judged.upper <= output.before.judged.upper
            assert output.after.kl.value <= output.before.kl.value
        # The mean error of the sites went down on the rows that it was fitted to.
        assert all(bias.error_after < bias.error_before for bias in plan.bias)
    assert {bias.site for bias in found.plans[0].bias} >= {"fc1", "fc2"}
    assert finished.report.corrections == found


def test_engines_carry_what_was_accepted(finished):
    found = serde.read(CorrectionSet, finished.directory / "corrections.json")
    logs = serde.read(RewriteLogs, finished.directory / "rewrites.json").logs
    for plan in found.plans:
        accepted, records = plan.accepted, logs[f"{plan.plan}-fp32"].records
        written = [
            applied.at for record in records if record.transform == "correct" for applied in record.applied
        ]
        assert written == [*(b.site for b in accepted.bias), *(c.output for c in accepted.constants)]
    assert any(not plan.accepted.is_empty for plan in found.plans)
    assert not any(record.transform == "correct" for record in logs["fp32-fp32"].records)


def test_the_engine_does_on_selection_what_the_simulation_did(finished):
    """The CPU engine runs the plan in FP32 as the simulation does, with the constants inside."""
    found = serde.read(CorrectionSet, finished.directory / "corrections.json")
    for plan in found.plans:
        evaluation = finished.report.evaluation(f"cpu-onnxruntime-cpu-{plan.plan}", "selection")
        for output, measured in zip(plan.outputs, evaluation.outputs, strict=True):
            # A value on the edge of two FP8 numbers may fall to the other side.
            width = output.before.delta_ne.upper - output.before.delta_ne.lower
            assert abs(measured.difference.delta_ne.value - output.after.delta_ne.value) < 0.02 * width


def test_a_plan_that_cannot_be_simulated_goes_without(copied, monkeypatch):
    """As when it divides by what FP8 has rounded to 0: the run goes on."""
    from loka_onnx.pipeline import correcting

    def observe(path: Path, *rest: Any) -> Any:
        if path.name.startswith("fp8-all"):
            raise CalibrationError("a mean is not finite")
        return real(path, *rest)

    real = correcting.observe
    monkeypatch.setattr(correcting, "observe", observe)
    (copied.output / "corrections.json").unlink()
    result = run(copied.run_file, RunOptions(resume=True))
    spoilt, other = serde.read(CorrectionSet, result.directory / "corrections.json").plans
    assert (spoilt.plan, spoilt.outputs, spoilt.accepted.is_empty) == ("fp8-all", (), True)
    assert "a mean is not finite" in spoilt.failure and not other.failure and other.outputs
    text = " ".join((result.directory / "report.md").read_text().split())
    assert "fp8-all has no corrections, because it could not be simulated: a mean is not finite" in text
    assert result.bundle is not None


def test_the_run_file_can_leave_them_out(copied):
    copied.write_run_file(plan={"corrections": False})
    reused = resumed(copied)
    assert serde.read(CorrectionSet, copied.output / "corrections.json") == CorrectionSet()
    assert "## Corrections" not in (copied.output / "report.md").read_text()
    assert not any(reused[stage] for stage in ("correct", "build", "evaluate"))
    assert all(reused[stage] for stage in ("export", "calibrate", "mods"))
