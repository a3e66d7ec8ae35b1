"""Which sites are safe.

The null hypothesis is "unsafe". A linear site is safe when the upper bound of its KL, relative to the FP32
loss, is inside its share of the budget for every judged output. Shares follow the floating-point operations:
a site may spend of the budget what it earns in arithmetic, so that a small site at the model's edge cannot
spend what the large ones need. The shares sum to the budget less an allowance for the labelled first-order
term, which is judged on the whole plan (selection split), not site by site: one site's labelled term has far
more noise than its KL.

Costs add: KL is quadratic in the logit change, and the changes of different sites are nearly uncorrelated
(`benchmarks.pipeline.additivity` holds their sum against the cost of a plan). Sites that share a quantized
tensor share its rounding as well, and are judged as one unit with the sum of their shares.

**Who stays.** The unit that oversteps its share most leaves, what it was allowed goes to those that stay, and
so on until all that stay are inside. Of a unit of several sites the one leaves that oversteps its own share
most; what is left is held to the cost that `costs` bounds it by. A share that grew by what others left
depends on the data, so that the bounds it is held against must be right all at once:

* The units that were measured, and the norms, each have a limit that is fixed beforehand: the share that they
  have while nobody has left. `holm.step_down` tests these and gives bounds that hold at once. A unit that is
  inside its limit never leaves, because shares only grow; the others are held to the bound that is theirs.
* A site of several that share a tensor has further bounds for the case that they part, one for each output,
  without step-down.

Each of all these bounds starts with the same risk, and together they fail with the risk that was asked for,
of which half is with the upper ends: at 95 % confidence, the chance is at most 2.5 % that any site is called
safe whose KL is beyond its share (that of its unit, where it is one of several). "Unsafe" (the lower end is
beyond the share) promises nothing of the kind; it says that more rows would hardly help. The outputs of one
unit need no correction among themselves: that it is wrongly called safe takes a bound that fails at the one
output where it is beyond its share most.

A norm is safe in the base precision when its KL there is inside its part of an extra tenth, which norms have
of their own beside the products. Products that do not compete (kept by the user, too thin for FP8, of two
activations) are held against the share that they would have had from the start, outside of that promise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.plan import Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.planning.costs import Cost, Costs, allowed_kl
from loka_onnx.planning.holm import step_down

NORM_ALLOWANCE = 0.1
"""What all norms together may spend, as a part of what the products may."""

Unit = frozenset[str]
"""Names of sites that are judged together."""


@dataclass(frozen=True)
class Judgement:
    """Verdict of one site under the recipe that it would run with."""

    verdict: Verdict
    reason: str


def judge(
    sites: Sequence[Site],
    kept: Collection[str],
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    confidence: float,
) -> dict[str, Judgement]:
    """Verdict of every product in FP8, and of every norm in the base precision.

    Args:
        sites: Sites of the model, in any order.
        kept: Names of those that do not compete for the budget.
        profile: Their profile.
        outputs: Judged outputs.
        confidence: Of all intervals together.

    Returns:
        By site; norms that are kept are left out.

    Raises:
        PlanningError: The profile lacks a site or an output.
    """
    costs = Costs(profile, outputs)
    able = {site.name: site.flops_per_example for site in sites if site.is_fp8_able}
    flops = {name: count for name, count in able.items() if name not in kept}
    norms = [site.name for site in sites if site.kind is SiteKind.NORM and site.name not in kept]
    judges = _Judges(costs, flops, norms, 1.0 - confidence)
    return {**judges.products(), **judges.norms(), **judges.others(_would_have_had(sites, able, flops))}


def _would_have_had(
    sites: Iterable[Site], able: Mapping[str, int], competing: Collection[str]
) -> dict[str, float]:
    """Share that a product which does not compete would have had from the start."""
    shares: dict[str, float] = {}
    for site in sites:
        if site.kind is SiteKind.NORM or site.name in competing:
            continue
        whole = sum(able.values()) + (0 if site.name in able else site.flops_per_example)
        shares[site.name] = site.flops_per_example / whole if whole else 0.0
    return shares


def _units(names: Collection[str], groups: Iterable[Unit]) -> tuple[Unit, ...]:
    """The sites in units; each is in one."""
    found: list[Unit] = []
    left = set(names)
    for group in groups:
        together = group & left
        if len(together) > 1:
            found.append(together)
            left -= together
    return (*found, *(frozenset({name}) for name in sorted(left)))


class _Judges:
    """The bounds of one model, and the verdicts that follow.

    Args:
        costs: What the sites cost.
        flops: Operations of the products that compete, by site.
        norms: Names of the norms.
        risk: That any interval does not hold.
    """

    def __init__(self, costs: Costs, flops: Mapping[str, int], norms: Sequence[str], risk: float) -> None:
        self._costs, self._flops = costs, flops
        self._units = _units(flops, costs.groups)
        self._norms = {Unit({name}): NORM_ALLOWANCE / len(norms) for name in norms}
        limits = {u: s for u, s in self._shares(self._units).items() if costs.is_measured(u)} | self._norms
        parting = sum(len(unit) for unit in self._units if len(unit) > 1)
        self._bounds = max(len(limits) + parting * len(costs.outputs), 1)
        self._risk = risk / self._bounds
        tested = step_down(
            limits,
            self._risk * len(limits),
            lambda unit, each: all(cost.is_inside(limits[unit]) for cost in costs.of(unit, each)),
        )
        self._risks = {unit: tested.shown.get(unit, tested.risk) for unit in limits}
        self._known: dict[Unit, tuple[Cost, ...]] = {}

    def products(self) -> dict[str, Judgement]:
        """Verdicts of the products that compete."""
        found: dict[str, Judgement] = {}
        staying = set(self._units)
        while staying:
            shares = self._shares(staying)
            # The names settle ties, so that the order of the sites does not.
            worst = max(staying, key=lambda unit: (self._overstep(unit, shares[unit]), sorted(unit)))
            if self._overstep(worst, shares[worst]) <= 1.0:
                break
            leaver = max(worst, key=lambda name: (self._overstep_alone(name, staying), name))
            found[leaver] = self._judgement(leaver, worst, shares[worst])
            staying.remove(worst)
            if rest := worst - {leaver}:
                staying.add(rest)
        shares = self._shares(staying)
        return found | {name: self._judgement(name, unit, shares[unit]) for unit in staying for name in unit}

    def norms(self) -> dict[str, Judgement]:
        """Verdicts of the norms."""
        return {name: self._judgement(name, u, share) for u, share in self._norms.items() for name in u}

    def others(self, shares: Mapping[str, float]) -> dict[str, Judgement]:
        """Verdicts of products that do not compete, each against its share."""
        return {name: self._judgement(name, Unit({name}), share) for name, share in shares.items()}

    def _shares(self, units: Collection[Unit]) -> dict[Unit, float]:
        operations = {unit: sum(self._flops[name] for name in unit) for unit in units}
        total = sum(operations.values())
        return {unit: count / total for unit, count in operations.items()}

    def _costs_of(self, unit: Unit) -> tuple[Cost, ...]:
        if unit not in self._known:
            self._known[unit] = self._costs.of(unit, self._risks.get(unit, self._risk))
        return self._known[unit]

    def _overstep(self, unit: Unit, share: float) -> float:
        return max(cost.overstep(share) for cost in self._costs_of(unit))

    def _overstep_alone(self, name: str, staying: Collection[Unit]) -> float:
        total = sum(self._flops[other] for unit in staying for other in unit)
        return self._overstep(Unit({name}), self._flops[name] / total)

    def _judgement(self, site: str, unit: Unit, share: float) -> Judgement:
        costs = self._costs_of(unit)
        beyond = [cost for cost in costs if cost.is_beyond(share)]
        worst = max(beyond or costs, key=lambda cost: cost.overstep(share))
        if beyond:
            verdict, relation = Verdict.UNSAFE, "beyond"
        elif worst.is_inside(share):
            verdict, relation = Verdict.SAFE, "inside"
        else:
            verdict, relation = Verdict.UNDECIDED, "astride"
        whose = "its" if len(unit) == 1 else "their"
        allowed = _percent(allowed_kl(share, worst.spec))
        words = self._cost_in_words(worst, unit, site)
        return Judgement(verdict, f"{words}, {relation} {whose} share {allowed}")

    def _cost_in_words(self, cost: Cost, unit: Unit, site: str) -> str:
        others = ", ".join(f"'{name}'" for name in sorted(unit - {site}))
        worst_of = f" in the worst of {cost.draws} draws" if cost.draws else ""
        corrected = f", corrected for {self._bounds} bounds" if self._bounds > 1 else ""
        level = f"{100.0 * cost.kl.confidence:.3f}".rstrip("0").rstrip(".")
        return (
            f"KL {'at most ' if cost.is_bound else ''}{_percent(cost.kl.value)}{worst_of} "
            f"(upper bound {_percent(cost.kl.upper)} at {level} %{corrected}) "
            f"of the {cost.denominator} of '{cost.spec.name}'"
            f"{f' together with {others} on the same tensor' if others else ''}"
        )


def _percent(value: float) -> str:
    return f"{100.0 * value:.3g} %"
