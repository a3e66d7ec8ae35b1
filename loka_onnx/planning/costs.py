"""What sites cost of the budget, with bounds at the risk that a verdict may take.

Every cost is a KL over the loss (or over the entropy) and comes with a two-sided interval that fails with a
given risk; its upper end alone fails with half of it. Where rows were added until verdicts were reached, the
interval is one that holds at every number of rows (`Sampling.interval_of`).

**Draws.** A profile measures its sites under its own scales, which are the ones a plan runs with: the
rounding of the weights is the very rounding that was measured. But in a plan the sites before one move its
input a little, so that each value falls elsewhere on the grid, and a calibration of another day moves the
scales. Where perturbed scales were drawn, the interval is therefore multiplied by the largest KL of a draw
over that of the profile's own scales, on the same rows. That errs on the safe side: it takes the worst of
several draws for the one that comes, at every site at once.

**Sites that share a quantized tensor** and were measured together have a cost of their own (`SiteGroup`). Of
some of them only, what is known is what each costs alone. With δ the change of the logit, KL ≈ ½E[p(1 − p)δ²]
is the square of a norm of δ, and to first order the changes add, so that by the triangle inequality

    √KL(a and b) ≤ √KL(a) + √KL(b),

whatever the correlation of their errors. (Σ√KL)² is the cost that such sites are held to. It is a bound to
first order only: KL is no longer the square of a norm where |δ| is not small, and a joint KL of 2.7 times
as much was constructed (two of δ = 2 at p = .002; 1.01 times at δ = .03). It says where to start, and proves
nothing of a plan: that is left to the joint measurement, of rungs on the selection split (`climbing`), and
of the engine on certification.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, isnan, sqrt

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import Profile
from loka_onnx.core.sensitivity import Sensitivity
from loka_onnx.errors import PlanningError

LABELLED_ALLOWANCE = 0.5
"""Part of the budget that is left to the labelled first-order term and to what selection adds to it."""


def allowed_kl(spec: OutputSpec) -> float:
    """KL over the loss that an output allows to all products together."""
    return spec.budget * (1.0 - LABELLED_ALLOWANCE)


@dataclass(frozen=True)
class Cost:
    """KL of sites in low precision, on one output.

    Attributes:
        spec: The output.
        denominator: What KL is relative to: ``loss`` or ``entropy``.
        kl: KL with its interval, other draws of rounding noise included.
        draws: Perturbed calibrations that `kl` is the worst of; 0 where none is worse than the profile's own.
        is_bound: Whether it is what the sites cost at most, from what each costs alone.
        is_carried_by_few: Whether few rows carry the KL, so that its upper end may be too low.
    """

    spec: OutputSpec
    denominator: str
    kl: Interval
    draws: int = 0
    is_bound: bool = False
    is_carried_by_few: bool = False

    @property
    def most(self) -> float:
        """Upper end, as a part of what the output allows; infinite where nothing is known."""
        return inf if isnan(self.kl.upper) else self._part(self.kl.upper)

    @property
    def least(self) -> float:
        """Lower end, as a part of what the output allows; 0 where nothing is known."""
        return 0.0 if isnan(self.kl.lower) else self._part(self.kl.lower)

    def _part(self, kl: float) -> float:
        if kl <= 0.0:
            return 0.0
        allowed = allowed_kl(self.spec)
        return kl / allowed if allowed > 0.0 else inf


class Costs:
    """Costs of sites and groups of a profile.

    Args:
        profile: The profile.
        outputs: Judged outputs.
    """

    def __init__(self, profile: Profile, outputs: Sequence[OutputSpec]) -> None:
        self.outputs = tuple(outputs)
        self._sampling = profile.sampling
        self._found = {
            (entry.site, item.output): item
            for entry in profile.sites
            for item in reversed(entry.sensitivities)  # the first one stands
        }
        self._groups = {frozenset(group.sites): group for group in profile.groups}
        self._source = f"it holds {len(profile.sites)} sites of model {profile.model_digest[:12]}"

    @property
    def groups(self) -> tuple[frozenset[str], ...]:
        """Sites that share a quantized tensor, in the order of the profile."""
        return tuple(self._groups)

    def of_site(self, site: str, spec: OutputSpec) -> Sensitivity:
        """What a site does to an output.

        Raises:
            PlanningError: It was not measured.
        """
        if (site, spec.name) not in self._found:
            raise self._unknown(f"site '{site}' and output '{spec.name}'")
        return self._found[site, spec.name]

    def of_group(self, sites: frozenset[str], spec: OutputSpec) -> Sensitivity:
        """What sites that were measured together do to an output.

        Raises:
            PlanningError: It was not measured.
        """
        try:
            return self._groups[sites].sensitivity(spec.name)
        except KeyError as error:
            names = ", ".join(f"'{name}'" for name in sorted(sites))
            raise self._unknown(f"the sites {names} together and output '{spec.name}'") from error

    def predicted(self, sites: Collection[str], spec: OutputSpec) -> float:
        """Sum of what sites cost: together where they were measured together, else each alone.

        Raises:
            PlanningError: One was not measured.
        """
        chosen = frozenset(sites)
        together = [group for group in self.groups if group <= chosen]
        alone = sorted(chosen.difference(*together))
        return fsum(
            [
                *(self.of_group(group, spec).kl_moments.value for group in together),
                *(self.of_site(name, spec).kl_moments.value for name in alone),
            ]
        )

    def is_measured(self, sites: frozenset[str]) -> bool:
        """Whether there is a measurement of exactly these sites, alone or together."""
        return len(sites) == 1 or sites in self._groups

    def of(self, sites: frozenset[str], risk: float) -> tuple[Cost, ...]:
        """Costs of sites on each output.

        Args:
            sites: One site, or several that share a quantized tensor.
            risk: That an interval does not hold; of sites that were not measured together, that the one of a
                site does not.

        Raises:
            PlanningError: They were not measured.
        """
        return tuple(self._cost(sites, spec, risk) for spec in self.outputs)

    def _cost(self, sites: frozenset[str], spec: OutputSpec, risk: float) -> Cost:
        if len(sites) == 1:
            (site,) = sites
            return self._of_one(self.of_site(site, spec), spec, risk)
        if sites in self._groups:
            return self._of_one(self.of_group(sites, spec), spec, risk)
        # The order of a sum must not depend on the order of a set.
        return _at_most([self._of_one(self.of_site(name, spec), spec, risk) for name in sorted(sites)])

    def _of_one(self, measured: Sensitivity, spec: OutputSpec, risk: float) -> Cost:
        kl = self._sampling.interval_of(measured.kl_moments, 1.0 - risk)
        draws, few = measured.draws, measured.kl_moments.is_carried_by_few
        if draws is None or draws.kl_growth <= 1.0:
            return Cost(spec, measured.denominator, kl, is_carried_by_few=few)
        grown = kl.scaled(draws.kl_growth)
        return Cost(spec, measured.denominator, grown, draws.count, is_carried_by_few=few)

    def _unknown(self, what: str) -> PlanningError:
        return PlanningError(
            f"the profile says nothing of {what}",
            evidence=self._source,
            remedy="calibrate this model with these outputs again",
        )


def _at_most(costs: Sequence[Cost]) -> Cost:
    """(Σ√KL)², end by end."""

    def bound(ends: Iterable[float]) -> float:
        return sum(sqrt(max(end, 0.0)) for end in ends) ** 2

    kl = replace(
        costs[0].kl,
        value=bound(cost.kl.value for cost in costs),
        lower=bound(cost.kl.lower for cost in costs),
        upper=bound(cost.kl.upper for cost in costs),
    )
    return replace(costs[0], kl=kl, draws=max(cost.draws for cost in costs), is_bound=True)
