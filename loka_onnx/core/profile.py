"""Result of calibration: ranges, FP8 error and sensitivity of every site."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from loka_onnx.core.exact_sum import ExactSum, Sums
from loka_onnx.core.intervals import Interval
from loka_onnx.core.ratio_moments import CONFIDENCE, RatioMoments
from loka_onnx.core.sensitivity import Sensitivity, SiteGroup, merge_sensitivities
from loka_onnx.core.serde import STRICT
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange


@dataclass(frozen=True)
class SiteProfile:
    """Calibration results of one site.

    Attributes:
        operands: Range of each operand, by tensor name (weights included).
        sensitivities: Effect on each output, per recipe.
        origins: Sites of an earlier profile that this one replaces.
    """

    site: str
    operands: dict[str, RangeStats]
    errors: tuple[ErrorStats, ...]
    sensitivities: tuple[Sensitivity, ...]
    origins: tuple[str, ...] = ()

    @property
    def judged_recipe(self) -> str | None:
        """Recipe of the site's verdict: the first with measured effect on the outputs.

        Without one, the first with a measured error; None where nothing was measured.
        """
        recipes = (*(s.recipe for s in self.sensitivities), *(e.recipe for e in self.errors))
        return next(iter(recipes), None)

    def error(self, recipe: str) -> ErrorStats:
        """Return the output error under a recipe."""
        for error in self.errors:
            if error.recipe == recipe:
                return error
        raise KeyError(recipe)

    def sensitivity(self, recipe: str, output: str) -> Sensitivity:
        """Return the effect of a recipe on an output."""
        for item in self.sensitivities:
            if (item.recipe, item.output) == (recipe, output):
                return item
        raise KeyError((recipe, output))

    def merge(self, other: SiteProfile, weights: Collection[str]) -> SiteProfile:
        """Return this profile combined with one of the same site that was measured on other rows.

        Args:
            weights: Names of constant operands, whose statistics are equal in both.

        Raises ValueError if the profiles differ in site, operand names, origins or recipes.
        """
        mine = (self.site, self.operands.keys(), self.origins, [e.recipe for e in self.errors])
        if mine != (other.site, other.operands.keys(), other.origins, [e.recipe for e in other.errors]):
            raise ValueError(f"the profiles of sites '{self.site}' and '{other.site}' do not merge")
        return SiteProfile(
            self.site,
            {
                name: stats if name in weights else stats.merge(other.operands[name])
                for name, stats in self.operands.items()
            },
            tuple(a.merge(b) for a, b in zip(self.errors, other.errors, strict=True)),
            merge_sensitivities(self.sensitivities, other.sensitivities),
            self.origins,
        )


@dataclass(frozen=True)
class WeightedMean(Sums):
    """Weighted sum over rows, and the sum of weights."""

    total: ExactSum
    weight: ExactSum

    @property
    def value(self) -> float:
        """The mean."""
        return self.total.value / self.weight.value


@dataclass(frozen=True)
class Sampling:
    """Number of rows behind the sensitivities, and why it ended.

    Attributes:
        looks: Evaluations of the verdicts; 1 where the number of rows was fixed beforehand.
        tightest_at: Rows at which the confidence sequence is tightest (`RatioMoments.anytime_interval`).
        undecided: Sites without a verdict at the end.
        may_stop_early: Whether any evaluation could have ended it.
    """

    rows: int
    looks: int
    tightest_at: int
    undecided: tuple[str, ...] = ()
    may_stop_early: bool = False

    @property
    def is_sequential(self) -> bool:
        """True if the number of rows depends on the data."""
        return self.may_stop_early or self.looks > 1

    def interval_of(self, moments: RatioMoments, confidence: float = CONFIDENCE) -> Interval:
        """Return a two-sided interval of a sensitivity, valid also for a data-dependent number of rows."""
        if self.is_sequential:
            return moments.anytime_interval(self.tightest_at, confidence)
        return moments.interval(confidence)

    def merge(self, other: Sampling) -> Sampling:
        """Merge both samplings; a site open in one stays open until verdicts are reached again."""
        return Sampling(
            self.rows + other.rows,
            self.looks + other.looks,
            min(self.tightest_at, other.tightest_at),
            tuple(sorted({*self.undecided, *other.undecided})),
            self.may_stop_early or other.may_stop_early,
        )


@dataclass(frozen=True)
class Profile:
    """The result of calibration.

    Attributes:
        data_digest: Digest of the calibration rows; of several merged sets, joined by "+".
        sampling: Rows behind the sensitivities.
        synthetic: Whether any row was generated; stamped on everything downstream.
        sites: In model order.
        scales: Activation scale by `Recipe.activation_id` and tensor name, used for errors, sensitivities and
            plans; of asymmetric formats also the zero point, by `Recipe.zero_point_id`.
        groups: Sites that share a quantized tensor.
        baseline_loss: Mean loss of the FP32 model per output on the sensitivity rows; without labels, the
            mean entropy of its predictions.
        weights: Constant operands, sorted.
        seconds: Wall time of each pass.
        tensors: Magnitudes of every floating-point, non-constant tensor of the model, by name; empty unless
            needed (FP16).
    """

    SCHEMA: ClassVar[str] = "profile/4"
    __pydantic_config__ = STRICT

    model_digest: str
    data_digest: str
    rows: int
    error_rows: int
    sampling: Sampling
    synthetic: bool
    sites: tuple[SiteProfile, ...]
    baseline_loss: dict[str, WeightedMean]
    scales: dict[str, dict[str, float]]
    seconds: dict[str, ExactSum]
    groups: tuple[SiteGroup, ...] = ()
    weights: tuple[str, ...] = ()
    tensors: dict[str, TensorRange] = field(default_factory=dict)

    def site(self, name: str) -> SiteProfile:
        """Return the entry of that site."""
        for entry in self.sites:
            if entry.site == name:
                return entry
        raise KeyError(name)

    def merge(self, other: Profile) -> Profile:
        """Merge the profiles of both sets of rows; associative to the last bit.

        The scales must be the same: measure new rows under the scales of this profile
        (`calibration.calibrate`). Groups of rows count as different ones. A tensor missing in one is dropped.

        Raises ValueError if they are of different models, sites, recipes, scales or outputs.
        """
        if self.model_digest != other.model_digest:
            raise ValueError("profiles of different models do not merge")
        names = [entry.site for entry in self.sites]
        if names != [entry.site for entry in other.sites] or self.weights != other.weights:
            raise ValueError("profiles of different sites do not merge")
        if self.scales != other.scales:
            raise ValueError("profiles of different scales do not merge")
        if len(self.groups) != len(other.groups) or self.baseline_loss.keys() != other.baseline_loss.keys():
            raise ValueError("profiles of different groups or outputs do not merge")
        nothing = ExactSum()
        return Profile(
            model_digest=self.model_digest,
            data_digest=f"{self.data_digest}+{other.data_digest}",
            rows=self.rows + other.rows,
            error_rows=self.error_rows + other.error_rows,
            sampling=self.sampling.merge(other.sampling),
            synthetic=self.synthetic or other.synthetic,
            sites=tuple(a.merge(b, self.weights) for a, b in zip(self.sites, other.sites, strict=True)),
            baseline_loss={
                name: mean.merge(other.baseline_loss[name]) for name, mean in self.baseline_loss.items()
            },
            scales=self.scales,
            seconds={
                name: self.seconds.get(name, nothing).merge(other.seconds.get(name, nothing))
                for name in sorted({*self.seconds, *other.seconds})
            },
            groups=tuple(a.merge(b) for a, b in zip(self.groups, other.groups, strict=True)),
            weights=self.weights,
            tensors={
                name: known.merge(other.tensors[name])
                for name, known in self.tensors.items()
                if name in other.tensors
            },
        )
