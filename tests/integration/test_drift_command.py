"""`loka-onnx drift` on a run directory: exit codes, messages, and what it leaves."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import Command, Done, make_columns, make_workplace, tree, write_rows

from loka_onnx.core import serde
from loka_onnx.core.lineage import RunRecord
from loka_onnx.core.profile import Profile
from loka_onnx.operations.drift.report import DriftReport, Measure
from loka_onnx.operations.drift.run import open_monitor
from loka_onnx.pipeline.run import RunOptions, Stage, run

UNSEEN = ("clicked", "bought", "amount", "request")
"""Labels and groups, which live rows need not have."""


@dataclass(frozen=True)
class Calibrated:
    """A run up to its plan, and live rows."""

    run: Path
    live: Path
    moved: Path

    @property
    def profile(self) -> Path:
        return self.run / "profile.json"


def live_columns(seed: int = 5) -> dict[str, np.ndarray]:
    return {name: values for name, values in make_columns(seed=seed).items() if name not in UNSEEN}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Do not write into its directory."""
    place = make_workplace(tmp_path_factory.mktemp("drift"))
    file = place.write_run_file(calibration={"batch_size": 64}, mods={"split_channels": False})
    run(file, RunOptions(until=Stage.PLAN))
    columns = live_columns()
    write_rows(place.path / "live.parquet", columns)
    columns["d3"] = columns["d3"] * 2
    write_rows(place.path / "moved.parquet", columns)
    return Calibrated(place.output, place.path / "live.parquet", place.path / "moved.parquet")


def drift(command: Command, profile: Path, data: Path, *more: object) -> Done:
    return command("drift", "--profile", profile, "--data", data, *more)


def test_rows_of_the_same_distribution_end_with_0(ready, command, tmp_path):
    before = tree(ready.run)
    done = drift(command, ready.profile, ready.live, "--json", tmp_path / "out" / "drift.json")
    assert done.code == 0, done.err
    assert "6,000 live rows (93 batches of 64) against 3,004 of the profile (46 batches)" in done.out
    assert "no drift" in done.out and "(plan fp8-safe, label-free part)" in done.out
    # The run file says so.
    assert "the profile was measured on generated rows" in done.out
    assert tree(ready.run) == before
    report = serde.read(DriftReport, tmp_path / "out" / "drift.json")
    assert report.is_judged and report.alarms == () and report.live_rows == 6000
    assert {site.site for site in report.sites if site.is_counted} == {"fc1", "fc2"}
    assert [o.budget for o in report.outputs] == [0.01, 0.01, 0.01]


@pytest.mark.slow
def test_a_doubled_feature_ends_with_3_and_its_name(ready, command, tmp_path):
    done = drift(command, ready.profile, ready.moved, "--json", tmp_path / "drift.json")
    assert done.code == 3
    assert "moved.parquet: the data have moved away from the profile\n  evidence: " in done.err
    assert "remedy: find out whether the change is meant; if it is, calibrate and plan again" in done.err
    report = serde.read(DriftReport, tmp_path / "drift.json")
    assert "the rms of 'd3' (column 3 of 'joined') is 1.9" in next(
        a.sentence for a in report.alarms if a.measure is Measure.COLUMN and a.where == "joined"
    )
    for alarm in report.alarms:
        assert alarm.sentence in done.out.replace("\n", "")
    # Thresholds that nothing reaches, and a budget that is wide enough.
    wide = [f"{name}=9" for name in ("rms", "column", "stability_index", "range_growth", "saturated_share")]
    relaxed = [part for item in wide for part in ("--relevance", item)]
    done = drift(command, ready.profile, ready.moved, *relaxed, "--max-predicted-delta-ne", "0.5")
    assert done.code == 0 and "changed for certain, but too little to matter" in done.out
    done = drift(command, ready.profile, ready.moved, *relaxed, "--max-predicted-delta-ne", "0.000001")
    assert done.code == 3 and "predicted ΔNE: FP8's share of ΔNE on 'spend'" in done.out


