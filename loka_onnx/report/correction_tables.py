"""Corrections of each quantized plan, with their effect on the selection split."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.correction import BiasCorrection, OutputCorrection, PlanCorrections, Trial, Variant
from loka_onnx.core.evaluation import DELTA_NE_NAME
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Cell, Field, Section, Table, Tone, cell, number, prose, table_of, text
from loka_onnx.report.figures import Place, counted, derive, formed, percent_interval, shown


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


def _kept(is_kept: bool) -> Cell:
    return cell("yes", Tone.GOOD) if is_kept else cell("no", Tone.MUTED)


_Tried = tuple[PlanCorrections, OutputCorrection, Trial]


def _variant_table(plans: tuple[PlanCorrections, ...]) -> Table:
    rows = [(plan, output, trial) for plan in plans for output in plan.outputs for trial in output.trials]
    judged: Field[_Tried] = number(
        f"{DELTA_NE_NAME} on selection [95 % interval]", lambda row: percent_interval(row[2].delta_ne)
    )

    def is_kept(row: _Tried) -> bool:
        return row[2].variant is row[1].accepted

    fields: tuple[Field[_Tried], ...] = (
        text("Plan", lambda row: row[0].plan),
        text("Output", lambda row: row[1].output),
        text("Corrected", lambda row: row[2].variant),
        text("Kept", lambda row: _kept(is_kept(row))),
        number(
            "Constant",
            lambda row: (
                shown("{:+.4g}".format, row[2], "constant") if row[2].variant.has_constant else numbers.NONE
            ),
        ),
        number("Mean change of the output", lambda row: shown("{:+.3g}".format, row[2], "mean_error")),
        *((judged,) if any(trial.delta_ne is not None for _, _, trial in rows) else ()),
        number("KL, label-free part", lambda row: percent_interval(row[2].kl)),
        # One sentence for each output: it weighs all variants.
        prose("Why", lambda row: row[1].reason if row[2].variant is Variant.NONE else ""),
    )
    return table_of("What was tried on each output", fields, rows, is_kept, keys=2)


def _bias_table(plans: tuple[PlanCorrections, ...]) -> Table:
    fields: tuple[Field[tuple[PlanCorrections, BiasCorrection]], ...] = (
        text("Plan", lambda row: row[0].plan),
        text("Site", lambda row: row[1].site),
        number("Channels", lambda row: counted(row[1], "values")),
        number(
            "Largest constant",
            lambda row: formed(numbers.scientific, derive("largest_magnitude", Place(row[1], "values"))),
        ),
        number("Mean error before", lambda row: shown(numbers.scientific, row[1], "error_before")),
        number("Mean error after", lambda row: shown(numbers.scientific, row[1], "error_after")),
        text("Kept", lambda row: _kept(row[0].keeps_bias)),
    )
    caption = "Corrected biases: mean error of each site, root mean square over its channels"
    return table_of(caption, fields, ((plan, bias) for plan in plans for bias in plan.bias), keys=2)
