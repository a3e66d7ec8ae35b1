"""Corrections of each quantized plan, with their effect on the selection split."""

from __future__ import annotations

from collections.abc import Iterator

from loka_onnx.core.correction import OutputCorrection, PlanCorrections, Trial, Variant
from loka_onnx.report import numbers
from loka_onnx.report.data import ReportData
from loka_onnx.report.document import Field, Section, Tone, cell, number, prose, table_of, text
from loka_onnx.report.figures import percent_interval, shown

_Tried = tuple[PlanCorrections, OutputCorrection, Trial]


def corrections_sections(data: ReportData) -> tuple[Section, ...]:
    """Return the section; empty without corrections."""
    plans = data.corrections.plans
    if not plans:
        return ()
    paragraphs = (
        "Constants that are fitted to a plan: the mean error of each site, taken out of the bias behind it, "
        "and what restores the FP32 model's mean on an output. They are kept where they help on the "
        "selection split, in simulation; the tables of engines say what they did to the engine. report.json "
        "has the constant of each channel.",
    )
    rows = [(plan, output, trial) for plan in plans for output in plan.outputs for trial in output.trials]
    judged: Field[_Tried] = number(
        "ΔNE on selection [95 % interval]", lambda row: percent_interval(row[2].delta_ne)
    )
    fields: tuple[Field[_Tried], ...] = (
        text("Plan", lambda row: row[0].plan),
        text("Output", lambda row: row[1].output),
        text("Corrected", lambda row: row[2].variant),
        text("Kept", lambda row: cell("yes", Tone.GOOD) if _is_kept(row) else cell("no", Tone.MUTED)),
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
    table = table_of("What was tried on each output", fields, rows, _is_kept)
    return (Section("corrections", "Corrections", paragraphs, tuple(_left_alone(plans)), (table,)),)


def _is_kept(row: _Tried) -> bool:
    return row[2].variant is row[1].accepted


def _left_alone(plans: tuple[PlanCorrections, ...]) -> Iterator[str]:
    for plan in plans:
        if plan.failure:
            yield f"{plan.plan} has no corrections, because {plan.failure}"
        for site, reason in plan.left_alone.items():
            yield f"{plan.plan}: {site} has no corrected bias: {reason}"
