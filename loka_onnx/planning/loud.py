"""Which unsafe sites would be safe without the input channels that make most of their error.

A part of a site's error energy is, to first order, the same part of its KL. Sites that are unsafe as a whole
share a quarter of what all products may cost equally; the rest is for those that are safe already. Bounds
are upper ends, other draws of the rounding noise included (`costs`).
"""

from __future__ import annotations

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.plan import Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.costs import Costs
from loka_onnx.planning.judging import judge
from loka_onnx.planning.patterns import find_places
from loka_onnx.planning.policy import PlanOptions

SHARED = 0.25
"""Part of what is allowed that the unsafe sites are cut down to, together."""
FEWEST_CHANNELS = 32


def errors_to_leave(
    model: ModelArtifact, profile: Profile, outputs: tuple[OutputSpec, ...], options: PlanOptions
) -> dict[str, float]:
    """The part of its error that each unsafe linear site may keep, by site; between 0 and 1.

    Args:
        model: The model.
        profile: Its profile.
        outputs: Judged outputs with their budgets.
        options: What the user decided. A pattern of `keep` that names nothing here may name what mods make
            later; `make_plans` judges it.

    Raises:
        PlanningError: The profile lacks a site of the model, or an output.
    """
    nodes = [node.name for node in GraphModel.load(model.path).nodes]
    kept = find_places(options.keep, model.sites, nodes).sites
    judgements = judge(model.sites, kept, profile, outputs, options.confidence)
    costs, risk = Costs(profile, outputs), 1.0 - options.confidence
    most = {
        site.name: max(cost.most for cost in costs.of(frozenset({site.name}), risk))
        for site in model.sites
        if site.is_fp8_able
        and site.k >= FEWEST_CHANNELS
        and site.name not in kept
        and judgements[site.name].verdict is Verdict.UNSAFE
    }
    parts = {name: SHARED / (len(most) * cost) for name, cost in most.items() if cost > 0.0}
    return {name: part for name, part in parts.items() if 0.0 < part < 1.0}
