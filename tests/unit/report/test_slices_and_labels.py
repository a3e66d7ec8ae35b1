"""What the report says of slices, and of outputs that have no labels."""

from __future__ import annotations

import dataclasses
import re

import pytest
from sample_run import BUDGET
from test_report import NASTY, Page, printed, rendered

from loka_onnx.core import serde
from loka_onnx.core.evaluation import EvaluationSet, OutputEvaluation, SliceDifference, TaskMetrics
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import ENTROPY
from loka_onnx.report import HTML_NAME, JSON_NAME, MARKDOWN_NAME, ReportData, numbers
from loka_onnx.report.document import Tone
from loka_onnx.report.verdict import verdicts

NO_LABELS = "KL over the mean entropy, no labels: the labelled first-order term is not seen"


def with_outputs(data: ReportData, change) -> ReportData:
    evaluations = (
        dataclasses.replace(e, outputs=tuple(change(e, o) for o in e.outputs))
        for e in data.evaluations.evaluations
    )
    return dataclasses.replace(data, evaluations=EvaluationSet(tuple(evaluations)))


def a_slice(column, value, lower, upper, rows=1000, status="undecided"):
    interval = Interval((lower + upper) / 2, lower, upper, 0.999, rows)
    return SliceDifference(column, value, rows, rows, interval, interval, interval, status)


def unjudged(column, value, rows):
    reason = f"{rows} rows, an interval needs 100 rows"
    return SliceDifference(column, value, rows, rows, None, None, None, "not judged", reason)


SLICES = (
    a_slice("country", NASTY, 0.0003, 0.0009, status="beyond"),
    a_slice("country", None, 0.0001, 0.0012),
    a_slice("device", "", -0.0001, 0.0001, status="within"),
    *(a_slice("country", f"c{i}", -0.001 - i / 1000, 0.002) for i in range(20)),
    unjudged("country", "LI", 38),
)


@pytest.fixture(scope="module")
def sliced(sample) -> ReportData:
    return with_outputs(
        sample.report,
        lambda _, o: (
            o
            if o.difference is None
            else dataclasses.replace(o, slices=SLICES, slices_left_out={"country": 1234})
        ),
    )


def flat(markdown: str) -> str:
    text = re.sub(r"\\(.)", r"\1", " ".join(markdown.split()))
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def test_the_worst_slices_are_in_both_texts_and_all_in_the_json(sliced, tmp_path):
    files = rendered(sliced, tmp_path)
    markdown, page = flat(files[MARKDOWN_NAME]), " ".join(" ".join(Page(files[HTML_NAME]).text).split())
    for text in (
        f"Worst slices of cpu-onnxruntime-cpu-fp32, ctr, on certification, budget 0.02 %; "
        f"{len(SLICES) - 10} more in report.json",
        "+0.060 % [+0.030 %, +0.090 %]",
        "(null)",
        "(empty text)",
        "Column 'country' has many values: the most frequent on selection are looked at, 1,234 are left out.",
        "Slices do not enter the choice.",
        NASTY,
    ):
        assert text in markdown
        assert text in page
    assert "c6" in markdown and "c7" not in markdown
    assert not any("<script>alert" in script for script in Page(files[HTML_NAME]).scripts)
    assert serde.loads(ReportData, files[JSON_NAME]) == sliced
    assert all(
        output.slices == SLICES
        for e in serde.loads(ReportData, files[JSON_NAME]).evaluations.evaluations
        for output in e.outputs
        if output.difference is not None
    )


def test_what_is_not_judged_is_not_dropped(sliced, tmp_path):
    few = with_outputs(sliced, lambda _, o: dataclasses.replace(o, slices=o.slices[-3:]))
    markdown = flat(rendered(few, tmp_path)[MARKDOWN_NAME])
    assert "not judged (38 rows)" in markdown
    assert "38 rows, an interval needs 100 rows" in markdown
    # Nothing harms a slice for certain: only the emitted engine is shown in detail.
    assert (
        markdown.count("Worst slices of") == markdown.count("Worst slices of cpu-onnxruntime-cpu-fp32") == 2
    )


def test_the_verdict_says_which_slice_is_beyond_the_budget(sliced):
    cpu, _ = verdicts(sliced)
    assert (
        f"Slices (ctr, certification): 1 of {len(SLICES) - 1} judged beyond the budget of 0.02 %; "
        f"worst country = {NASTY}: +0.060 % [+0.030 %, +0.090 %]; 1 within, 21 undecided, 1 not judged."
    ) in cpu.facts
    none = with_outputs(sliced, lambda _, o: dataclasses.replace(o, slices=o.slices[1:3]))
    assert (
        "Slices (ctr, certification): none of 2 judged beyond the budget of 0.02 %; 1 within, 1 undecided."
        in verdicts(none)[0].facts
    )


