"""Which sites of a plan return to the base precision when its engine misses the budget.

The engine was measured: on each output its KL and the upper bound U of what is judged are known. What each
site contributes is known from calibration, up to a factor that is the same for all. With f the part of the
predicted KL that given back sites make up, the logit change shrinks by √(1 − f): KL is quadratic in it, and
everything else in U (the labelled first-order term, and the half width of the interval, which follows the
spread of the change) is linear in it. So the upper bound to expect is

    U(f) = KL·(1 − f) + (U − KL)·√(1 − f).

Sites go that cost most for each microsecond that they save, until U(f) is inside the budget with some room on
every output. Sites that read one quantized tensor were measured together, share its quantize step, and go
together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, sqrt

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.evaluation import Evaluation, OutputEvaluation
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, SiteSpeed
from loka_onnx.core.profile import Profile
from loka_onnx.core.refinement import Returned
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.costs import Costs, allowed_kl
from loka_onnx.planning.flops import useful_flops
from loka_onnx.planning.judging import Unit, units_of

ROOM = 0.9
"""Part of the budget that the expected upper bound may take: it is an estimate, and selection favours what it
happens to find good."""


@dataclass(frozen=True)
class GivenBack:
    """A plan with fewer sites in FP8.

    Attributes:
        plan: The plan, under the id of the one that it was made from: who takes it names it.
        returned: What it has no longer in FP8, in the order in which it went.
    """

    plan: PrecisionPlan
    returned: tuple[Returned, ...]


class GivingBack:
    """What sites cost and save, for one model on one device.

    Args:
        model: The model that plans are of.
        profile: Its profile.
        outputs: Judged outputs.
        speeds: What FP8 saves at sites, on any device.
        forced: Sites that the user wants in FP8 whatever they cost.
    """

    def __init__(
        self,
        model: ModelArtifact,
        profile: Profile,
        outputs: Sequence[OutputSpec],
        speeds: Sequence[SiteSpeed],
        forced: Collection[str] = (),
    ) -> None:
        graph = GraphModel.load(model.path)
        self._outputs = {spec.name: spec for spec in outputs}
        self._costs = Costs(profile, outputs)
        self._flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
        self._speeds, self._forced = tuple(speeds), frozenset(forced)

    def give_back(self, plan: PrecisionPlan, evaluation: Evaluation, device: str) -> GivenBack | None:
        """The plan with as few sites less as should bring its engine inside the budget.

        Args:
            plan: A plan with sites in FP8.
            evaluation: Its engine on the selection split.
            device: Where the engine runs.

        Returns:
            None where nothing would be left in FP8, or nothing can be expected to help.
        """
        measured = {output.output: output for output in evaluation.outputs if output.difference is not None}
        units = units_of([site for site in plan.fp8_sites if site not in self._forced], self._costs.groups)
        total = {name: self._kl_of(plan.fp8_sites, name) for name in measured}
        by_rate = sorted(units, key=lambda unit: (-self._rate(unit, plan, device), sorted(unit)))
        gone: list[Unit] = []
        for unit in by_rate:
            gone.append(unit)
            left = set(plan.fp8_sites).difference(*gone)
            if not left:
                return None
            parts = {name: self._kl_of(left, name) / kl if kl > 0.0 else 0.0 for name, kl in total.items()}
            if all(
                _expected(output, parts[name]) <= ROOM * output.budget for name, output in measured.items()
            ):
                break
        else:
            return None
        returned = tuple(
            Returned(tuple(sorted(unit)), self._cost(unit), self._saved_us(unit, plan, device))
            for unit in gone
        )
        return GivenBack(self._without(plan, frozenset().union(*gone), device), returned)

    def _rate(self, unit: Unit, plan: PrecisionPlan, device: str) -> float:
        """Cost for each microsecond saved; for each operation where times are not known of all sites."""
        saved = self._saved_us(unit, plan, device)
        if not self._is_timed(device):
            saved = float(fsum(self._flops.get(site, 0) for site in sorted(unit)))
        return self._cost(unit) / saved if saved is not None and saved > 0.0 else inf

    def _cost(self, unit: Unit) -> float:
        """KL over what is allowed, on the output where that is most."""
        return max(
            self._kl_of(unit, name) / allowed_kl(spec) if spec.budget > 0.0 else inf
            for name, spec in self._outputs.items()
        )

    def _kl_of(self, sites: Collection[str], output: str) -> float:
        """Predicted KL of sites, together where they were measured together."""
        spec, chosen = self._outputs[output], frozenset(sites)
        together = [group for group in self._costs.groups if group <= chosen]
        alone = sorted(chosen.difference(*together))
        return fsum(
            [
                *(self._costs.of_group(group, spec).kl_moments.value for group in together),
                *(self._costs.of_site(name, spec).kl_moments.value for name in alone),
            ]
        )

    def _on(self, device: str) -> list[SiteSpeed]:
        """What is known of sites on a device."""
        return [speed for speed in self._speeds if speed.device == device]

    def _is_timed(self, device: str) -> bool:
        return any(speed.device == device and speed.saved_us for speed in self._speeds)

    def _saved_us(self, unit: Unit, plan: PrecisionPlan, device: str) -> float | None:
        """Microseconds a row that a unit saves where the rest of the plan stays, mean over batch sizes.

        With the quantize steps that only it needs, and those behind it that it makes free.
        """
        known = self._on(device)
        left = set(plan.fp8_sites) - unit
        batches = dict.fromkeys(batch for speed in known if speed.site in unit for batch in speed.saved_us)
        if not batches:
            return None
        return _per_row(
            {b: _float8_us(known, left, b) - _float8_us(known, plan.fp8_sites, b) for b in batches}
        )

    def _without(self, plan: PrecisionPlan, gone: frozenset[str], device: str) -> PrecisionPlan:
        decisions = tuple(_in_base(d, plan) if d.site in gone else d for d in plan.decisions)
        left = [d.site for d in decisions if d.precision is Precision.FP8]
        able = sum(self._flops.values())
        return replace(
            plan,
            decisions=decisions,
            predicted_kl={name: self._kl_of(left, name) for name in plan.predicted_kl},
            fp8_share=sum(self._flops.get(site, 0) for site in left) / able if able else 0.0,
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
        """The times of the plan, with what fewer sites save less, and the quantize steps that they need."""
        predicted, known = plan.predicted_us.get(device, {}), self._on(device)
        if not predicted or not {*plan.fp8_sites} <= {speed.site for speed in known}:
            return {}
        return {
            device: {
                batch: us + _float8_us(known, left, batch) - _float8_us(known, plan.fp8_sites, batch)
                for batch, us in predicted.items()
            }
        }


def _expected(output: OutputEvaluation, left: float) -> float:
    """The upper bound to expect when this part of the predicted KL is left."""
    difference = output.difference
    if difference is None:
        return 0.0
    kl = max(difference.kl.value, 0.0)
    return kl * left + (difference.judged.upper - kl) * sqrt(max(left, 0.0))


def _float8_us(known: Sequence[SiteSpeed], sites: Collection[str], batch: str) -> float:
    """What sites in FP8 take more than in the base precision: quantize steps, less what products save.

    The step of a tensor is one for all that read it, and none where the site that makes it is in FP8 as well.
    Who reads it without a known time needs it too: what it takes, and who makes it, is known from the others.

    Args:
        known: What is known of all sites on the device.
        sites: Those in FP8.
        batch: Batch size.
    """
    steps = {speed.tensor: speed.quantize_us[batch] for speed in known if batch in speed.quantize_us}
    makers = {speed.tensor: speed.made_by for speed in known if speed.made_by}
    chosen = [speed for speed in known if speed.site in sites]
    casts = {
        speed.tensor: 0.0 if makers.get(speed.tensor) in sites else steps.get(speed.tensor, 0.0)
        for speed in chosen
    }
    return fsum([*casts.values(), *(-speed.saved_us.get(batch, 0.0) for speed in chosen)])


def _in_base(decision: Decision, plan: PrecisionPlan) -> Decision:
    return Decision(
        decision.site,
        plan.base,
        None,
        decision.verdict,
        f"given back: the engine of '{plan.id}' is not inside the budget; {decision.reason}",
    )


def _per_row(by_batch: Mapping[str, float]) -> float:
    return fsum(us / int(batch) for batch, us in by_batch.items()) / len(by_batch) if by_batch else 0.0
