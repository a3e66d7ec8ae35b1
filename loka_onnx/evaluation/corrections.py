"""Choose the corrections of a plan, on rows that they were not fitted to.

The plan runs in simulation with corrected biases of its sites and without; the constant on an output is then
arithmetic. Each variant is paired with the FP32 reference, row by row, like an engine. The rule:

* A variant is admitted where the upper end of its interval of ΔNE (of KL without labels) is lower than
  without any correction, and its KL is no larger.
* Without corrected biases, and with them, each output takes its admitted variant with the lowest upper end.
  Biases belong to all outputs. They are kept if, on every output, an admitted variant with them has an upper
  end no higher than the best without them, and on one a lower one.

The lowest of several upper ends is slightly optimistic: the effect is read from the engine on certification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.correction import OutputCorrection, Trial, Variant
from loka_onnx.core.evaluation import DELTA_NE_NAME, KL_NAME
from loka_onnx.evaluation.columns import Scores, Truth, read_scores, read_truth
from loka_onnx.evaluation.engines import Reference
from loka_onnx.evaluation.paired import paired_rows
from loka_onnx.evaluation.predictions import Predictions
from loka_onnx.numerics.task_metrics import probabilities_from_logits, weighted_mean

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """A plan in simulation on a split, with corrected biases or without.

    `predictions` has its outputs, and the logit (or regression) behind each as further outputs, of the names
    `scores`; `constants` restore the FP32 model's mean score, by output.
    """

    predictions: Predictions
    scores: Mapping[str, str]
    constants: Mapping[str, float]

    def with_constant(self, spec: OutputSpec) -> Rows:
        """Return an output with the constant of its score added; unchanged without one."""
        outputs = self.predictions.outputs
        if spec.name not in self.constants:
            return outputs[spec.name]
        score = outputs[self.scores[spec.name]].astype(np.float64) + self.constants[spec.name]
        return probabilities_from_logits(score) if spec.kind is OutputKind.PROBABILITY else score


def try_corrections(
    specs: Sequence[OutputSpec], reference: Reference, plain: Simulated, biased: Simulated | None
) -> tuple[OutputCorrection, ...]:
    """Judge every variant on the selection split; `biased` is None where no site has a bias to correct."""
    columns, groups = reference.predictions.columns, reference.units.groups
    tried: dict[str, tuple[Trial, ...]] = {}
    for spec in specs:
        truth = read_truth(columns, spec, groups)
        before = read_scores(reference.predictions.outputs, spec, truth.rows, is_reference=True)
        trials = [*_trials(spec, before, truth, plain, Variant.NONE, Variant.CONSTANT)]
        if biased is not None:
            trials += _trials(spec, before, truth, biased, Variant.BIAS, Variant.BOTH)
        tried[spec.name] = tuple(trials)
    return decide(tried, {spec.name: spec.kind for spec in specs})


def decide(
    tried: Mapping[str, tuple[Trial, ...]], kinds: Mapping[str, OutputKind]
) -> tuple[OutputCorrection, ...]:
    """Return the variant that each output keeps; `Variant.NONE` is the first trial of each output."""
    plain = {name: _best(trials, has_bias=False) for name, trials in tried.items()}
    biased = {name: _best(trials, has_bias=True) for name, trials in tried.items()}
    pairs = [(biased[name], plain[name] or trials[0]) for name, trials in tried.items()]
    keeps_bias = all(b is not None and b.judged.upper <= p.judged.upper for b, p in pairs) and any(
        b is not None and b.judged.upper < p.judged.upper for b, p in pairs
    )
    kept = biased if keeps_bias else plain
    return tuple(
        OutputCorrection(
            name,
            kinds[name],
            trials,
            (kept[name] or trials[0]).variant,
            _reason(trials, kept[name], refused=biased[name] if not keeps_bias else None),
        )
        for name, trials in tried.items()
    )


def _trials(
    spec: OutputSpec,
    before: Scores,
    truth: Truth,
    simulated: Simulated,
    plain: Variant,
    with_constant: Variant,
) -> Iterator[Trial]:
    """Yield the trial of an output as it is, and with its constant where it has one."""
    outputs = simulated.predictions.outputs
    variants = [(plain, 0.0, outputs)]
    if spec.name in simulated.constants:
        moved = {**outputs, spec.name: simulated.with_constant(spec)}
        variants.append((with_constant, simulated.constants[spec.name], moved))
    for variant, constant, changed in variants:
        after = read_scores(changed, spec, before.raw.size, is_reference=False)
        change = paired_rows(spec, before, after, truth).relative()
        shift = weighted_mean(after.scores - before.scores, truth.weights)
        yield Trial(variant, constant, shift, change.delta_ne, change.kl, change.labelled)


def _best(trials: Sequence[Trial], *, has_bias: bool) -> Trial | None:
    """Return the admitted variant with the lowest upper end."""
    none = trials[0]
    admitted = [
        trial
        for trial in trials[1:]
        if trial.variant.has_bias is has_bias
        and trial.judged.upper < none.judged.upper
        and trial.kl.value <= none.kl.value
    ]
    return min(admitted, key=lambda trial: trial.judged.upper, default=None)


def _reason(trials: Sequence[Trial], kept: Trial | None, refused: Trial | None) -> str:
    """Return why a variant is kept, or none; the trials have the numbers of the others."""
    none = trials[0]
    if kept is not None:
        name = KL_NAME if none.delta_ne is None else DELTA_NE_NAME
        return (
            f"{kept.variant}: {name} at most {_percent(kept.judged.upper)} instead of "
            f"{_percent(none.judged.upper)}, KL {_percent(kept.kl.value)} instead of "
            f"{_percent(none.kl.value)}"
        )
    if len(trials) == 1:
        return "nothing to correct: no bias, and no logit that a constant could be added to"
    if refused is not None:
        return f"{refused.variant} would help here, and not do as well as without on another output"
    return "nothing helps on the selection rows"


def _percent(value: float) -> str:
    return f"{100 * value:.4g} %"
