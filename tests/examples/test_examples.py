"""Each example, run as a user runs it, in an empty directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.sessions.host_devices import integer_instructions

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHREC = ROOT / ".venv" / "torchrec"
"""Where `make venv` puts it: fbgemm-gpu-cpu has the import name of a GPU package that tests stand in for."""
CHANGE = r"[+-]?\d\S*%"
BUDGET, LAST_DIGIT = 0.1, 0.001
"""Of the example, and of what it prints: %."""
QUANTIZED = "int8" if integer_instructions() else "fp8"
"""Format that a run on this CPU plans by default; FP8 is simulated, and no CPU runs it."""


def run_example(name: str, directory: Path, packages: str = "") -> str:
    """What it prints on standard output.

    Args:
        name: File name of the example.
        directory: Where it runs.
        packages: Directory of packages that it needs beside those installed.
    """
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "out"],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": packages} if packages else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def emitted_on_the_cpu(printed: str) -> str:
    """The plan that was chosen: where the CPU multiplies INT8, times decide between it and FP32."""
    (plan,) = re.findall(r"^cpu: plan (\S+), ", printed, re.M)
    assert plan in ({"fp32", "int8-all", "int8-safe"} if QUANTIZED == "int8" else {"fp32"})
    return str(plan)


def the_bundle(directory: Path) -> Path:
    (manifest,) = (directory / "out").glob("runs/*/bundle/manifest.json")
    verify_bundle(manifest.parent)
    return manifest.parent


@pytest.mark.slow
def test_a_pytorch_ranker_with_two_outputs(tmp_path: Path) -> None:
    printed = run_example("pytorch_ranker.py", tmp_path)
    emitted = emitted_on_the_cpu(printed)
    judged = re.findall(rf"^(\S+), (\w+): ΔNE ({CHANGE}) \[({CHANGE}), ({CHANGE})\], (\w+)$", printed, re.M)
    assert {(plan, output) for plan, output, *_ in judged} == {
        (f"{QUANTIZED}-{sites}", output) for sites in ("all", "safe") for output in ("ctr", "cvr")
    }
    # PyTorch trains to other digits each time, so that a verdict may be open; it follows from the interval.
    for plan, output, _, *ends, status in judged:
        lower, upper = (float(end.rstrip("%")) for end in ends)
        if min(abs(lower - BUDGET), abs(upper - BUDGET)) > LAST_DIGIT:
            expected = "within" if upper < BUDGET else "beyond" if lower > BUDGET else "undecided"
            assert status == expected, (plan, output, lower, upper)
        assert (plan, status) != (f"{QUANTIZED}-safe", "beyond")
        assert plan != emitted or status == "within", "what is emitted is inside the budget on both outputs"
    assert len(re.findall(r"^(?:ctr|cvr) \[.*\]$", printed, re.M)) == 2
    the_bundle(tmp_path)


@pytest.mark.slow
def test_a_bare_onnx_file_without_labels(tmp_path: Path) -> None:
    printed = run_example("bare_onnx.py", tmp_path)
    assert "inputs numbers item · outputs p_click" in printed
    exported, modified = (re.search(rf"^{name}: (.*)$", printed, re.M) for name in ("exported", "modified"))
    assert exported and "einsum" not in exported[1] and "norm" not in exported[1]
    assert modified and "dense.einsum" in modified[1] and "norm" in modified[1], "mods make sites of both"
    emitted_on_the_cpu(printed)
    judged = rf"^{QUANTIZED}-safe: KL {CHANGE} \[{CHANGE}, {CHANGE}\] of the mean entropy$"
    assert re.search(judged, printed, re.M)
    the_bundle(tmp_path)


def untimed(printed: str) -> list[str]:
    """The lines without what times decide: the plan, and which products are in INT8, hence the KL."""
    without_plan = re.sub(r"^cpu: plan .*$", "cpu", printed, flags=re.M)
    of_int8 = rf"^(int8-\S+: KL) {CHANGE} \[{CHANGE}, {CHANGE}\]"
    return re.sub(of_int8, r"\1", without_plan, flags=re.M).splitlines()


@pytest.mark.slow
def test_an_example_runs_again_where_it_ran_before(tmp_path: Path) -> None:
    first, second = (run_example("bare_onnx.py", tmp_path) for _ in range(2))
    assert untimed(first) == untimed(second)
    the_bundle(tmp_path)


def test_no_example_is_refused_by_what_it_left() -> None:
    """Each takes half a minute: that it may run twice is run for one, and read of the others."""
    for path in EXAMPLES.glob("*.py"):
        (call,) = re.findall(r"loka_onnx\.run\((.*)\)", path.read_text(encoding="utf-8"))
        assert "loka_onnx.RunOptions(force=True)" in call, path.name


@pytest.mark.slow
def test_a_torchrec_model(tmp_path: Path) -> None:
    if not (TORCHREC / "torchrec").is_dir():
        pytest.skip("needs torchrec: `make venv` installs it beside the other packages")
    printed = run_example("torchrec_model.py", tmp_path, str(TORCHREC))
    assert "the dense engine reads numbers, pooled.genre, pooled.clicked_items, pooled.country" in printed
    assert emitted_on_the_cpu(printed) == "fp32", "the run file asks for FP8, which a CPU only judges"
    difference = re.search(r"largest difference from TorchRec's own answer on 512 rows: (\S+)", printed)
    assert difference and 0 <= float(difference[1]) < 1e-5, "sums of FP32 in another order, and nothing more"
    the_bundle(tmp_path)


def test_every_example_is_run_here() -> None:
    tested = set(re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.slow
def test_the_notebook(tmp_path: Path) -> None:
    reason = "needs nbclient, ipykernel and pandas: `make venv` installs them"
    for package in ("ipykernel", "pandas"):
        pytest.importorskip(package, reason=reason)
    client = pytest.importorskip("nbclient", reason=reason)
    import nbformat

    for name in ("notebook.ipynb", "bare_onnx.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook = nbformat.read(tmp_path / "notebook.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells if cell.cell_type == "code"]
    tables = [output.data["text/html"].count("<tr") for output in outputs[:-1]]
    assert all(rows > 1 for rows in tables)
    answers = [float(number) for number in re.findall(r"0\.\d+", outputs[-1].text)]
    assert len(answers) == 4 and all(0 < answer < 1 for answer in answers)
