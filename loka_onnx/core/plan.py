"""Which precision each site runs in, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.serde import STRICT, Component


class Verdict(StrEnum):
    """Accuracy verdict of a recipe at a site."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    UNDECIDED = "undecided"
    NOT_JUDGED = "not judged"
    """No recipe applies to the site, or the user decided for it."""


class SpeedVerdict(StrEnum):
    """Speed verdict of FP8 at a site, on a named device."""

    FAST = "fast"
    """FP8 saves time there, the quantize step counted once for all sites that read the tensor."""
    SLOW = "slow"
    UNKNOWN = "not known"
    """No kernel of such a product was timed on the device."""


@dataclass(frozen=True)
class SiteSpeed:
    """What FP8 saves at one site on one device, before anything is built.

    Attributes:
        site: Name of the site.
        device: As run files name it.
        verdict: Fast, slow or not known.
        saved_us: Time of the product in the base precision less that in FP8, by batch size, microseconds; the
            quantize step is not in it. Empty where it is not known.
        quantize_us: Time of the quantize step of the tensor that the site reads, by batch size, microseconds;
            0 where the kernel in front of it quantizes as well. Sites that read one tensor share it.
        tensor: That tensor, before layout operations.
        is_measured: Whether every time behind it was measured on this very shape; else some are predicted.
        reason: One sentence.
        made_by: Site that makes the tensor, if its kernel quantizes as well when it runs in FP8 itself, and
            the quantize step then costs nothing; empty for none.
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


class Protection(StrEnum):
    """What stays in FP32 beside what the user names (`graph.protected`)."""

    LOGITS = "logits"
    """What lies between the last products and the outputs."""
    RESIDUAL = "residual"
    """Adds that join a block to its own input, and what carries the sum on."""


@dataclass(frozen=True)
class Wide:
    """A node that is no site and stays in FP32.

    Attributes:
        node: Its name.
        reason: Why.
    """

    node: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """The precision of one site.

    Attributes:
        site: Name of the site.
        precision: What it runs in; FP8 comes with a recipe.
        recipe: How it is quantized; None unless FP8.
        verdict: Accuracy verdict behind the decision.
        reason: One sentence a reader can act on.
        activation_scale: Scale of the activation; None unless FP8.
        weight_scale: One scale, or one per output channel; empty unless FP8.
    """

    site: str
    precision: Precision
    recipe: Recipe | None
    verdict: Verdict
    reason: str
    activation_scale: float | None = None
    weight_scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class PrecisionPlan:
    """One precision assignment of the whole model.

    Attributes:
        id: ``fp32``, ``bf16``, ``fp16``, ``fp8-all``, ``fp8-safe``, ``fp8-fast`` or a numbered refinement.
        model_digest: Digest of the model that it is for.
        base: Precision of everything that is not FP8.
        decisions: One per site.
        predicted_kl: Sum of the chosen sites' KL relative to the loss, per output, predicted from
            calibration; empty for plans without FP8.
        fp8_share: Share of the FP8-able FLOPs that run in FP8.
        wide: Nodes beside the sites that stay in FP32 where the base is not; of a site, its decision says so.
        base_reason: Why this base, where the profile chose it; empty where the user did.
        device: Device that the plan was made for, by its kernel times; empty for a plan that is for any.
        predicted_us: Time of its products and of their quantize steps, by device and batch size (as text),
            microseconds, predicted from kernel times; a device without them is left out. Products that no
            time is known of are in no plan's time: it is the difference between two plans that counts
            (`planning.expected_latency.expected_us`).
        breaks_up: By device, of the sites in FP8 that the engine maker computes inside of a larger kernel
            where they are not, that kernel. Its parts are not timed: `predicted_us` may be held against that
            of a plan with the same ones only.
        instead_of: Plan that was selected and missed on certification, of which this one has fewer sites in
            FP8; empty for one that competes.
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

    @property
    def fp8_sites(self) -> tuple[str, ...]:
        """Names of the sites that run in FP8."""
        return tuple(d.site for d in self.decisions if d.precision is Precision.FP8)

    def decision(self, site: str) -> Decision:
        """The decision for a site.

        Raises:
            KeyError: The plan does not name the site.
        """
        for decision in self.decisions:
            if decision.site == site:
                return decision
        raise KeyError(site)


@dataclass(frozen=True)
class PlanSet:
    """Every plan of a run.

    Attributes:
        plans: In the order they compete.
        notes: What was asked for and no plan follows, each a sentence without its full stop.
        speeds: What FP8 saves at each linear site, on each device that plans were made for.
        able_share: Part of the operations of all products, sites or not, that FP8-able sites make: times its
            `fp8_share`, the share of all products that a plan runs in FP8. None where it is not known.
    """

    SCHEMA: ClassVar[str] = "plans/4"
    __pydantic_config__ = STRICT

    plans: tuple[PrecisionPlan, ...]
    notes: tuple[str, ...] = ()
    speeds: tuple[SiteSpeed, ...] = ()
    able_share: float | None = None

    def plan(self, plan_id: str) -> PrecisionPlan:
        """The plan of that id.

        Raises:
            KeyError: There is none.
        """
        for plan in self.plans:
            if plan.id == plan_id:
                return plan
        raise KeyError(plan_id)