def test_a_slice_beyond_the_budget_takes_the_good_colour_from_an_fp8_engine(sample):
    def within(_, o: OutputEvaluation) -> OutputEvaluation:
        return dataclasses.replace(o, budget_status="within")

    inside = with_outputs(sample.report, within)
    cpu, *rest = inside.choice.targets
    chosen = dataclasses.replace(cpu, engine="cpu-onnxruntime-cpu-fp8-safe", plan="fp8-safe")
    inside = dataclasses.replace(inside, choice=dataclasses.replace(inside.choice, targets=(chosen, *rest)))
    assert verdicts(inside)[0].tone is Tone.GOOD
    harmed = with_outputs(
        inside, lambda _, o: o if o.difference is None else dataclasses.replace(o, slices=SLICES)
    )
    assert verdicts(harmed)[0].tone is Tone.WARN


@pytest.fixture(scope="module")
def unlabelled(sample) -> ReportData:
    def change(_, o: OutputEvaluation) -> OutputEvaluation:
        difference = o.difference and dataclasses.replace(
            o.difference,
            denominator=ENTROPY,
            delta_ne=None,
            labelled=None,
            delta_auc=None,
            delta_prediction_ratio=None,
        )
        return dataclasses.replace(o, metrics=TaskMetrics(None, None, None, None), difference=difference)

    return with_outputs(sample.report, change)


def test_an_output_without_labels_is_named_as_such_wherever_it_is_judged(unlabelled, tmp_path):
    files = rendered(unlabelled, tmp_path)
    markdown, page = flat(files[MARKDOWN_NAME]), " ".join(" ".join(Page(files[HTML_NAME]).text).split())
    engine = unlabelled.evaluation("cpu-onnxruntime-cpu-fp8-all", "selection")
    assert engine is not None
    kl = numbers.percent_interval(engine.outputs[0].difference.kl, BUDGET)
    for text in (
        f"Judged on {NO_LABELS}. This concerns ctr.",
        "KL over the mean entropy [95 % interval]",
        "What the change is made of on selection, relative to the mean entropy",
        "Cost (ctr, 1,600 certification rows): KL over the mean entropy",
        f"({NO_LABELS})",
        f"KL {kl}",
    ):
        assert text in markdown
        assert text in page
    # Nothing may pass for a change of normalized entropy, and no metric is made up.
    assert "ΔNE" not in markdown and "ΔNE" not in files[HTML_NAME]
    assert '"text":"KL over the mean entropy, %"' in "".join(Page(files[HTML_NAME]).scripts)
    assert "nan" not in markdown.lower().split()
    assert serde.loads(ReportData, files[JSON_NAME]) == unlabelled


def test_the_terminal_names_it_too(unlabelled, sample):
    text = printed(unlabelled)
    assert "KL, 95 %" in text and "ΔNE" not in text
    assert NO_LABELS in " ".join(text.split())
    pairs = zip(unlabelled.evaluations.evaluations, sample.report.evaluations.evaluations, strict=True)
    some = tuple(
        known if known.plan == "fp32" else dataclasses.replace(e, outputs=renamed(e.outputs))
        for e, known in pairs
    )
    both = dataclasses.replace(unlabelled, evaluations=EvaluationSet(some))
    assert "ΔNE or KL, 95 %" in printed(both)


def renamed(outputs: tuple[OutputEvaluation, ...]) -> tuple[OutputEvaluation, ...]:
    return tuple(dataclasses.replace(output, output="cvr") for output in outputs)


def test_headings_say_how_sure_the_intervals_are(sample, tmp_path):
    """Certification is at 97.5 % where its rows may be looked at twice, as a refresh may."""

    def surer(evaluation):
        def of(output: OutputEvaluation) -> OutputEvaluation:
            if output.difference is None or evaluation.split != "certification":
                return output
            known = output.difference
            change = dataclasses.replace(known.delta_ne, confidence=0.975)
            return dataclasses.replace(output, difference=dataclasses.replace(known, delta_ne=change))

        return dataclasses.replace(evaluation, outputs=tuple(map(of, evaluation.outputs)))

    evaluations = EvaluationSet(tuple(map(surer, sample.report.evaluations.evaluations)))
    assert evaluations != sample.report.evaluations
    text = flat(
        rendered(dataclasses.replace(sample.report, evaluations=evaluations), tmp_path)[MARKDOWN_NAME]
    )
    assert "ΔNE [95 % interval]" in text and "ΔNE [97.5 % interval]" in text
    before = flat(rendered(sample.report, tmp_path / "before")[MARKDOWN_NAME])
    assert "ΔNE [95 % interval]" in before and "97.5 %" not in before
