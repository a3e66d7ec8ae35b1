"""Judge which sites are safe.

The null hypothesis is "unsafe". All products together may cost the budget less an allowance for the labelled
first-order term, which is judged on the whole plan (selection split). Costs are parts of the allowance, on
the output where they are largest, so the parts of a set of sites sum to at most 1 where it is inside every
budget. They add: KL is quadratic in the logit change, and the changes of different sites are nearly
uncorrelated (`benchmarks.pipeline.additivity`). Sites that share a quantized tensor are one unit.

**Shares.** Every unit has a share fixed beforehand: its part of the floating-point operations. `step_down`
finds the units whose cost is inside their share; these are safe.

**Unused budget is reallocated.** The allowance that safe units leave goes to the unit with the least cost per
operation, then to the next, as long as the cost fits. A unit that does not fit is out; of a unit with several
sites the one with the highest cost per operation leaves, and the rest counts the bound of `costs`. The
remainder depends on the data, so its costs are upper bounds that hold simultaneously: one for each measured
unit, and for each site of several that share a tensor one per output, at equal risk (Bonferroni).

**Risk.** Half of it goes to the step-down, over products and norms, half to the bounds of reallocation. They
fail with the requested risk, half of it at the upper ends: at 95 % confidence the chance is at most 2.5 %
that any site counts as inside its share though it costs more, or that the safe products together exceed the
allowance. The outputs of one unit need no correction among themselves: to underestimate its cost, the bound
must fail at the one output where it is largest. "Unsafe" (beyond share and remainder even by the lower end)
carries no such guarantee.

A norm is safe in the base precision when its KL there is inside its part of an extra tenth that norms have
beside the products. Products that do not compete (kept by the user, too thin for FP8, of two activations) are
compared with the share that they would have had, outside of that guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.plan import Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.planning.costs import Cost, Costs, allowed_kl

NORM_ALLOWANCE = 0.1
"""KL that all norms together may cost, as a part of the allowance of the products."""
HANDED_ON = 0.5
"""Part of the risk that goes to the bounds of reallocation."""

Unit = frozenset[str]
"""Names of sites that are judged together."""
C = TypeVar("C")


@dataclass(frozen=True)
class SiteVerdict:
    """Verdict of one site under the recipe that it would run with."""

    verdict: Verdict
    reason: str


def judge_sites(
    sites: Sequence[Site],
    kept: Collection[str],
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    confidence: float,
) -> dict[str, SiteVerdict]:
    """Return the verdict of every product in FP8 and, unless kept, of every norm in the base precision.

    `kept` sites do not compete for the budget; `confidence` is that of all intervals together.
    """
    costs = Costs(profile, outputs)
    able = {site.name: site.flops_per_example for site in sites if site.is_fp8_able}
    flops = {name: count for name, count in able.items() if name not in kept}
    norms = [site.name for site in sites if site.kind is SiteKind.NORM and site.name not in kept]
    judges = _Judges(costs, flops, norms, 1.0 - confidence)
    verdicts = {**judges.products(), **judges.norms()}
    for site in sites:
        if site.kind is not SiteKind.NORM and site.name not in flops:
            # The share that a product would have had if it competed.
            whole = sum((able | {site.name: site.flops_per_example}).values())
            verdicts[site.name] = judges.beside(site.name, site.flops_per_example / whole if whole else 0.0)
    return verdicts


@dataclass(frozen=True)
class StepDown(Generic[C]):
    """Shown claims with the risk of their tests, and the risk of the last test of the others."""

    shown: dict[C, float]
    risk: float


def step_down(claims: Collection[C], risk: float, is_shown: Callable[[C, float], bool]) -> StepDown[C]:
    """Test many claims at a joint risk α of showing a false one (Holm's step-down).

    Each of n claims says that an unknown θ_u is at most a limit c_u fixed before the data were seen; it is
    shown when an upper bound U_u(r), which fails with risk r, is inside c_u: `is_shown(claim, risk)`, which a
    larger risk must not undo. All are tested at α/n each; shown ones pass their risk to the others, which are
    tested at α/(number left), until no further one is shown. All at once but for the risk α,

        θ_u ≤ c_u                     where the claim was shown,
        θ_u ≤ U_u(α/number left)      where it was not.

    Let F be the set of false claims (θ_u > c_u). With F empty, the first line is true, and so is the second:
    a bound that did not show its claim is above c_u. Otherwise, but for the risk α, U_u(α/|F|) ≥ θ_u > c_u
    for all u in F at once. Then no claim of F is ever shown: before the first of them at most n − |F| others
    were shown, so it was tested at no more than α/|F|. Hence at least |F| claims are left, α/number left is
    at most α/|F|, and the bounds of F hold; claims outside F are at most their limits, which either line
    allows. The price of passing on risk: for a shown claim only the limit is known, however small U_u is.

    Sources: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (Scandinavian Journal of
    Statistics 1979); Strassburger and Bretz, "Compatible simultaneous lower confidence bounds for the Holm
    procedure and other Bonferroni-based closed tests" (Statistics in Medicine 2008).
    """
    left, shown, each = list(claims), dict[C, float](), risk
    while left:
        each = risk / len(left)
        now = [claim for claim in left if is_shown(claim, each)]
        if not now:
            break
        shown |= dict.fromkeys(now, each)
        left = [claim for claim in left if claim not in shown]
    return StepDown(shown, each)


def units_of(names: Collection[str], groups: Iterable[Unit]) -> tuple[Unit, ...]:
    """Partition sites into units."""
    units: list[Unit] = []
    left = set(names)
    for group in groups:
        together = group & left
        if len(together) > 1:
            units.append(together)
            left -= together
    return (*units, *(frozenset({name}) for name in sorted(left)))


class _Judges:
    """Bounds and verdicts of one model; any bound fails with `risk`; `flops` are of competing products."""

    def __init__(self, costs: Costs, flops: Mapping[str, int], norms: Sequence[str], risk: float) -> None:
        self._costs, self._flops, self._operations = costs, flops, sum(flops.values())
        self._units = units_of(flops, costs.groups)
        self._norms = {Unit({name}): NORM_ALLOWANCE / len(norms) for name in norms}
        measured = [unit for unit in self._units if costs.is_measured(unit)]
        parting = sum(len(unit) for unit in self._units if len(unit) > 1)
        bounds = len(measured) + parting * len(costs.outputs)
        self._bounds_risk = HANDED_ON * risk / max(bounds, 1)
        self._limits = {unit: self._share(unit) for unit in measured} | self._norms
        self._tested = step_down(
            self._limits,
            (1.0 - HANDED_ON) * risk,
            lambda unit, each: _most(costs.of(unit, each)) <= self._limits[unit],
        )
        self._corrected_for = bounds + len(norms)

    def products(self) -> dict[str, SiteVerdict]:
        verdicts: dict[str, SiteVerdict] = {}
        # The remaining allowance, by the upper and by the lower ends of the costs.
        surely = at_best = 1.0
        waiting: list[Unit] = []
        for unit in self._units:
            if unit in self._tested.shown:
                # Both bounds hold: the share, and the one that is simultaneous with all others.
                costs = self._costs.of(unit, self._bounds_risk)
                surely -= min(self._share(unit), _most(costs))
                at_best -= _least(costs)
                verdicts |= {name: self._inside_share(name, unit) for name in unit}
            else:
                waiting.append(unit)
        # Split units that do not fit first, so that their cheap sites queue at their own price.
        queue = set[Unit]()
        for unit in waiting:
            part = unit
            while len(part) > 1 and _most(self._bounds(part)) > surely:
                leaver = self._dearest(part)
                verdicts[leaver] = self._against_rest(leaver, part, surely, at_best)
                part -= {leaver}
            queue.add(part)
        while queue:
            # Names settle ties, so the order of sites does not matter.
            unit = min(queue, key=lambda unit: (self._price(unit), sorted(unit)))
            queue.remove(unit)
            most, least = _most(self._bounds(unit)), _least(self._bounds(unit))
            if most <= surely:
                verdicts |= {name: self._against_rest(name, unit, surely, at_best) for name in unit}
                surely, at_best = surely - most, at_best - least
                continue
            leaver = self._dearest(unit)
            verdicts[leaver] = self._against_rest(leaver, unit, surely, at_best)
            queue |= {unit - {leaver}} - {Unit()}
        return verdicts

    def norms(self) -> dict[str, SiteVerdict]:
        return {
            name: self._inside_share(name, unit)
            if unit in self._tested.shown
            else self._outside_share(name, share, self._tested.risk)
            for unit, share in self._norms.items()
            for name in unit
        }

    def beside(self, site: str, share: float) -> SiteVerdict:
        """Judge a product that does not compete against its share."""
        return self._outside_share(site, share, self._bounds_risk)

    def _share(self, unit: Unit) -> float:
        return sum(self._flops[name] for name in unit) / self._operations

    def _bounds(self, unit: Unit) -> tuple[Cost, ...]:
        """Return the costs of a unit that is not inside its share; they hold for all units at once."""
        risk = self._bounds_risk
        if unit in self._limits:
            # Both bounds hold: that of the step-down, and that of reallocation.
            risk = max(risk, self._tested.risk)
        return self._costs.of(unit, risk)

    def _dearest(self, unit: Unit) -> str:
        """Return the site of a unit with the highest cost per operation."""
        return max(unit, key=lambda name: (self._price(Unit({name})), name))

    def _price(self, unit: Unit) -> float:
        return _most(self._bounds(unit)) / sum(self._flops[name] for name in unit)

    def _inside_share(self, site: str, unit: Unit) -> SiteVerdict:
        cost = _worst(self._costs.of(unit, self._tested.shown[unit]))
        share = self._kl_of(self._limits[unit], cost)
        whose = "its" if len(unit) == 1 else "their"
        return SiteVerdict(Verdict.SAFE, f"{self._in_words(cost, unit, site)}, inside {whose} share {share}")

    def _outside_share(self, site: str, share: float, risk: float) -> SiteVerdict:
        """Judge a site that gets no reallocated budget."""
        costs = self._costs.of(Unit({site}), risk)
        verdict = _verdict(costs, share, share)
        cost = _worst(costs, share)
        words = self._in_words(cost, Unit({site}), site)
        return SiteVerdict(verdict, f"{words}, {_RELATIONS[verdict]} its share {self._kl_of(share, cost)}")

    def _against_rest(self, site: str, unit: Unit, surely: float, at_best: float) -> SiteVerdict:
        """Judge a site whose unit is not inside its share."""
        costs = self._bounds(unit)
        verdict = _verdict(costs, surely, at_best)
        cost = _worst(costs, at_best)
        whose = "its" if len(unit) == 1 else "their"
        left = self._kl_of(max(surely, 0.0), cost)
        share = self._kl_of(self._share(unit), cost)
        return SiteVerdict(
            verdict,
            f"{self._in_words(cost, unit, site)}, {_RELATIONS[verdict]} the {left} that the others leave "
            f"({whose} own share is {share})",
        )

    def _kl_of(self, part: float, cost: Cost) -> str:
        return percent(part * allowed_kl(cost.spec))

    def _in_words(self, cost: Cost, unit: Unit, site: str) -> str:
        others = ", ".join(f"'{name}'" for name in sorted(unit - {site}))
        worst_of = f" in the worst of {cost.draws} draws" if cost.draws else ""
        corrected = f", corrected for {self._corrected_for} bounds" if self._corrected_for > 1 else ""
        level = f"{100.0 * cost.kl.confidence:.3f}".rstrip("0").rstrip(".")
        return (
            f"KL {'at most ' if cost.is_bound else ''}{percent(cost.kl.value)}{worst_of} "
            f"(upper bound {percent(cost.kl.upper)} at {level} %{corrected}) "
            f"of the {cost.denominator} of '{cost.spec.name}'"
            f"{f' together with {others} on the same tensor' if others else ''}"
            f"{', which few rows carry: the bound may be too low' if cost.is_carried_by_few else ''}"
        )


_RELATIONS = {Verdict.SAFE: "inside", Verdict.UNDECIDED: "astride", Verdict.UNSAFE: "beyond"}


def _verdict(costs: Sequence[Cost], room: float, room_at_best: float) -> Verdict:
    if _most(costs) <= room:
        return Verdict.SAFE
    return Verdict.UNSAFE if _least(costs) > room_at_best else Verdict.UNDECIDED


def _most(costs: Sequence[Cost]) -> float:
    return max(cost.most for cost in costs)


def _least(costs: Sequence[Cost]) -> float:
    return max(cost.least for cost in costs)


def _worst(costs: Sequence[Cost], room: float = inf) -> Cost:
    """Return the cost to report: one beyond the room, or else the one with the largest bound."""
    return max(costs, key=lambda cost: (cost.least > room, cost.most))


def percent(value: float) -> str:
    """Format a part of 1."""
    return f"{100.0 * value:.3g} %"
