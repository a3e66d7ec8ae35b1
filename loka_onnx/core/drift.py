"""How far live data have moved from a profile, and whether somebody should know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import copysign, inf
from typing import ClassVar

from loka_onnx.core.serde import STRICT


class Measure(StrEnum):
    """What an alarm is about."""

    MEAN = "mean"
    RMS = "rms"
    ZEROS = "zeros"
    DISTRIBUTION = "distribution"
    RANGE = "range"
    SATURATION = "saturation"
    COLUMN = "column"
    DELTA_NE = "predicted ΔNE"


@dataclass(frozen=True)
class Relevance:
    """How large a change must be to alarm. Certainty is asked for as well, and is not enough.

    With enough rows every real difference is certain, and none of a hundredth of a percent is worth waking
    somebody. Set all to 0 to hear of every change that is certain.

    Attributes:
        mean: Shift of a tensor's mean, in standard deviations of its elements. 0.1 is half of what Cohen
            calls a small effect.
        rms: Relative change of its root mean square.
        zeros: Change of its share of zeros.
        column: Of one column of a narrow tensor, a feature as a rule: shift of the mean in its standard
            deviations, or relative change of its rms. More than of a tensor, because single features do move
            (seasons, new items); a unit that changed, a default that came in or a source that fell silent
            goes beyond it.
        stability_index: Population stability index of its magnitudes; 0.1 is where credit scoring begins to
            look.
        range_growth: Live amax over that of the profile, less 1. At 0.25 the largest value loses a fifth
            of itself to clipping, three times what E4M3 rounds off at most (1/16).
        saturated_share: Growth of the share of activation elements that are clipped. 0.001 is ten times what
            the scale rule ``percentile-99.99`` gives up on purpose.
        delta_ne: Predicted growth of ΔNE over the output's budget. Half of a budget is what a plan leaves
            to other causes than KL, so that a plan with more than that is no longer inside.
    """

    mean: float = 0.1
    rms: float = 0.1
    zeros: float = 0.05
    column: float = 0.25
    stability_index: float = 0.1
    range_growth: float = 0.25
    saturated_share: float = 0.001
    delta_ne: float = 0.5


@dataclass(frozen=True)
class Shift:
    """One statistic over batches, in the profile and in the live data.

    Attributes:
        statistic: Its name in `BatchSpread.statistics`: ``mean``, ``rms``, ``zeros``, ``log2.<e>``,
            ``column.<i>.mean`` or ``column.<i>.rms``.
        profile: Its mean over the profile's batches.
        live: Its mean over the live batches.
        unit: What a change of it is large or small against: of a mean the standard deviation of the elements,
            of an rms itself, of a share 1.
        standard_error: Of the difference.
        p_value: Two-sided, of this test alone.
        adjusted: The same, adjusted for all tests of the report (Holm).
    """

    statistic: str
    profile: float
    live: float
    unit: float
    standard_error: float
    p_value: float
    adjusted: float = 1.0

    @property
    def difference(self) -> float:
        """Live less profile."""
        return self.live - self.profile

    @property
    def effect(self) -> float:
        """The difference in its unit."""
        return _over(self.difference, self.unit)

    @property
    def deviation(self) -> float:
        """The difference in standard errors."""
        return _over(self.difference, self.standard_error)


def _over(difference: float, unit: float) -> float:
    """The quotient; infinite for a difference where nothing varies."""
    if difference == 0.0:
        return 0.0
    return difference / unit if unit else copysign(inf, difference)


@dataclass(frozen=True)
class RangeShift:
    """The range of one tensor, in the profile and in the live data.

    Attributes:
        profile_amax: Largest magnitude in the profile.
        live_amax: Largest magnitude in the live data.
        beyond: Live batches that went beyond the profile's range.
        batches: Live batches.
        p_value: Of so many under exchangeable batches, of this test alone.
        adjusted: The same, adjusted for all tests of the report (Holm).
    """

    profile_amax: float
    live_amax: float
    beyond: int
    batches: int
    p_value: float
    adjusted: float = 1.0

    @property
    def growth(self) -> float:
        """Live amax over that of the profile; 1 where both are 0."""
        if self.profile_amax == 0.0:
            return 1.0 if self.live_amax == 0.0 else inf
        return self.live_amax / self.profile_amax


@dataclass(frozen=True)
class TensorDrift:
    """One activation.

    Attributes:
        tensor: Its name in the graph.
        sites: Sites that read it.
        range: Its range.
        shifts: Its statistics over batches; empty where there are too few.
        stability_index: Population stability index over zeros and octaves of magnitude.
        columns: Names of its columns, "" for one without; empty where none has one. Columns of a file keep
            theirs on the way through the model as long as nothing mixes them.
    """

    tensor: str
    sites: tuple[str, ...]
    range: RangeShift
    shifts: tuple[Shift, ...]
    stability_index: float
    columns: tuple[str, ...] = ()

    def shift(self, statistic: str) -> Shift | None:
        """A statistic by its name; None where it was not tested."""
        return next((shift for shift in self.shifts if shift.statistic == statistic), None)

    @property
    def smallest_adjusted(self) -> float:
        """Smallest adjusted p-value of its tests."""
        return min([self.range.adjusted, *(shift.adjusted for shift in self.shifts)])

    def effect(self, statistic: str) -> float:
        """Change of a statistic in its unit; 0 where it was not tested."""
        found = self.shift(statistic)
        return 0.0 if found is None else found.effect


@dataclass(frozen=True)
class SiteDrift:
    """One site under the recipe that its sensitivity was measured in.

    Attributes:
        site: Its name.
        recipe: Id of the recipe.
        tensor: Its activation.
        is_counted: Whether it is among the sites that the prediction of ΔNE adds up.
        profile_saturated: Share of activation elements beyond the format's range, in the profile.
        live_saturated: The same in the live data.
        profile_noise: Noise energy over signal energy of its output, in the profile.
        live_noise: The same in the live data.
        kl: Its KL on each output in the profile, relative to the loss there.
        live_kl: Its KL on each output in the live data, relative to the same loss; empty where it is not
            counted.
    """

    site: str
    recipe: str
    tensor: str
    is_counted: bool
    profile_saturated: float
    live_saturated: float
    profile_noise: float
    live_noise: float
    kl: dict[str, float]
    live_kl: dict[str, float]

    @property
    def predicted(self) -> dict[str, float]:
        """Change of its KL on each output, which is what it is predicted to do to ΔNE."""
        return {output: now - self.kl[output] for output, now in self.live_kl.items()}


@dataclass(frozen=True)
class OutputDrift:
    """What the change of FP8 error is predicted to do to one output.

    Attributes:
        output: Its name.
        budget: Largest accepted relative loss increase; None where it is not known.
        kl: Sum of the counted sites' KL in the profile, relative to the loss there.
        live_kl: The same in the live data, relative to the same loss; None where no site is counted. The
            loss on live rows is not known without labels, and drift rather raises it.
        standard_error: Of the difference of both.
    """

    output: str
    budget: float | None
    kl: float
    live_kl: float | None
    standard_error: float

    @property
    def predicted(self) -> float:
        """Predicted growth of ΔNE: of its label-free part, which is FP8's doing alone; 0 if unknown."""
        return 0.0 if self.live_kl is None else self.live_kl - self.kl


