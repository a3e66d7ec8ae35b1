"""Result of calibration: ranges, errors and sensitivities of every site, as sums that merge exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt
from operator import or_
from typing import ClassVar

from loka_onnx.core.exact_sum import NOTHING_ADDED, ExactSum, Rules, Sums, largest, least
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import CONFIDENCE, Interval, RatioMoments
from loka_onnx.core.recipe import precision_of
from loka_onnx.core.serde import STRICT
from loka_onnx.core.statistics import ErrorStats, RangeStats, TensorRange
from loka_onnx.core.tables import Rows, Tabular

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
class Draws(Sums):
    """Extremes of the effect under slightly moved scales, as of another day's calibration: every value then
    falls elsewhere on the grid, which an interval over rows does not show.

    `count` includes the profile's own scales; `kl_growth` is the largest KL of a draw over theirs on the same
    rows; the labelled term is None without labels.
    """

    RULES: ClassVar[Rules] = {
        **dict.fromkeys(("count", "kl_high", "kl_growth"), max),
        **{"kl_low": min, "labelled_low": least, "labelled_high": largest},
    }

    count: int
    kl_low: float
    kl_high: float
    kl_growth: float
    labelled_low: float | None = None
    labelled_high: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """Effect of one site in one recipe on one output of the model.

    Loss terms are relative to the `denominator` on the same rows: the FP32 model's ``loss``, or without
    labels the mean ``entropy`` of its predictions. The 95 % intervals hold for a number of rows fixed
    beforehand; use `kl_moments.anytime_interval` where rows were added until verdicts were reached.

    Attributes:
        recipe: Id of the recipe, or the precision for a norm.
        kl_moments: KL(p ‖ p′): the part of the loss increase that needs no label; `kl` is its interval. For a
            regression with squared loss, the mean of δ².
        labelled_moments: Mean of (p − y)·δ: the labelled first-order term; None without labels.
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
        of_labels = None if labelled is None else labelled.interval()
        named = (name.recipe, name.output, name.denominator)
        return cls(*named, delta, kl, labelled, kl.interval(), of_labels, draws)

    @property
    def name(self) -> SensitivityName:
        """Measured quantity."""
        return SensitivityName(self.recipe, self.output, self.denominator)

    def merge(self, other: Sensitivity) -> Sensitivity:
        """Merge both sets of rows; their units (groups, rows) count as different ones.

        Raises ValueError if recipes, outputs or denominators differ, or only one has labels.
        """
        if self.name != other.name or (self.labelled_moments is None) != (other.labelled_moments is None):
            raise ValueError(f"the sensitivities {self.name} and {other.name} do not merge")
        labelled = self.labelled_moments
        if labelled is not None and other.labelled_moments is not None:
            labelled = labelled.merge(other.labelled_moments)
        draws = self.draws.merge(other.draws) if self.draws and other.draws else self.draws or other.draws
        delta, kl = self.delta.merge(other.delta), self.kl_moments.merge(other.kl_moments)
        return Sensitivity.of(self.name, delta, kl, labelled, draws)


@dataclass(frozen=True)
class SensitivityName:
    """Identity of a sensitivity; its fields are those of `Sensitivity`."""

    recipe: str
    output: str
    denominator: str


@dataclass(frozen=True)
class SiteGroup:
    """Sites (at least two, in the model's order) that read one tensor, measured in low precision together.

    Their errors share that tensor's rounding and do not add up like independent ones. `tensor` is their input
    before layout operations; the recipe is that of the tensor.
    """

    tensor: str
    sites: tuple[str, ...]
    sensitivities: tuple[Sensitivity, ...]

    @property
    def precision(self) -> Precision | None:
        """Precision that the sites were measured in."""
        return precision_of(self.sensitivities[0].recipe)

    def sensitivity(self, output: str) -> Sensitivity:
        """Return the effect on an output."""
        return {item.output: item for item in self.sensitivities}[output]

    def merge(self, other: SiteGroup) -> SiteGroup:
        """Merge both sets of rows. Raises ValueError if they are not the same sites in the same recipes."""
        if (self.tensor, self.sites) != (other.tensor, other.sites):
            raise ValueError(f"the groups {self.sites} and {other.sites} do not merge")
        merged = merge_sensitivities(self.sensitivities, other.sensitivities)
        return SiteGroup(self.tensor, self.sites, merged)


