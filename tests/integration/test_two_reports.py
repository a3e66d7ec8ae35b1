"""Reports of two real runs are held against one another."""

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from synthetic_runs import make_workplace, tree

from loka_onnx.core import serde
from loka_onnx.operations.compare.difference import Difference
from loka_onnx.pipeline.run import RunResult, run
from loka_onnx.report import ReportData

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run that keeps a site out of FP8, and has another budget and seed."""
    place = make_workplace(tmp_path_factory.mktemp("later"))
    place.write_run_file(
        outputs=[
            {"name": "ctr", "kind": "logit", "label": "clicked", "weight": "importance", "budget": 0.02}
        ],
        plan={"keep": ["fc2"]},
        calibration={"seed": 1},
    )
    return run(place.run_file)


@pytest.mark.slow
def test_two_run_directories_are_compared(finished, later, tmp_path, command):
    out = tmp_path / "out"
    done = command("compare-runs", finished.directory, later.directory, "--out", out)
    assert done.code == 0
    found = serde.read(Difference, out / "comparison.json")
    facts = json.loads((out / "comparison.json").read_text())
    schema = json.loads((DOCS / "run-comparison-schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(facts)
    assert not found.is_different
    assert "  cpu: cpu-onnxruntime-cpu-fp32 (plan fp32) → " in done.out and "  the same; " in done.out
    assert "wrote" in done.out and "comparison.html" in done.out

    def texts(section: str) -> dict[str, tuple[str | None, ...]]:
        return {
            item.what: tuple(value and value.text for value in (item.before, item.after, item.verdict))
            for item in found.rows(section)
        }

    assert {verdict for *_, verdict in texts("data").values()} == {"the same"}
    settings = texts("settings")
    assert settings["plan.keep"] == ("[]", '["fc2"]', None)
    assert settings["calibration.seed"] == ("0", "1", None)
    kept = [item for item in found.rows("sites") if item.what.endswith(" · fc2")]
    assert kept
    for item in kept:
        before, after, _ = texts("sites")[item.what]
        assert before is not None and before.startswith("fp8 ") and after is not None
        assert after.startswith("bf16, ") and "now: kept in bf16 by 'fc2'" in item.note
    # Outputs that the later run does not judge are not compared, and said to be so.
    costs = {tuple(item.what.split(" · ")[1:3]): item for item in found.rows("cost")}
    assert costs["cvr", "selection"].note == "it was not measured in the new run"
    both = costs["ctr", "selection"]
    assert (0.01 in both.before.numbers, 0.02 in both.after.numbers) == (True, True)
    assert {item.what.split(" · ")[1] for item in found.rows("latency")} == {"batch 8", "batch 64"}
    assert all(item.verdict is not None and item.verdict.numbers[0] > 0 for item in found.rows("latency"))
    # Another engine is no failure, unless that is asked for.
    assert command("compare-runs", finished.directory, later.directory, "--out", out, "--exit-code").code == 0


@pytest.mark.slow
def test_a_report_of_an_older_schema_is_written_again_from_its_run(later, tmp_path, command, monkeypatch):
    """The remedy that `compare-runs` names works in a copy, though no fact of the run is another."""
    copy = tmp_path / "copy"
    shutil.copytree(later.directory, copy)
    file, run_file = copy / "report.json", later.directory.parents[1] / "RUN.yaml"
    before, original = file.read_text(), tree(later.directory)
    monkeypatch.setattr(ReportData, "SCHEMA", "report/1000")
    refused = command("compare-runs", later.directory, later.directory)
    assert refused.code == 2
    assert "an older version of loka-onnx" in refused.err
    assert "`loka-onnx report RUN.yaml --output COPY`" in refused.err
    done = command("report", run_file, "--output", copy)
    assert done.code == 0
    assert done.err.count("reused") > 5  # of one version, nothing is measured again
    after = file.read_text()
    assert after.replace("report/1000", "report/8").replace(str(copy), str(later.directory)) == before
    monkeypatch.undo()
    assert command("report", run_file, "--output", copy).code == 0
    assert file.read_text().replace(str(copy), str(later.directory)) == before
    assert tree(later.directory) == original


def test_what_is_no_run_is_refused_in_one_message(finished, tmp_path, command):
    done = command("compare-runs", finished.directory, tmp_path, "--out", tmp_path / "out")
    assert done.code == 2
    assert "there is no report of a run" in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
