"""The constants of each FP8 plan: fitted on calibration rows, kept if they help on selection rows.

Both are simulated: the planned model in FP32, with Q/DQ as it is, in ONNX Runtime. The engine of a plan with
corrections is measured like every other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from loka_onnx.calibration.corrections.biases import Fit, FittedBiases, fit_biases, observe
from loka_onnx.calibration.corrections.means import MeanRows, Means
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.correction import BiasCorrection, Corrections, CorrectionSet, PlanCorrections
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.errors import StageError
from loka_onnx.evaluation.corrections import Simulated, try_corrections
from loka_onnx.evaluation.engines import Reference, Split, predict_reference
from loka_onnx.evaluation.predictions import Run, predict
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.precision.insert_qdq import check_decision

FITTED_ROWS = 32_768
"""Calibration rows that constants are fitted to, at most: a mean is then known to .006 of its spread."""
HOPELESS = 3.0
"""Predicted KL over the budget from which on nothing is tried: constants took off two thirds at most."""
CORRECT = DocumentStage("correct", "corrections.json", CorrectionSet)
SCRATCH = "calibration/instrumented"


def mean_rows(context: Context, most: int | None = None) -> MeanRows:
    """Calibration rows that constants are fitted to, at most `most` of them."""
    settings, limit = context.config.calibration, FITTED_ROWS if most is None else min(most, FITTED_ROWS)
    executor, data = LocalExecutor(context.threads), context.splits.calibration
    return MeanRows(
        data, limit, settings.batch_size, settings.seed, executor, context.progress, settings.rows
    )


def output_names(specs: Sequence[OutputSpec], scores: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the judged outputs and of their scores, each once."""
    return tuple(dict.fromkeys((*(spec.name for spec in specs), *scores.values())))


def simulate(
    context: Context,
    run: Run,
    split: Split,
    scores: Mapping[str, str],
    means: tuple[Mapping[str, float], Mapping[str, float]],
    task: str,
) -> Simulated:
    """Run a simulated plan on a split; `run` is of a session of one thread.

    `scores` names the score of each output; constants restore the first of both mean scores, by output: that
    of the FP32 model and that of the plan.
    """
    exact, ours = means
    predictions = predict(
        context.in_streams(run),
        split.batches(),
        output_names(context.specs, scores),
        progress=lambda done: context.progress(task, done, split.rows),
    )
    constants = {name: exact[name] - ours[name] for name in scores if name in exact and name in ours}
    return Simulated(predictions, scores, constants)


