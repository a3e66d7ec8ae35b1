"""Costs of sites: their part of the budget, with bounds at the risk of a verdict; and their arithmetic.

Every cost is a KL over the loss (or entropy), with a two-sided interval that fails with a given risk; its
upper end alone fails with half of it. Where rows were added until verdicts were reached, the interval holds
at every number of rows (`Sampling.interval_of`).

**Noise seeds.** A profile measures sites under its own scales. But earlier sites of a plan move the input a
little, so each value falls elsewhere on the grid, and a later calibration moves the scales. Where perturbed
scales were measured, the interval is therefore multiplied by the largest KL of a noise seed over that of the
profile's own scales, on the same rows: the worst of several seeds, at every site at once.

**Sites that share a quantized tensor** and were measured together have a cost of their own (`SiteGroup`). Of
a subset only the single costs are known. With δ the change of the logit, KL ≈ ½E[p(1 − p)δ²] is the square of
a norm of δ, and to first order the changes add, so by the triangle inequality

    √KL(a and b) ≤ √KL(a) + √KL(b),

whatever the correlation of their errors. Such sites count (Σ√KL)². The bound is of first order only: a joint
KL of 2.7 times as much was constructed (two of δ = 2 at p = .002; 1.01 times at δ = .03). The joint
measurement decides, of rungs on the selection split (`climbing`) and of the engine on certification.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, isnan, sqrt

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.intervals import Interval
from loka_onnx.core.profile import Profile, Sensitivity
from loka_onnx.core.site import Site
from loka_onnx.errors import InternalError, PlanningError
from loka_onnx.graph.model import GraphModel, values_of

LABELLED_ALLOWANCE = 0.5
"""Part of the budget that is left to the labelled first-order term and to what selection adds to it."""


def allowed_kl(spec: OutputSpec) -> float:
    """Return the KL over the loss that an output allows to all products together."""
    return spec.budget * (1.0 - LABELLED_ALLOWANCE)


@dataclass(frozen=True)
class Cost:
    """KL of sites in low precision, on one output.

    `kl` is the worst of `draws` noise seeds, 0 if none is worse than the profile's own. `is_bound` if it is
    an upper bound from single sites. `is_carried_by_few` rows: then its upper end may be too low.
    """

    spec: OutputSpec
    denominator: str
    kl: Interval
    draws: int = 0
    is_bound: bool = False
    is_carried_by_few: bool = False

    @property
    def most(self) -> float:
        """Upper end, as a part of what the output allows; infinite where unknown."""
        return inf if isnan(self.kl.upper) else self._part(self.kl.upper)

    @property
    def least(self) -> float:
        """Lower end, as a part of what the output allows; 0 where unknown."""
        return 0.0 if isnan(self.kl.lower) else self._part(self.kl.lower)

    def _part(self, kl: float) -> float:
        if kl <= 0.0:
            return 0.0
        allowed = allowed_kl(self.spec)
        return kl / allowed if allowed > 0.0 else inf


class Costs:
    """Costs of sites and groups of a profile, on judged outputs."""

    def __init__(self, profile: Profile, outputs: Sequence[OutputSpec]) -> None:
        self.outputs = tuple(outputs)
        self._sampling = profile.sampling
        self._found = {
            (entry.site, item.output): item
            for entry in profile.sites
            for item in reversed(entry.sensitivities)  # the first one counts
        }
        self._groups = {frozenset(group.sites): group for group in profile.groups}
        self._source = f"it holds {len(profile.sites)} sites of model {profile.model_digest[:12]}"

    @property
    def groups(self) -> tuple[frozenset[str], ...]:
        """Sites that share a quantized tensor, in the order of the profile."""
        return tuple(self._groups)

    def of_site(self, site: str, spec: OutputSpec) -> Sensitivity:
        """Return the effect of a site on an output; raises PlanningError if it was not measured."""
        if (site, spec.name) not in self._found:
            raise self._unknown(f"site '{site}' and output '{spec.name}'")
        return self._found[site, spec.name]

    def of_group(self, sites: frozenset[str], spec: OutputSpec) -> Sensitivity:
        """Return the effect of sites measured together on an output; PlanningError if they were not."""
        try:
            return self._groups[sites].sensitivity(spec.name)
        except KeyError as error:
            names = ", ".join(f"'{name}'" for name in sorted(sites))
            raise self._unknown(f"the sites {names} together and output '{spec.name}'") from error

    def predicted(self, sites: Collection[str], spec: OutputSpec) -> float:
        """Return the sum of costs, of groups measured together, else of sites; PlanningError without one."""
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
        """True if exactly these sites were measured, alone or together."""
        return len(sites) == 1 or sites in self._groups

    def of(self, sites: frozenset[str], risk: float) -> tuple[Cost, ...]:
        """Return the cost on each output of one site, or of several that share a quantized tensor.

        `risk` is that an interval fails; of sites not measured together, that the interval of one site fails.
        PlanningError if they were not measured.
        """
        return tuple(self._cost(sites, spec, risk) for spec in self.outputs)

    def _cost(self, sites: frozenset[str], spec: OutputSpec, risk: float) -> Cost:
        if not self.is_measured(sites):
            # The order of a sum must not depend on the order of a set.
            return _at_most([self._cost(frozenset({name}), spec, risk) for name in sorted(sites)])
        measured = self.of_group(sites, spec) if len(sites) > 1 else self.of_site(next(iter(sites)), spec)
        kl = self._sampling.interval_of(measured.kl_moments, 1.0 - risk)
        draws, few = measured.draws, measured.kl_moments.is_carried_by_few
        if draws is None or draws.kl_growth <= 1.0:
            return Cost(spec, measured.denominator, kl, is_carried_by_few=few)
        grown = kl.scaled(draws.kl_growth)
        return Cost(spec, measured.denominator, grown, draws.count, is_carried_by_few=few)

    def _unknown(self, what: str) -> PlanningError:
        return PlanningError(
            f"E0704 the profile says nothing of {what}",
            evidence=self._source,
            remedy="calibrate this model with these outputs again",
        )


def _at_most(costs: Sequence[Cost]) -> Cost:
    """Return (Σ√KL)², end by end."""

    def bound(*ends: float) -> float:
        return sum(sqrt(max(end, 0.0)) for end in ends) ** 2

    value, lower, upper = map(bound, *((cost.kl.value, cost.kl.lower, cost.kl.upper) for cost in costs))
    kl = replace(costs[0].kl, value=value, lower=lower, upper=upper)
    return replace(costs[0], kl=kl, draws=max(cost.draws for cost in costs), is_bound=True)


def useful_flops(graph: GraphModel, site: Site) -> int:
    """Return 2·M·N·K of one example without zero rows and columns of the weight, which mods add."""
    if site.weight is None:
        raise InternalError(f"site '{site.name}' has no weight")
    used = values_of(graph.node(site.name).inputs[site.weight.index]) != 0
    # K and N are the last two axes of a weight, in either order.
    return round(site.flops_per_example * float(used.any(axis=-1).mean()) * float(used.any(axis=-2).mean()))


def share_of(sites: Iterable[str], flops: Mapping[str, int]) -> float:
    """Return the part of the FP8-able operations that sites make."""
    able = sum(flops.values())
    return sum(flops.get(site, 0) for site in sites) / able if able else 0.0


def able_share(model: ModelArtifact, useful: int) -> float:
    """Return the part of all products' operations, sites or not, made by FP8-able sites (`useful`)."""
    others = model.product_flops - model.fp8_able_flops
    return useful / (useful + others) if useful else 0.0
