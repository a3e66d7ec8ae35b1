"""The constants of each FP8 plan: fitted on calibration rows, kept or not by what they do on selection rows.

Both are simulated: the planned model in FP32, with Q/DQ as it is, in ONNX Runtime. What a backend then makes
of the plan and its corrections is measured on its engine like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
from loka_onnx.evaluation.predictions import predict
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import Stage
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

FITTED_ROWS = 32_768
"""Calibration rows that constants are fitted to, at most: a mean is then known to .006 of its spread."""
HOPELESS = 3.0
"""Predicted KL over the budget from which on nothing is tried: no constant was seen to take off more than two
thirds."""
CORRECT = Stage("correct", "corrections.json", CorrectionSet)
SCRATCH = "calibration/instrumented"


def mean_rows(context: Context, most: int | None = None) -> MeanRows:
    """Calibration rows that constants are fitted to, at most `most` of them."""
    settings, limit = context.config.calibration, FITTED_ROWS if most is None else min(most, FITTED_ROWS)
    executor, data = LocalExecutor(context.threads), context.splits.calibration
    return MeanRows(
        data, limit, settings.batch_size, settings.seed, executor, context.progress, settings.rows
    )


@dataclass(frozen=True)
class Correcting:
    """The stage that fits and judges corrections of plans for a model.

    Attributes:
        most: Rows that constants are fitted to, and that decide, at most; None for as many as a run takes.
    """

    context: Context
    model: ModelArtifact
    most: int | None = None

    @property
    def specs(self) -> tuple[OutputSpec, ...]:
        """The judged outputs."""
        return self.context.specs

    @cached_property
    def calibration(self) -> MeanRows:
        """The rows that constants are fitted to."""
        return mean_rows(self.context, self.most)

    @cached_property
    def selection(self) -> Split:
        """The rows that decide."""
        config = self.context.config
        rows = self.context.splits.selection
        return Split("selection", rows, config.columns, config.data.group, most=self.most)

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
        hopeless = {plan.id: why for plan in quantized if (why := self._why_hopeless(plan))}
        able = [plan for plan in quantized if plan.id not in hopeless]
        tried: dict[str, PlanCorrections] = {}
        if able:
            scratch = self.context.path(SCRATCH)
            fit = fit_biases(self.model, able, self.specs, self.calibration, scratch / "means.onnx")
            trials = _Trials(self, fit, self._reference(), scratch)
            tried = {plan.id: self._tried(trials, plan) for plan in able}
        return CorrectionSet(
            tuple(
                tried.get(plan.id) or PlanCorrections(plan.id, 0, (), {}, (), hopeless[plan.id])
                for plan in quantized
            )
        )

    def _reference(self) -> Reference:
        if self.most is None:
            return self.context.reference(self.context.selection)
        # Fewer rows than a run takes need a reference of their own.
        run = self.context.open_exported().run
        return predict_reference(self.selection, run, self.specs, self.context.progress)

    def _why_hopeless(self, plan: PrecisionPlan) -> str:
        """Reason why no constant can bring a plan inside the budget; empty if one may."""
        for spec in self.specs:
            kl = plan.predicted_kl.get(spec.name, 0.0)
            if kl > HOPELESS * spec.budget:
                return (
                    f"its KL on '{spec.name}' is predicted as {kl / spec.budget:.3g} times the budget: "
                    "no constants take off enough of that"
                )
        return ""

    def _tried(self, trials: _Trials, plan: PrecisionPlan) -> PlanCorrections:
        """The corrections of one plan; one that cannot be simulated (it overflows) goes without."""
        try:
            return trials.of(plan)
        except StageError as error:
            return PlanCorrections(plan.id, 0, (), {}, (), f"it could not be simulated: {error}")

    def simulate(self, path: Path, exact: Means, means: Means, task: str) -> Simulated:
        """Run a planned model in FP32 on the selection split; `exact` are the means of the FP32 model."""
        graph = GraphModel.load(path)
        kinds = {spec.name: spec.kind for spec in self.specs}
        scores = expose_scores(graph, kinds)
        exposed = path.with_suffix(".scores.onnx")
        graph.save(exposed)
        names = tuple(dict.fromkeys((*kinds, *scores.values())))
        total = self.selection.rows
        predictions = predict(
            OnnxSession(exposed, SessionOptions(threads=self.context.threads)).run,
            self.selection.batches(),
            names,
            progress=lambda done: self.context.progress(task, done, total),
        )
        constants = {
            name: exact.scores[name] - means.scores[name]
            for name in scores
            if name in exact.scores and name in means.scores
        }
        return Simulated(predictions, scores, constants)


@dataclass(frozen=True)
class _Trials:
    """Tries fitted constants, plan by plan."""

    stage: Correcting
    fit: Fit
    reference: Reference
    scratch: Path

    def of(self, plan: PrecisionPlan) -> PlanCorrections:
        """The corrections of one plan."""
        stage, fitted = self.stage, self.fit.plans[plan.id]
        shapes = {site: values.shape for site, values in fitted.values.items()}
        plain_path = self._planned(plan, Corrections())
        plain = observe(plain_path, shapes, stage.specs, stage.calibration)
        simulated = stage.simulate(plain_path, self.fit.exact, plain, f"{plan.id} uncorrected")
        if not shapes:
            outputs = try_corrections(stage.specs, self.reference, simulated, None)
            return PlanCorrections(plan.id, plain.rows, (), fitted.left_alone, outputs)
        biased_path = self._planned(plan, Corrections(self._described(fitted, plain, plain)))
        biased = observe(biased_path, shapes, stage.specs, stage.calibration)
        corrected = stage.simulate(biased_path, self.fit.exact, biased, f"{plan.id} corrected")
        return PlanCorrections(
            plan.id,
            plain.rows,
            self._described(fitted, plain, biased),
            fitted.left_alone,
            try_corrections(stage.specs, self.reference, simulated, corrected),
        )

    def _planned(self, plan: PrecisionPlan, corrections: Corrections) -> Path:
        name = f"{plan.id}-{'plain' if corrections.is_empty else 'corrected'}.onnx"
        form = PlanForm(Precision.FP32, corrections=corrections)
        return apply_plan(self.stage.model, plan, form, self.scratch / name).path

    def _described(self, fitted: FittedBiases, before: Means, after: Means) -> tuple[BiasCorrection, ...]:
        return tuple(
            BiasCorrection(
                site,
                values.shape,
                tuple(values.reshape(-1).tolist()),
                _rms(before.tensors[site] - self.fit.exact.tensors[site]),
                _rms(after.tensors[site] - self.fit.exact.tensors[site]),
            )
            for site, values in fitted.values.items()
        )


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
