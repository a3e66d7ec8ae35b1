"""Corrections: constants fitted to a quantized model.

A plan with corrections is another candidate than the plan alone, judged on rows that they were not fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


class Variant(StrEnum):
    """Corrections that an output is judged with."""

    NONE = "none"
    CONSTANT = "output constant"
    BIAS = "biases"
    BOTH = "biases and output constant"

    @property
    def has_bias(self) -> bool:
        """True if the biases of sites are corrected."""
        return self in {Variant.BIAS, Variant.BOTH}

    @property
    def has_constant(self) -> bool:
        """True if the output has a constant."""
        return self in {Variant.CONSTANT, Variant.BOTH}


@dataclass(frozen=True)
class BiasCorrection:
    """Constants added behind one site, one number a channel; `shape` is that of `values`.

    `error_before` and `error_after` are root mean squares over channels of the mean error of the site's
    output on the fitting rows, without corrections and with the biases of all sites corrected.
    """

    site: str
    shape: tuple[int, ...]
    values: tuple[float, ...]
    error_before: float
    error_after: float

    @property
    def largest(self) -> float:
        """Largest magnitude of `values`."""
        return max(map(abs, self.values), default=0.0)


@dataclass(frozen=True)
class OutputConstant:
    """Constant added to the logit (or regression output); of a probability, in front of its Sigmoid."""

    output: str
    kind: OutputKind
    value: float


@dataclass(frozen=True)
class Corrections:
    """Constants of a planned model, by site and by output."""

    bias: tuple[BiasCorrection, ...] = ()
    constants: tuple[OutputConstant, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing is added."""
        return not self.bias and not self.constants


@dataclass(frozen=True)
class Trial:
    """One output under one variant on the selection split, against the FP32 reference.

    `constant` (0 without one) is added to the logit or regression output, whose mean change is `mean_error`.
    `delta_ne` is the relative change of the loss, `kl` and `labelled` its parts; None where labels lack.
    """

    variant: Variant
    constant: float
    mean_error: float
    delta_ne: Interval | None
    kl: Interval
    labelled: Interval | None

    @property
    def judged(self) -> Interval:
        """ΔNE, or KL where there are no labels: it decides."""
        return self.kl if self.delta_ne is None else self.delta_ne


@dataclass(frozen=True)
class OutputCorrection:
    """Trials on one output of every possible variant, `Variant.NONE` first, and the kept one."""

    output: str
    kind: OutputKind
    trials: tuple[Trial, ...]
    accepted: Variant
    reason: str

    def trial(self, variant: Variant) -> Trial:
        """Return the trial of a variant."""
        return {trial.variant: trial for trial in self.trials}[variant]

    @property
    def before(self) -> Trial:
        """Trial without any correction."""
        return self.trial(Variant.NONE)

    @property
    def after(self) -> Trial:
        """Trial of the kept variant."""
        return self.trial(self.accepted)


@dataclass(frozen=True)
class PlanCorrections:
    """The corrections of one plan: fitted on calibration rows, judged on the selection split.

    `left_alone` has the reason why a site in FP8 has none, by name; `failure` why the plan has none:
    simulation failed, or it is too far beyond the budget.
    """

    plan: str
    rows: int
    bias: tuple[BiasCorrection, ...]
    left_alone: dict[str, str]
    outputs: tuple[OutputCorrection, ...]
    failure: str = ""

    @property
    def accepted(self) -> Corrections:
        """Corrections to write into the planned model; biases are shared: kept if one output keeps them."""
        constants = tuple(
            OutputConstant(output.output, output.kind, output.after.constant)
            for output in self.outputs
            if output.accepted.has_constant
        )
        keeps_bias = any(output.accepted.has_bias for output in self.outputs)
        return Corrections(self.bias if keeps_bias else (), constants)


@dataclass(frozen=True)
class CorrectionSet:
    """Every correction of a run, by plan."""

    SCHEMA: ClassVar[str] = "corrections/1"
    __pydantic_config__ = STRICT

    plans: tuple[PlanCorrections, ...] = ()

    def accepted(self, plan: str) -> Corrections:
        """Return the accepted corrections of a plan; empty for a plan without any."""
        return next((each.accepted for each in self.plans if each.plan == plan), Corrections())
