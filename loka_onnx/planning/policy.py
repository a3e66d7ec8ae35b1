"""Which sites are safe, and the plans that follow.

The null hypothesis is "unsafe". A linear site is safe when the upper end of its KL, relative to the FP32
loss, is inside its share of the budget for every judged output. Shares follow the floating-point operations:
a site may spend of the budget what it earns in arithmetic, so that a small site at the model's edge cannot
spend what the large ones need. The site that oversteps its share most leaves, what it was allowed goes to
those that stay, and so on until all that stay are inside. The shares sum to the budget less an allowance for
the labelled first-order term, which is judged on the whole plan (selection split), not site by site: one
site's labelled term has far more noise than its KL.

Errors of sites add: KL is quadratic in the logit change, and the changes of different sites are nearly
uncorrelated (docs/architecture.md, "Ideas and evidence").

A norm is safe in the base precision when its KL there is inside its part of an extra tenth, which norms have
of their own beside the products.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, isnan

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.sensitivity import Sensitivity
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ConfigError, PlanningError
from loka_onnx.planning.scales import ScaleReader

LABELLED_ALLOWANCE = 0.5
"""Part of the budget that is left to the labelled first-order term and to what selection adds to it."""
NORM_ALLOWANCE = 0.1
"""What all norms together may spend, as a part of what the products may."""


_FP8_PLANS = ("fp8-all", "fp8-safe")


@dataclass(frozen=True)
class PlanOptions:
    """What the user decides about plans.

    Attributes:
        keep: Patterns of site names that stay in the base precision.
        force: Patterns of site names that run in FP8 whatever their verdict.
        base: Precision of everything that is not FP8.
        plans: Ids of the plans to make.
    """

    keep: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    base: Precision = Precision.BF16
    plans: tuple[str, ...] = ("fp32", "bf16", "fp8-all", "fp8-safe")


def make_plans(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    recipes: Sequence[Recipe],
    options: PlanOptions | None = None,
) -> PlanSet:
    """Make every plan that was asked for.

    Args:
        model: The model after mods.
        profile: Its profile.
        outputs: Judged outputs with their budgets.
        recipes: Recipes that the profile holds.
        options: What the user decided.

    Raises:
        ConfigError: A pattern names no site, a site is kept and forced, or a plan id is unknown.
        PlanningError: The profile lacks a site of the model, or an output.
    """
    options = options or PlanOptions()
    planner = _Planner(model, profile, outputs, tuple(recipes), options)
    return PlanSet(tuple(planner.plan(plan_id) for plan_id in options.plans))


@dataclass(frozen=True)
class Judgement:
    """Verdict of one site under the recipe that it would run with."""

    verdict: Verdict
    reason: str


class _Measured:
    """Sensitivities of a profile by site and output."""

    def __init__(self, profile: Profile) -> None:
        self._found = {
            (entry.site, item.output): item
            for entry in profile.sites
            for item in reversed(entry.sensitivities)  # the first one stands
        }
        self._source = f"it holds {len(profile.sites)} sites of model {profile.model_digest[:12]}"

    def of(self, site: str, spec: OutputSpec) -> Sensitivity:
        """What a site does to an output.

        Raises:
            PlanningError: It was not measured.
        """
        if (site, spec.name) not in self._found:
            raise PlanningError(
                f"the profile says nothing of site '{site}' and output '{spec.name}'",
                evidence=self._source,
                remedy="calibrate this model with these outputs again",
            )
        return self._found[site, spec.name]

    def overstep(self, site: Site, share: float, outputs: Sequence[OutputSpec]) -> float:
        """Upper end of KL over what is allowed, where that is largest; inside at 1 or less."""
        return max(_ratio(self.of(site.name, spec).kl.upper, _allowed(share, spec)) for spec in outputs)


def _ratio(upper: float, allowed: float) -> float:
    if upper <= 0.0:
        return 0.0
    return upper / allowed if allowed > 0.0 and not isnan(upper) else inf


class _Planner:
    def __init__(
        self,
        model: ModelArtifact,
        profile: Profile,
        outputs: tuple[OutputSpec, ...],
        recipes: tuple[Recipe, ...],
        options: PlanOptions,
    ) -> None:
        self.model, self.profile, self.outputs, self.options = model, profile, outputs, options
        self.recipes = {recipe.id: recipe for recipe in recipes}
        self.scales = ScaleReader(model)
        self.measured = _Measured(profile)
        products = [site for site in model.sites if site.kind is not SiteKind.NORM]
        self.kept = matching_sites(options.keep, model.sites, "plan.keep")
        self.forced = matching_sites(options.force, products, "plan.force")
        both = sorted(set(self.kept) & set(self.forced))
        if both:
            raise ConfigError(
                f"site '{both[0]}' is both kept and forced",
                evidence=f"plan.keep has '{self.kept[both[0]]}', plan.force has '{self.forced[both[0]]}'",
                remedy="make one of the patterns narrower",
            )
        candidates = [s for s in model.sites if s.is_fp8_able and s.name not in self.kept]
        self.judgements = {
            **judge_products(model.sites, candidates, profile, outputs),
            **judge_norms(model.sites, profile, outputs),
        }

    def plan(self, plan_id: str) -> PrecisionPlan:
        """The plan of that id."""
        simple = {"fp32": Precision.FP32, "bf16": Precision.BF16, "fp16": Precision.FP16}
        if plan_id in simple:
            base = simple[plan_id]
            decisions = tuple(self._base_decision(site, base) for site in self.model.sites)
            return PrecisionPlan(plan_id, self.model.digest, base, decisions, {}, 0.0)
        if plan_id not in _FP8_PLANS:
            raise ConfigError(
                f"unknown plan '{plan_id}'",
                where="plan.plans",
                evidence=f"known are {', '.join((*simple, *_FP8_PLANS))}",
                remedy="remove it, or correct its name",
            )
        decisions = tuple(self._fp8_decision(site, plan_id) for site in self.model.sites)
        chosen = {d.site for d in decisions if d.precision is Precision.FP8}
        return PrecisionPlan(
            id=plan_id,
            model_digest=self.model.digest,
            base=self.options.base,
            decisions=decisions,
            predicted_kl={spec.name: self._predicted(chosen, spec) for spec in self.outputs},
            fp8_share=_flop_share(self.model, chosen),
        )

    # Decisions -------------------------------------------------------------------------------------

    def _base_decision(self, site: Site, base: Precision) -> Decision:
        if site.kind is SiteKind.NORM and base is not Precision.FP32:
            return self._norm_decision(site, base)
        return Decision(site.name, base, None, Verdict.NOT_JUDGED, f"the plan runs everything in {base}")

    def _norm_decision(self, site: Site, base: Precision) -> Decision:
        if site.name in self.kept:
            return Decision(
                site.name, Precision.FP32, None, Verdict.NOT_JUDGED, f"kept by '{self.kept[site.name]}'"
            )
        judgement = self.judgements[site.name]
        precision = base if judgement.verdict is Verdict.SAFE else Precision.FP32
        tried = self.measured.of(site.name, self.outputs[0]).recipe
        reason = judgement.reason if tried == base else f"{judgement.reason}; measured in {tried}"
        return Decision(site.name, precision, None, judgement.verdict, reason)

    def _fp8_decision(self, site: Site, plan_id: str) -> Decision:
        if site.kind is SiteKind.NORM:
            return self._norm_decision(site, self.options.base)
        recipe, judgement = self._recipe(site), self.judgements[site.name]
        if site.name in self.forced:
            reason = f"forced by '{self.forced[site.name]}'; {judgement.reason}"
            return self._quantized(site, recipe, judgement.verdict, reason)
        obstacle = self._obstacle(site, plan_id)
        if obstacle is not None:
            return Decision(
                site.name, self.options.base, None, judgement.verdict, f"{obstacle}{judgement.reason}"
            )
        return self._quantized(site, recipe, judgement.verdict, judgement.reason)

    def _obstacle(self, site: Site, plan_id: str) -> str | None:
        """Why a product does not run in FP8, to stand before its verdict; None when it does."""
        if site.name in self.kept:
            return f"kept in {self.options.base} by '{self.kept[site.name]}'; "
        if site.kind is SiteKind.INTERACTION:
            return "a product of two activations runs in FP8 only when forced; "
        if plan_id == "fp8-all":
            return None
        if not site.is_fp8_able:
            return f"K = {site.k}, N = {site.n}: FP8 kernels want both to be at least 16; "
        return None if self.judgements[site.name].verdict is Verdict.SAFE else ""

    def _quantized(self, site: Site, recipe: Recipe, verdict: Verdict, reason: str) -> Decision:
        scales = self.scales.read(site, self.profile.site(site.name), recipe)
        return Decision(site.name, Precision.FP8, recipe, verdict, reason, scales.activation, scales.other)

    def _recipe(self, site: Site) -> Recipe:
        """The recipe whose sensitivity was measured."""
        return self.recipes[self.measured.of(site.name, self.outputs[0]).recipe]

    def _predicted(self, chosen: set[str], spec: OutputSpec) -> float:
        return sum(self.measured.of(name, spec).kl.value for name in sorted(chosen))


def judge_products(
    sites: Sequence[Site], candidates: Sequence[Site], profile: Profile, outputs: tuple[OutputSpec, ...]
) -> dict[str, Judgement]:
    """Verdict of every matrix product.

    Args:
        sites: Sites of the model.
        candidates: Sites that compete for the budget.
        profile: Their profile.
        outputs: Judged outputs.

    Returns:
        By site. A product that does not compete is held against the share that it would have had from the
        start.
    """
    measured = _Measured(profile)
    staying = list(candidates)
    allowed: dict[str, float] = {}
    while staying:
        total = sum(site.flops_per_example for site in staying)
        shares = {site.name: site.flops_per_example / total for site in staying}
        allowed.update(shares)
        oversteps = {site.name: measured.overstep(site, shares[site.name], outputs) for site in staying}
        # The name settles ties, so that the order of the sites does not.
        worst = max(staying, key=lambda site: (oversteps[site.name], site.name))
        if oversteps[worst.name] <= 1.0:
            break
        staying.remove(worst)
    able = sum(site.flops_per_example for site in sites if site.is_fp8_able)
    for site in sites:
        if site.kind is not SiteKind.NORM and site.name not in allowed:
            whole = able if site.is_fp8_able else able + site.flops_per_example
            allowed[site.name] = site.flops_per_example / whole if whole else 0.0
    return {
        site.name: _judge(measured, site, allowed[site.name], outputs)
        for site in sites
        if site.kind is not SiteKind.NORM
    }


def judge_norms(
    sites: Sequence[Site], profile: Profile, outputs: tuple[OutputSpec, ...]
) -> dict[str, Judgement]:
    """Verdict of every norm in the base precision.

    Norms together may spend a tenth of what the products may, in equal parts.
    """
    measured = _Measured(profile)
    norms = [site for site in sites if site.kind is SiteKind.NORM]
    return {site.name: _judge(measured, site, NORM_ALLOWANCE / len(norms), outputs) for site in norms}


def _judge(measured: _Measured, site: Site, share: float, outputs: tuple[OutputSpec, ...]) -> Judgement:
    spec = max(outputs, key=lambda output: measured.overstep(site, share, (output,)))
    kl, allowed = measured.of(site.name, spec).kl, _allowed(share, spec)
    if kl.upper <= allowed:
        verdict, relation = Verdict.SAFE, "inside"
    elif kl.lower > allowed:
        verdict, relation = Verdict.UNSAFE, "beyond"
    else:
        verdict, relation = Verdict.UNDECIDED, "astride"
    reason = (
        f"KL {_percent(kl.value)} (95 % upper {_percent(kl.upper)}) of the loss of '{spec.name}', "
        f"{relation} its share {_percent(allowed)}"
    )
    return Judgement(verdict, reason)


def _allowed(share: float, spec: OutputSpec) -> float:
    return share * spec.budget * (1.0 - LABELLED_ALLOWANCE)


def _flop_share(model: ModelArtifact, chosen: set[str]) -> float:
    able = model.fp8_able_flops
    taken = sum(s.flops_per_example for s in model.sites if s.is_fp8_able and s.name in chosen)
    return taken / able if able else 0.0


def matching_sites(patterns: Sequence[str], sites: Sequence[Site], key: str) -> dict[str, str]:
    """Sites that a pattern matches, each with the pattern."""
    found: dict[str, str] = {}
    names = [site.name for site in sites]
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ConfigError(
                f"pattern '{pattern}' matches no site",
                where=key,
                evidence=f"the nearest of {len(names)} sites is '{near[0]}'"
                if near
                else "there are no sites",
                remedy="`loka-onnx export` lists the sites of a model",
            )
        found.update(dict.fromkeys(hits, pattern))
    return found


def _percent(value: float) -> str:
    return f"{100.0 * value:.3g} %"