def test_too_few_rows_end_with_2_and_are_not_called_the_same(ready, command):
    done = drift(command, ready.profile, ready.moved, "--rows", 500)
    assert done.code == 2
    assert "not judged" in done.out and "no drift" not in done.out
    assert "moved.parquet: drift was not judged" in done.err and "give at least 512 rows" in done.err


@pytest.mark.slow
def test_a_profile_elsewhere_takes_the_run_directory_by_name(ready, command, tmp_path):
    elsewhere = tmp_path / "lonely" / "p.json"
    elsewhere.parent.mkdir()
    shutil.copy(ready.profile, elsewhere)
    done = drift(command, elsewhere, ready.live)
    assert done.code == 2
    assert "--profile: there is no run directory that says how the model's inputs are made of" in done.err
    assert f"evidence: no run.json in {elsewhere.parent} or {tmp_path}" in done.err
    assert drift(command, elsewhere, ready.live, "--run", ready.run).code == 0
    # The exported model's own profile lies one level down.
    assert drift(command, ready.run / "calibration/exported.json", ready.live).code == 0
    done = drift(command, elsewhere, ready.live, "--run", tmp_path)
    assert done.code == 2 and "--run: there is no run directory" in done.err


def another_model(directory: Path) -> None:
    model = directory / "model/modified.onnx"
    model.write_bytes(model.read_bytes().replace(b"fc2", b"fcX"))


def another_profile(directory: Path) -> None:
    text = (directory / "profile.json").read_text()
    digest = serde.read(Profile, directory / "profile.json").model_digest
    (directory / "profile.json").write_text(text.replace(digest, "0" * 64))


def another_version(directory: Path) -> None:
    record = serde.read(RunRecord, directory / "run.json")
    record.config["data"] = {"columns": {}}
    serde.write(record, directory / "run.json")


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (another_model, "modified.onnx: the model is not the one that the run left"),
        (another_profile, "profile.json: the profile is of no model in"),
        (another_version, "run.json: the run was recorded by another version of loka-onnx"),
    ],
)
def test_an_altered_run_is_refused(ready, command, tmp_path, alter, message):
    directory = Path(shutil.copytree(ready.run, tmp_path / "run"))
    alter(directory)
    done = drift(command, directory / "profile.json", ready.live)
    assert done.code == 2 and message in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "fp32"], "--plan: there is no plan 'fp32' with quantized sites for the model"),
        (["--relevance", "loudness=1"], "evidence: the names are mean, rms, zeros, column, stability_index"),
        (["--relevance", "rms=loud"], "--relevance 'rms=loud': a threshold is NAME=VALUE, at least 0"),
        (["--relevance", "rms=-1"], "--relevance 'rms=-1': a threshold is NAME=VALUE, at least 0"),
        (["--family-wise", "1"], "family-wise: a probability of false alarms lies between 0 and 1"),
    ],
)
def test_a_wrong_option_is_refused(ready, command, arguments, message):
    done = drift(command, ready.profile, ready.live, *arguments)
    assert done.code == 2 and message in done.err


def test_a_monitor_of_a_run_finds_the_change_and_refuses_ids_out_of_range(ready):
    columns = make_columns(4096, seed=6)
    dense = np.stack([columns[f"d{i}"] for i in range(16)], axis=1)
    dense[:, 3] *= 2
    item = columns["item_id"].copy()
    item[10] = 10**6
    with open_monitor(ready.profile, sample_rate=1.0, pending=100) as monitor:
        for start in range(0, 4096, 64):
            monitor.feed({"dense": dense[start : start + 64], "item": item[start : start + 64]})
        assert monitor.flush(30)
        report, tally = monitor.report(), monitor.tally()
    assert (tally.rejected, tally.failed_batches, tally.batches) == (1, 0, 63)
    assert report is not None and report.basis == "plan fp8-safe"
    assert "the rms of 'd3' (column 3 of 'joined')" in " ".join(alarm.sentence for alarm in report.alarms)
