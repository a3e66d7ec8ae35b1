"""What is said of two runs: each kind of difference, and that every number is in the comparison's JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from page_numbers import NUMBER, check_numbers, tables_of
from rich_run import rich
from sample_run import SampleRun
from two_runs import compared, costing, emitting, slower, write_run

from loka_onnx.core import serde
from loka_onnx.core.evaluation import EvaluationSet, InputPlace
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Verdict
from loka_onnx.core.rewrite import Declined, RewriteLog
from loka_onnx.errors import UserError
from loka_onnx.operations.compare.run_document import Change, RunComparison
from loka_onnx.operations.compare.run_text import comparison_document, render_comparison
from loka_onnx.operations.compare.runs import compare_runs, read_run
from loka_onnx.report import ReportData
from loka_onnx.report.document import Document, Tone
from loka_onnx.report.figures import Told


@pytest.fixture(scope="module")
def old(sample: SampleRun) -> ReportData:
    """FP32 is emitted for the CPU, and an engine that was not run for the RTX."""
    return rich(sample.report)


@pytest.fixture(scope="module")
def new(old: ReportData) -> ReportData:
    """A later run: FP8 for the CPU, another model, other rows, other versions."""
    data = slower(old, 0.9)
    engine = next(e for e in data.engines if e.plan == "fp8-safe" and e.target == "cpu")
    choice = emitting(data, engine.id, "fp8-safe").choice
    renamed = dataclasses.replace(data.modified.sites[2], name="over_arch.last", merged_from=("a", "b"))
    safe = data.plans.plan("fp8-safe")
    harmful = dataclasses.replace(
        safe.decisions[0], verdict=Verdict.UNSAFE, reason="KL is now beyond its part"
    )
    plans = tuple(
        dataclasses.replace(p, decisions=(harmful, *p.decisions[1:])) if p.id == "fp8-safe" else p
        for p in data.plans.plans
        if p.id != "fp8-all"
    )
    merged, *others = data.rewrites["mods"].records
    left_alone = Declined(merged.applied[0].at, "its input has one consumer now")
    declined = dataclasses.replace(merged, applied=(), declined=(*merged.declined, left_alone))
    splits = tuple(
        dataclasses.replace(s, digest="e" * 64) if s.split == "certification" else s for s in data.data.splits
    )
    return dataclasses.replace(
        data,
        title="Ranker, day 08",
        modified=dataclasses.replace(data.modified, sites=(*data.modified.sites[:2], renamed)),
        choice=dataclasses.replace(choice, targets=choice.targets[:1]),
        plans=dataclasses.replace(data.plans, plans=plans),
        rewrites={"mods": RewriteLog((declined, *others))},
        data=dataclasses.replace(data.data, splits=splits),
        versions={**data.versions, "onnxruntime": "1.32.0", "torch": "2.13.0"},
    )


@pytest.fixture
def found(tmp_path: Path, old: ReportData, new: ReportData) -> RunComparison:
    return compared(tmp_path, old, new)


def test_a_run_against_itself_differs_in_nothing(tmp_path: Path, old: ReportData) -> None:
    directory = write_run(tmp_path, old)
    same = compare_runs(directory, directory)
    assert [t.change for t in same.targets] == [Change.SAME, Change.SAME]
    assert not (same.sites or same.presence or same.rewrites or same.versions or same.settings)
    assert same.has_same_rows
    assert all(c.difference == 0.0 and c.overlap for c in same.accuracy if c.difference is not None)
    assert {c.ratio for c in same.latency if c.ratio is not None} == {1.0}
    assert all(plan.old == plan.new and plan.moved == 0 for plan in same.plans)
    assert "Both are the same report" in same.notes
    assert {v.tone for v in comparison_document(same).verdicts} == {Tone.GOOD}


def test_another_engine_and_a_target_that_is_gone(found: RunComparison) -> None:
    cpu, rtx = found.targets
    assert (cpu.target, cpu.change) == ("cpu", Change.CHANGED)
    assert cpu.old is not None and cpu.new is not None
    assert (cpu.old.plan, cpu.old.fp8_sites) == ("fp32", 0)
    assert [(route.batch, route.plan) for route in cpu.old.routes] == [
        (8, "fp32"), (64, "fp8-safe"), (512, "fp8-all")
    ]  # fmt: skip
    assert (cpu.new.plan, cpu.new.fp8_sites, cpu.new.routes) == ("fp8-safe", 1, ())
    assert (rtx.target, rtx.change, rtx.new) == ("rtx", Change.VANISHED, None)
    headlines = [v.headline for v in comparison_document(found).verdicts]
    assert headlines[0] == (
        "cpu: cpu-onnxruntime-cpu-fp8-safe (plan fp8-safe) in place of cpu-onnxruntime-cpu-fp32 (plan fp32)"
    )
    assert headlines[1] == "rtx: only the old run emits an engine"


def test_an_engine_built_anew_from_the_same_plan_is_the_same(tmp_path: Path, old: ReportData) -> None:
    engines = tuple(dataclasses.replace(e, digest="f" * 64, backend_version="9") for e in old.engines)
    again = compared(tmp_path, old, dataclasses.replace(old, engines=engines))
    assert [t.change for t in again.targets] == [Change.SAME, Change.SAME]


def test_costs_are_set_side_by_side_and_the_overlap_is_that_of_the_intervals(
    tmp_path: Path, old: ReportData
) -> None:
    def with_cost(lower: float, upper: float) -> ReportData:
        return costing(unrouted, Interval((lower + upper) / 2, lower, upper, 0.95, 2400))

    unrouted = emitting(old, "cpu-onnxruntime-cpu-fp32", "fp32")
    for name, bounds, overlap, difference in (
        ("inside", (0.0002, 0.0004), True, 0.0001),
        ("touching", (0.0003, 0.0005), True, 0.0002),
        ("beyond", (0.0004, 0.0006), False, 0.0003),
    ):
        changes = compared(tmp_path / name, with_cost(0.0001, 0.0003), with_cost(*bounds)).accuracy
        judged = [c for c in changes if c.target == "cpu"]
        assert [c.split for c in judged] == ["selection", "certification"]
        for change in judged:
            assert change.overlap is overlap
            assert change.difference == pytest.approx(difference)
    worse = compared(tmp_path / "again", with_cost(0.0001, 0.0003), with_cost(0.0004, 0.0006))
    (cpu, *_) = comparison_document(worse).verdicts
    assert cpu.tone is Tone.BAD
    assert (
        "Cost (ctr, selection): ΔNE +0.020 % [+0.010 %, +0.030 %] then, +0.050 % [+0.040 %, +0.060 %] now; "
        "the intervals do not overlap."
    ) in cpu.facts


def test_what_was_not_measured_is_not_compared(found: RunComparison) -> None:
    certified, *_ = [c for c in found.accuracy if (c.target, c.split) == ("cpu", "certification")]
    assert certified.new is None and certified.difference is None and certified.overlap is None
    assert certified.remark == "it was not measured in the new run"
    # FP8 on the CPU is simulated: what it takes says nothing.
    assert all(c.new is None and c.ratio is None for c in found.latency)
    assert {c.remark for c in found.latency} == {"it was not measured in the new run"}


def test_latencies_have_a_ratio_on_one_device_only(tmp_path: Path, old: ReportData) -> None:
    unrouted = emitting(old, "cpu-onnxruntime-cpu-fp32", "fp32")
    faster = compared(tmp_path / "faster", unrouted, slower(unrouted, 0.8))
    places = [(c.batch, c.inputs) for c in faster.latency]
    assert places == [(8, InputPlace.HOST), (1024, InputPlace.DEVICE), (1024, InputPlace.HOST)]
    assert [c.ratio for c in faster.latency] == pytest.approx([0.8] * 3)
    assert all(c.new is not None and c.old is not None for c in faster.latency)
    (cpu, *_) = comparison_document(faster).verdicts
    assert (
        "Latency p50 (batch 8, inputs on the host): 81.3 µs then, 65.1 µs now, 0.800× the time." in cpu.facts
    )
    stats = {stat.label: (stat.shown.text, stat.note) for stat in cpu.stats}
    assert stats["Time, new over old"] == ("0.800×", "of p50 at batch 1,024, inputs on the host; no interval")
    assert stats["Plan now"] == ("fp32", "then fp32")
    assert stats["ΔNE now"][1].endswith("; ctr on certification")
    moved = compared(tmp_path / "moved", unrouted, slower(unrouted, 0.8, "NVIDIA H100"))
    assert {c.ratio for c in moved.latency} == {None}
    assert {c.remark for c in moved.latency} == {"not comparable: measured on 'cpu' and on 'NVIDIA H100'"}
    elsewhere = EvaluationSet(
        tuple(
            dataclasses.replace(
                e, latencies=tuple(dataclasses.replace(i, counts_for_choice=False) for i in e.latencies)
            )
            for e in unrouted.evaluations.evaluations
        )
    )
    other = compared(tmp_path / "other", unrouted, dataclasses.replace(unrouted, evaluations=elsewhere))
    assert {c.remark for c in other.latency} == {"not comparable: not measured on the target"}


def test_gains_over_an_engine_of_the_same_run(tmp_path: Path, old: ReportData) -> None:
    first, *rest = old.choice.targets
    slow = Interval(1.5, 1.45, 1.55, 0.95, 10)
    losers = tuple(dataclasses.replace(loser, times=slow) for loser in first.losers)
    changed = dataclasses.replace(
        old,
        choice=dataclasses.replace(old.choice, targets=(dataclasses.replace(first, losers=losers), *rest)),
    )
    (gain,) = compared(tmp_path, old, changed).gains
    assert (gain.target, gain.baseline, gain.overlap) == ("cpu", "bf16", False)
    assert gain.old is not None and gain.new is not None
    assert (gain.old.value, gain.new.value) == (1.2537, 1.5)


def test_sites_are_told_with_both_reasons(found: RunComparison) -> None:
    (change,) = [c for c in found.sites if c.where == "plan fp8-safe"]
    assert change.old is not None and change.new is not None
    assert (change.old.verdict, change.new.verdict) == ("safe", "unsafe")
    assert change.old.reason == "KL is far inside the site's part of the budget"
    assert change.new.reason == "KL is now beyond its part"
    (emitted,) = [c for c in found.sites if c.where == "emitted for cpu, fp32 → fp8-safe"]
    assert emitted.old is not None and emitted.new is not None
    assert (emitted.old.plan, emitted.old.precision) == ("fp32", "fp32")
    assert (emitted.new.plan, emitted.new.precision) == ("fp8-safe", "fp8")
    gone, came = found.presence
    assert (gone.site, gone.change) == ("over_arch.fc2", Change.VANISHED)
    assert (came.site, came.change, came.merged_from) == ("over_arch.last", Change.APPEARED, ("a", "b"))


def test_plans_rewrites_data_versions_and_settings(found: RunComparison) -> None:
    plans = {plan.plan: plan for plan in found.plans}
    assert plans["fp8-all"].new is None and plans["fp8-all"].old is not None
    assert plans["fp8-all"].old.fp8_sites == 2
    assert plans["fp8-safe"].moved == 0
    (rewrite,) = found.rewrites
    assert rewrite.old is not None and rewrite.new is not None
    assert (rewrite.transform, rewrite.at) == ("merge-parallel-linears", "over_arch.fc0")
    assert (rewrite.old.outcome, rewrite.new.outcome) == ("applied", "declined")
    assert rewrite.new.what == "its input has one consumer now"
    assert [(s.split, s.is_same) for s in found.splits] == [
        ("calibration", True), ("selection", True), ("certification", False)
    ]  # fmt: skip
    assert [(v.name, v.old, v.new) for v in found.versions] == [
        ("onnxruntime", "1.31.1", "1.32.0"), ("torch", None, "2.13.0")
    ]  # fmt: skip
    assert found.settings is not None
    assert [(v.name, v.old, v.new) for v in found.settings] == [
        ("budget", "0.001", None), ("calibration.batch_size", "512", "256"), ("mods", None, '["a"]')
    ]  # fmt: skip


def texts(document: Document) -> list[str]:
    cells = [cell.text for s in document.sections for table in s.tables for row in table.rows for cell in row]
    facts = [fact for verdict in document.verdicts for fact in verdict.facts]
    return [*cells, *facts, *(p for s in document.sections for p in s.paragraphs)]


def stats(document: Document) -> list[str]:
    """Only on the page; the facts say the same."""
    return [text for v in document.verdicts for stat in v.stats for text in (stat.shown.text, stat.note)]


def test_every_number_is_in_its_json_and_on_its_page(found: RunComparison, tmp_path: Path) -> None:
    files = {path.name: path.read_text() for path in render_comparison(found, tmp_path / "out")}
    assert set(files) == {"comparison.json", "comparison.md", "comparison.html"}
    assert serde.loads(RunComparison, files["comparison.json"]) == found
    facts = json.loads(files["comparison.json"])
    document = comparison_document(found)
    checked = 0
    for section in document.sections:
        for table in section.tables:
            for row in table.rows:
                for column, cell in zip(table.columns, row, strict=True):
                    if column.numeric and NUMBER.search(cell.text):
                        assert cell.source, (table.caption, column.title, cell.text)
    for text in (*texts(document), *stats(document)):
        if isinstance(text, Told) and text.figures and "Speed:" not in text:
            checked += check_numbers(facts, text, text.source, None)
    assert checked > 60
    page = tables_of(files["comparison.html"])
    assert sum(bool(cell.attributes.get("data-source")) for cell in page.cells) > 30
    flat = " ".join(files["comparison.md"].replace("\\", "").split())
    for text in texts(document):
        assert " ".join(text.split()) in flat
    assert "SYNTHETIC DATA: numbers of both runs" in flat


def test_the_json_fits_its_schema_and_nothing_strange_does(found: RunComparison) -> None:
    validator = jsonschema.Draft202012Validator(serde.json_schema(RunComparison))
    document = json.loads(serde.dumps(found))
    validator.validate(document)
    for change in (
        lambda d: d.update(schema="loka-onnx/run-comparison/0"),
        lambda d: d["value"].pop("targets"),
        lambda d: d["value"].update(colour="red"),
        lambda d: d["value"]["targets"][0].update(change="better"),
        lambda d: d["value"]["latency"][0]["old"].update(p50_us="fast"),
        lambda d: d["value"]["sites"][0]["old"].pop("reason"),
    ):
        broken = json.loads(serde.dumps(found))
        change(broken)
        assert not validator.is_valid(broken)


def test_a_report_by_itself_has_no_settings_and_says_so(tmp_path: Path, old: ReportData) -> None:
    directory = write_run(tmp_path / "a", old, seed=1)
    other = write_run(tmp_path / "b", old, seed=2)
    found = compare_runs(directory / "report.json", other)
    assert found.settings is None
    *_, surroundings = comparison_document(found).sections
    assert surroundings.paragraphs[2:] == (
        "Settings were not compared: they stand in run directories, and not both were given.",
    )
    assert [table.caption for table in surroundings.tables] == ["Versions that differ"]
    assert any(
        "Settings are not compared: of the old run only its report was given" in n for n in found.notes
    )
    both = compare_runs(directory, other)
    assert both.settings is not None and [item.name for item in both.settings] == ["seed"]
    *_, surroundings = comparison_document(both).sections
    assert len(surroundings.paragraphs) == 2
    assert [table.caption for table in surroundings.tables][1:] == ["Settings that differ"]


def test_what_is_no_report_is_refused(tmp_path: Path, old: ReportData) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UserError) as raised:
            read_run(path)
        return str(raised.value)

    assert refused(tmp_path) == (
        f"{tmp_path}: there is no report of a run\n"
        "  evidence: it has no 'report.json'\n"
        "  remedy: name a run directory or a report.json; `loka-onnx report RUN.yaml` writes one"
    )
    assert "there is no such file" in refused(tmp_path / "nothing.json")
    file = tmp_path / "x.json"
    file.write_text("{")
    assert refused(file).startswith(
        f"{file}: this is no report of a run\n  evidence: it is no JSON document\n"
    )
    file.write_text('{"schema": "loka-onnx/comparison/1", "value": {}}')
    assert "its schema is 'loka-onnx/comparison/1'" in refused(file)
    assert "`loka-onnx compare` is for bundles and models" in refused(file)
    file.write_text('{"schema": "loka-onnx/report/5", "value": {}}')
    assert refused(file) == (
        f"{file}: the report was written by an older version of loka-onnx\n"
        f"  evidence: schema is 'loka-onnx/report/5', this version reads '{serde.schema_id(ReportData)}'\n"
        "  remedy: compare with the version that wrote it; or copy its run directory and write the report "
        "again there: `loka-onnx report RUN.yaml --output COPY`, which runs every stage once more, and "
        "measures anew, where the version of loka-onnx or of a library has changed"
    )
    file.write_text('{"schema": "loka-onnx/report/99", "value": {}}')
    assert "a newer version" in refused(file)
    document = json.loads(serde.dumps(old))
    document["value"].pop("title")
    file.write_text(json.dumps(document))
    assert "at title: Field required" in refused(file)
