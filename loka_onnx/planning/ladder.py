"""The ladder of plans: nested sets of quantized sites, climbed and descended by measurements.

Sites are ordered once, by KL per microsecond saved, or per operation where no kernel times are known; rung k
has the first k of them. No label decides the order. Where times are known, sites that read one quantized
tensor share its quantize step and stay together. A site whose KL alone exceeds the budget stands last.

The cost of sites together is expected to be the sum of single costs, to first order: a starting point, and
the joint measurement decides (`climbing`).

**From one rung to another.** On each output the KL of a rung and the upper bound U of the judged change were
measured. With f the part of the predicted KL that another rung has, the logit change is √f times as large: KL
is quadratic in it, and the rest of U (the labelled first-order term, and the half width of the interval) is
linear in it. So the expected upper bound is

    U(f) = KL·f + (U − KL)·√f.

A plan whose engine misses the budget reverts sites from the top of its ladder until U(f) is inside the
budget, with some room, on every output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import fsum, inf, sqrt

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.evaluation import Evaluation
from loka_onnx.core.plan import Decision, PrecisionPlan, SiteSpeed
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import Returned
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.costs import Costs, allowed_kl, share_of, useful_flops
from loka_onnx.planning.judging import Unit, units_of

ROOM = 0.9
"""Part of the budget that the expected upper bound may take: it is an estimate, and selection favours what it
happens to find good."""


@dataclass(frozen=True)
class Reverted:
    """A plan, under its original id, less some quantized sites, `returned` in the order of reverting."""

    plan: PrecisionPlan
    returned: tuple[Returned, ...]


class Ladder:
    """Costs and savings of a model's sites, and their order; `forced` sites stay quantized at any cost."""

    def __init__(
        self,
        model: ModelArtifact,
        profile: Profile,
        outputs: Sequence[OutputSpec],
        speeds: Sequence[SiteSpeed],
        forced: Collection[str] = (),
    ) -> None:
        graph = GraphModel.load(model.path)
        self.outputs = {spec.name: spec for spec in outputs}
        self._costs = Costs(profile, outputs)
        self._flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
        self._speeds, self._forced = tuple(speeds), frozenset(forced)

    def revert_sites(self, plan: PrecisionPlan, evaluation: Evaluation, device: str) -> Reverted | None:
        """Return the plan with the fewest sites reverted that should bring its engine inside the budget.

        `evaluation` is the engine's on the selection split. None where no quantized site would be left, or
        nothing is expected to help.
        """
        sites = plan.quantized_sites
        *lower, top = self.rungs(sites, device)

        def fits(rung: Unit) -> bool:
            for output in evaluation.outputs:
                if output.difference is not None:
                    part, kl = self.part(rung, top, output.output), max(output.difference.kl.value, 0.0)
                    expected = kl * part + (output.difference.judged.upper - kl) * sqrt(max(part, 0.0))
                    if expected > ROOM * output.budget:
                        return False
            return True

        left = next((rung for rung in reversed(lower) if rung and fits(rung)), None)
        if left is None:
            return None
        gone = [unit for unit in reversed(self._ordered(sites, device)) if not unit <= left]
        returned = tuple(
            Returned(tuple(sorted(unit)), self._cost(unit), self._saved_us(unit, sites, device))
            for unit in gone
        )
        return Reverted(self.plan_of(plan, left, device), returned)

    def rungs(self, sites: Collection[str], device: str = "") -> tuple[Unit, ...]:
        """Return nested sets of sites, ascending: the forced ones, then one more unit each."""
        lowest = Unit(self._forced.intersection(sites))
        return tuple(accumulate(self._ordered(sites, device), Unit.union, initial=lowest))

    def part(self, rung: Unit, other: Unit, output: str) -> float:
        """Return the predicted KL of a rung over that of another one; 0 where the other costs nothing."""
        whole = self._kl_of(other, output)
        return self._kl_of(rung, output) / whole if whole > 0.0 else 0.0

    def predicted_kl(self, sites: Collection[str]) -> dict[str, float]:
        """Return the expected KL over the loss of sites together, by output."""
        return {name: self._kl_of(sites, name) for name in self.outputs}

    def share(self, sites: Collection[str]) -> float:
        """Return the part of the FP8-able floating-point operations that sites make."""
        return share_of(sites, self._flops)

    def _ordered(self, sites: Collection[str], device: str) -> list[Unit]:
        """Return units that are not forced, the cheapest first."""
        free = [site for site in sites if site not in self._forced]
        # Without kernel times nothing is shared: each site counts its own operations.
        units = units_of(free, self._costs.groups if self._is_timed(device) else ())

        def order(unit: Unit) -> tuple[bool, float, float, list[str]]:
            # A unit that alone costs the whole budget of an output comes last.
            return (
                any(self._kl_of(unit, name) >= spec.budget for name, spec in self.outputs.items()),
                self._rate(unit, sites, device),
                self._rate(unit, sites, ""),
                sorted(unit),
            )

        return sorted(units, key=order)

    def _rate(self, unit: Unit, sites: Collection[str], device: str) -> float:
        """Return the cost per microsecond saved beside the others; per operation without kernel times."""
        saved = self._saved_us(unit, sites, device)
        if not self._is_timed(device):
            saved = float(fsum(self._flops.get(site, 0) for site in sorted(unit)))
        return self._cost(unit) / saved if saved is not None and saved > 0.0 else inf

    def _cost(self, unit: Unit) -> float:
        return max(
            self._kl_of(unit, name) / allowed_kl(spec) if spec.budget > 0.0 else inf
            for name, spec in self.outputs.items()
        )

    def _kl_of(self, sites: Collection[str], output: str) -> float:
        """Return the predicted KL of sites, together where they were measured together."""
        return self._costs.predicted(sites, self.outputs[output])

    def _on(self, device: str) -> list[SiteSpeed]:
        return [speed for speed in self._speeds if speed.device == device]

    def _is_timed(self, device: str) -> bool:
        return any(speed.saved_us for speed in self._on(device))

    def _saved_us(self, unit: Unit, sites: Collection[str], device: str) -> float | None:
        """Return microseconds per row that a unit saves, its quantize steps counted, a mean over batches."""
        known = self._on(device)
        left = set(sites) - unit
        batches = dict.fromkeys(batch for speed in known if speed.site in unit for batch in speed.saved_us)
        if not batches:
            return None
        saved = ((_quantized_us(known, left, b) - _quantized_us(known, sites, b)) / int(b) for b in batches)
        return fsum(saved) / len(batches)

    def plan_of(self, plan: PrecisionPlan, left: Collection[str], device: str = "") -> PrecisionPlan:
        """Return the plan with only these of its sites quantized."""
        gone = set(plan.quantized_sites).difference(left)
        why = f"given back: the engine of '{plan.id}' is not inside the budget"
        decisions = tuple(
            Decision(d.site, plan.base, None, d.verdict, f"{why}; {d.reason}") if d.site in gone else d
            for d in plan.decisions
        )
        return replace(
            plan,
            decisions=decisions,
            predicted_kl={name: self._kl_of(left, name) for name in plan.predicted_kl},
            fp8_share=self.share(left),
            predicted_us=self._predicted_us(plan, left, device),
            breaks_up={
                where: still
                for where, broken in plan.breaks_up.items()
                if (still := {site: kernel for site, kernel in broken.items() if site in left})
            },
            device=device if plan.device else "",
        )

    def _predicted_us(
        self, plan: PrecisionPlan, left: Collection[str], device: str
    ) -> dict[str, dict[str, float]]:
        """Return the plan's times corrected for the sites and quantize steps that are gone."""
        predicted, known, sites = plan.predicted_us.get(device, {}), self._on(device), plan.quantized_sites
        if not predicted or not {*sites} <= {speed.site for speed in known}:
            return {}
        return {
            device: {
                batch: us + _quantized_us(known, left, batch) - _quantized_us(known, sites, batch)
                for batch, us in predicted.items()
            }
        }


def _quantized_us(known: Sequence[SiteSpeed], sites: Collection[str], batch: str) -> float:
    """Return the extra time of sites in eight bits: quantize steps less savings of products, at a batch size.

    Readers of a tensor share its quantize step; it is free where the site that makes the tensor is
    quantized too. A reader without a known time needs it too: time and maker are known from the others.
    """
    steps = {speed.tensor: speed.quantize_us[batch] for speed in known if batch in speed.quantize_us}
    makers = {speed.tensor: speed.made_by for speed in known if speed.made_by}
    chosen = [speed for speed in known if speed.site in sites]
    casts = {
        speed.tensor: 0.0 if makers.get(speed.tensor) in sites else steps.get(speed.tensor, 0.0)
        for speed in chosen
    }
    return fsum([*casts.values(), *(-speed.saved_us.get(batch, 0.0) for speed in chosen)])