def merge_sensitivities(
    ours: tuple[Sensitivity, ...], theirs: tuple[Sensitivity, ...]
) -> tuple[Sensitivity, ...]:
    """Merge sensitivities pairwise; ValueError unless they are of the same recipes and outputs."""
    if [item.name for item in ours] != [item.name for item in theirs]:
        raise ValueError("sensitivities of different recipes or outputs do not merge")
    return tuple(a.merge(b) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class SiteProfile:
    """Calibration results of one site.

    `operands` are ranges by tensor name, weights included; `errors` are of every recipe, `sensitivities` of
    one in each precision; `origins` are sites of an earlier profile that this one replaces.
    """

    site: str
    operands: dict[str, RangeStats]
    errors: tuple[ErrorStats, ...]
    sensitivities: tuple[Sensitivity, ...]
    origins: tuple[str, ...] = ()

    @property
    def judged_recipe(self) -> str | None:
        """Recipe of the site's verdict: the first with a measured effect on outputs, else with an error."""
        recipes = (*(s.recipe for s in self.sensitivities), *(e.recipe for e in self.errors))
        return next(iter(recipes), None)

    def of(self, precision: Precision) -> SiteProfile:
        """Return the entry without recipes of other precisions; a norm's stays."""
        kept = {precision, None}
        errors = tuple(error for error in self.errors if precision_of(error.recipe) in kept)
        sensitivities = tuple(item for item in self.sensitivities if precision_of(item.recipe) in kept)
        return replace(self, errors=errors, sensitivities=sensitivities)

    def error(self, recipe: str) -> ErrorStats:
        """Return the output error under a recipe."""
        return {error.recipe: error for error in self.errors}[recipe]

    def sensitivity(self, recipe: str, output: str) -> Sensitivity:
        """Return the effect of a recipe on an output."""
        return {(item.recipe, item.output): item for item in self.sensitivities}[recipe, output]

    def merge(self, other: SiteProfile, weights: Collection[str]) -> SiteProfile:
        """Return this profile combined with one of the same site that was measured on other rows.

        Statistics of constant operands, `weights`, are equal in both. ValueError if the profiles do not fit.
        """
        mine = (self.site, self.operands.keys(), self.origins, [e.recipe for e in self.errors])
        if mine != (other.site, other.operands.keys(), other.origins, [e.recipe for e in other.errors]):
            raise ValueError(f"the profiles of sites '{self.site}' and '{other.site}' do not merge")
        pairs = ((name, stats, other.operands[name]) for name, stats in self.operands.items())
        operands = {name: a if name in weights else a.merge(b) for name, a, b in pairs}
        errors = tuple(a.merge(b) for a, b in zip(self.errors, other.errors, strict=True))
        sensitivities = merge_sensitivities(self.sensitivities, other.sensitivities)
        return SiteProfile(self.site, operands, errors, sensitivities, self.origins)


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
class Sampling(Sums):
    """Number of rows behind the sensitivities, and why it ended.

    `looks` are evaluations of the verdicts, of which any could have ended it with `may_stop_early`;
    `tightest_at` is that of `RatioMoments.anytime_interval`; `undecided` are sites without a verdict.
    """

    # A site open in one stays open until verdicts are reached again.
    RULES: ClassVar[Rules] = {
        "tightest_at": min,
        "undecided": lambda a, b: tuple(sorted({*a, *b})),
        "may_stop_early": or_,
    }

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


@dataclass(frozen=True, repr=False)
class Profile(Tabular):
    """The result of calibration.

    Attributes:
        data_digest: Digest of the calibration rows; of several merged sets, joined by "+".
        sampling: Rows behind the sensitivities.
        synthetic: Whether any row was generated; stamped on everything downstream.
        sites: In model order; `groups` are those that share a quantized tensor, once in each precision.
        scales: Activation scale by `Recipe.activation_id` and tensor name, used for errors, sensitivities and
            plans; of asymmetric formats also the zero point, by `Recipe.zero_point_id`.
        baseline_loss: Mean loss of the FP32 model per output on the sensitivity rows; without labels, the
            mean entropy of its predictions.
        weights: Constant operands, sorted.
        seconds: Wall time of each pass.
        tensors: Magnitudes of every floating-point, non-constant tensor; empty unless needed (FP16).
    """

    SCHEMA: ClassVar[str] = "profile/5"
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

    @property
    def title(self) -> str:
        """Sites and rows."""
        return f"Profile of {len(self.sites)} sites, measured on {self.rows:,} rows"

    def records(self) -> Rows:
        """Return the effect of each site and recipe on each output: changes relative to the denominator."""
        return [
            {
                "site": entry.site,
                "recipe": item.recipe,
                "output": item.output,
                "relative_error": next(
                    (e.relative_error for e in entry.errors if e.recipe == item.recipe), None
                ),
                "kl": item.kl.value,
                "kl_lower": item.kl.lower,
                "kl_upper": item.kl.upper,
                "labelled": item.labelled.value if item.labelled else None,
                "denominator": item.denominator,
                "rows": item.kl_moments.rows,
            }
            for entry in self.sites
            for item in entry.sensitivities
        ]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that products were measured in."""
        known = (precision_of(item.recipe) for entry in self.sites for item in entry.sensitivities)
        return tuple(dict.fromkeys(each for each in known if each is not None))

    def of(self, precision: Precision | Mapping[str, Precision]) -> Profile:
        """Return the profile with errors and effects of products in one precision alone.

        The precision may be given by site; a site without one keeps everything.
        """
        known = precision if isinstance(precision, Mapping) else dict.fromkeys(self._by_name, precision)
        groups = tuple(g for g in self.groups if all(known.get(site) is g.precision for site in g.sites))
        sites = tuple(e.of(known[e.site]) if e.site in known else e for e in self.sites)
        return replace(self, sites=sites, groups=groups)

    def site(self, name: str) -> SiteProfile:
        """Return the entry of that site."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, SiteProfile]:
        return {entry.site: entry for entry in self.sites}

    def merge(self, other: Profile) -> Profile:
        """Merge the profiles of both sets of rows; associative to the last bit.

        The scales must be the same: measure new rows under the scales of this profile
        (`calibration.calibrate`). Groups of rows count as different ones. A tensor missing in one is dropped.
        Raises ValueError if models, sites, recipes, scales or outputs differ.
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
