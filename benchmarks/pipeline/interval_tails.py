"""How often the ends of intervals hold where few rows carry a sum, groups are few, or their sizes differ.

Logits and labels are drawn, and changes of the logit that have normal tails, Student's t with 3 degrees of
freedom, or one row in a thousand that is 30 times as far out. The truth is known from ten million rows. The
package's own function takes the intervals (`evaluation.paired.PairedRows.relative`), and its rule says where
"within" can be said at all (`evaluation.budget`: 100 groups).

- **Misses**: share of samples whose upper end lies below the truth (nominal 2.5 %), for ΔNE and KL, and the
  same above the lower end. `can_be_said`: within could have been said of the sample; misses are counted only
  there under `misses_that_count`, whose bar is 4 %.
- **Bounds of KL compared**: Student's t as before; with Hall's correction for skewness; further out by the
  largest unit; empirical Bernstein's; what the package takes. With the median of upper end over truth.
- **Power**: share of samples within, where the loss change is half the budget and the interval is a quarter
  of the budget wide. Aim: 90 %.
- **One row a group**: the same where nothing groups the rows. What is so rare that 1,000 rows hold none of it
  cannot be seen by any rule; this block records how often that is wrong.

    python -m benchmarks.pipeline.interval_tails
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit, stdtrit

from benchmarks.recording import write_record
from loka_onnx.core.evaluation import LEAST_UNITS
from loka_onnx.evaluation.paired import PairedRows
from loka_onnx.numerics.intervals import Ends, interval_around, ratio_interval, spread_of
from loka_onnx.numerics.loss_change import kl_rows, labelled_rows
from loka_onnx.numerics.task_metrics import log_loss_rows

GROUPS = {20: 2000, 100: 4000, 1000: 300, 10_000: 500}
"""Groups of a sample, and samples."""
TAILS = ("gaussian", "t3", "outliers")
SIZES = ("even", "pareto", "one")
MEAN_ROWS = {20: 100, 100: 100, 1000: 100, 10_000: 20}
"""Rows of a group, by groups: MovieLens 1M has 165 for a user."""
SCALE = 0.03
"""Root mean square change of the logit, of the normal ones."""

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """How samples are drawn."""

    groups: int
    tail: str
    sizes: str

    def of(self, random: np.random.Generator) -> PairedRows:
        """One sample."""
        mean = MEAN_ROWS[self.groups]
        if self.sizes == "pareto":
            # Tail index 1.5: the mean is 3; the largest group may have 100 times as many rows.
            wanted = (random.pareto(1.5, self.groups) + 1.0) * mean / 3.0
            counts = np.minimum(np.ceil(wanted), 100 * mean).astype(int)
        else:
            counts = np.full(self.groups, 1 if self.sizes == "one" else mean)
        groups = None if self.sizes == "one" else np.repeat(np.arange(self.groups), counts)
        return rows_of(int(counts.sum()), self.tail, groups, random)


def rows_of(
    rows: int, tail: str, groups: npt.NDArray[np.intp] | None, random: np.random.Generator
) -> PairedRows:
    """Paired changes of that many rows."""
    z = random.normal(-1.0, 1.2, rows)
    delta = random.standard_t(3, rows) / np.sqrt(3.0) if tail == "t3" else random.standard_normal(rows)
    if tail == "outliers":
        delta[random.random(rows) < 1e-3] *= 30.0
    delta = SCALE * delta
    labels = (random.random(rows) < expit(z)).astype(np.float64)
    return PairedRows(
        base=log_loss_rows(z, labels),
        kl=kl_rows(z, z + delta),
        labelled=labelled_rows(z, z + delta, labels),
        weights=None,
        groups=groups,
        probabilities=None,
    )


def truth_of(tail: str, random: np.random.Generator, pieces: int = 20) -> float:
    """ΔNE and KL over the loss: the labels are those of a calibrated model, so that both are the same."""
    kl = base = 0.0
    for _ in range(pieces):
        found = rows_of(500_000, tail, None, random)
        kl, base = kl + float(found.kl.sum()), base + float(found.base.sum())
    return kl / base


def bounds_of(sample: PairedRows) -> dict[str, float]:
    """Upper ends of KL by several rules."""
    total = float(sample.base.sum())
    ratio = float(sample.kl.sum()) / total
    influence = (sample.kl - ratio * sample.base) / total
    spread = spread_of(influence, sample.groups)
    found = {ends.value: interval_around(ratio, spread, influence.size, ends=ends).upper for ends in Ends}
    # Hall (1992): T + γ/3·T² + γ²/27·T³ + γ/6 is nearly Student's, with γ the skewness over √units.
    skewness = sample.tail.skewness
    t = float(stdtrit(spread.units - 1, 0.975))
    if abs(skewness) > 1e-9:
        t = -3.0 / skewness * (np.cbrt(1.0 - skewness * (t + skewness / 6.0)) - 1.0)
    return {**found, "hall": ratio + float(t) * spread.standard_error}


def misses(draw: Draw, truth: float, samples: int, random: np.random.Generator) -> dict[str, Any]:
    """Shares of samples, in percent."""
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(samples):
        sample = draw.of(random)
        found = sample.relative()
        assert found.delta_ne is not None
        heavy = sample.tail.is_heavy
        seen["heavy"].append(heavy)
        for name, interval in (("delta_ne", found.delta_ne), ("kl", found.kl)):
            seen[f"{name}_above"].append(interval.upper < truth)
            seen[f"{name}_below"].append(interval.lower > truth)
            seen[f"{name}_upper"].append(interval.upper / truth)
        for name, upper in bounds_of(sample).items():
            seen[f"bound_{name}"].append(upper < truth)
            seen[f"bound_{name}_upper"].append(upper / truth)
    can_be_said = draw.groups >= LEAST_UNITS
    shares = {name: 100.0 * float(np.mean(values)) for name, values in seen.items() if "upper" not in name}
    widths = {name: float(np.median(values)) for name, values in seen.items() if "upper" in name}
    return {
        "samples": samples,
        "can_be_said": can_be_said,
        "heavy_tails_percent": shares["heavy"],
        "truth_above_upper_end_percent": {"delta_ne": shares["delta_ne_above"], "kl": shares["kl_above"]},
        "truth_below_lower_end_percent": {"delta_ne": shares["delta_ne_below"], "kl": shares["kl_below"]},
        "misses_that_count_percent": max(shares["delta_ne_above"], shares["kl_above"])
        if can_be_said
        else None,
        "upper_end_of_kl_over_truth": widths["kl_upper"],
        "bounds_of_kl": {
            ends: {"misses_percent": shares[f"bound_{ends}"], "over_truth": widths[f"bound_{ends}_upper"]}
            for ends in ("student", "hall", "one more", "bernstein")
        },
    }


def power(samples: int, random: np.random.Generator, groups: int = 1000, rows: int = 20) -> dict[str, float]:
    """How often "within" is said where the truth is half the budget and the interval a quarter of it wide.

    A group shares a part of its change, so that groups matter. The loss of a row is 1, and so is the budget.
    """
    within = widths = 0.0
    members = np.repeat(np.arange(groups), rows)
    for _ in range(samples):
        change = random.standard_normal(groups)[members] + random.standard_normal(members.size)
        sd = np.sqrt(1.0 + 1.0 / rows) / np.sqrt(groups)
        change *= 0.25 / (2.0 * float(stdtrit(groups - 1, 0.975)) * sd)
        found = ratio_interval(0.5 + change, np.ones(members.size), None, members)
        within += found.upper <= 1.0
        widths += found.upper - found.lower
    return {"within_percent": 100.0 * within / samples, "mean_width_over_budget": widths / samples}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of samples")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    found: dict[str, Any] = {}
    for tail in TAILS:
        truth = truth_of(tail, random)
        for sizes in SIZES:
            for groups, samples in GROUPS.items():
                draw, count = Draw(groups, tail, sizes), max(20, round(samples * options.scale))
                found[f"{tail}, {sizes}, {groups}"] = misses(draw, truth, count, random)
                print(draw, found[f"{tail}, {sizes}, {groups}"], flush=True)
    figures = {"cells": found, "power": power(max(100, round(400 * options.scale)), random)}
    counted = [cell["misses_that_count_percent"] for name, cell in found.items() if "one" not in name]
    figures["largest_miss_that_counts_percent"] = max(value for value in counted if value is not None)
    settings = {"rows_of_a_group": MEAN_ROWS, "scale": SCALE, "seed": options.seed}
    print(write_record("interval_tails", figures, settings))


if __name__ == "__main__":
    main()
