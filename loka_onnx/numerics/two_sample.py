"""Tests whether two sets of batches come from one distribution, and the size of their difference.

**Means.** Of a statistic with one value per batch (its mean, its rms, its share of zeros), two tests are made
and the larger p-value is taken, which is valid wherever one of them is:

* Welch's, with standard error² = s₁²/n₁ + s₂²/n₂ and Welch–Satterthwaite's degrees of freedom. It is valid
  where one set varies more than the other, as rows in time order do beside shuffled ones. It is far too
  confident where a small set happens to hold nothing: of an event in every tenth batch, eight batches mostly
  show nothing, s is 0 there, and beside 1,000 batches that is 10 standard errors.
* Student's, with the pooled variance, which is the variance of both under the hypothesis. It allows for what
  eight batches can show, and is too confident where the small set varies more.

Both fail at once where the set that varies more holds nothing of a rare event. The set's unseen variance is
then taken from the other set's, times the ratio of their variances over all statistics of the kind (all
octaves, the means of all columns): `variance_ratio`, a design effect in survey sampling.

**Ranges.** Let the largest magnitude of each batch be exchangeable over N batches of a profile and n live
ones. All N + n ranks are then equally likely to be any batch's, and k or more of the live ones exceed every
batch of the profile exactly when the k largest of all are live; ties make it smaller than it says:

    P = n/(n + N) · (n − 1)/(n + N − 1) · … = ∏_{i<k} (n − i)/(n + N − i).

**Many tests.** Holm's step-down procedure: no false alarm in 1 − α of the cases, under any dependence. **Size
of a shift.** The population stability index Σ (qᵢ − pᵢ)·ln(qᵢ/pᵢ) over bins, the symmetric Kullback–Leibler
divergence of Jeffreys. Counts get half an element more, so that an empty bin is finite.

Sources: Welch, "The generalization of 'Student's' problem" (Biometrika 1947) and Satterthwaite (1946); Holm,
"A simple sequentially rejective multiple test procedure" (1979); the index is from credit scoring (Siddiqi,
"Credit Risk Scorecards", 2006, chapter 10: under 0.1 no shift, over 0.25 a major one), the divergence from
Jeffreys, "An invariant form for the prior probability" (1946).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr

from loka_onnx.core.statistics import BINS_PER_OCTAVE, BatchSpread, BatchSums, MagnitudeHistogram
from loka_onnx.errors import InternalError

FEWEST_BATCHES = 8
"""Student's t over fewer batches has tails so wide that no test among hundreds could ever alarm."""


@dataclass(frozen=True)
class BatchSample:
    """Mean and sample variance (ddof = 1) of one statistic over the batches of one set."""

    batches: int
    mean: float
    variance: float

    @classmethod
    def of(cls, spread: BatchSpread, statistic: str) -> BatchSample:
        """Return a statistic by its name, 0 in every batch if missing; InternalError under two batches."""
        count = spread.batches
        if count < 2:
            raise InternalError("a variance needs two batches", evidence=f"'{statistic}' has {count}")
        sums = spread.statistics.get(statistic, BatchSums())
        mean = sums.total.value / count
        return cls(count, mean, max(sums.squares.value - count * mean * mean, 0.0) / (count - 1))


@dataclass(frozen=True)
class MeanChange:
    """Second mean less first, larger standard error of Welch's and Student's, and two-sided p-value."""

    difference: float
    standard_error: float
    p_value: float


def variance_ratio(pairs: Sequence[tuple[BatchSample, BatchSample]], units: Sequence[float]) -> float:
    """Return the second set's summed variance over the first's, over statistics of one kind; 1 if one is 0.
    `units` are scales of the statistics, such as the rms of a column; those with 0 are left out.
    """
    scaled = [
        (first.variance / unit**2, second.variance / unit**2)
        for (first, second), unit in zip(pairs, units, strict=True)
        if unit > 0.0
    ]
    before, after = math.fsum(v for v, _ in scaled), math.fsum(v for _, v in scaled)
    return after / before if before > 0.0 and after > 0.0 else 1.0


def compare_means(
    first: BatchSample, second: BatchSample, resolution: float = 0.0, ratio: float | None = None
) -> MeanChange:
    """Test whether two sets of batches, each of two or more, have one mean.

    `resolution` is the error of each mean that batches do not average out, such as that of the arithmetic on
    two machines. `ratio` is the variance of the second set over that of the first, from statistics of the
    same kind (no variance is then taken to be smaller than it implies); None for the sets' own. The p-value
    is 1 where the means are equal, 0 where they differ and nothing varies.
    """
    n1, n2 = first.batches, second.batches
    v1, v2 = first.variance, second.variance
    if ratio is not None:
        v1, v2 = max(v1, v2 / ratio), max(v2, v1 * ratio)
    part1, part2 = v1 / n1, v2 / n2
    pooled = ((n1 - 1) * v1 + (n2 - 1) * v2) / (n1 + n2 - 2)
    welch = part1 + part2
    freedom = welch**2 / (part1**2 / (n1 - 1) + part2**2 / (n2 - 1)) if welch > 0.0 else n1 + n2 - 2.0
    difference = second.mean - first.mean
    errors = [
        math.hypot(math.sqrt(variance), resolution) for variance in (welch, pooled * (1.0 / n1 + 1.0 / n2))
    ]
    tests = zip(errors, (freedom, n1 + n2 - 2.0), strict=True)
    return MeanChange(difference, max(errors), max(_two_sided(difference, e, f) for e, f in tests))


def _two_sided(difference: float, standard_error: float, freedom: float) -> float:
    if difference == 0.0:
        return 1.0
    if standard_error == 0.0:
        return 0.0
    return float(2.0 * stdtr(freedom, -abs(difference) / standard_error))


def exceedance_probability(beyond: int, live: int, profile: int) -> float:
    """Return the probability that `beyond` of `live` batches or more exceed every one of `profile` batches.
    Raises InternalError if the numbers contradict one another.
    """
    if not 0 <= beyond <= live or profile < 1:
        raise InternalError(
            "no such number of batches", evidence=f"{beyond} of {live} beyond {profile} of the profile"
        )
    return math.prod((live - i) / (live + profile - i) for i in range(beyond))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return p-values adjusted by Holm's procedure; rejecting those ≤ α errs at all in at most α."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = largest
    return tuple(adjusted)


def stability_index(profile: MagnitudeHistogram, live: MagnitudeHistogram) -> float:
    """Return the population stability index over zeros and the octaves of magnitude; 0 where one is empty."""
    if not profile.total or not live.total:
        return 0.0
    ours, theirs = octave_counts(profile), octave_counts(live)
    names = {*ours, *theirs}
    before = {name: ours.get(name, 0) + 0.5 for name in names}
    after = {name: theirs.get(name, 0) + 0.5 for name in names}
    n, m = sum(before.values()), sum(after.values())
    return math.fsum(
        (after[name] / m - before[name] / n) * math.log((after[name] / m) / (before[name] / n))
        for name in names
    )


def octave_counts(histogram: MagnitudeHistogram) -> dict[int | None, int]:
    """Return the number of elements in each nonempty octave [2ᵉ, 2ᵉ⁺¹), by e; of zeros under None."""
    octaves: dict[int | None, int] = {None: histogram.zeros} if histogram.zeros else {}
    for index, count in enumerate(histogram.counts, histogram.first):
        if count:
            octave = index // BINS_PER_OCTAVE - 127
            octaves[octave] = octaves.get(octave, 0) + count
    return octaves
