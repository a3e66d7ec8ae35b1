"""Reference of a drift comparison: a model, its profile, and which of its sites run in FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loka_onnx.calibration.effects.switchable import Switch
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import SiteKind
from loka_onnx.core.statistics import RangeStats
from loka_onnx.errors import UserError


@dataclass(frozen=True)
class Baseline:
    """Model and profile that live data are compared with.

    Attributes:
        outputs: Judged outputs; labels are not read.
        counted: Sites that ΔNE is predicted for, those that run in FP8; None for the linear sites that could.
        basis: Origin of those sites, for the reader.
        columns: Names of the columns of an activation, by its name; "" for one without. For the reader.

    Raises:
        UserError: The profile is not that of the model.
    """

    model: ModelArtifact
    profile: Profile
    outputs: tuple[OutputSpec, ...] = ()
    counted: frozenset[str] | None = None
    basis: str = "every FP8-able linear site"
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.profile.model_digest != self.model.digest:
            raise UserError(
                f"E1619 the profile is not that of '{self.model.path.name}'",
                evidence=f"it was measured on a model with digest {self.profile.model_digest[:12]}…, and "
                f"this one has {self.model.digest[:12]}…",
                remedy="give the profile of this model, or calibrate the model again",
            )

    @property
    def batch_rows(self) -> int:
        """Rows of a batch of the profile; 0 where it holds no full one."""
        return max((stats.spread.rows for stats in self.ranges.values()), default=0)

    @property
    def ranges(self) -> dict[str, RangeStats]:
        """Range of every activation in the profile, by tensor name."""
        weights = set(self.profile.weights)
        return {
            tensor: stats
            for site in self.profile.sites
            for tensor, stats in site.operands.items()
            if tensor not in weights
        }

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Every product that was profiled, in the recipe that its sensitivity was measured in."""
        known = {entry.site: entry for entry in self.profile.sites}
        return tuple(
            Switch(site, Recipe.of_id(known[site.name].sensitivities[0].recipe))
            for site in self.model.sites
            if site.kind is not SiteKind.NORM and site.name in known and known[site.name].sensitivities
        )

    @property
    def counted_switches(self) -> tuple[Switch, ...]:
        """Switches of the sites that ΔNE is predicted for."""
        return tuple(
            switch
            for switch in self.switches
            if (switch.site.is_fp8_able if self.counted is None else switch.site.name in self.counted)
        )
