"""What calibration learned: ranges, FP8 error and sensitivity of every site."""

from __future__ import annotations

from dataclasses import dataclass
from math import log10
from typing import ClassVar

from loka_onnx.core.histogram import NOTHING_COUNTED, MagnitudeHistogram
from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class RangeStats:
    """Range of one tensor over the calibration rows; merges exactly.

    Attributes:
        count: Elements seen.
        amax: Largest magnitude.
        minimum: Smallest value.
        maximum: Largest value.
        total: Sum of the values, in float64.
        total_squares: Sum of their squares, in float64.
        histogram: Magnitudes. Of an activation, a sample of the rows (`calibration.sampling`): it says
            shares and quantiles, the range itself is `amax`.
        channel_amax: Largest magnitude at each index of the last axis, over the rows of the histogram; empty
            where it is unknown (a scalar, a layout of another tensor, an axis that is not fixed).
    """

    count: int
    amax: float
    minimum: float
    maximum: float
    total: float
    total_squares: float
    histogram: MagnitudeHistogram = NOTHING_COUNTED
    channel_amax: tuple[float, ...] = ()

    def merge(self, other: RangeStats) -> RangeStats:
        """Statistics of both sets of rows together; channels that one of them does not know are unknown.

        Raises:
            ValueError: They have different numbers of channels.
        """
        channels: tuple[float, ...] = ()
        if self.channel_amax and other.channel_amax:
            if len(self.channel_amax) != len(other.channel_amax):
                raise ValueError("ranges of tensors with different numbers of channels do not merge")
            channels = tuple(map(max, zip(self.channel_amax, other.channel_amax, strict=True)))
        return RangeStats(
            self.count + other.count,
            max(self.amax, other.amax),
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.total + other.total,
            self.total_squares + other.total_squares,
            self.histogram.merge(other.histogram),
            channels,
        )

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Population variance of the values."""
        return max(self.total_squares / self.count - self.mean**2, 0.0)


@dataclass(frozen=True)
class ErrorStats:
    """Error of a site's output under one recipe; merges exactly under equal scales.

    Attributes:
        recipe: Id of the recipe, or the precision for a norm.
        activation_scale: Scale of the activation; None for a norm. Statistics of different scales do
            not merge.
        count: Output elements seen.
        signal: Sum of squares of the exact output.
        noise: Sum of squares of the difference between quantized and exact output.
        cross: Sum of products of quantized and exact output.
        quantized: Sum of squares of the quantized output.
        activation_count: Activation elements seen.
        saturated: Activation elements beyond the format's range.
        underflowed: Nonzero activation elements that became zero.
        zeros: Activation elements that were zero.
    """

    recipe: str
    activation_scale: float | None
    count: int
    signal: float
    noise: float
    cross: float
    quantized: float
    activation_count: int
    saturated: int
    underflowed: int
    zeros: int = 0

    def merge(self, other: ErrorStats) -> ErrorStats:
        """Statistics of both sets of rows together.

        Raises:
            ValueError: They were taken under different recipes or scales.
        """
        if (self.recipe, self.activation_scale) != (other.recipe, other.activation_scale):
            raise ValueError("error statistics of different recipes or scales do not merge")
        return ErrorStats(
            self.recipe,
            self.activation_scale,
            self.count + other.count,
            self.signal + other.signal,
            self.noise + other.noise,
            self.cross + other.cross,
            self.quantized + other.quantized,
            self.activation_count + other.activation_count,
            self.saturated + other.saturated,
            self.underflowed + other.underflowed,
            self.zeros + other.zeros,
        )

    @property
    def relative_error(self) -> float:
        """‖quantized − exact‖ / ‖exact‖; 0 where both are zero."""
        if self.signal == 0.0:
            return 0.0 if self.noise == 0.0 else float("inf")
        return float((self.noise / self.signal) ** 0.5)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of the output, decibels; infinite without noise."""
        if self.noise == 0.0:
            return float("inf")
        return 10.0 * log10(self.signal / self.noise) if self.signal > 0.0 else float("-inf")

    @property
    def cosine(self) -> float:
        """Cosine between quantized and exact output; 1 where both are zero, 0 where only one is."""
        norm = (self.signal * self.quantized) ** 0.5
        if norm == 0.0:
            return 1.0 if self.signal == self.quantized else 0.0
        return float(self.cross / norm)


@dataclass(frozen=True)
class Sensitivity:
    """What one site in one recipe does to one output of the model.

    All loss terms are relative to the FP32 model's loss on the same rows, or to the mean entropy of its
    predictions where there are no labels (`denominator` says which).

    Attributes:
        recipe: Id of the recipe, or the precision for a norm.
        output: Name of the output.
        denominator: ``loss`` or ``entropy``.
        delta_rmse: Root mean square change of the logit (or of the regression output).
        delta_mean: Mean change of the logit.
        kl: KL(p ‖ p′): the part of the loss increase that needs no label. For a regression with
            squared loss, the mean of δ².
        labelled: Mean of (p − y)·δ: the labelled first-order term; None without labels.
    """

    recipe: str
    output: str
    denominator: str
    delta_rmse: float
    delta_mean: float
    kl: Interval
    labelled: Interval | None


@dataclass(frozen=True)
class SiteProfile:
    """Everything calibration knows of one site.

    Attributes:
        site: Name of the site.
        operands: Range of each operand, by tensor name (weights included).
        errors: Output error under each recipe.
        sensitivities: Effect on each output, per recipe.
        origins: Sites of an earlier profile that this one replaces.
    """

    site: str
    operands: dict[str, RangeStats]
    errors: tuple[ErrorStats, ...]
    sensitivities: tuple[Sensitivity, ...]
    origins: tuple[str, ...] = ()

    def error(self, recipe: str) -> ErrorStats:
        """Output error under a recipe.

        Raises:
            KeyError: The recipe was not measured.
        """
        for error in self.errors:
            if error.recipe == recipe:
                return error
        raise KeyError(recipe)

    def sensitivity(self, recipe: str, output: str) -> Sensitivity:
        """Effect of a recipe on an output.

        Raises:
            KeyError: It was not measured.
        """
        for item in self.sensitivities:
            if (item.recipe, item.output) == (recipe, output):
                return item
        raise KeyError((recipe, output))


@dataclass(frozen=True)
class Profile:
    """The result of calibration.

    Attributes:
        model_digest: Digest of the model that was calibrated.
        data_digest: Digest of the calibration rows.
        rows: Rows that ranges and errors were taken from.
        sensitivity_rows: Rows that sensitivities were taken from.
        synthetic: Whether the data was generated; stamped on everything downstream.
        sites: One entry per site, in the model's order.
        baseline_loss: Mean loss of the FP32 model per output on the sensitivity rows.
        seconds: Wall time of each pass.
    """

    SCHEMA: ClassVar[str] = "profile/2"
    __pydantic_config__ = STRICT

    model_digest: str
    data_digest: str
    rows: int
    sensitivity_rows: int
    synthetic: bool
    sites: tuple[SiteProfile, ...]
    baseline_loss: dict[str, float]
    seconds: dict[str, float]

    def site(self, name: str) -> SiteProfile:
        """The entry of that site.

        Raises:
            KeyError: It was not calibrated.
        """
        for entry in self.sites:
            if entry.site == name:
                return entry
        raise KeyError(name)
