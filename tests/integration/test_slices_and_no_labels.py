"""A whole run on rows without labels, with its slices: what is judged, on what, and how it is named."""

import json
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import yaml
from run_findings import resumed
from synthetic_runs import (
    ROWS,
    WIDTH,
    Done,
    Workplace,
    finish,
    make_columns,
    make_workplace,
    start,
    write_rows,
)

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation
from loka_onnx.core.profile import Profile
from loka_onnx.data import SplitRule, split_file
from loka_onnx.report import ReportData

pytestmark = pytest.mark.slow

NO_LABELS = "KL over the mean entropy, no labels: the labelled first-order term is not seen"
TIGHT, WIDE = 1e-7, 0.05
"""Far below what FP8 costs this model, and far above."""
COUNTRIES = np.array(["BR", "DE", "JP", "LI", None], object)


@dataclass(frozen=True)
class Unlabelled:
    """A finished run, with what it printed."""

    place: Workplace
    done: Done

    @property
    def report(self) -> ReportData:
        return serde.read(ReportData, self.place.output / "report.json")

    def output(self, plan: str, name: str, split: str = "certification") -> OutputEvaluation:
        evaluation = self.report.evaluation(f"cpu-onnxruntime-cpu-{plan}", split)
        return next(output for output in evaluation.outputs if output.output == name)


def unlabelled_rows() -> dict[str, Any]:
    columns: dict[str, Any] = make_columns()
    for label in ("clicked", "bought", "amount"):
        del columns[label]
    random = np.random.default_rng(8)
    columns["country"] = COUNTRIES[random.choice(5, ROWS, p=[0.4, 0.3, 0.15, 0.01, 0.14])].tolist()
    columns["shop"] = [None if value == 3 else int(value) for value in random.integers(0, 4, ROWS)]
    return columns


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Unlabelled:
    place = make_workplace(tmp_path_factory.mktemp("unlabelled"))
    write_rows(place.path / "rows.parquet", unlabelled_rows())
    place.write_run_file(
        outputs=[
            {"name": "ctr", "kind": "logit", "label": None, "weight": "importance", "budget": TIGHT},
            {"name": "cvr", "kind": "probability", "label": None, "budget": WIDE},
        ],
        data={"slices": ["country", "shop"]},
    )
    return Unlabelled(place, finish(start("run", place.run_file, "--quiet")))


def certification(run: Unlabelled) -> dict[str, np.ndarray]:
    names = (*(f"d{i}" for i in range(WIDTH)), "item_id", "importance", "request", "country", "shop")
    rule = SplitRule(0.2, 0.3, 0.5, "request", 0)
    path = run.place.path / "rows.parquet"
    batches = split_file(path, rule, (), names, ("country", "shop")).certification.batches(ROWS)
    return dict(next(batches).columns)


def test_the_run_needs_no_label_and_invents_none(unlabelled):
    assert unlabelled.done.code == 0, unlabelled.done.err
    report = unlabelled.report
    for evaluation in report.evaluations.evaluations:
        for output in evaluation.outputs:
            metrics = output.metrics
            assert (metrics.loss, metrics.normalized_entropy) == (None, None)
            assert (metrics.auc, metrics.prediction_ratio) == (None, None)
            if output.difference is not None:
                assert (output.difference.denominator, output.difference.delta_ne) == ("entropy", None)
    profile = serde.read(Profile, unlabelled.place.output / "profile.json")
    measured = [item for site in profile.sites for item in site.sensitivities]
    assert measured and {(s.denominator, s.labelled) for s in measured} == {("entropy", None)}
    assert report.data.label_rule == "ctr: no labels, cvr: no labels"


def test_the_upper_bound_of_kl_decides(unlabelled):
    ctr, cvr = (unlabelled.output("fp8-all", name) for name in ("ctr", "cvr"))
    assert ctr.difference.kl.lower > TIGHT and ctr.budget_status == BudgetStatus.BEYOND
    assert cvr.difference.kl.upper < WIDE and cvr.budget_status == BudgetStatus.WITHIN
    (choice,) = unlabelled.report.choice.targets
    assert choice.plan == "fp32"
    lost = {loser.engine: loser.reason for loser in choice.losers}
    assert lost["cpu-onnxruntime-cpu-fp8-all"].startswith("accuracy beyond")


def test_what_was_judged_is_named_wherever_it_is_told(unlabelled):
    markdown = (unlabelled.place.output / "report.md").read_text()
    page = (unlabelled.place.output / "report.html").read_text()
    for text in (" ".join(markdown.split()), page):
        assert f"Judged on {NO_LABELS}. This concerns ctr, cvr." in text
        assert "ΔNE" not in text
    assert NO_LABELS in " ".join(unlabelled.done.out.split())
    manifest = json.loads((unlabelled.place.output / "bundle/manifest.json").read_text())["value"]
    assert [judged["label"] for judged in manifest["judged"]] == [None, None]
    difference = manifest["engines"][0]["evaluation"]["outputs"][0]["difference"]
    assert (difference["denominator"], difference["delta_ne"]) == ("entropy", None)
    assert manifest["engines"][0]["evaluation"]["outputs"][0]["slices"] == []
    assert serde.read(ReportData, unlabelled.place.output / "bundle/report/report.json") == unlabelled.report
    loka_onnx.verify_bundle(unlabelled.place.output / "bundle")


def test_asking_for_fp8_names_it_too(unlabelled, command):
    done = command("run", unlabelled.place.run_file, "--resume", "--quiet", "--require-fp8")
    assert done.code == 3
    assert "cpu-onnxruntime-cpu-fp8-all, ctr: upper bound of KL over the mean entropy +" in done.err


def test_every_value_of_every_slice_column_is_accounted_for(unlabelled):
    columns = certification(unlabelled)
    output = unlabelled.output("fp8-all", "ctr")
    judged = [item for item in output.slices if item.judged is not None]
    for column in ("country", "shop"):
        values, counts = np.unique([str(value) for value in columns[column]], return_counts=True)
        found = {str(item.value): item.rows for item in output.slices if item.column == column}
        assert found == dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert [item.value for item in output.slices if item.judged is None] == ["LI"]
    for item in judged:
        assert item.kl is not None and item.delta_ne is None
        assert item.status == BudgetStatus.BEYOND
    assert {item.status for item in unlabelled.output("fp8-all", "cvr").slices} == {"within", "not judged"}


def test_slices_are_in_the_report_and_do_not_enter_the_choice(unlabelled):
    text = " ".join((unlabelled.place.output / "report.md").read_text().split())
    assert "Worst slices of cpu-onnxruntime-cpu-fp8-all, ctr, on certification" in text
    assert "| country | LI |" in text and "(null)" in text
    assert f"Slices (cvr, certification): none of {len(COUNTRIES) - 1 + 4} judged beyond the budget" in text
    assert "Slices do not enter the choice." in text


def test_other_slices_cost_an_evaluation_and_no_calibration(unlabelled, tmp_path):
    place = Workplace(tmp_path / "copy")
    shutil.copytree(unlabelled.place.path, place.path)
    values = yaml.safe_load(place.run_file.read_text())
    values["data"]["slices"] = ["shop"]
    place.run_file.write_text(yaml.safe_dump(values))
    reused = resumed(place)
    again = [stage for stage, was_reused in reused.items() if not was_reused]
    assert again == ["evaluate", "choose", "report", "bundle"]
    report = serde.read(ReportData, place.output / "report.json")
    columns = {s.column for e in report.evaluations.evaluations for o in e.outputs for s in o.slices}
    assert columns == {"shop"}
