"""Climb the ladder: find the highest rung that certification is expected to pass.

A rung was judged on the selection split: its estimate d̂, with the standard error s, is inside the budget B
by its upper end. A labelled part λ̂ = d̂ − KL below 0 is multiplied by max(0, 1 − s²/λ̂²): it is 0 on average
for a calibrated model, so a gain within its noise is luck. Certification will compare its own estimate with
B, from n' rows instead of n:

    its standard error     s' = s · √(n/n' · D'/D)
    its estimate           N(d̂, s² + s'²)           (predictive distribution under a flat prior)
    it passes where        estimate + z·s' ≤ B,

    P(pass) = Φ((B − d̂ − z·s') / √(s² + s'²)),

with z the quantile of certification's interval. D is the design effect of grouped rows, 1 + (m − 1)·ρ, with m
= Σ mᵢ²/Σ mᵢ over the group sizes; ρ follows from the two standard errors of the selection split, with groups
and without. A rung with several outputs passes at least with 1 − Σ(1 − P(pass)) (Bonferroni). Sources: Gelman
et al., "Bayesian Data Analysis" (third edition), section 2.5; James and Stein (1961), the positive part in
one dimension; Kish, "Survey Sampling" (1965), with the mean group size of Holt, "Methodology Issues"
(Biometrics 1980).

**Climbing.** KL grows along the ladder, so a rung that fits and one that does not bracket the budget. Each
judged rung predicts the others (`ladder`: KL follows the predicted KL, everything else its root). The highest
rung expected to fit is judged next, or the middle of the bracket where the same end moved twice, `MOST` rungs
at most. `tests/unit/planning/test_climbing.py` counts how many of the taken rungs then pass.

**Certification attempts.** Where certification is missed, a lower rung is held against the same rows, and
then a third. `SHARES` divides the error of certification among them beforehand (Bonferroni with unequal
weights, valid under any dependence). All three follow from the selection split; certification decides only
which is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf, isfinite, sqrt

from scipy.special import ndtr, ndtri

from loka_onnx.core.evaluation import BudgetStatus, OutputEvaluation
from loka_onnx.core.plan import Climb, JudgedRung
from loka_onnx.planning.judging import Unit
from loka_onnx.planning.ladder import Ladder

SHARES = (0.8, 0.15, 0.05)
"""Parts of certification's error that its attempts may use, in their order."""
CHANCES = (0.9, 0.99, 0.999)
"""Least chance of passing certification of the rung that each attempt takes."""
MOST = 8
"""Rungs that are judged at most."""
WORTH = 0.005
"""Rungs less than this share of the FP8-able operations apart are not worth another judgement."""


@dataclass(frozen=True)
class Judged:
    """A rung on the selection split; `spread` is s'/s of each output (`design_spread`)."""

    outputs: tuple[OutputEvaluation, ...]
    spread: Mapping[str, float]


@dataclass(frozen=True)
class Goal:
    """To pass certification's two-sided interval of `confidence` with probability `chance`."""

    confidence: float
    chance: float

    @classmethod
    def of(cls, attempt: int, error: float) -> Goal:
        """Return the goal of an attempt, from 0; `error` is that of all attempts together."""
        return cls(1.0 - error * SHARES[attempt], CHANCES[attempt])


def design_spread(plain: float, grouped: float, before: Sequence[int], after: Sequence[int]) -> float:
    """Return the standard error on certification over that on selection, s'/s, both with groups.

    `plain` is that on selection as if rows were independent, `grouped` the one with groups; `before` and
    `after` are the rows of each group of selection and certification.
    """
    n, m = sum(before), sum(size * size for size in before) / sum(before)
    later, larger = sum(after), sum(size * size for size in after) / sum(after)
    effect = (grouped / plain) ** 2 if plain > 0.0 and isfinite(grouped) else 1.0
    alike = max(effect - 1.0, 0.0) / (m - 1.0) if m > 1.0 else 0.0
    return sqrt(n / later * (1.0 + (larger - 1.0) * alike) / (1.0 + (m - 1.0) * alike))


