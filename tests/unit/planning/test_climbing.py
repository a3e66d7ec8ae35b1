"""How far a ladder is climbed, how often certification then passes, and what attempts may err."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation, PairedDifference, TaskMetrics
from loka_onnx.core.intervals import Interval
from loka_onnx.planning.climbing import (
    CHANCES,
    MOST,
    SHARES,
    Goal,
    Judged,
    affordable_kl,
    chance_to_pass,
    climb,
    design_spread,
    expected_rung,
    fits,
)

BUDGET = 2e-4
Z = float(ndtri(0.975))
METRICS = TaskMetrics(0.5, 0.9, 0.8, 1.0)
FIRST = Goal.of(0, 0.05)


def judged(*outputs: tuple[float, float, float], spread: float = 1.0) -> Judged:
    """Outputs by estimate, KL and standard error on selection."""
    found = []
    for number, (value, kl, error) in enumerate(outputs):
        change = Interval(value, value - Z * error, value + Z * error, 0.95, 1000)
        difference = PairedDifference(
            "loss", change, Interval(kl, kl, kl, 0.95, 1000), None, None, None, 0.0, 0.0
        )
        status = BudgetStatus.WITHIN if change.upper <= BUDGET else BudgetStatus.UNDECIDED
        found.append(
            OutputEvaluation(
                f"o{number}", OutputKind.LOGIT, METRICS, difference, BUDGET, status, rows_to_decide=None
            )
        )
    return Judged(tuple(found), {output.output: spread for output in found})


@dataclass
class Rungs:
    """A ladder of one output whose rungs have a known KL."""

    kl: tuple[float, ...]
    outputs: ClassVar = {"o0": OutputSpec("o0", OutputKind.LOGIT, "y", budget=BUDGET)}

    @property
    def rungs(self) -> tuple[frozenset[str], ...]:
        names = [f"s{i:02}" for i in range(len(self.kl) - 1)]
        return tuple(frozenset(names[:count]) for count in range(len(self.kl)))

    def predicted_kl(self, rung: frozenset[str]) -> Mapping[str, float]:
        return {"o0": self.kl[len(rung)]}

    def part(self, rung: frozenset[str], other: frozenset[str], output: str) -> float:
        return self.kl[len(rung)] / self.kl[len(other)] if self.kl[len(other)] else 0.0

    def share(self, rung: frozenset[str]) -> float:
        return len(rung) / (len(self.kl) - 1)


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_the_chance_is_that_of_a_second_sample(spread):
    value, error = 8e-5, 4e-5
    later = spread * error
    random = np.random.default_rng(0)
    truth = value + error * random.standard_normal(400_000)
    second = truth + later * random.standard_normal(truth.size)
    passed = np.mean(second + float(ndtri(0.98)) * later <= BUDGET)
    found = chance_to_pass(judged((value, 2e-5, error), spread=spread), 0.96)
    assert found == pytest.approx(passed, abs=0.005)


def test_every_output_must_pass():
    one, other = (8e-5, 2e-5, 3e-5), (6e-5, 2e-5, 4e-5)
    alone = [chance_to_pass(judged(each), 0.96) for each in (one, other)]
    assert chance_to_pass(judged(one, other), 0.96) == pytest.approx(sum(alone) - 1.0)
    assert min(alone) > 0.5
    # An interval that is not known gives no chance.
    assert chance_to_pass(judged((0.0, 0.0, float("inf"))), 0.96) == 0.0
    assert not fits(judged((0.0, 0.0, float("inf"))), FIRST)
    assert fits(judged((0.0, 0.0, 0.0)), FIRST)


def test_a_gain_that_noise_explains_is_no_room():
    """Labels that made the change smaller than its KL by less than a standard error are luck."""
    fair, lucky, large = (judged((value, 1e-4, 5e-5)) for value in (1e-4, 6e-5, -1e-4))
    assert chance_to_pass(lucky, 0.96) == pytest.approx(chance_to_pass(fair, 0.96))
    assert chance_to_pass(fair, 0.96) < 0.9
    # λ̂ = −2e-4 is four standard errors: 15/16 of it count.
    spread = sqrt(2) * 5e-5
    room = BUDGET - (1e-4 - 2e-4 * 15 / 16) - float(ndtri(0.98)) * 5e-5
    assert chance_to_pass(large, 0.96) == pytest.approx(float(ndtr(room / spread)), rel=1e-6)


def test_the_error_is_divided_and_later_attempts_are_surer():
    goals = [Goal.of(attempt, 0.05) for attempt in range(len(SHARES))]
    assert sum(1.0 - goal.confidence for goal in goals) == pytest.approx(0.05)
    assert [goal.chance for goal in goals] == sorted(CHANCES)
    # Two looks of a refresh: each has half of the error, and divides that.
    assert Goal.of(0, 0.025).confidence == pytest.approx(1.0 - 0.025 * SHARES[0])


@pytest.mark.parametrize("alike", [0.0, 0.3])
def test_groups_widen_the_interval_as_much_as_they_are_alike(alike):
    random = np.random.default_rng(1)
    before, after = random.integers(2, 12, 4000), random.integers(10, 40, 3000)

    def error(sizes: np.ndarray) -> float:
        groups = np.repeat(np.arange(sizes.size), sizes)
        common = random.standard_normal(sizes.size)[groups]
        rows = sqrt(alike) * common + sqrt(1 - alike) * random.standard_normal(groups.size)
        sums = np.bincount(groups, weights=rows - rows.mean()) / groups.size
        return float(np.sqrt(np.square(sums).sum()))

    plain = 1.0 / sqrt(before.sum())
    found = design_spread(plain, error(before), before.tolist(), after.tolist())
    assert found == pytest.approx(error(after) / error(before), rel=0.05)
    # Without groups rows count.
    assert design_spread(1e-5, 1e-5, [1] * 400, [1] * 1600) == pytest.approx(0.5)


def test_the_first_guess_stands_where_a_calibrated_model_would():
    rows = {"selection": 100_000, "certification": 300_000}
    kl = affordable_kl(BUDGET, FIRST, rows)
    error, later = (2.0 * sqrt(kl / count) for count in rows.values())
    chance = chance_to_pass(judged((kl, kl, error), spread=later / error), FIRST.confidence)
    inside = kl + Z * error
    # One of the two conditions is met exactly, the other with room.
    assert chance >= 0.9 - 1e-6 and inside <= BUDGET * (1 + 1e-9)
    assert chance == pytest.approx(0.9, abs=1e-6) or inside == pytest.approx(BUDGET)
    ladder = Rungs((0.0, 0.5 * kl, 0.9 * kl, 1.1 * kl))
    assert expected_rung(ladder, ladder.rungs, FIRST, rows) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 300])
def test_the_highest_rung_that_fits_is_found_in_a_few_judgements(count, factor):
    """KL adds up to `factor` times what calibration said: fewer rungs fit than expected, or more."""
    random = np.random.default_rng(count)
    ladder = Rungs((0.0, *np.cumsum(np.sort(random.lognormal(-11.0, 1.0, count)) * 7.0 / count).tolist()))
    rows = {"selection": 100_000, "certification": 300_000}
    asked: list[int] = []

    def judge(rung: frozenset[str]) -> Judged:
        asked.append(len(rung))
        kl = factor * ladder.kl[len(rung)]
        return judged((kl, kl, 2.0 * sqrt(kl / rows["selection"])), spread=sqrt(1 / 3))

    found = climb(ladder, ladder.rungs, judge, FIRST, rows)  # type: ignore[arg-type]
    assert len(asked) == len(set(asked)) <= MOST
    assert [each.rung for each in found.judged] == asked
    best = max(at for at in range(count + 1) if at == 0 or fits(judge(ladder.rungs[at]), FIRST))
    assert found.rung <= best and set(found.sites) == ladder.rungs[found.rung]
    # What is left out is worth less than another pass.
    assert best - found.rung <= max(0.02 * count, 0)
    assert found.rung == 0 or (found.taken is not None and found.taken.fits)


def test_what_is_too_expensive_does_not_block_what_stands_behind_it():
    """By KL for each operation a large site may stand below a small one that still fits."""
    costs = {"s00": 1e-6, "s01": 2.5e-4, "s02": 2e-6, "s03": 3e-4, "s04": 1e-6}

    class Sites(Rungs):
        def predicted_kl(self, rung: frozenset[str]) -> Mapping[str, float]:
            return {"o0": sum(costs[site] for site in rung)}

        def part(self, rung: frozenset[str], other: frozenset[str], output: str) -> float:
            return self.predicted_kl(rung)[output] / self.predicted_kl(other)[output]

    ladder = Sites((0.0,) * (len(costs) + 1))
    rows = {"selection": 1_000_000, "certification": 1_000_000}

    def judge(rung: frozenset[str]) -> Judged:
        kl = ladder.predicted_kl(rung)["o0"]
        return judged((kl, kl, 2.0 * sqrt(kl / rows["selection"])))

    found = climb(ladder, ladder.rungs, judge, FIRST, rows)  # type: ignore[arg-type]
    assert set(found.sites) == {"s00", "s02", "s04"}
    assert found.taken is not None and found.taken.fits and found.taken.sites == 3
    assert len(found.judged) <= MOST


def taken_and_certified(random: np.random.Generator) -> tuple[bool, float] | None:
    """Whether a taken rung passes, and its KL over what is affordable; None where none is taken.

    Nested rungs share their noise: each site adds to KL, and to a labelled part of the same spread.
    """
    count = int(random.integers(5, 60))
    alone = np.sort(random.lognormal(0.0, 1.5, count))
    ladder = Rungs((0.0, *np.cumsum(alone * float(random.lognormal(-8.5, 0.7)) / alone.sum()).tolist()))
    rows = {"selection": int(random.integers(20_000, 200_000)), "certification": 100_000}
    true_kl = np.array(ladder.kl) * float(random.lognormal(0.0, 0.3))

    def seen_on(split: str) -> np.ndarray:
        noise = random.standard_normal(count) * 2.0 * np.sqrt(np.diff(true_kl) / rows[split])
        return true_kl + np.concatenate([[0.0], np.cumsum(noise)])

    seen, spread = seen_on("selection"), sqrt(rows["selection"] / rows["certification"])

    def judge(rung: frozenset[str]) -> Judged:
        kl = float(true_kl[len(rung)])
        return judged((float(seen[len(rung)]), kl, 2.0 * sqrt(kl / rows["selection"])), spread=spread)

    found = climb(ladder, ladder.rungs, judge, FIRST, rows)  # type: ignore[arg-type]
    if found.rung == 0:
        return None
    error = 2.0 * sqrt(true_kl[found.rung] / rows["certification"])
    upper = seen_on("certification")[found.rung] + float(ndtri(0.5 + FIRST.confidence / 2.0)) * error
    return bool(upper <= BUDGET), true_kl[found.rung] / affordable_kl(BUDGET, FIRST, rows)


@pytest.mark.slow
def test_what_is_taken_passes_certification_in_nine_of_ten_runs():
    random = np.random.default_rng(3)
    taken = [found for found in (taken_and_certified(random) for _ in range(1500)) if found is not None]
    assert len(taken) > 1000
    assert np.mean([passed for passed, _ in taken]) >= 0.9
    # Not by staying low.
    assert np.median([height for _, height in taken]) > 0.6
