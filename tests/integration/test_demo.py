"""The demo, as a user runs it: one command, no arguments, no network."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import Done, finish, start

import loka_onnx
from loka_onnx.errors import BundleInvalid

pytestmark = pytest.mark.slow
LAYOUT = {
    "RUN.yaml",
    "bundle",
    "calibration",
    "choice.json",
    "data",
    "engines",
    "engines.json",
    "evaluation.json",
    "model",
    "plan.json",
    "planned",
    "profile.json",
    "report.html",
    "report.json",
    "report.md",
    "rewrites.json",
    "run.json",
    "train",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "runs" / "demo"


@pytest.fixture(scope="module")
def first(output: Path) -> Done:
    done = finish(start("demo", "--output", output), seconds=900)
    assert done.code == 0, done.err
    return done


def row(table: str, plan: str) -> list[str]:
    """Cells of the table line of a plan: NE, AUC, ΔNE, …"""
    line = next(line for line in table.splitlines() if line.startswith(f"{plan} "))
    return line.removeprefix(plan).replace("*", " ").split()


def test_the_table(first: Done) -> None:
    assert "\x1b" not in first.out + first.err
    cpu = first.out.partition("demo, cpu: certification")[2].partition("demo, ")[0]
    reference, fp8_all, fp8_safe = (row(cpu, plan) for plan in ("FP32", "fp8-all", "fp8-safe"))
    assert reference[2] == "reference"
    assert row(cpu, "fp32")[:2] == reference[:2], "the FP32 engine is as good as the reference"
    for plan in (fp8_all, fp8_safe):
        assert plan[2][0] in "+-" and plan[:2] != reference[:2]
    # A ranker that has learned something, on ratings that split about evenly into liked and not.
    assert float(reference[0]) < 0.9 and float(reference[1]) > 0.7
    assert "cpu: fp32 — " in first.out
    for target in ("nvidia-rtx-ada", "nvidia-rtx-blackwell"):
        assert f"demo, {target}: certification" in first.out
    stages = [line.split()[1] for line in first.err.splitlines() if line.startswith("✓")]
    assert stages[:2] == ["prepare", "train"] and stages[-1] == "bundle"


def test_layout(first: Done, output: Path) -> None:
    assert {path.name for path in output.iterdir()} == LAYOUT
    text = (output / "report.md").read_text()
    assert "fp8-safe" in text and "SYNTHETIC" not in text
    record = json.loads((output / "run.json").read_text())["value"]
    assert record["stages"][0]["stage"] == "train"
    assert record["stages"][1]["parents"].keys() == {"train"}


def test_bundle(first: Done, output: Path) -> None:
    bundle = output / "bundle"
    done = finish(start("bundle", "verify", bundle))
    assert done.code == 0 and "verified" in done.out
    assert "fallback-fp32" in finish(start("bundle", "inspect", bundle)).out

    engine = loka_onnx.load(bundle)
    rows = {spec.name: np.zeros((5, *(d or 1 for d in spec.shape[1:])), spec.dtype) for spec in engine.inputs}
    assert engine.infer(rows)["logit"].shape[0] == 5
    assert engine.health().ready

    (bundle / "manifest.json").write_text((bundle / "manifest.json").read_text() + " ")
    (bundle / "report" / "report.md").write_text("all is well")
    with pytest.raises(BundleInvalid):
        loka_onnx.load(bundle)
    assert finish(start("bundle", "verify", bundle)).code == 3


def test_a_second_demo_reuses_everything(first: Done, output: Path) -> None:
    """Runs after the bundle was spoilt, which is the one thing that it must do again."""
    began = time.monotonic()
    again = finish(start("demo", "--output", output))
    seconds = time.monotonic() - began
    assert again.code == 0
    assert again.out == first.out
    # Measured 3 s on two cores; the first takes minutes.
    assert seconds < 30
    redone = [
        line.split()[1]
        for line in again.err.splitlines()
        if "reused" not in line and not line.startswith(("✓ prepare data", "✓ check data"))
    ]
    assert set(redone) <= {"bundle"}
    assert finish(start("bundle", "verify", output / "bundle")).code == 0


def test_the_run_file_that_the_demo_writes_is_a_run_file(first: Done, output: Path) -> None:
    done = finish(start("run", output / "RUN.yaml", "--resume"))
    assert done.code == 0
    stages = [line.split() for line in done.err.splitlines() if line.startswith("✓")]
    assert [words[1] for words in stages if words[-1] == "reused"][:3] == ["export", "calibrate", "mods"]
