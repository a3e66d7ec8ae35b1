"""Precision of each site, with reasons; the ladder of plans, and its judged rungs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from operator import not_
from typing import Annotated, ClassVar

from pydantic import Field

from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.recipe import Recipe, Scaling
from loka_onnx.core.serde import STRICT, Component
from loka_onnx.core.tables import Rows, Tabular


class Verdict(StrEnum):
    """Accuracy verdict of a recipe at a site."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNDECIDED = "undecided"
    NOT_JUDGED = "not judged"
    """No recipe applies to the site, or the user decided."""


class SpeedVerdict(StrEnum):
    """Speed verdict of FP8 or INT8 at a site, on a named device."""

    FAST = "fast"
    """It saves time, with the quantize step counted once for all sites of the tensor."""
    SLOW = "slow"
    UNKNOWN = "not known"
    """No kernel of such a product was timed on the device."""


EIGHT_BITS = (Precision.FP8, Precision.INT8)
MIXED = "mixed"
"""Kind of the plan whose sites run in the one or the other."""


def plan_kind(plan_id: str) -> str:
    """Return the first word of the id of a plan: ``fp8``, ``int8`` or ``mixed``, or the base."""
    return plan_id.partition("-")[0]


def quantized_precisions(plan_id: str) -> tuple[Precision, ...]:
    """FP8 or INT8, by the kind of a plan; both of `MIXED`, none of a plan in high precision."""
    return tuple(precision for precision in EIGHT_BITS if plan_kind(plan_id) in {precision, MIXED})


@dataclass(frozen=True)
class SiteSpeed:
    """Time that a precision saves at one site on one device (by its name in run files), before building.

    By batch size, microseconds: `saved_us` is the time of the product in the base precision less that in this
    one, without the quantize step (empty where unknown); `quantize_us` that of the step, which sites of one
    tensor share, 0 where the kernel in front quantizes. `is_measured` if every time is of this very shape.
    The kernel of the site `made_by` makes the tensor, and quantizes it at no cost if it runs in FP8 itself.
    """

    site: str
    device: str
    verdict: SpeedVerdict
    saved_us: dict[str, float]
    quantize_us: dict[str, float]
    tensor: str
    is_measured: bool
    reason: str
    made_by: str = ""
    precision: Precision = Precision.FP8


class Protection(StrEnum):
    """Nodes kept in FP32 beside those that the user names (`graph.protected`)."""

    LOGITS = "logits"
    """Nodes between the last products and the outputs."""
    RESIDUAL = "residual"
    """Adds that join a block to its own input, and nodes that carry the sum on."""


@dataclass(frozen=True)
class Wide:
    """A node, no site, that stays in FP32."""

    node: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """The precision of one site; recipe and scales are there if it is quantized.

    `weight_scale` is one scale, or one per output channel; of an interaction, it and `weight_zero_point` are
    of the second activation. `activation_zero_point` is not 0 in asymmetric formats only; documents leave out
    zero points of 0.
    """

    site: str
    precision: Precision
    recipe: Recipe | None
    verdict: Verdict
    reason: str
    activation_scale: float | None = None
    weight_scale: tuple[float, ...] = ()
    activation_zero_point: Annotated[int, Field(exclude_if=not_)] = 0
    weight_zero_point: Annotated[int, Field(exclude_if=not_)] = 0

    @property
    def scales(self) -> tuple[float, ...]:
        """Every scale, that of the activation first."""
        activation = () if self.activation_scale is None else (self.activation_scale,)
        return (*activation, *self.weight_scale)

    @property
    def activation_scaling(self) -> Scaling | None:
        """Scale and zero point of the activation; None unless quantized."""
        scale = self.activation_scale
        return None if scale is None else Scaling(scale, self.activation_zero_point)


