"""How often the intervals of sensitivities contain what they should, over resamplings of real rows.

The effect of every site on every calibration row is measured once. Then the calibration split is the whole
world, whose values are known exactly: users are drawn from it with replacement, as many as there are, with
all of their rows, and the package's own intervals are taken from each such sample (users fall into buckets
by the package's hash).

- **Fixed number of rows**: share of samples whose 95 % interval contains the value of the whole split; by
  chance alone a true 95 % over 2,000 samples comes out within .94 and .96 nineteen times in twenty. Aim: 93
  to 97 %.
- **Stopping time**: the rows of a sample arrive one by one in random order, or user by user, and are looked
  at as calibration looks at them; a site stops when its confidence sequence excludes a threshold, which
  stands at a multiple of the true value. Coverage of the sequence at that time, and of the interval for a
  fixed number of rows, which is not made for it. Where a threshold equals the true value, to exclude it is an
  error: its share is to be at most 5 % for the sequence, however often one looks.
- **Tails**: how much of a site's KL the one unit in a hundred with the largest KL holds.

Needs the files under ``$LOKA_ONNX_DATA``::

    python -m benchmarks.pipeline.interval_coverage --models dcnv2 wukong

With ``--runs DIR``, in which `benchmarks.engines.zoo_shares` ran the models, quantized plans stand in place
of sites, by what their engines put out, and certification rows, whose number is fixed, in place of those of
calibration. The intervals of certification itself, which are wider where tails are heavy, stand beside the
plain ones (`certificates`): how often they hold the true value, and how often their upper end lies below it::

    python -m benchmarks.pipeline.interval_coverage --models dcnv2 dlrm --runs DIR --data DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array

from benchmarks.engines.zoo import prepared
from benchmarks.pipeline.site_effects import (
    BATCH,
    RowEffects,
    exported,
    output_of,
    profile_of,
    row_effects,
    split_of,
    switchable_of,
)
from benchmarks.pipeline.training import GROUP, TRAINING
from benchmarks.recording import write_record
from loka_onnx.calibration.effects.loss_totals import BUCKETS, buckets_of
from loka_onnx.calibration.effects.sensitivity import TIGHTEST_AT_ROWS, StoppingSchedule
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import Interval, RatioMoments
from loka_onnx.evaluation.paired import PairedRows
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Arrays
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

RESAMPLES = 2000
CERTIFICATES = 500
"""Resamplings of every row, for the intervals of certification."""
THRESHOLDS = (0.8, 0.95, 1.0, 1.05, 1.25)
"""Where the threshold of a verdict stands, over the true value."""

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class World:
    """The rows that samples are drawn from.

    Attributes:
        names: Sites.
        kl: (rows, sites) KL of each row.
        labelled: (rows, sites) labelled term of each row.
        loss: (rows,) loss of the exact model.
        units: (rows,) number of the unit that a row belongs to.
    """

    names: tuple[str, ...]
    kl: Values
    labelled: Values
    loss: Values
    units: Indices

    @property
    def count(self) -> int:
        """Number of units."""
        return int(self.units.max()) + 1

    @cached_property
    def rows_by_unit(self) -> Indices:
        """(rows,) indices of the rows of the first unit, of the second, and so on."""
        return np.argsort(self.units, kind="stable")

    def unit_sums(self, rows: Values) -> Values:
        """(units, columns) sums over the rows of each unit."""
        return sum_by(self.units, rows, self.count)


def sum_by(keys: Indices, rows: Values, count: int) -> Values:
    """(count, columns) sums of the rows of each key."""
    chosen = csc_array((np.ones(keys.size), keys, np.arange(keys.size + 1)), shape=(count, keys.size))
    return np.asarray(chosen @ rows)


@dataclass(frozen=True)
class UnitMoments:
    """The sums that intervals are made of, for several numerators over one denominator.

    Attributes:
        rows: Rows seen.
        units: Units seen.
        a: (numerators,) ΣA.
        aa: (numerators,) ΣA².
        ab: (numerators,) ΣAB.
        b: ΣB.
        bb: ΣB².
    """

    rows: int
    units: int
    a: Values
    aa: Values
    ab: Values
    b: float
    bb: float

    @classmethod
    def of(cls, rows: int, seen: int, numerators: Values, denominator: Values) -> UnitMoments:
        """From (units, numerators) and (units,) sums over the rows of each unit; zeros for units not seen."""
        return cls(
            rows,
            seen,
            numerators.sum(axis=0),
            np.square(numerators).sum(axis=0),
            denominator @ numerators,
            float(denominator.sum()),
            float(denominator @ denominator),
        )

    def each(self) -> Iterator[RatioMoments]:
        """The package's moments of each numerator."""
        b, bb = ExactSum.of((self.b,)), ExactSum.of((self.bb,))
        for a, aa, ab in zip(self.a, self.aa, self.ab, strict=True):
            sums = (ExactSum.of((float(value),)) for value in (a, aa, ab))
            a_sum, aa_sum, ab_sum = sums
            yield RatioMoments(self.rows, self.units, a_sum, b, aa_sum, ab_sum, bb)


