"""Which corrections are kept: on simulated rows with formulas written out, and the rule on trials by hand."""

from collections.abc import Mapping

import numpy as np
import pytest
from judged_rows import LOGIT, UNLABELLED, kl_of, losses, sigmoid

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.correction import Trial, Variant
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import EvaluationError
from loka_onnx.evaluation.accuracy import Units
from loka_onnx.evaluation.corrections import Simulated, decide, try_corrections
from loka_onnx.evaluation.engines import Reference
from loka_onnx.evaluation.predictions import Predictions

PROBABILITY = OutputSpec("p", OutputKind.PROBABILITY, "clicked")
REGRESSION = OutputSpec("spend", OutputKind.REGRESSION, "amount")
NONE, CONSTANT, BIAS, BOTH = Variant
ROWS = 4000


def columns(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    z = rng.normal(-1, 1.2, ROWS)
    return {
        "z": z,
        "noise": 0.05 * rng.normal(size=ROWS),
        "clicked": (rng.random(ROWS) < sigmoid(z)).astype(np.int64),
        "amount": z + rng.normal(size=ROWS),
    }


def reference(spec: OutputSpec, data: Mapping[str, np.ndarray]) -> Reference:
    values = sigmoid(data["z"]) if spec.kind is OutputKind.PROBABILITY else data["z"]
    known = {name: data[name] for name in ("clicked", "amount")}
    return Reference(Predictions({spec.name: values}, known, ROWS), Units())


def simulated(spec: OutputSpec, score: np.ndarray, constant: float | None) -> Simulated:
    outputs = {spec.name: score, "score": score[:, None]}
    if spec.kind is OutputKind.PROBABILITY:
        outputs[spec.name] = sigmoid(score)
    has = {} if constant is None else {spec.name: constant}
    return Simulated(Predictions(outputs, {}, ROWS), dict.fromkeys(has, "score"), has)


def try_one(spec, shift, constant, biased=None):
    """One output whose score is off by `shift` and noise, and the constant that calibration found."""
    data = columns()
    plain = simulated(spec, data["z"] + shift + data["noise"], constant)
    (found,) = try_corrections((spec,), reference(spec, data), plain, biased)
    return found


@pytest.mark.parametrize(
    "spec", [LOGIT, UNLABELLED, PROBABILITY, REGRESSION], ids=lambda s: f"{s.kind}-{s.label}"
)
def test_a_known_shift_is_corrected(spec: OutputSpec) -> None:
    found = try_one(spec, 0.3, -0.3)
    assert found.accepted is CONSTANT
    assert [trial.variant for trial in found.trials] == [NONE, CONSTANT]
    assert found.before.mean_error == pytest.approx(0.3, abs=0.003)
    assert found.after.mean_error == pytest.approx(0.0, abs=0.003)
    assert found.after.judged.upper < found.before.judged.upper / 4
    assert (found.before.delta_ne is None) == (spec.label is None)
    name = "KL over the mean entropy" if spec.label is None else "ΔNE"
    assert found.reason.startswith(f"output constant: {name} at most 0.")
    assert f"instead of {100 * found.before.judged.upper:.4g} %" in found.reason


def test_a_trial_is_that_of_the_formulas() -> None:
    data, found = columns(), try_one(LOGIT, 0.3, -0.25)
    z, y = data["z"], data["clicked"]
    moved = z + 0.05 + data["noise"]
    base = losses(z, y).mean()
    trial = found.trial(CONSTANT)
    assert trial.delta_ne is not None and trial.labelled is not None
    assert trial.delta_ne.value == pytest.approx(losses(moved, y).mean() / base - 1, rel=1e-9)
    assert trial.kl.value == pytest.approx(kl_of(z, moved).mean() / base, rel=1e-9)
    assert trial.labelled.value == pytest.approx(trial.delta_ne.value - trial.kl.value, rel=1e-9)
    assert trial.constant == -0.25
    # Probabilities move in front of the sigmoid.
    after = try_one(PROBABILITY, 0.3, -0.3).after.delta_ne
    assert after.value == pytest.approx(losses(z + data["noise"], y).mean() / base - 1, rel=1e-8)


def test_rows_that_contradict_calibration_refuse_the_constant() -> None:
    found = try_one(LOGIT, 0.1, 0.1)
    assert found.accepted is NONE
    assert found.after is found.before
    assert found.reason == "nothing helps on the selection rows"


def test_without_a_score_there_is_nothing_to_try() -> None:
    found = try_one(LOGIT, 0.3, None)
    assert [trial.variant for trial in found.trials] == [NONE]
    assert found.reason == "nothing to correct: no bias, and no logit that a constant could be added to"


def test_corrected_biases_compete_with_the_constant() -> None:
    data = columns()
    quiet = simulated(LOGIT, data["z"] + 0.1 + data["noise"] / 5, -0.1)
    found = try_one(LOGIT, 0.3, -0.3, quiet)
    assert [trial.variant for trial in found.trials] == [NONE, CONSTANT, BIAS, BOTH]
    assert found.accepted is BOTH
    noisy = simulated(LOGIT, data["z"] + 4 * data["noise"], 0.0)
    assert try_one(LOGIT, 0.3, -0.3, noisy).accepted is CONSTANT


def test_an_output_that_is_not_finite_is_an_error() -> None:
    data = columns()
    broken = simulated(LOGIT, np.full(ROWS, np.nan), 0.0)
    with pytest.raises(EvaluationError) as caught:
        try_corrections((LOGIT,), reference(LOGIT, data), broken, None)
    assert caught.value.code == "E1007"


def trial(variant: Variant, upper: float, kl: float = 1.0) -> Trial:
    whole, part = (Interval(v, v - 1, v, 0.95, 100) for v in (upper, kl))
    return Trial(variant, 0.5 if variant.has_constant else 0.0, 0.0, whole, part, part)


def decided(**outputs: tuple[Trial, ...]) -> dict[str, Variant]:
    kinds = dict.fromkeys(outputs, OutputKind.LOGIT)
    return {each.output: each.accepted for each in decide(outputs, kinds)}


def trials(none: float, constant: float, bias: float, both: float) -> tuple[Trial, ...]:
    return tuple(trial(v, upper) for v, upper in zip(Variant, (none, constant, bias, both), strict=True))


@pytest.mark.parametrize(
    ("uppers", "kept"),
    [
        ((4.0, 3.0, 2.0, 1.0), BOTH),
        ((4.0, 3.0, 1.0, 2.0), BIAS),
        ((4.0, 1.0, 3.0, 2.0), CONSTANT),
        ((1.0, 2.0, 3.0, 4.0), NONE),
        ((1.0, 1.0, 1.0, 1.0), NONE),
        ((4.0, 2.0, 2.0, 3.0), CONSTANT),
    ],
)
def test_the_lowest_upper_end_wins_and_less_is_kept_where_it_is_as_good(uppers, kept):
    assert decided(y=trials(*uppers)) == {"y": kept}


def test_kl_must_not_rise() -> None:
    tried = (trial(NONE, 4.0, 1.0), trial(CONSTANT, 1.0, 1.01), trial(BIAS, 3.0, 1.0), trial(BOTH, 1.0, 2.0))
    (found,) = decide({"y": tried}, {"y": OutputKind.LOGIT})
    assert found.accepted is BIAS
    (alone,) = decide({"y": tried[:2]}, {"y": OutputKind.LOGIT})
    assert alone.accepted is NONE


def test_biases_are_kept_for_all_outputs_or_for_none() -> None:
    helped = trials(4.0, 3.0, 2.0, 1.0)
    assert decided(a=helped, b=trials(4.0, 3.0, 3.0, 3.5)) == {"a": BOTH, "b": BIAS}
    assert decided(a=helped, b=trials(4.0, 2.0, 3.0, 3.5)) == {"a": CONSTANT, "b": CONSTANT}
    # Output b has no admitted variant with biases: it would be harmed by them.
    assert decided(a=helped, b=trials(4.0, 5.0, 6.0, 7.0)) == {"a": CONSTANT, "b": NONE}