@dataclass(frozen=True)
class Correcting:
    """The stage that fits and judges corrections of plans, on `most` rows; all that a run takes for None."""

    context: Context
    model: ModelArtifact
    most: int | None = None

    @cached_property
    def calibration(self) -> MeanRows:
        """The rows that constants are fitted to."""
        return mean_rows(self.context, self.most)

    @cached_property
    def selection(self) -> Split:
        """The rows that decide."""
        return replace(self.context.selection, slices=(), most=self.most)

    def correct(self, plans: PlanSet) -> CorrectionSet:
        """Fit, try and decide, for every plan with FP8 → `corrections.json`."""
        rows, config = self.calibration, self.context.config
        reads = {
            "asked_for": config.plan.corrections,
            "exported": self.context.exported,
            "model": self.model,
            "plans": [plan for plan in plans.plans if plan.quantized_sites],
            "data": [rows.data, self.selection.data],
            "rows": [rows.most, rows.first, rows.batch_size, rows.seed, self.selection.most],
            "outputs": config.outputs,
            "group": self.selection.group,
        }
        return self.context.directory.document(CORRECT, reads, lambda: self.fit(plans.plans))

    def fit(self, plans: Iterable[PrecisionPlan]) -> CorrectionSet:
        """Fit, try and decide, without a record; nothing where none is asked for or no plan has FP8."""
        quantized = [plan for plan in plans if plan.quantized_sites]
        if not self.context.config.plan.corrections or not quantized:
            return CorrectionSet()
        fitted = {plan.id: _failed(plan, why) for plan in quantized if (why := self._why_hopeless(plan))}
        able = [plan for plan in quantized if plan.id not in fitted]
        if able:
            for plan, site in product(able, self.model.sites):
                if site.name in plan.quantized_sites:
                    check_decision(site, plan.decision(site.name))
            means = self.context.path(SCRATCH) / "means.onnx"
            fit = fit_biases(self.model, able, self.context.specs, self.calibration, means)
            reference = self._reference()
            fitted |= {plan.id: self._tried(plan, fit, reference) for plan in able}
        return CorrectionSet(tuple(fitted[plan.id] for plan in quantized))

    def _reference(self) -> Reference:
        if self.most is None:
            return self.context.reference(self.context.selection)
        # Fewer rows than a run takes need a reference of their own.
        run = self.context.in_streams(self.context.open_exported(threads=1).run)
        return predict_reference(self.selection, run, self.context.specs, self.context.progress)

    def _why_hopeless(self, plan: PrecisionPlan) -> str:
        """Reason why no constant can bring a plan inside the budget; empty if one may."""
        for spec in self.context.specs:
            kl = plan.predicted_kl.get(spec.name, 0.0)
            if kl > HOPELESS * spec.budget:
                return (
                    f"its KL on '{spec.name}' is predicted as {kl / spec.budget:.3g} times the budget: "
                    "no constants take off enough of that"
                )
        return ""

    def _tried(self, plan: PrecisionPlan, fit: Fit, reference: Reference) -> PlanCorrections:
        """The corrections of one plan; one that cannot be simulated (it overflows) goes without."""
        fitted, specs = fit.plans[plan.id], self.context.specs
        try:
            plain, simulated = self._simulated(plan, fit, Corrections())
            biased, corrected = plain, None
            if fitted.values:
                uncorrected = Corrections(_described(fitted, fit.exact, plain, plain))
                biased, corrected = self._simulated(plan, fit, uncorrected)
            outputs = try_corrections(specs, reference, simulated, corrected)
        except StageError as error:
            return _failed(plan, f"it could not be simulated: {error}")
        biases = _described(fitted, fit.exact, plain, biased)
        return PlanCorrections(plan.id, plain.rows, biases, fitted.left_alone, outputs)

    def _simulated(self, plan: PrecisionPlan, fit: Fit, corrections: Corrections) -> tuple[Means, Simulated]:
        """The plan in FP32 with corrected biases: its means on calibration, and the selection split."""
        context, how = self.context, "uncorrected" if corrections.is_empty else "corrected"
        shapes = {site: values.shape for site, values in fit.plans[plan.id].values.items()}
        form, path = PlanForm(Precision.FP32, corrections=corrections), context.path(SCRATCH)
        path = apply_plan(self.model, plan, form, path / f"{plan.id}-{how}.onnx").path
        means = observe(path, shapes, context.specs, self.calibration)
        graph = GraphModel.load(path)
        scores = expose_scores(graph, {spec.name: spec.kind for spec in context.specs})
        exposed = path.with_suffix(".scores.onnx")
        graph.save(exposed)
        run = OnnxSession(exposed, SessionOptions(threads=1)).run
        both = (fit.exact.scores, means.scores)
        return means, simulate(context, run, self.selection, scores, both, f"{plan.id} {how}")


def _failed(plan: PrecisionPlan, why: str) -> PlanCorrections:
    return PlanCorrections(plan.id, 0, (), {}, (), why)


def _described(fitted: FittedBiases, exact: Means, before: Means, after: Means) -> tuple[BiasCorrection, ...]:
    """The fitted biases, with the root mean square of the sites' mean errors before and after them."""

    def error(means: Means, site: str) -> float:
        return float(np.sqrt(np.mean(np.square(means.tensors[site] - exact.tensors[site]))))

    return tuple(
        BiasCorrection(
            site, values.shape, tuple(values.reshape(-1).tolist()), error(before, site), error(after, site)
        )
        for site, values in fitted.values.items()
    )