def fixed_coverage(world: World, resamples: int, seed: int) -> dict[str, Values]:
    """(sites,) share of samples whose fixed-n interval contains the true value, for both terms."""
    random = np.random.default_rng(seed)
    columns = world.unit_sums(np.column_stack([world.kl, world.labelled, world.loss]))
    truth = columns[:, :-1].sum(axis=0) / columns[:, -1].sum()
    sizes, buckets = np.bincount(world.units), buckets_of(np.arange(world.count))
    hits = np.zeros(truth.size)
    for _ in range(resamples):
        drawn = random.integers(0, world.count, world.count)
        sums = sum_by(buckets, columns[drawn], BUCKETS)
        seen = np.unique(buckets).size
        moments = UnitMoments.of(int(sizes[drawn].sum()), seen, sums[:, :-1], sums[:, -1])
        hits += [_contains(m.interval(), t) for m, t in zip(moments.each(), truth, strict=True)]
    kl, labelled = np.split(hits / resamples, 2)
    return {"kl": kl, "labelled": labelled}


def certificates(world: World, resamples: int, seed: int) -> dict[str, float]:
    """Shares of samples whose interval of certification holds the value of the whole, and lies below it."""
    random = np.random.default_rng(seed)
    sizes = np.bincount(world.units)
    starts = np.cumsum(sizes) - sizes
    seen: dict[str, list[bool]] = {}
    for _ in range(resamples):
        drawn = random.integers(0, world.count, world.count)
        counts = sizes[drawn]
        groups = np.repeat(np.arange(world.count), counts)
        first = np.repeat(starts[drawn] - (np.cumsum(counts) - counts), counts)
        rows = world.rows_by_unit[first + np.arange(groups.size)]
        for column, name in enumerate(world.names):
            parts = world.kl[:, column], world.labelled[:, column]
            kl, labelled = (part[rows] for part in parts)
            change = PairedRows(world.loss[rows], kl, labelled, None, groups, None).relative()
            assert change.delta_ne is not None
            whole, of_kl = float(sum(part.sum() for part in parts)), float(parts[0].sum())
            for term, interval, total in (("delta_ne", change.delta_ne, whole), ("kl", change.kl, of_kl)):
                truth = total / float(world.loss.sum())
                seen.setdefault(f"{name}, {term} covered", []).append(_contains(interval, truth))
                seen.setdefault(f"{name}, {term} above its interval", []).append(interval.upper < truth)
    return {name: float(np.mean(found)) for name, found in seen.items()}


def _contains(interval: Interval, value: float) -> bool:
    return interval.lower <= value <= interval.upper


@dataclass
class StoppingTally:
    """What was seen of one threshold, over samples and sites.

    Attributes:
        decided: Site by site, samples in which the threshold was excluded before the rows ended.
        wrong: Those of them whose verdict was wrong.
        sequence: Samples in which the confidence sequence contained the true value at the stopping time.
        fixed: Samples in which the fixed-n interval contained it at the stopping time.
        rows: Rows at the stopping times, sample by sample.
    """

    decided: Values
    wrong: Values
    sequence: Values
    fixed: Values
    rows: list[Values] = field(default_factory=list)

    @classmethod
    def empty(cls, sites: int) -> StoppingTally:
        """Nothing seen."""
        return cls(np.zeros(sites), np.zeros(sites), np.zeros(sites), np.zeros(sites))


