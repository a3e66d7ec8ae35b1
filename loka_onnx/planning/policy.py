"""Make plans from the verdicts (`judging`) and the user's decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import CONFIDENCE
from loka_onnx.core.plan import (
    Climb,
    Decision,
    PlanSet,
    PrecisionPlan,
    Protection,
    SiteSpeed,
    Verdict,
    Wide,
    quantized_precision,
)
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ConfigError
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.planning.base import Base, Bases
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.fast import REFINEMENTS, FastSearch
from loka_onnx.planning.flops import able_share, share_of, useful_flops
from loka_onnx.planning.judging import judge
from loka_onnx.planning.ladder import Ladder
from loka_onnx.planning.patterns import named_places, nothing_left, wishes
from loka_onnx.planning.scales import ScaleReader
from loka_onnx.planning.search import Sites
from loka_onnx.planning.site_speed import DeviceTimings, SiteSpeeds

_QUANTIZED = tuple(f"{precision}-{which}" for precision in ("fp8", "int8") for which in ("all", "safe"))
FAST = "fp8-fast"
"""The plan that is made for each device by its kernel times."""
MATRIX = 2
"""Axes of a matrix."""


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
        devices: Kernel times of each device; one without any becomes a note and gets no plan `fp8-fast`.
        safe: The climbed rung, the sites of `fp8-safe` or `int8-safe`. None where nothing was judged jointly;
            that plan then rests on the bounds of single sites (`judging`).
    """

    keep: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    base: Precision | None = Precision.BF16
    plans: tuple[str, ...] = ("fp32", "bf16", "fp8-all", "fp8-safe")
    confidence: float = CONFIDENCE
    protect: tuple[Protection, ...] = (Protection.LOGITS,)
    exported: ModelArtifact | None = None
    devices: tuple[DeviceTimings, ...] = ()
    safe: Climb | None = None


