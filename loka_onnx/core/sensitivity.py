"""Effect of low-precision sites on the model's outputs, as sums that merge exactly."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from loka_onnx.core.exact_sum import NOTHING_ADDED, ExactSum, Sums
from loka_onnx.core.intervals import Interval
from loka_onnx.core.ratio_moments import RatioMoments

LOSS = "loss"
ENTROPY = "entropy"
"""Values of `Sensitivity.denominator`."""


@dataclass(frozen=True)
class DeltaSums(Sums):
    """Weighted sums over rows of the change of the logit (or of the regression output), and of its square."""

    weight: ExactSum = NOTHING_ADDED
    total: ExactSum = NOTHING_ADDED
    squares: ExactSum = NOTHING_ADDED

    @property
    def mean(self) -> float:
        """Mean change."""
        return self.total.value / self.weight.value

    @property
    def rmse(self) -> float:
        """Root mean square change."""
        return sqrt(self.squares.value / self.weight.value)


@dataclass(frozen=True)
class Draws:
    """The same rows under slightly moved scales: other noise seeds of rounding.

    Another day's calibration moves the scales as well, and every value then falls elsewhere on the grid. An
    interval over rows does not show that.

    Attributes:
        count: Draws, the profile's own scales included.
        kl_growth: Largest KL of a draw over that of the profile's own scales, on the same rows.
        labelled_low: Smallest labelled term of a draw; None without labels.
    """

    count: int
    kl_low: float
    kl_high: float
    kl_growth: float
    labelled_low: float | None = None
    labelled_high: float | None = None

    def merge(self, other: Draws) -> Draws:
        """Return the widest of both."""
        lows = [d.labelled_low for d in (self, other) if d.labelled_low is not None]
        highs = [d.labelled_high for d in (self, other) if d.labelled_high is not None]
        return Draws(
            max(self.count, other.count),
            min(self.kl_low, other.kl_low),
            max(self.kl_high, other.kl_high),
            max(self.kl_growth, other.kl_growth),
            min(lows, default=None),
            max(highs, default=None),
        )


@dataclass(frozen=True)
class Sensitivity:
    """Effect of one site in one recipe on one output of the model.

    All loss terms are relative to the FP32 model's loss on the same rows, or to the mean entropy of its
    predictions without labels (`denominator` says which). The intervals hold for a number of rows fixed
    beforehand; use `kl_moments.anytime_interval` where rows were added until verdicts were reached.

    Attributes:
        recipe: Id of the recipe, or the precision for a norm.
        denominator: ``loss`` or ``entropy``.
        kl_moments: KL(p ‖ p′): the part of the loss increase that needs no label. For a regression with
            squared loss, the mean of δ².
        labelled_moments: Mean of (p − y)·δ: the labelled first-order term; None without labels.
        kl: Its 95 % interval.
        labelled: Its 95 % interval; None without labels.
        draws: Spread over perturbed calibrations; None where none was drawn.
    """

    recipe: str
    output: str
    denominator: str
    delta: DeltaSums
    kl_moments: RatioMoments
    labelled_moments: RatioMoments | None
    kl: Interval
    labelled: Interval | None
    draws: Draws | None = None

    @classmethod
    def of(
        cls,
        name: SensitivityName,
        delta: DeltaSums,
        kl: RatioMoments,
        labelled: RatioMoments | None,
        draws: Draws | None = None,
    ) -> Sensitivity:
        """Return a sensitivity with the 95 % intervals of `kl` and `labelled`."""
        return cls(
            name.recipe,
            name.output,
            name.denominator,
            delta,
            kl,
            labelled,
            kl.interval(),
            None if labelled is None else labelled.interval(),
            draws,
        )

    @property
    def name(self) -> SensitivityName:
        """Measured quantity."""
        return SensitivityName(self.recipe, self.output, self.denominator)

    def merge(self, other: Sensitivity) -> Sensitivity:
        """Merge both sets of rows; their units (groups, rows) count as different ones.

        Raises ValueError if they are of different recipes, outputs or denominators, or only one has labels.
        """
        if self.name != other.name or (self.labelled_moments is None) != (other.labelled_moments is None):
            raise ValueError(f"the sensitivities {self.name} and {other.name} do not merge")
        labelled = self.labelled_moments
        if labelled is not None and other.labelled_moments is not None:
            labelled = labelled.merge(other.labelled_moments)
        draws = self.draws or other.draws
        if self.draws is not None and other.draws is not None:
            draws = self.draws.merge(other.draws)
        return Sensitivity.of(
            self.name,
            self.delta.merge(other.delta),
            self.kl_moments.merge(other.kl_moments),
            labelled,
            draws,
        )


@dataclass(frozen=True)
class SensitivityName:
    """Identity of a sensitivity.

    Attributes:
        recipe: Id of the recipe, or the precision for a norm.
        denominator: ``loss`` or ``entropy``.
    """

    recipe: str
    output: str
    denominator: str


@dataclass(frozen=True)
class SiteGroup:
    """Sites that read one quantized tensor, measured in low precision together.

    Their errors share that tensor's rounding and do not add up like independent ones.

    Attributes:
        tensor: Their input (before layout operations).
        sites: Names of the sites, in the model's order; at least two.
        sensitivities: Joint effect on each output; the recipe is that of the tensor.
    """

    tensor: str
    sites: tuple[str, ...]
    sensitivities: tuple[Sensitivity, ...]

    def sensitivity(self, output: str) -> Sensitivity:
        """Return the effect on an output."""
        for item in self.sensitivities:
            if item.output == output:
                return item
        raise KeyError(output)

    def merge(self, other: SiteGroup) -> SiteGroup:
        """Merge both sets of rows. Raises ValueError if they are not the same sites in the same recipes."""
        if (self.tensor, self.sites) != (other.tensor, other.sites):
            raise ValueError(f"the groups {self.sites} and {other.sites} do not merge")
        return SiteGroup(
            self.tensor, self.sites, merge_sensitivities(self.sensitivities, other.sensitivities)
        )


def merge_sensitivities(
    ours: tuple[Sensitivity, ...], theirs: tuple[Sensitivity, ...]
) -> tuple[Sensitivity, ...]:
    """Merge sensitivities of the same recipes and outputs pairwise.

    Raises ValueError if they are not of the same recipes and outputs.
    """
    if [item.name for item in ours] != [item.name for item in theirs]:
        raise ValueError("sensitivities of different recipes or outputs do not merge")
    return tuple(a.merge(b) for a, b in zip(ours, theirs, strict=True))
