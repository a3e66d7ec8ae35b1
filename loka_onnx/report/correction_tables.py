"""Corrections of each quantized plan, with their effect on the selection split."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.correction import OutputCorrection, PlanCorrections, Trial, Variant
from loka_onnx.core.evaluation import DELTA_NE_NAME
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Column, Section, Table, Tone, cell
from loka_onnx.report.figures import Place, derive, formed, percent_interval, shown


def corrections_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section; empty without corrections."""
    plans = data.corrections.plans
    if not plans:
        return ()
    tables = [_variant_table(plans)]
    if any(plan.bias for plan in plans):
        tables.append(_bias_table(plans))
    paragraphs = (
        "Constants that are fitted to a plan: the mean error of each site, taken out of the bias behind it, "
        "and what restores the FP32 model's mean on an output. They are kept where they help on the "
        "selection split, in simulation; the tables of engines say what they did to the engine.",
    )
    return (
        Section("corrections", "Corrections", paragraphs, tuple(_left_alone(plans)), tables=tuple(tables)),
    )


def _left_alone(plans: tuple[PlanCorrections, ...]) -> Iterator[str]:
    for plan in plans:
        if plan.failure:
            yield f"{plan.plan} has no corrections, because {plan.failure}"
        for site, reason in plan.left_alone.items():
            yield f"{plan.plan}: {site} has no corrected bias: {reason}"


def _variant_table(plans: tuple[PlanCorrections, ...]) -> Table:
    rows = [(plan, output, trial) for plan in plans for output in plan.outputs for trial in output.trials]
    is_labelled = any(trial.delta_ne is not None for _, _, trial in rows)
    columns = (
        Column("Plan"),
        Column("Output"),
        Column("Corrected"),
        Column("Kept"),
        Column("Constant", numeric=True),
        Column("Mean change of the output", numeric=True),
        *((Column(f"{DELTA_NE_NAME} on selection [95 % interval]", numeric=True),) if is_labelled else ()),
        Column("KL, label-free part", numeric=True),
        Column("Why", prose=True),
    )
    return Table(
        "What was tried on each output",
        columns,
        tuple(_variant_row(*row, is_labelled=is_labelled) for row in rows),
        frozenset(i for i, (_, output, trial) in enumerate(rows) if trial.variant is output.accepted),
        keys=2,
    )


def _variant_row(
    plan: PlanCorrections, output: OutputCorrection, trial: Trial, *, is_labelled: bool
) -> tuple[Cell, ...]:
    is_kept = trial.variant is output.accepted
    constant = shown("{:+.4g}".format, trial, "constant") if trial.variant.has_constant else numbers.NONE
    return (
        cell(plan.plan),
        cell(output.output),
        cell(trial.variant),
        cell("yes", Tone.GOOD) if is_kept else cell("no", Tone.MUTED),
        cell(constant),
        cell(shown("{:+.3g}".format, trial, "mean_error")),
        *((cell(percent_interval(trial.delta_ne)),) if is_labelled else ()),
        cell(percent_interval(trial.kl)),
        # One sentence for each output: it weighs all variants.
        cell(output.reason if trial.variant is Variant.NONE else ""),
    )


def _bias_table(plans: tuple[PlanCorrections, ...]) -> Table:
    columns = (
        Column("Plan"),
        Column("Site"),
        Column("Channels", numeric=True),
        Column("Largest constant", numeric=True),
        Column("Mean error before", numeric=True),
        Column("Mean error after", numeric=True),
        Column("Kept"),
    )
    rows = tuple(
        (
            cell(plan.plan),
            cell(bias.site),
            cell(formed(numbers.count, derive("count", Place(bias, "values")))),
            cell(formed(numbers.scientific, derive("largest_magnitude", Place(bias, "values")))),
            cell(shown(numbers.scientific, bias, "error_before")),
            cell(shown(numbers.scientific, bias, "error_after")),
            cell("yes", Tone.GOOD) if plan.keeps_bias else cell("no", Tone.MUTED),
        )
        for plan in plans
        for bias in plan.bias
    )
    caption = "Corrected biases: mean error of each site, root mean square over its channels"
    return Table(caption, columns, rows, keys=2)
