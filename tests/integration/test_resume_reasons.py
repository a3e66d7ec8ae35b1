"""A resumed run says which key of the run file made which stage stale; a budget needs no calibration."""

from __future__ import annotations

import pytest
from synthetic_runs import Command, Workplace

from loka_onnx.pipeline.directory import MOST_READ, Outcome, changes, readable
from loka_onnx.pipeline.run import RunOptions, Stage, run


def resumed(place: Workplace, until: Stage) -> dict[str, Outcome]:
    ended: dict[str, Outcome] = {}
    options = RunOptions(
        resume=True, until=until, on_stage=lambda stage, end: ended.update({stage: end} if end else {})
    )
    run(place.run_file, options)
    return ended


def test_a_changed_budget_plans_again_from_the_profile(copied: Workplace):
    text = copied.run_file.read_text(encoding="utf-8")
    copied.run_file.write_text(text.replace("budget: 0.01", "budget: 0.02", 1), encoding="utf-8")
    ended = resumed(copied, Stage.PLAN)
    assert all(ended[stage].reused for stage in ("export", "calibrate", "mods"))
    assert "outputs[0].budget: 0.01 → 0.02" in ended["ladder"].because
    assert not any(outcome.because for outcome in ended.values() if outcome.reused)


@pytest.mark.slow
def test_the_terminal_names_the_key(copied: Workplace, command: Command):
    done = command("plan", copied.run_file, "--set", "calibration.batch_size=256")
    (line,) = (line for line in done.err.splitlines() if line.startswith("✓ calibrate "))
    assert done.code == 0 and line.endswith("again: calibration.batch_size: 512 → 256")


def test_inputs_are_told_by_their_parts():
    before = readable({"batch": {"serve": [1, 2], "max": 8}, "model": {"big": [0] * (MOST_READ + 1)}})
    now = readable({"batch": {"serve": [1, 3], "max": 8}, "model": {"big": [1] * (MOST_READ + 1)}})
    assert changes(before, now) == "batch.serve[1]: 2 → 3, model.big"
    assert changes(now, now) == ""
    assert changes({}, {"group": '"user"'}) == 'group: none → "user"'