@dataclass(frozen=True)
class PrecisionPlan:
    """One precision assignment of the whole model.

    Attributes:
        id: ``fp32``, ``bf16``, ``fp16``, ``untouched``, ``fp8-`` or ``int8-`` with ``all``, ``safe`` or
            ``fast``, ``mixed`` or a numbered refinement.
        base: Precision outside the quantized sites; `base_reason` says why, where the profile chose it.
        predicted_kl: Sum of the chosen sites' KL relative to the loss, per output, predicted from
            calibration; empty for plans in high precision.
        fp8_share: Share of the FP8-able FLOPs that run in FP8 or INT8.
        wide: Nodes beside the sites that stay in FP32 where the base is not.
        device: Device that the plan was made for, by its kernel times; empty for a plan that is for any.
        predicted_us: Time of its products and of their quantize steps, by device and batch size (as text),
            microseconds, predicted from kernel times; a device without them is left out. Products of unknown
            time are in no plan's: only differences of plans count (`planning.expected_latency.expected_us`).
        breaks_up: By device, of the sites in FP8 that the engine maker computes inside of a larger kernel
            where they are not, that kernel. Its parts are not timed: `predicted_us` may be held against that
            of a plan with the same ones only.
        instead_of: Plan that was selected and missed on certification, of which this one has fewer sites in
            FP8; empty for one that competes.
        untouched: Whether it is for the exported model before mods, which a backend compiles without fusions
            of this project (`engines.base.Backend.untouched`).
    """

    SCHEMA: ClassVar[str] = "plan/4"
    __pydantic_config__ = STRICT

    id: Component
    model_digest: str
    base: Precision
    decisions: tuple[Decision, ...]
    predicted_kl: dict[str, float]
    fp8_share: float
    wide: tuple[Wide, ...] = ()
    base_reason: str = ""
    device: str = ""
    predicted_us: dict[str, dict[str, float]] = field(default_factory=dict)
    breaks_up: dict[str, dict[str, str]] = field(default_factory=dict)
    instead_of: str = ""
    untouched: Annotated[bool, Field(exclude_if=not_)] = False

    @property
    def quantized_sites(self) -> tuple[str, ...]:
        """Names of the sites that run in FP8 or INT8."""
        return tuple(d.site for d in self.decisions if d.precision.is_quantized)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """FP8 and INT8, as far as its quantized sites run in them."""
        used = {d.precision for d in self.decisions}
        return tuple(precision for precision in EIGHT_BITS if precision in used)

    @property
    def kind(self) -> str:
        """``fp8``, ``int8`` or ``mixed``, by `precisions`; empty without any."""
        known = self.precisions
        return MIXED if len(known) > 1 else "".join(known)

    @property
    def formats(self) -> dict[str, Precision]:
        """FP8 or INT8 of each site, of one in high precision the first of the plan; empty without any."""
        known = self.precisions
        return {d.site: d.precision if d.precision in known else known[0] for d in self.decisions if known}

    @property
    def fp8_sites(self) -> tuple[str, ...]:
        """Names of the sites that run in FP8."""
        return tuple(d.site for d in self.decisions if d.precision is Precision.FP8)

    @property
    def int8_sites(self) -> tuple[str, ...]:
        """Names of the sites that run in INT8."""
        return tuple(d.site for d in self.decisions if d.precision is Precision.INT8)

    def decision(self, site: str) -> Decision:
        """Return the decision for a site."""
        return {decision.site: decision for decision in self.decisions}[site]


@dataclass(frozen=True, repr=False)
class PlanSet(Tabular):
    """Every plan of a run, in competing order.

    Attributes:
        notes: Requests that gave no plan, each a sentence without its full stop.
        speeds: Time saved at each linear site on each device of the plans.
        able_share: Share of all products' operations in FP8-able sites: times `fp8_share`, the share of all
            products that a plan runs in FP8. None where unknown.
    """

    SCHEMA: ClassVar[str] = "plans/4"
    __pydantic_config__ = STRICT

    plans: tuple[PrecisionPlan, ...]
    notes: tuple[str, ...] = ()
    speeds: tuple[SiteSpeed, ...] = ()
    able_share: float | None = None

    @property
    def title(self) -> str:
        """Plans by id, with their quantized sites."""
        plans = (f"{plan.id} ({len(plan.quantized_sites)})" for plan in self.plans)
        return f"{len(self.plans)} plans, with sites in {self.quantized}: {', '.join(plans)}"

    def records(self) -> Rows:
        """Return the decision on each site in each plan."""
        names = ("site", "precision", "verdict", "reason")
        return [
            {"plan": plan.id, **{name: str(getattr(decision, name)) for name in names}}
            for plan in self.plans
            for decision in plan.decisions
        ]

    @property
    def quantized(self) -> str:
        """``FP8``, ``INT8`` or ``FP8 or INT8``: precisions of quantized sites; ``FP8`` without any."""
        known = dict.fromkeys(p for plan in self.plans for p in quantized_precisions(plan.id))
        return " or ".join(precision.upper() for precision in known or (Precision.FP8,))

    def plan(self, plan_id: str) -> PrecisionPlan:
        """Return the plan of that id."""
        return {plan.id: plan for plan in self.plans}[plan_id]


@dataclass(frozen=True)
class JudgedRung:
    """A rung (numbered from 0: only forced sites), judged on the selection split in simulation.

    `output` is the one nearest to its budget, or farthest beyond: `change` is its judged quantity, `kl` its
    KL over the loss (None where nothing was measured). `chance` is that of all outputs to pass certification;
    the rung `fits` if all are inside their budgets on selection, with the requested chance.
    """

    rung: int
    sites: int
    fp8_share: float
    output: str
    change: Interval | None
    kl: float | None
    chance: float
    fits: bool


@dataclass(frozen=True)
class Climb:
    """Result of climbing a ladder; rung 0 where none fits. `confidence` is of certification intervals."""

    rung: int
    sites: tuple[str, ...]
    confidence: float
    chance: float
    judged: tuple[JudgedRung, ...]

    @property
    def taken(self) -> JudgedRung | None:
        """The chosen rung as judged; None where none fits."""
        return next((each for each in self.judged if each.rung == self.rung and each.fits), None)


@dataclass(frozen=True)
class Climbs:
    """The climbed ladders, each by the `plan_kind` its plan."""

    SCHEMA: ClassVar[str] = "climbs/2"
    __pydantic_config__ = STRICT

    by_kind: dict[str, Climb] = field(default_factory=dict)
