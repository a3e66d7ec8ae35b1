"""Make plans from the verdicts (`judging`) and the user's decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import CONFIDENCE
from loka_onnx.core.plan import (
    MIXED,
    Climb,
    Climbs,
    Decision,
    PlanSet,
    PrecisionPlan,
    Protection,
    SiteSpeed,
    Verdict,
    plan_kind,
    quantized_precisions,
)
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.base import UNTOUCHED, Base, Bases, untouched_plan, with_scales
from loka_onnx.planning.costs import Costs, able_share, allowed_kl, share_of, useful_flops
from loka_onnx.planning.judging import judge_sites, percent
from loka_onnx.planning.ladder import Ladder
from loka_onnx.planning.mixing import Mixture, mix_formats, why_no_integers
from loka_onnx.planning.patterns import nothing_left, wishes
from loka_onnx.planning.search import FastSearch, Sites
from loka_onnx.planning.site_speed import DeviceTimings, SiteSpeeds

_QUANTIZED = ("fp8-all", "fp8-safe", "int8-all", "int8-safe", MIXED)
FAST = "fast"
"""Last word of the ids of plans that are made for each device by its kernel times."""


@dataclass(frozen=True)
class PlanOptions:
    """Decisions of the user about plans.

    Attributes:
        keep: Patterns (`planning.patterns`) of products that stay in the base precision, of norms that stay
            in FP32, and of other nodes that do; a pattern that matches a site matches no other node.
        force: Patterns of products that are quantized whatever their verdict, unless FP16 would overflow.
        base: Precision of everything not quantized; None for FP16 where the profile shows that it fits, else
            BF16.
        plans: Ids of the plans to make.
        confidence: Of all intervals of verdicts together.
        protect: Parts that stay in FP32 in a BF16 or FP16 plan without being named.
        exported: The model before mods, for which the patterns were written; a pattern that matches only
            there becomes a note. None where plans are made for that model itself.
        devices: Kernel times of each device; one without any becomes a note and gets no fast plan.
        safe: The climbed rungs, the sites of `fp8-safe`, `int8-safe` and `mixed`. A plan without one, as
            nothing was judged jointly, rests on the bounds of single sites (`judging`).
    """

    keep: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    base: Precision | None = Precision.BF16
    plans: tuple[str, ...] = ("fp32", "bf16", "fp8-all", "fp8-safe")
    confidence: float = CONFIDENCE
    protect: tuple[Protection, ...] = (Protection.LOGITS,)
    exported: ModelArtifact | None = None
    devices: tuple[DeviceTimings, ...] = ()
    safe: Climbs = field(default_factory=Climbs)


@dataclass(frozen=True)
class LadderStart:
    """Ladder that a safe plan is climbed on, its nested rungs, and the plan with all its sites quantized."""

    ladder: Ladder
    rungs: tuple[frozenset[str], ...]
    plan: PrecisionPlan


def make_plans(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    recipes: Sequence[Recipe],
    options: PlanOptions | None = None,
) -> PlanSet:
    """Make every requested plan for the model after mods.

    Raises ConfigError if a pattern matches nothing in this model nor in the exported one, a site is kept and
    forced, or a plan id is unknown; PlanningError if the profile lacks a site of the model, an output, or
    magnitudes for FP16.
    """
    options = options or PlanOptions()
    kinds: list[str] = [*dict.fromkeys(recipe.precision for recipe in recipes)]
    kinds += [MIXED] if MIXED in options.plans else []
    planners = {kind: Planner(model, profile, outputs, recipes, options, kind) for kind in kinds}
    # Plans in high precision are the same for each.
    first = next(iter(planners.values()))
    makers = ((name, planners.get(plan_kind(name), first)) for name in options.plans)
    plans = tuple(plan for name, planner in makers for plan in planner.plans(name))
    notes = dict.fromkeys(note for planner in planners.values() for note in planner.notes)
    speeds = tuple(speed for kind, of in planners.items() if kind != MIXED for speed in of.speeds)
    share = able_share(model, sum(first.flops.values()))
    return PlanSet(_compared(plans, planners), tuple(notes), speeds, share)


def _compared(plans: Sequence[PrecisionPlan], planners: Mapping[str, Planner]) -> tuple[PrecisionPlan, ...]:
    """Add to the reasons of sites out of one safe plan and in another by how much the two formats differ."""
    safe = [plan for plan in plans if plan.id.endswith("-safe")]

    def compared(decision: Decision, plan: PrecisionPlan) -> Decision:
        ours = Precision(plan_kind(plan.id))
        for other in safe:
            there = other.decision(decision.site).precision
            if decision.precision.is_quantized or not there.is_quantized:
                continue
            kl, kl_there = (percent(planners[each].kl_of(decision.site)) for each in (ours, there))
            words = f"{there.upper()}, with a KL of {kl_there} against {kl} in {ours.upper()}"
            return replace(decision, reason=f"{decision.reason}; plan '{other.id}' has it in {words}")
        return decision

    return tuple(
        replace(plan, decisions=tuple(compared(decision, plan) for decision in plan.decisions))
        if plan in safe and len(safe) > 1
        else plan
        for plan in plans
    )


def check_patterns(model: ModelArtifact, options: PlanOptions) -> None:
    """Refuse the patterns that `make_plans` would refuse, without a profile; raises ConfigError."""
    wishes(model, GraphModel.load(model.path), options.keep, options.force, options.exported)


def open_verdicts(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    confidence: float = CONFIDENCE,
) -> tuple[str, ...]:
    """Return products and norms that are UNDECIDED in some precision of a profile, in the model's order.

    More rows may decide them. `confidence` is joint over the intervals of one precision.
    """
    in_each = [
        judge_sites(model.sites, (), profile.of(precision), outputs, confidence)
        for precision in profile.precisions
    ]
    return tuple(
        site.name
        for site in model.sites
        if (site.is_fp8_able or site.kind is SiteKind.NORM)
        and any(judgements[site.name].verdict is Verdict.UNDECIDED for judgements in in_each)
    )


class Planner:
    """Makes plans of one model, `MIXED` or in the first recipe's precision; arguments as of `make_plans`."""

    def __init__(
        self,
        model: ModelArtifact,
        profile: Profile,
        outputs: tuple[OutputSpec, ...],
        recipes: Sequence[Recipe],
        options: PlanOptions,
        kind: str = "",
    ) -> None:
        self.model, self.outputs, self.options = model, outputs, options
        self.kind = kind or recipes[0].precision
        precisions = quantized_precisions(self.kind)
        self.recipes = {recipe.id: recipe for recipe in recipes if recipe.precision in precisions}
        graph = self.graph = GraphModel.load(model.path)
        self.mixture = Mixture(dict.fromkeys((site.name for site in model.sites), precisions[0]), {})
        if self.kind == MIXED:
            each = {p: Planner(model, profile, outputs, recipes, options, p) for p in precisions}
            costs = {precision: planner.costs for precision, planner in each.items()}
            timed = [planner._site_speeds for planner in each.values()]
            shared = next((device for device in timed[0] if all(device in of for of in timed)), None)
            speeds = {} if shared is None else {p: of._site_speeds[shared] for p, of in each.items()}
            self.mixture = mix_formats(graph, model.sites, outputs, costs, speeds)
        profile = self.profile = profile.of(self.mixture.formats)
        self.flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
        self.costs: Costs = Costs(profile, outputs)
        named, forced = wishes(model, graph, options.keep, options.force, options.exported)
        self.kept, self.forced = named.sites, forced.sites
        self.notes = [*nothing_left("plan.keep", named.nothing), *nothing_left("plan.force", forced.nothing)]
        self.judgements = judge_sites(model.sites, self.kept, profile, outputs, options.confidence)
        self.bases = Bases(graph, profile.tensors, options.protect, named.nodes, self.forced)

    def plans(self, plan_id: str) -> Iterator[PrecisionPlan]:
        """Yield the plan of that id, or a fast plan for each device where it saves time; others are notes."""
        if plan_id != self._fast:
            yield from self._unless_of_one_format(self._plan_of(plan_id))
            return
        if not self.options.devices:
            self._leave_out("no device was named that it could be made for")
        for known in self.options.devices:
            if known.device not in self._searches:
                of = "" if self.kind == Precision.FP8 else f" in {self.kind.upper()}"
                self._leave_out(f"no kernel timings for device {known.device}{of}; run `loka-onnx tune`")
                continue
            search = self._searches[known.device]
            if search.note:
                self.notes.append(f"plan {self._fast}: {search.note}")
            if search.saves:
                plan = self._fast_plan(self._fast_id(known.device), search, search.best)
                yield from self._unless_of_one_format(plan)
            else:
                self._leave_out(search.why_nothing())

    def _unless_of_one_format(self, plan: PrecisionPlan) -> Iterator[PrecisionPlan]:
        if plan_kind(plan.id) == MIXED and plan.kind != MIXED:
            only = plan.kind.upper() or "none of both"
            self.notes.append(f"plan {MIXED} is left out: it would have sites in {only} alone")
        else:
            yield plan

    @property
    def has_ladder(self) -> bool:
        """True if a ladder chooses the sites of the safe or mixed plan; False where kernel times do."""
        return self._fast != MIXED

    def kl_of(self, site: str) -> float:
        """Return the KL of a site over the loss, on the output where it takes most of what is allowed."""
        kls = {spec: self.costs.predicted((site,), spec) for spec in self.outputs}
        return kls[max(kls, key=lambda spec: kls[spec] / (allowed_kl(spec) or 1.0))]

    def _leave_out(self, reason: str) -> None:
        self.notes.append(f"plan {self._fast} is left out: {reason}")

    def refinements(self) -> tuple[PrecisionPlan, ...]:
        """Return refinements (`search.neighbours`) of the fast plan, ``fp8-fast-1``…, best first."""
        return tuple(
            self._fast_plan(f"{self._fast_id(device)}-{number}", search, chosen)
            for device, search in self._searches.items()
            for number, chosen in enumerate(search.refinements(), start=1)
        )

    @property
    def speeds(self) -> tuple[SiteSpeed, ...]:
        """Savings at each site that could be quantized, on each device with kernel times."""
        return tuple(speeds.speed(site) for speeds in self._site_speeds.values() for site in speeds.sources)

    def start_ladder(self, plan: PrecisionPlan | None = None) -> LadderStart:
        """Return the ladder over the sites of a plan, or over all sites that may be quantized.

        Kernel times of the plan's device order it; without a plan those of the first device that has any.
        """
        if plan is None:
            obstacles = {site.name: self._kept_out(site) for site in self.model.sites}
            plan = self._quantized_plan(MIXED if self.kind == MIXED else f"{self.kind}-safe", obstacles)
        ladder = Ladder(self.model, self.profile, self.outputs, self.speeds, self.forced)
        device = plan.device or next(iter(self._site_speeds), "")
        return LadderStart(ladder, ladder.rungs(plan.quantized_sites, device), plan)

    def _plan_of(self, plan_id: str) -> PrecisionPlan:
        options = self.options
        if plan_id == UNTOUCHED:
            exported = options.exported or self.model
            return untouched_plan(exported, self.profile.tensors, options.keep, options.protect)
        simple = {"fp32": Precision.FP32, "bf16": Precision.BF16, "fp16": Precision.FP16}
        if plan_id in simple:
            base = self.bases.fixed(simple[plan_id])
            decisions = (self._decision(s, base, is_judged=False) for s in self.model.sites)
            return self._plan(plan_id, base, tuple(decisions))
        if plan_id not in _QUANTIZED:
            raise ConfigError(
                f"E0707 unknown plan '{plan_id}'",
                where="plan.plans",
                evidence=f"known are {', '.join((*simple, *_QUANTIZED, 'fp8-fast', 'int8-fast', UNTOUCHED))}",
                remedy="remove it, or correct its name",
            )
        obstacles = {site.name: self._obstacle(site, plan_id) for site in self.model.sites}
        return self._quantized_plan(plan_id, obstacles)

    def _climb(self, plan_id: str) -> Climb | None:
        is_safe = plan_id == MIXED or plan_id.endswith("-safe")
        return self.options.safe.by_kind.get(self.kind) if is_safe else None

    def _quantized_plan(self, plan_id: str, obstacles: Mapping[str, str | None]) -> PrecisionPlan:
        """Return the plan with every site quantized that has no obstacle."""
        climb = self._climb(plan_id)
        quantized = {s.name: self._quantized(s, climb) for s in self.model.sites if obstacles[s.name] is None}
        return self._judged_plan(plan_id, quantized, obstacles)

    def _judged_plan(
        self, plan_id: str, quantized: Mapping[str, Decision], obstacles: Mapping[str, str | None]
    ) -> PrecisionPlan:
        wanted = self.options.base
        base = self.bases.chosen(quantized.values()) if wanted is None else self.bases.fixed(wanted)
        decisions = (
            self._decision(s, base, quantized.get(s.name), obstacles[s.name]) for s in self.model.sites
        )
        return self._plan(plan_id, base, tuple(decisions))

    def _plan(self, plan_id: str, base: Base, decisions: tuple[Decision, ...]) -> PrecisionPlan:
        chosen = {d.site for d in decisions if d.precision.is_quantized}
        outputs = self.outputs if quantized_precisions(plan_id) else ()
        return PrecisionPlan(
            id=plan_id,
            model_digest=self.model.digest,
            base=base.precision,
            decisions=decisions,
            predicted_kl={spec.name: self.costs.predicted(chosen, spec) for spec in outputs},
            fp8_share=share_of(chosen, self.flops),
            wide=base.other_nodes({d.site for d in decisions}),
            base_reason=base.reason,
            predicted_us={
                device: predicted
                for device, speeds in self._site_speeds.items()
                if (predicted := speeds.predicted_us(base.precision, decisions))
            },
            breaks_up={
                device: broken
                for device, speeds in self._site_speeds.items()
                if (broken := speeds.broken_up(decisions))
            },
        )

    @cached_property
    def _site_speeds(self) -> dict[str, SiteSpeeds]:
        precisions = quantized_precisions(self.kind)
        timed = [d for d in self.options.devices if all(d.times(precision) for precision in precisions)]
        # Kernel times compare eight bits with the base.
        base = self.options.base or Precision.BF16
        able = [site for site in self.model.sites if site.is_fp8_able] if timed else []
        recipes = {site.name: self._recipe(site) for site in able}
        return {d.device: SiteSpeeds(self.graph, self.model.sites, d, base, recipes) for d in timed}

    @cached_property
    def _searches(self) -> dict[str, FastSearch]:
        decided = {*self.kept, *self.bases.protected, *self.forced}
        free = [name for name in self.flops if name not in decided]
        forced = tuple(site.name for site in self.model.sites if site.name in self.forced)
        risk = 1.0 - self.options.confidence
        return {
            device: FastSearch([n for n in free if n not in speeds.fused], forced, speeds, self.costs, risk)
            for device, speeds in self._site_speeds.items()
        }

    def _fast_id(self, device: str) -> str:
        """Return the id of the fast plan, with the device where there are several."""
        return self._fast if len(self._site_speeds) == 1 else f"{self._fast}-{device}"

    @property
    def _fast(self) -> str:
        return MIXED if self.kind == MIXED and self._site_speeds else f"{self.kind}-{FAST}"

    def _fast_plan(self, plan_id: str, search: FastSearch, chosen: Sites) -> PrecisionPlan:
        sites = self.model.sites
        quantized = {s.name: self._chosen(s, search, chosen) for s in sites if s.name in chosen}
        why_out = {s.name: self._why_out(s, search, chosen) for s in sites}
        return replace(self._judged_plan(plan_id, quantized, why_out), device=search.speeds.device)

    def _chosen(self, site: Site, search: FastSearch, chosen: Sites) -> Decision:
        decision, why = self._quantized(site), search.why_in(site.name, chosen)
        if site.name in self.forced:
            return replace(decision, reason=f"{decision.reason}; {why}")
        # Together with these sites it is inside the budget, whatever its verdict among all sites.
        return replace(decision, verdict=Verdict.SAFE, reason=why)

    def _why_out(self, site: Site, search: FastSearch, chosen: Sites) -> str:
        """Return why a site is not chosen, as a prefix of its verdict."""
        obstacle = self._obstacle(site, self._fast)
        if obstacle or site.name not in self.flops or site.name in self.kept:
            return obstacle or ""
        kernel = search.speeds.fused.get(site.name)
        if kernel is not None:
            name = self.mixture.formats[site.name].upper()
            return (
                f"slow: {name} would break up the kernel '{kernel}', which computes it with its neighbours; "
            )
        return f"{search.why_out(site.name, chosen)}; "

    def _decision(
        self,
        site: Site,
        base: Base,
        quantized: Decision | None = None,
        obstacle: str | None = None,
        *,
        is_judged: bool = True,
    ) -> Decision:
        """Return a site's decision, `quantized` or in the base; plans in high precision judge norms only."""
        name, precision = site.name, base.precision
        is_norm = site.kind is SiteKind.NORM and (is_judged or precision is not Precision.FP32)
        if name in base.wide or not (is_norm or is_judged):
            return base.decide(name, f"the plan runs everything in {precision}")
        if is_norm:
            return self._norm_decision(name, precision)
        if quantized is not None:
            return quantized
        judgement = self.judgements[name]
        if name in self.kept:
            obstacle = f"kept in {precision} by '{self.kept[name]}'; "
        reason = f"{obstacle or ''}{judgement.reason}{self._why_format(name)}"
        return Decision(name, precision, None, judgement.verdict, reason)

    def _why_format(self, site: str) -> str:
        """Return which format a site has, or would have, in a mixed plan, and which lost by how much."""
        why = self.mixture.reasons.get(site)
        return f"; {why}" if why else ""

    def _norm_decision(self, name: str, base: Precision) -> Decision:
        if name in self.kept:
            return Decision(name, Precision.FP32, None, Verdict.NOT_JUDGED, f"kept by '{self.kept[name]}'")
        judgement = self.judgements[name]
        tried = self.costs.of_site(name, self.outputs[0]).recipe
        reason = judgement.reason if tried == base else f"{judgement.reason}; measured in {tried}"
        precision = base if judgement.verdict is Verdict.SAFE else Precision.FP32
        return Decision(name, precision, None, judgement.verdict, reason)

    def _obstacle(self, site: Site, plan_id: str) -> str | None:
        """Return why a site is not quantized, as a prefix of its verdict; None when it is."""
        takes_all = plan_id.endswith("-all")
        kept_out = self._kept_out(site, takes_thin=takes_all)
        if kept_out is not None or takes_all or site.name in self.forced:
            return kept_out
        climb = self._climb(plan_id)
        if climb is None:
            return None if self.judgements[site.name].verdict is Verdict.SAFE else ""
        if site.name in climb.sites:
            return None
        if climb.rung == 0:
            return "no rung of the ladder that was judged on the selection split fits; "
        return f"above rung {climb.rung} of the ladder, the highest that certification is expected to pass; "

    def _kept_out(self, site: Site, *, takes_thin: bool = False) -> str | None:
        """Return why a site may not be quantized whatever it costs, as a prefix; None where it may."""
        precision = self.mixture.formats.get(site.name, Precision.FP8)
        no_integers = why_no_integers(self.graph, site) if precision is Precision.INT8 else ""
        if no_integers or site.name in self.forced:
            return no_integers or None
        name = precision.upper()
        if site.kind is SiteKind.NORM or site.name in self.kept:
            return ""
        if site.name in self.bases.protected:
            return f"{self.bases.protected[site.name]}; "
        if site.kind is SiteKind.INTERACTION:
            return f"a product of two activations runs in {name} only when forced; "
        if not site.is_fp8_able and not takes_thin:
            return f"K = {site.k}, N = {site.n}: {name} kernels want both to be at least 16; "
        return None

    def _quantized(self, site: Site, climb: Climb | None = None) -> Decision:
        recipe, judgement = self._recipe(site), self.judgements[site.name]
        verdict, reason = judgement.verdict, judgement.reason
        if site.name in self.forced:
            reason = f"forced by '{self.forced[site.name]}'; {reason}"
        elif climb is not None:
            # Together with these sites it is inside the budget, whatever its verdict among all sites.
            verdict, reason = Verdict.SAFE, f"{_on_rung(climb)}; {reason}"
        reason += self._why_format(site.name)
        decision = Decision(site.name, recipe.precision, recipe, verdict, reason)
        return with_scales(decision, site, recipe, self.graph, self.profile)

    def _recipe(self, site: Site) -> Recipe:
        return self.recipes[self.costs.of_site(site.name, self.outputs[0]).recipe]


def _on_rung(climb: Climb) -> str:
    """Return why a site of the taken rung is quantized."""
    taken = climb.taken
    if taken is None or taken.change is None:
        return f"on rung {climb.rung} of the ladder"
    return (
        f"on rung {climb.rung} of the ladder, whose {taken.sites} sites together change the loss of "
        f"'{taken.output}' by at most {100.0 * taken.change.upper:.3g} % on selection rows, in simulation"
    )