@dataclass(frozen=True)
class LadderStart:
    """Ladder that a safe plan is climbed on, its nested rungs, and the plan with all its sites quantized."""

    ladder: Ladder
    rungs: tuple[frozenset[str], ...]
    plan: PrecisionPlan

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites on it."""
        return self.plan.quantized_sites


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
    planner = _Planner(model, profile, outputs, tuple(recipes), options)
    plans = tuple(plan for plan_id in options.plans for plan in planner.plans(plan_id))
    share = able_share(model, sum(planner.flops.values()))
    return PlanSet(plans, (*planner.notes, *planner.left_out), planner.speeds, share)


def start_ladder(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    recipes: Sequence[Recipe],
    options: PlanOptions,
    plan: PrecisionPlan | None = None,
) -> LadderStart:
    """Return the ladder over the sites that may be quantized, or over those of a plan.

    Kernel times of the plan's device order it; without a plan those of the first device that has any. Other
    arguments and errors are those of `make_plans`.
    """
    return _Planner(model, profile, outputs, tuple(recipes), options).start(plan)


def check_patterns(model: ModelArtifact, options: PlanOptions) -> None:
    """Refuse patterns that `make_plans` would refuse, without a profile.

    Raises ConfigError if a pattern matches nothing in this model nor in the exported one, or a site is kept
    and forced.
    """
    wishes(model, GraphModel.load(model.path), options.keep, options.force, options.exported)


def refine_fast_plans(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    recipes: Sequence[Recipe],
    options: PlanOptions,
) -> tuple[PrecisionPlan, ...]:
    """Return refinements of `fp8-fast` worth building and timing, the most informative first: ``fp8-fast-1``,
    ….

    Each toggles the sites of one tensor and is otherwise the best inside the budget (`search.neighbours`).
    Arguments and errors are those of `make_plans`.
    """
    planner = _Planner(model, profile, outputs, tuple(recipes), options)
    return tuple(plan for known in options.devices for plan in planner.refinements(known, REFINEMENTS))


def open_verdicts(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    options: PlanOptions | None = None,
) -> tuple[str, ...]:
    """Return the sites whose verdict more rows could still change, in the model's order.

    Raises ConfigError if a pattern matches nothing; PlanningError if the profile lacks a site of the model,
    or an output.
    """
    options = options or PlanOptions()
    nodes = (node.name for node in GraphModel.load(model.path).nodes) if options.keep else ()
    kept = named_places(options.keep, model.sites, nodes, "plan.keep").sites
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
        self.precision = recipes[0].precision
        graph = self.graph = GraphModel.load(model.path)
        self.scales = ScaleReader(graph, profile)
        self.flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
        self.costs = Costs(profile, outputs)
        named, forced = wishes(model, graph, options.keep, options.force, options.exported)
        self.kept, self.forced = named.sites, forced.sites
        self.notes = (*nothing_left("plan.keep", named.nothing), *nothing_left("plan.force", forced.nothing))
        self.judgements = judge(model.sites, self.kept, profile, outputs, options.confidence)
        self.bases = Bases(graph, profile.tensors, options.protect, named.nodes, self.forced)
        self.left_out: list[str] = []

    def plans(self, plan_id: str) -> Iterator[PrecisionPlan]:
        """Yield the plans of that id: one, or of `FAST` one for each device on which it saves time."""
        if plan_id != FAST:
            yield self._plan_of(plan_id)
            return
        if not self.options.devices:
            self._leave_out("no device was named that it could be made for")
        for known in self.options.devices:
            if not known.timings:
                self._leave_out(f"no kernel timings for device {known.device}; run `loka-onnx tune`")
                continue
            search = self._searches[known.device]
            if search.note:
                self.left_out.append(f"plan {FAST}: {search.note}")
            if search.saves:
                yield self._fast_plan(self._fast_id(known.device), search, search.best)
            else:
                self._leave_out(search.why_nothing())

    def _leave_out(self, reason: str) -> None:
        self.left_out.append(f"plan {FAST} is left out: {reason}")

    def refinements(self, known: DeviceTimings, count: int) -> Iterator[PrecisionPlan]:
        """Yield numbered refinements for one device; none without kernel times of it."""
        if known.timings:
            search = self._searches[known.device]
            for number, chosen in enumerate(search.refinements(count), start=1):
                yield self._fast_plan(f"{self._fast_id(known.device)}-{number}", search, chosen)

    @property
    def speeds(self) -> tuple[SiteSpeed, ...]:
        """Savings at each site that could be quantized, on each device with kernel times."""
        return tuple(speeds.speed(site) for speeds in self._site_speeds.values() for site in speeds.sources)

    def start(self, plan: PrecisionPlan | None) -> LadderStart:
        """Return the ladder over the sites of a plan, or over all that may be quantized."""
        ladder = Ladder(self.model, self.profile, self.outputs, self.speeds, self.forced)
        timed = next((known.device for known in self.options.devices if known.timings), "")
        if plan is None:
            plan = self._quantized_plan(
                f"{self.precision}-safe", {site.name: self._kept_out(site) for site in self.model.sites}
            )
        return LadderStart(ladder, ladder.rungs(plan.quantized_sites, plan.device or timed), plan)

    def _plan_of(self, plan_id: str) -> PrecisionPlan:
        simple = {"fp32": Precision.FP32, "bf16": Precision.BF16, "fp16": Precision.FP16}
        if plan_id in simple:
            base = self.bases.fixed(simple[plan_id])
            return self._plan(plan_id, base, tuple(self._base_decision(s, base) for s in self.model.sites))
        if plan_id not in _QUANTIZED:
            raise ConfigError(
                f"E0707 unknown plan '{plan_id}'",
                where="plan.plans",
                evidence=f"known are {', '.join((*simple, *_QUANTIZED, FAST))}",
                remedy="remove it, or correct its name",
            )
        obstacles = {site.name: self._obstacle(site, plan_id) for site in self.model.sites}
        return self._quantized_plan(plan_id, obstacles)

    def _quantized_plan(self, plan_id: str, obstacles: Mapping[str, str | None]) -> PrecisionPlan:
        """Return the plan with every site quantized that has no obstacle."""
        climb = self.options.safe if plan_id.endswith("-safe") else None
        quantized = {s.name: self._quantized(s, climb) for s in self.model.sites if obstacles[s.name] is None}
        base = self._base_of(quantized)
        decisions = tuple(
            self._site_decision(s, quantized.get(s.name), obstacles[s.name], base) for s in self.model.sites
        )
        return self._plan(plan_id, base, decisions)

    def _base_of(self, quantized: Mapping[str, Decision]) -> Base:
        wanted = self.options.base
        return self.bases.chosen(quantized.values()) if wanted is None else self.bases.fixed(wanted)

    def _plan(self, plan_id: str, base: Base, decisions: tuple[Decision, ...]) -> PrecisionPlan:
        chosen = {d.site for d in decisions if d.precision.is_quantized}
        sites = {d.site for d in decisions}
        outputs = self.outputs if quantized_precision(plan_id) else ()
        return PrecisionPlan(
            id=plan_id,
            model_digest=self.model.digest,
            base=base.precision,
            decisions=decisions,
            predicted_kl={spec.name: self.costs.predicted(chosen, spec) for spec in outputs},
            fp8_share=share_of(chosen, self.flops),
            wide=tuple(Wide(node, reason) for node, reason in base.wide.items() if node not in sites),
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
        if not any(known.timings for known in self.options.devices):
            return {}
        base = self.options.base or Precision.BF16
        recipes = {site.name: self._recipe(site) for site in self.model.sites if site.is_fp8_able}
        return {
            known.device: SiteSpeeds(self.graph, self.model.sites, known, base, recipes)
            for known in self.options.devices
            if known.timings
        }

    @cached_property
    def _searches(self) -> dict[str, FastSearch]:
        decided = {*self.kept, *self.bases.protected, *self.forced}
        free = [name for name in self.flops if name not in decided]
        forced = tuple(site.name for site in self.model.sites if site.name in self.forced)
        risk = 1.0 - self.options.confidence
        return {
            device: FastSearch(
                [n for n in free if n not in self._fused(device)], forced, speeds, self.costs, risk
            )
            for device, speeds in self._site_speeds.items()
        }

    def _fused(self, device: str) -> Mapping[str, str]:
        """Return the sites that are faster inside a larger kernel, by name with that kernel's."""
        return next(known.fused for known in self.options.devices if known.device == device)

    def _fast_id(self, device: str) -> str:
        """Return `FAST`, with the device where there are several."""
        return FAST if len(self._site_speeds) == 1 else f"{FAST}-{device}"

    def _fast_plan(self, plan_id: str, search: FastSearch, chosen: Sites) -> PrecisionPlan:
        quantized = {
            site.name: self._chosen(site, search, chosen) for site in self.model.sites if site.name in chosen
        }
        base = self._base_of(quantized)
        decisions = tuple(
            self._site_decision(site, quantized.get(site.name), self._why_out(site, search, chosen), base)
            for site in self.model.sites
        )
        return replace(self._plan(plan_id, base, decisions), device=search.speeds.device)

    def _chosen(self, site: Site, search: FastSearch, chosen: Sites) -> Decision:
        decision, why = self._quantized(site), search.why_in(site.name, chosen)
        if site.name in self.forced:
            return replace(decision, reason=f"{decision.reason}; {why}")
        # Together with these sites it is inside the budget, whatever its verdict among all sites.
        return replace(decision, verdict=Verdict.SAFE, reason=why)

    def _why_out(self, site: Site, search: FastSearch, chosen: Sites) -> str:
        """Return why a site is not chosen, as a prefix of its verdict."""
        obstacle = self._obstacle(site, FAST)
        if obstacle or site.name not in self.flops or site.name in self.kept:
            return obstacle or ""
        kernel = self._fused(search.speeds.device).get(site.name)
        if kernel is not None:
            return f"slow: FP8 would break up the kernel '{kernel}', which computes it with its neighbours; "
        return f"{search.why_out(site.name, chosen)}; "

    def _base_decision(self, site: Site, base: Base) -> Decision:
        if site.name in base.wide:
            return Decision(site.name, Precision.FP32, None, Verdict.NOT_JUDGED, base.wide[site.name])
        if site.kind is SiteKind.NORM and base.precision is not Precision.FP32:
            return self._norm_decision(site, base)
        reason = f"the plan runs everything in {base.precision}"
        return Decision(site.name, base.precision, None, Verdict.NOT_JUDGED, reason)

    def _norm_decision(self, site: Site, base: Base) -> Decision:
        if site.name in self.kept:
            return Decision(
                site.name, Precision.FP32, None, Verdict.NOT_JUDGED, f"kept by '{self.kept[site.name]}'"
            )
        judgement = self.judgements[site.name]
        precision = base.precision if judgement.verdict is Verdict.SAFE else Precision.FP32
        tried = self.costs.of_site(site.name, self.outputs[0]).recipe
        reason = judgement.reason if tried == base.precision else f"{judgement.reason}; measured in {tried}"
        return Decision(site.name, precision, None, judgement.verdict, reason)

    def _site_decision(
        self, site: Site, quantized: Decision | None, obstacle: str | None, base: Base
    ) -> Decision:
        if site.name in base.wide:
            return Decision(site.name, Precision.FP32, None, Verdict.NOT_JUDGED, base.wide[site.name])
        if site.kind is SiteKind.NORM:
            return self._norm_decision(site, base)
        if quantized is not None:
            return quantized
        judgement = self.judgements[site.name]
        if site.name in self.kept:
            obstacle = f"kept in {base.precision} by '{self.kept[site.name]}'; "
        return Decision(
            site.name, base.precision, None, judgement.verdict, f"{obstacle or ''}{judgement.reason}"
        )

    def _obstacle(self, site: Site, plan_id: str) -> str | None:
        """Return why a site is not quantized, as a prefix of its verdict; None when it is."""
        takes_all = plan_id.endswith("-all")
        kept_out = self._kept_out(site, takes_thin=takes_all)
        if kept_out is not None or takes_all or site.name in self.forced:
            return kept_out
        climb = self.options.safe if plan_id.endswith("-safe") else None
        if climb is None:
            return None if self.judgements[site.name].verdict is Verdict.SAFE else ""
        return None if site.name in climb.sites else f"{_beyond_rung(climb)}; "

    def _kept_out(self, site: Site, *, takes_thin: bool = False) -> str | None:
        """Return why a site may not be quantized whatever it costs, as a prefix of its verdict; None where it
        may.
        """
        name, no_integers = self.precision.upper(), self._no_integers(site)
        if no_integers or site.name in self.forced:
            return no_integers
        if site.kind is SiteKind.NORM or site.name in self.kept:
            return ""
        if site.name in self.bases.protected:
            return f"{self.bases.protected[site.name]}; "
        if site.kind is SiteKind.INTERACTION:
            return f"a product of two activations runs in {name} only when forced; "
        if not site.is_fp8_able and not takes_thin:
            return f"K = {site.k}, N = {site.n}: {name} kernels want both to be at least 16; "
        return None

    def _no_integers(self, site: Site) -> str | None:
        """Return why ONNX Runtime does not multiply a site in INT8, as a prefix; None where it does, and in
        FP8.
        """
        weight = site.weight
        if weight is None or self.precision is not Precision.INT8:
            return None
        if weight.index == 0 and site.op_type in {"MatMul", "Gemm"}:
            return "its weight is the left factor: no INT8 kernel has a scale for each of its rows; "
        axes = values_of(self.graph.node(site.name).inputs[weight.index]).ndim
        if axes > MATRIX and site.op_type == "MatMul":
            return f"its weight has {axes} axes: no INT8 kernel has a scale for each channel of it; "
        return None

    def _quantized(self, site: Site, climb: Climb | None = None) -> Decision:
        recipe, judgement = self._recipe(site), self.judgements[site.name]
        verdict, reason = judgement.verdict, judgement.reason
        if site.name in self.forced:
            reason = f"forced by '{self.forced[site.name]}'; {reason}"
        elif climb is not None:
            # Together with these sites it is inside the budget, whatever its verdict among all sites.
            verdict, reason = Verdict.SAFE, f"{_on_rung(climb)}; {reason}"
        decision = Decision(site.name, recipe.precision, recipe, verdict, reason)
        return self.scales.scaled(decision, site, recipe)

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


def _beyond_rung(climb: Climb) -> str:
    if climb.rung == 0:
        return "no rung of the ladder that was judged on the selection split fits"
    return f"above rung {climb.rung} of the ladder, the highest that certification is expected to pass"