def stopping(world: World, resamples: int, seed: int, together: bool) -> dict[str, Any]:
    """Look at growing parts of each sample until a threshold is excluded, for every site and threshold.

    Args:
        world: The rows.
        resamples: Samples.
        seed: Draws them.
        together: Whether the rows of a user arrive one after the other, as in a sorted file.
    """
    random = np.random.default_rng(seed)
    truth = world.kl.sum(axis=0) / world.loss.sum()
    tallies = {threshold: StoppingTally.empty(len(world.names)) for threshold in THRESHOLDS}
    peeked = np.zeros(len(world.names))
    for _ in range(resamples):
        looks = list(_looks(world, random, together))
        fixed = np.array([[(i.lower, i.upper) for i in look.fixed] for look in looks])
        anytime = np.array([[(i.lower, i.upper) for i in look.anytime] for look in looks])
        rows = np.array([look.rows for look in looks])
        peeked += ~_inside(fixed, truth).all(axis=0)
        for threshold, tally in tallies.items():
            _add(tally, threshold * truth, truth, (fixed, anytime, rows))
    return {
        "thresholds_over_value": {
            f"{threshold:g}": _summary(tally, resamples) for threshold, tally in tallies.items()
        },
        "ever_excludes_the_truth": {
            "confidence_sequence": _spread(tallies[1.0].decided / resamples),
            "fixed_interval_looked_at_each_time": _spread(peeked / resamples),
        },
        "looks": len(rows),
    }


@dataclass(frozen=True)
class _Look:
    rows: int
    fixed: list[Interval]
    anytime: list[Interval]


def _looks(world: World, random: np.random.Generator, together: bool) -> Iterator[_Look]:
    """Draw users with replacement, and look at more and more of their rows as calibration does."""
    order, sizes = world.rows_by_unit, np.bincount(world.units)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    drawn = random.integers(0, world.count, world.count)
    rows_of = sizes[drawn]
    # A user who is drawn twice is two users, so the place in the sample is what is hashed.
    bucket = np.repeat(buckets_of(np.arange(world.count)), rows_of)
    within = np.arange(bucket.size) - np.repeat(np.cumsum(rows_of) - rows_of, rows_of)
    row = order[np.repeat(starts[drawn], rows_of) + within]
    if not together:
        shuffled = random.permutation(bucket.size)
        row, bucket = row[shuffled], bucket[shuffled]
    columns = np.column_stack([world.kl, world.loss])
    sums, seen, done = np.zeros((BUCKETS, columns.shape[1])), np.zeros(BUCKETS, dtype=bool), 0
    for stop in look_rows(bucket.size):
        sums += sum_by(bucket[done:stop], columns[row[done:stop]], BUCKETS)
        seen[bucket[done:stop]] = True
        done = stop
        moments = list(UnitMoments.of(stop, int(seen.sum()), sums[:, :-1], sums[:, -1]).each())
        yield _Look(
            stop,
            [m.interval() for m in moments],
            [m.anytime_interval(TIGHTEST_AT_ROWS) for m in moments],
        )


def look_rows(limit: int) -> Iterator[int]:
    """Numbers of rows at which calibration looks."""
    looks = StoppingSchedule(limit, may_stop=True)
    for done in (*range(BATCH, limit, BATCH), limit):
        if looks.is_due(done):
            looks.take(done)
            yield done


def _inside(bounds: Values, values: Values) -> npt.NDArray[np.bool_]:
    """(looks, sites) whether (looks, sites, 2) intervals contain (sites,) values."""
    return (bounds[..., 0] <= values) & (values <= bounds[..., 1])


def _add(
    tally: StoppingTally, thresholds: Values, truth: Values, seen: tuple[Values, Values, Indices]
) -> None:
    """Add one sample."""
    fixed, anytime, rows = seen
    excluded = ~_inside(anytime, thresholds)
    decided = excluded.any(axis=0)
    stop = np.where(decided, excluded.argmax(axis=0), len(rows) - 1)
    sites = np.arange(truth.size)
    says_below = anytime[stop, sites, 1] < thresholds
    tally.decided += decided
    tally.wrong += decided & (says_below != (truth < thresholds))
    tally.sequence += _inside(anytime, truth)[stop, sites]
    tally.fixed += _inside(fixed, truth)[stop, sites]
    tally.rows.append(rows[stop].astype(np.float64))


def _summary(tally: StoppingTally, resamples: int) -> dict[str, Any]:
    return {
        "decided": _spread(tally.decided / resamples),
        "wrong": _spread(tally.wrong / resamples),
        "coverage_of_the_confidence_sequence": _spread(tally.sequence / resamples),
        "coverage_of_the_fixed_interval": _spread(tally.fixed / resamples),
        "median_rows": float(np.median(np.stack(tally.rows))),
    }


