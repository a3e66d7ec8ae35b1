"""The plans that follow from the verdicts (`judging`) and from what the user decided."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.ratio_moments import CONFIDENCE
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ConfigError
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.judging import judge
from loka_onnx.planning.scales import ScaleReader

_FP8_PLANS = ("fp8-all", "fp8-safe")


@dataclass(frozen=True)
class PlanOptions:
    """What the user decides about plans.

    Attributes:
        keep: Patterns of site names that stay in the base precision.
        force: Patterns of site names that run in FP8 whatever their verdict.
        base: Precision of everything that is not FP8.
        plans: Ids of the plans to make.
        confidence: Of the intervals that verdicts rest on, all of them together.
    """

    keep: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    base: Precision = Precision.BF16
    plans: tuple[str, ...] = ("fp32", "bf16", "fp8-all", "fp8-safe")
    confidence: float = CONFIDENCE


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


def open_verdicts(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    options: PlanOptions | None = None,
) -> tuple[str, ...]:
    """Sites whose verdict more rows could still change, in the model's order.

    Args:
        model: The model.
        profile: Its profile so far.
        outputs: Judged outputs with their budgets.
        options: What the user decided.

    Raises:
        ConfigError: A pattern names no site.
        PlanningError: The profile lacks a site of the model, or an output.
    """
    options = options or PlanOptions()
    kept = matching_sites(options.keep, model.sites, "plan.keep")
    judgements = judge(model.sites, kept, profile, outputs, options.confidence)
    return tuple(
        site.name
        for site in model.sites
        if site.name not in kept
        and (site.is_fp8_able or site.kind is SiteKind.NORM)
        and judgements[site.name].verdict is Verdict.UNDECIDED
    )


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
        self.scales = ScaleReader(model, profile)
        self.costs = Costs(profile, outputs)
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
        self.judgements = judge(model.sites, self.kept, profile, outputs, options.confidence)

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
        tried = self.costs.of_site(site.name, self.outputs[0]).recipe
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
        scales = self.scales.read(site, recipe)
        return Decision(site.name, Precision.FP8, recipe, verdict, reason, scales.activation, scales.other)

    def _recipe(self, site: Site) -> Recipe:
        """The recipe whose sensitivity was measured."""
        return self.recipes[self.costs.of_site(site.name, self.outputs[0]).recipe]

    def _predicted(self, chosen: set[str], spec: OutputSpec) -> float:
        """Sum of what the chosen sites cost, together where they were measured together."""
        together = [group for group in self.costs.groups if group <= chosen]
        alone = chosen.difference(*together)
        return sum(self.costs.of_group(group, spec).kl_moments.value for group in together) + sum(
            self.costs.of_site(name, spec).kl_moments.value for name in sorted(alone)
        )


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