@dataclass(frozen=True)
class Alarm:
    """A change that is certain and large enough to matter.

    Attributes:
        where: Name of the tensor, site or output.
        measure: What changed.
        value: By how much, in the unit of the threshold.
        threshold: What it was held against.
        adjusted: p-value of the change, adjusted for all tests of the report.
        sentence: The same for a reader.
    """

    where: str
    measure: Measure
    value: float
    threshold: float
    adjusted: float
    sentence: str


@dataclass(frozen=True)
class DriftReport:
    """Live data against a profile.

    Attributes:
        model_digest: Digest of the model.
        profile_digest: Digest of the calibration rows.
        live_digest: Digest of the live rows.
        profile_rows: Rows behind the profile's ranges.
        live_rows: Live rows.
        batch_rows: Rows of a batch, the unit of every test; 0 where the profile knows none.
        profile_batches: Full batches of the profile.
        live_batches: Full live batches.
        family_wise: Largest probability of any false alarm.
        tests: Tests made.
        basis: Whose sites the prediction of ΔNE adds up, as in ``plan fp8-safe``.
        relevance: How large a change had to be.
        tensors: Every activation, worst first.
        sites: Every product, worst first.
        outputs: Every output of the profile.
        alarms: What stands, worst first.
        synthetic: Whether any row of the profile was generated.
        not_judged: Why nothing could be judged, and what to do; empty where it was. Without it, no alarm
            means that none is called for.
    """

    SCHEMA: ClassVar[str] = "drift/1"
    __pydantic_config__ = STRICT

    model_digest: str
    profile_digest: str
    live_digest: str
    profile_rows: int
    live_rows: int
    batch_rows: int
    profile_batches: int
    live_batches: int
    family_wise: float
    tests: int
    basis: str
    relevance: Relevance
    tensors: tuple[TensorDrift, ...]
    sites: tuple[SiteDrift, ...]
    outputs: tuple[OutputDrift, ...]
    alarms: tuple[Alarm, ...]
    synthetic: bool = False
    not_judged: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether there were batches enough to tell drift from chance."""
        return not self.not_judged

    @property
    def changed(self) -> tuple[TensorDrift, ...]:
        """Tensors with a change that is certain, however small."""
        return tuple(t for t in self.tensors if t.smallest_adjusted <= self.family_wise)
