"""Patterns of `plan.keep` and `plan.force` that name nothing are found before the first long stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import HIGH_ERROR, SiteKind
from loka_onnx.errors import ConfigError
from loka_onnx.pipeline.steps import Steps
from loka_onnx.planning.policy import PlanOptions, check_patterns


def check_plan_patterns(steps: Steps, exported: ModelArtifact) -> None:
    """Refuse patterns that name nothing in the exported model, nor in the one that mods make of it.

    A user who has read a report may name what mods made, so they are applied where the exported model lacks a
    name; that is seldom, and takes rows, but no calibration. Which high-error channels are split off is known
    after calibration only: a pattern may name the product of those of any linear site.

    Raises:
        ConfigError: A pattern names nothing, or a site is kept and forced.
    """
    chosen = steps.config.plan
    options = PlanOptions(keep=chosen.keep, force=chosen.force)
    try:
        check_patterns(exported, options)
    except ConfigError:
        with TemporaryDirectory(prefix=".mods-", dir=exported.path.parent) as scratch:
            modified = steps.rewrite(exported, Path(scratch) / "modified.onnx").model
            named = any(HIGH_ERROR in pattern for pattern in (*chosen.keep, *chosen.force))
            if named and steps.config.mods.split_channels:
                parts = (
                    replace(s, name=f"{s.name}{HIGH_ERROR}")
                    for s in modified.sites
                    if s.kind is SiteKind.LINEAR
                )
                modified = replace(modified, sites=(*modified.sites, *parts))
            check_patterns(modified, replace(options, exported=exported))