def chance_to_pass(judged: Judged, confidence: float) -> float:
    """Return the least chance that all outputs pass certification, with intervals of that confidence."""
    return _chance([_Reading.of(output, judged.spread) for output in judged.outputs], confidence)


def fits(judged: Judged, goal: Goal) -> bool:
    """True if a rung is inside its budgets on selection and expected to be on certification."""
    inside = all(output.budget_status == BudgetStatus.WITHIN for output in judged.outputs)
    return inside and chance_to_pass(judged, goal.confidence) >= goal.chance


def climb(
    ladder: Ladder,
    rungs: Sequence[Unit],
    judge: Callable[[Unit], Judged],
    goal: Goal,
    rows: Mapping[str, int],
) -> Climb:
    """Return the highest rung that meets the goal, after at most `MOST` judgements.

    `rungs` are nested and ascending; the first is not judged. Additions that fail are left out, so the result
    may be none of `rungs`. `rows` of ``selection`` and ``certification`` give the starting point.
    """
    climber = _Climber(ladder, judge, goal, rows)
    below = number = 0
    while True:
        low = climber.highest(rungs, below)
        # The lowest rung of a later pass is the one that the previous pass ended on.
        number = below + low if low else number
        rung = rungs[low]
        units = [higher - lower for lower, higher in pairwise(rungs[low + 1 :])]
        beside = [unit for unit in units if climber.is_expected(rung, rung | unit)]
        smaller = tuple(accumulate(beside, Unit.union, initial=rung))
        if len(climber.seen) == MOST or ladder.share(smaller[-1]) - ladder.share(rung) < WORTH:
            return Climb(number, tuple(sorted(rung)), goal.confidence, goal.chance, tuple(climber.seen))
        below, rungs = below + low + 1, smaller


@dataclass
class _Climber:
    """Judges rungs and keeps the readings."""

    ladder: Ladder
    judge: Callable[[Unit], Judged]
    goal: Goal
    rows: Mapping[str, int]
    seen: list[JudgedRung] = field(default_factory=list)
    readings: dict[Unit, list[_Reading]] = field(default_factory=dict)

    def highest(self, rungs: Sequence[Unit], below: int) -> int:
        """Return the highest of nested rungs that fits; they are numbered from `below` on."""
        low, high = 0, len(rungs)
        latest = 0 if rungs[0] in self.readings else None
        moved: list[bool] = []
        while high - low > 1 and len(self.seen) < MOST:
            gain = self.ladder.share(rungs[high - 1]) - self.ladder.share(rungs[low])
            if moved and gain < WORTH and high < len(rungs):
                break
            at = self._next(rungs, low, high, latest)
            if len(moved) > 1 and moved[-1] == moved[-2]:
                at = (low + high) // 2
            latest = at
            moved.append(self._fits(rungs[at], below + at))
            low, high = (at, high) if moved[-1] else (low, at)
        return low

    def _fits(self, rung: Unit, number: int) -> bool:
        judged = self.judge(rung)
        is_fit = fits(judged, self.goal)
        worst = max(judged.outputs, key=_upper_over_budget, default=None)
        change = None if worst is None else worst.difference
        self.seen.append(
            JudgedRung(
                rung=number,
                sites=len(rung),
                fp8_share=self.ladder.share(rung),
                output="" if worst is None else worst.output,
                change=None if change is None else change.judged,
                kl=None if change is None else change.kl.value,
                chance=chance_to_pass(judged, self.goal.confidence),
                fits=is_fit,
            )
        )
        self.readings[rung] = [_Reading.of(output, judged.spread) for output in judged.outputs]
        return is_fit

    def _next(self, rungs: Sequence[Unit], low: int, high: int, latest: int | None) -> int:
        """Return the highest rung inside the bracket that is expected to fit, or the lowest one there."""
        if latest is None:
            return min(max(expected_rung(self.ladder, rungs, self.goal, self.rows), low + 1), high - 1)
        known, inside = rungs[latest], range(high - 1, low, -1)
        return next((at for at in inside if self.is_expected(known, rungs[at])), low + 1)

    def is_expected(self, known: Unit, rung: Unit) -> bool:
        """True if a rung is expected to fit, by a known one, or else by the latest judged one."""
        if known not in self.readings and self.readings:
            known = next(reversed(self.readings))
        if known not in self.readings:
            return expected_rung(self.ladder, (Unit(), rung), self.goal, self.rows) == 1
        expected = [r.at(self.ladder.part(rung, known, r.output)) for r in self.readings[known]]
        return (
            all(r.is_inside for r in expected) and _chance(expected, self.goal.confidence) >= self.goal.chance
        )


