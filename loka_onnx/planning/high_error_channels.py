"""Choose sites that would fit on the ladder without the input channels that make most of their error.

To first order, a part of a site's error energy is the same part of its KL. The rung that almost surely passes
certification, by calibration's prediction (`climbing.expected_rung`), leaves some of the KL that would still
pass; the sites above it are cut to equal parts of that. The ladder of the resulting model shows whether it is
enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.intervals import CONFIDENCE
from loka_onnx.core.plan import MIXED
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.climbing import Goal, affordable_kl, expected_rung
from loka_onnx.planning.patterns import find_places
from loka_onnx.planning.policy import Planner, PlanOptions

SURE = 0.99
"""Chance of passing of a rung whose sites are left whole: a miss costs a site, a cut only some channels."""
MOST = 0.5
"""Largest part of its error that a site may keep."""
LEAST = 0.1
"""Least part of the affordable KL that the cut sites share: after the cut they may precede others."""
FEWEST_CHANNELS = 32


def errors_to_leave(
    model: ModelArtifact,
    profile: Profile,
    outputs: tuple[OutputSpec, ...],
    recipes: Sequence[Recipe],
    options: PlanOptions,
    rows: Mapping[str, int],
) -> dict[str, float]:
    """Return the part of its error, between 0 and 1, that each site that does not fit may keep.

    If `recipes` are of several precisions, a site has the one of plan `mixed`. A pattern of `options` without
    a match here may match sites that mods make later; `make_plans` judges it. `rows` are those of
    ``selection`` and ``certification``.
    """
    nodes = [node.name for node in GraphModel.load(model.path).nodes]
    gone = find_places((*options.keep, *options.force), model.sites, nodes).nothing
    keep = tuple(pattern for pattern in options.keep if pattern not in gone)
    force = tuple(pattern for pattern in options.force if pattern not in gone)
    options = replace(options, keep=keep, force=force)
    kinds = {recipe.precision for recipe in recipes}
    kind = MIXED if len(kinds) > 1 else ""
    start = Planner(model, profile, outputs, recipes, options, kind).start_ladder()
    goal = Goal.of(0, 1.0 - CONFIDENCE)
    fitting = start.rungs[expected_rung(start.ladder, start.rungs, replace(goal, chance=SURE), rows)]
    above = [
        s
        for s in model.sites
        if s.name in start.plan.quantized_sites and s.name not in fitting and s.is_fp8_able
    ]
    wide = [site.name for site in above if site.k >= FEWEST_CHANNELS]
    spent = start.ladder.predicted_kl(fitting)
    most = {spec.name: affordable_kl(spec.budget, goal, rows) for spec in outputs}
    room = {output: max(kl - spent[output], LEAST * kl) / max(len(wide), 1) for output, kl in most.items()}
    alone = {name: start.ladder.predicted_kl({name}) for name in wide}
    return {
        name: min([MOST, *(room[output] / kl for output, kl in kls.items() if kl > 0.0)])
        for name, kls in alone.items()
    }
