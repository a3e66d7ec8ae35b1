"""Drift of live data from a profile as a document, with its options and alarms."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import copysign, inf
from typing import ClassVar

from loka_onnx.core.serde import STRICT
from loka_onnx.errors import ConfigError


class Measure(StrEnum):
    """Subject of an alarm."""

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
    """Least relevant changes: an alarm needs a change that is certain and at least this large.

    With enough rows every real difference is certain. Set all to 0 to report every certain change.

    Attributes:
        mean: Shift of a tensor's mean, in standard deviations of its elements (half of Cohen's small effect).
        rms: Relative change of its root mean square; `zeros`: change of its share of zeros.
        column: For one column of a narrow tensor, a feature as a rule: shift of the mean in its standard
            deviations, or relative change of its rms. Larger, because single features do move (seasons, new
            items); a changed unit, a new default or a silent source exceeds it.
        stability_index: Population stability index of its magnitudes; credit scoring investigates from 0.1.
        range_growth: Live amax over the profile's, less 1. At 0.25 the largest value loses a fifth of itself
            to clipping, three times the largest E4M3 rounding (1/16).
        saturated_share: Growth of the share of clipped activation elements. 0.001 is ten times what the scale
            rule ``percentile-99.99`` clips on purpose.
        delta_ne: Predicted growth of ΔNE over the output's budget, of which a plan leaves half to causes
            other than KL.
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
class DriftOptions:
    """Options of comparing live data.

    Attributes:
        family_wise: Largest probability of any false alarm.
        most_delta_ne: Largest accepted predicted growth of ΔNE; None for `relevance.delta_ne` of the budget.
        rows: Live rows, from the first on; None for all.
        kl_rows: Most rows that KL is measured on, from all over the data; `seed` picks them.
        threads: Batches at once; 0 for one a core.
    """

    family_wise: float = 0.01
    relevance: Relevance = field(default_factory=Relevance)
    most_delta_ne: float | None = None
    rows: int | None = None
    kl_rows: int = 16384
    seed: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.family_wise < 1.0:
            raise ConfigError(
                "E1626 a probability of false alarms lies between 0 and 1",
                where="family-wise",
                evidence=f"it is {self.family_wise:g}",
                remedy="0.01 lets one of a hundred comparisons without any drift alarm",
            )
        if self.most_delta_ne is not None and not self.most_delta_ne >= 0.0:
            raise ConfigError(
                "E1627 a threshold is at least 0",
                where="max-predicted-delta-ne",
                evidence=f"it is {self.most_delta_ne:g}",
                remedy="0.0001 alarms when ΔNE is predicted to grow by 0.01 %",
            )


@dataclass(frozen=True)
class Shift:
    """One statistic over batches, its mean in the profile and in the live data.

    Attributes:
        statistic: Key in `BatchSpread.statistics`: ``mean``, ``rms``, ``zeros``, ``log2.<e>``,
            ``column.<i>.mean`` or ``column.<i>.rms``.
        unit: Unit of changes: the standard deviation of the elements, the rms itself, or 1 for a share.
        standard_error: Standard error of the difference.
        p_value: Two-sided, of this test alone; `adjusted` for all tests of the report (Holm).
    """

    statistic: str
    profile: float
    live: float
    unit: float
    standard_error: float
    p_value: float
    adjusted: float = 1.0

    @property
    def effect(self) -> float:
        """The difference, live less profile, in its unit."""
        return _over(self.live - self.profile, self.unit)

    @property
    def deviation(self) -> float:
        """The difference in standard errors."""
        return _over(self.live - self.profile, self.standard_error)


def _over(difference: float, unit: float) -> float:
    """The quotient; infinite for a difference where nothing varies."""
    if difference == 0.0:
        return 0.0
    return difference / unit if unit else copysign(inf, difference)


@dataclass(frozen=True)
class RangeShift:
    """Largest magnitude of one tensor; `beyond` of the live `batches` exceed the profile's range.

    `p_value` is the probability of that many if batches are exchangeable; `adjusted` for all tests (Holm).
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
    """One activation, by its name in the graph, and the sites that read it.

    `shifts` is empty if there are too few batches. `stability_index` is the population stability index over
    zeros and octaves of magnitude. `columns` names its columns, "" for one without; empty if none has one.
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
        shift = self.shift(statistic)
        return 0.0 if shift is None else shift.effect


@dataclass(frozen=True)
class SiteDrift:
    """One site under the recipe that its sensitivity was measured in.

    Attributes:
        is_counted: True if the prediction of ΔNE adds it up.
        profile_saturated: Share of activation elements beyond the format's range.
        profile_noise: Noise energy over signal energy of its output.
        kl: Its KL on each output in the profile, relative to the loss there; `live_kl` in the live data,
            relative to the same loss, empty if it is not counted.
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
        """Change of its KL on each output: the predicted change of ΔNE."""
        return {output: now - self.kl[output] for output, now in self.live_kl.items()}


@dataclass(frozen=True)
class OutputDrift:
    """Predicted effect of the changed FP8 error on one output; its `budget` is None if unknown.

    `kl` is the sum of the counted sites' KL in the profile, relative to the loss there. `live_kl` is that in
    the live data, relative to the same loss (unknown without labels); None if no site is counted.
    `standard_error` is of their difference.
    """

    output: str
    budget: float | None
    kl: float
    live_kl: float | None
    standard_error: float

    @property
    def predicted(self) -> float:
        """Predicted growth of ΔNE, label-free part, due to FP8 alone; 0 if unknown."""
        return 0.0 if self.live_kl is None else self.live_kl - self.kl


@dataclass(frozen=True)
class Alarm:
    """A change of a tensor, site or output that is certain and large; `value` has the unit of `threshold`.

    `adjusted` is the p-value, adjusted for all tests of the report.
    """

    where: str
    measure: Measure
    value: float
    threshold: float
    adjusted: float
    sentence: str


@dataclass(frozen=True)
class DriftReport:
    """Live data against a profile. Tensors, sites (every product) and alarms are sorted, worst first.

    Attributes:
        batch_rows: Rows of a batch, the unit of every test; 0 where the profile knows none.
        family_wise: Largest probability of any false alarm.
        basis: Origin of the sites that the prediction of ΔNE adds up: ``plan fp8-safe``.
        synthetic: Whether any row of the profile was generated.
        not_judged: Why nothing could be judged, and the remedy; where it is empty, no alarms means no drift.
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
        """True if there were enough batches to tell drift from chance."""
        return not self.not_judged

    @property
    def changed(self) -> tuple[TensorDrift, ...]:
        """Tensors with a certain change, however small."""
        return tuple(t for t in self.tensors if t.smallest_adjusted <= self.family_wise)