def _spread(values: Values) -> dict[str, float]:
    """Over sites."""
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def tails(world: World) -> Values:
    """(sites,) share of KL that the units with the largest KL hold, one in a hundred."""
    sums = np.sort(world.unit_sums(world.kl), axis=0)
    top: Values = sums[-max(world.count // 100, 1) :].sum(axis=0) / sums.sum(axis=0)
    return top


def world_of(model: str, data: PreparedData, options: argparse.Namespace) -> World:
    """Measure the effect of every site on every calibration row."""
    options.directory.mkdir(parents=True, exist_ok=True)
    calibration = split_of(data, "calibration")
    with TemporaryDirectory(dir=options.directory) as directory:
        scratch = Path(directory)
        artifact = exported(model, data, options.directory, scratch)
        profile = profile_of(artifact, output_of(data, 0.0005), calibration, scratch, options.threads)
        switchable = switchable_of(artifact, profile, scratch)
        names = [site.name for site in artifact.sites]
        sets: dict[str, Sequence[str]] = {name: (name,) for name in names}
        return _world(row_effects(switchable, calibration, sets, options.threads))


@dataclass(frozen=True)
class Engines:
    """Engines of a run for the CPU, by plan."""

    by_plan: Mapping[str, OnnxSession]

    @classmethod
    def of(cls, run: Path) -> Engines:
        """Those of a run directory."""
        files = (run / "engines").glob("*/engine.onnx")
        return cls({path.parent.name.partition("-cpu-")[2]: OnnxSession(path) for path in files})

    def run(self, inputs: Arrays, on: Sequence[str]) -> Arrays:
        """Outputs of the engine of the plan that is on; of FP32 where none is."""
        return self.by_plan["".join(on) or "fp32"].run(inputs)


def world_of_plans(model: str, options: argparse.Namespace) -> World:
    """Measure the effect of every quantized plan of a run on every certification row."""
    engines = Engines.of(options.runs / model / "run")
    certification = split_of(prepared(options.data.absolute()), "certification")
    sets = {name: (name,) for name in engines.by_plan if name != "fp32"}
    return _world(row_effects(engines, certification, sets, options.threads))


def _world(effects: RowEffects) -> World:
    changes = {name: effects.change(name) for name in effects.changed}
    names = [name for name in changes if changes[name].kl.any()]
    return World(
        tuple(names),
        np.column_stack([changes[name].kl for name in names]),
        np.column_stack([changes[name].labelled for name in names]),
        effects.loss,
        np.unique(effects.units, return_inverse=True)[1],
    )


def measure(model: str, data: PreparedData | None, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model."""
    world = world_of(model, data, options) if data else world_of_plans(model, options)
    fixed = fixed_coverage(world, options.resamples, seed=0)
    top = tails(world)
    return {
        "rows": int(world.loss.size),
        "units": world.count,
        "fixed": {name: _spread(values) for name, values in fixed.items()},
        "stopping": {
            f"rows of a user {order}": stopping(world, options.resamples, seed, order == "together")
            for seed, order in enumerate(("scattered", "together") if data else (), 1)
        },
        **({} if data else {"certificates": certificates(world, CERTIFICATES, seed=3)}),
        "by_site": {
            name: {
                "kl_coverage": float(fixed["kl"][i]),
                "labelled_coverage": float(fixed["labelled"][i]),
                "kl_in_top_hundredth_of_units": float(top[i]),
            }
            for i, name in enumerate(world.names)
        },
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dcnv2", "wukong"], choices=sorted(TRAINING))
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/bench-movielens1m"), help="of checkpoints"
    )
    parser.add_argument("--runs", type=Path, help="directory of runs whose plans stand in place of sites")
    parser.add_argument("--data", type=Path, help="with --runs: parquet files of the splits")
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    options.directory = options.directory.absolute()
    data = None if options.runs else movielens_1m()
    found = {}
    for model in options.models:
        found[model] = measure(model, data, options)
        print(model, json.dumps({k: v for k, v in found[model].items() if k != "by_site"}), flush=True)
    settings = {"resamples": options.resamples, "group": GROUP, "confidence": 0.95}
    print(write_record("interval_coverage" + "_of_plans" * bool(options.runs), found, settings))


if __name__ == "__main__":
    main()