@dataclass(frozen=True)
class _Reading:
    """One output of a rung, measured or expected: the label-free part of the change, and the rest.

    The rest lacks the part of a gain that its noise explains. `error` is the standard error of the change on
    selection, from the upper half of its interval with that `quantile`; `later` is expected on certification.
    """

    output: str
    kl: float
    rest: float
    error: float
    later: float
    quantile: float
    budget: float

    @classmethod
    def of(cls, output: OutputEvaluation, spread: Mapping[str, float]) -> _Reading:
        if output.difference is None:
            return cls(output.output, 0.0, 0.0, 0.0, 0.0, 0.0, output.budget)
        judged, kl = output.difference.judged, max(output.difference.kl.value, 0.0)
        quantile = float(ndtri(0.5 + judged.confidence / 2.0))
        error = (judged.upper - judged.value) / quantile
        later, rest = error * spread[output.output], judged.value - kl
        if rest < 0.0:
            rest *= max(0.0, 1.0 - (error / rest) ** 2)
        return cls(output.output, kl, rest, error, later, quantile, output.budget)

    def at(self, part: float) -> _Reading:
        """Return the expected reading where the predicted KL is `part` times as large."""
        root = sqrt(part)
        kl, rest = self.kl * part, self.rest * root
        return replace(self, kl=kl, rest=rest, error=self.error * root, later=self.later * root)

    @property
    def is_inside(self) -> bool:
        return self.kl + self.rest + self.quantile * self.error <= self.budget

    def chance(self, quantile: float) -> float:
        room = self.budget - self.kl - self.rest - quantile * self.later
        spread = sqrt(self.error**2 + self.later**2)
        if spread == 0.0:
            return 1.0 if room >= 0.0 else 0.0
        return float(ndtr(room / spread)) if isfinite(spread) else 0.0


def _chance(readings: Sequence[_Reading], confidence: float) -> float:
    quantile = float(ndtri(0.5 + confidence / 2.0))
    return max(0.0, 1.0 - sum(1.0 - reading.chance(quantile) for reading in readings))


def expected_rung(ladder: Ladder, rungs: Sequence[Unit], goal: Goal, rows: Mapping[str, int]) -> int:
    """Return the highest of nested rungs that is expected to fit before any was judged; `rows` by split."""
    most = {name: affordable_kl(spec.budget, goal, rows) for name, spec in ladder.outputs.items()}
    costs = (ladder.predicted_kl(rung).items() for rung in rungs)
    fitting = [at for at, kls in enumerate(costs) if all(kl <= most[name] for name, kl in kls)]
    return max(fitting, default=0)


def affordable_kl(budget: float, goal: Goal, rows: Mapping[str, int]) -> float:
    """Return the KL that should meet the goal, where the model is calibrated.

    KL ≈ ½·E[p(1 − p)·δ²] of a row, and the variance of its labelled part (p − y)·δ is E[p(1 − p)·δ²], twice
    the KL. Relative to a loss of about a half, its standard error is 2·√(KL/n); a squared error has the same.
    With a = 2·(z/√n' + q·√(1/n + 1/n')), KL + a·√KL is the budget. The interval on selection needs the same
    with a = 2·1.96/√n.
    """
    before, after = rows["selection"], rows["certification"]
    quantile, chance = float(ndtri(0.5 + goal.confidence / 2.0)), float(ndtri(goal.chance))
    later = quantile / sqrt(after) + chance * sqrt(1.0 / before + 1.0 / after)
    a = 2.0 * max(later, float(ndtri(0.975)) / sqrt(before))
    return float((sqrt(a * a / 4.0 + budget) - a / 2.0) ** 2)


def _upper_over_budget(output: OutputEvaluation) -> float:
    return -inf if output.difference is None else output.difference.judged.upper / output.budget
