"""A whole run on rows without labels, with its slices: what is judged, on what, and how it is named."""

import json
import shutil
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import yaml
from run_findings import resumed
from scipy.special import expit, stdtrit
from synthetic_runs import (
    ROWS,
    WIDTH,
    Done,
    Workplace,
    finish,
    make_columns,
    make_workplace,
    scores,
    start,
    write_rows,
)

import loka_onnx
from loka_onnx.core import serde
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation
from loka_onnx.core.profile import Profile
from loka_onnx.data import SplitRule, split_file
from loka_onnx.report import ReportData
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

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


FIRST_ATTEMPT = 0.8 * 0.05
"""Error that the first attempt at certification may use."""


def certification(run: Unlabelled) -> dict[str, np.ndarray]:
    names = (*(f"d{i}" for i in range(WIDTH)), "item_id", "importance", "request", "country", "shop")
    rule = SplitRule(0.2, 0.3, 0.5, "request", 0)
    path = run.place.path / "rows.parquet"
    batches = split_file(path, rule, (), names, ("country", "shop")).certification.batches(ROWS)
    return dict(next(batches).columns)


def kl_over_entropy(run: Unlabelled, rows: np.ndarray, confidence: float) -> tuple[float, float, float]:
    """Of `ctr` under fp8-all, weighted and by request: the engine's own outputs, the rest in float64 here."""
    columns = {name: values[rows] for name, values in certification(run).items()}
    dense = np.stack([columns[f"d{i}"] for i in range(WIDTH)], axis=1)
    engine = run.place.output / "engines/cpu-onnxruntime-cpu-fp8-all"
    (model,) = engine.glob("*.onnx")
    inputs = {"dense": dense, "item": columns["item_id"]}
    after = OnnxSession(model, SessionOptions(threads=1)).run(inputs)["ctr"].astype(np.float64)
    before = OnnxSession(run.place.output / "model/exported.onnx", SessionOptions(threads=1)).run(inputs)[
        "ctr"
    ]
    assert before == pytest.approx(scores(dense, columns["item_id"])[:, 0], abs=1e-5)
    p, q = expit(before.astype(np.float64)), expit(after)
    weight = columns["importance"].astype(np.float64)
    kl = weight * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))
    entropy = weight * -(p * np.log(p) + (1 - p) * np.log1p(-p))
    ratio = kl.sum() / entropy.sum()
    requests, member = np.unique(columns["request"], return_inverse=True)
    influence = np.bincount(member, kl - ratio * entropy) / entropy.sum()
    units = len(requests)
    half = stdtrit(units - 1, 0.5 + confidence / 2) * np.sqrt(units / (units - 1) * (influence**2).sum())
    # What is never negative has its upper end further out by the largest influence.
    return ratio, ratio - half, ratio + half + float(influence.max())


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


def test_kl_is_that_of_the_engine_and_its_upper_bound_decides(unlabelled):
    ctr, cvr = (unlabelled.output("fp8-all", name) for name in ("ctr", "cvr"))
    kl = ctr.difference.kl
    everything = np.arange(kl.rows)
    # Logits of FP32: KL, of second order in a change of 1e-2, keeps four digits.
    assert (kl.value, kl.lower, kl.upper) == pytest.approx(
        kl_over_entropy(unlabelled, everything, 1 - FIRST_ATTEMPT), rel=1e-3
    )
    assert kl.lower > TIGHT and ctr.budget_status == BudgetStatus.BEYOND
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
        mask = np.array([None if value is None else str(value) for value in columns[item.column]], object)
        rows = np.flatnonzero(mask == item.value)
        assert item.kl is not None and item.delta_ne is None
        expected = kl_over_entropy(unlabelled, rows, 1 - FIRST_ATTEMPT / len(judged))
        assert (item.kl.value, item.kl.lower, item.kl.upper) == pytest.approx(expected, rel=1e-3)
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
