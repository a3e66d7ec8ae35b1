"""Calibrating some sites again, and putting them among the others of an earlier profile.

A profile says of all of its sites that they were measured on one model, the same rows, and under recipes that
the plan knows. Sites that were measured otherwise must not stand beside those that are measured now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loka_onnx.calibration.arithmetic import NORM_PRECISION
from loka_onnx.core import serde
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Recipe
from loka_onnx.errors import ConfigError


@dataclass(frozen=True)
class Measurement:
    """What the sites that are calibrated now are measured on.

    Attributes:
        model: Digest of the model.
        data: Digest of the calibration split.
        rows: Rows of ranges and errors.
        sensitivity_rows: Rows of sensitivities.
        outputs: Names of the judged outputs.
        recipes: Recipes of which a plan may take one.
    """

    model: str
    data: str
    rows: int
    sensitivity_rows: int
    outputs: tuple[str, ...]
    recipes: tuple[Recipe, ...]


def read_earlier(document: Path, now: Measurement) -> Profile:
    """The profile that sites are put into.

    Args:
        document: Where it is.
        now: What the sites will be measured on.

    Raises:
        ConfigError: There is none, or its sites were measured otherwise.
        UserError: It is not a profile of this version.
    """
    remedy = "calibrate every site: the same command without --only"
    if not document.is_file():
        raise ConfigError(
            "there is no profile whose sites could be done again",
            where="--only",
            evidence=f"'{document}' does not exist",
            remedy=remedy,
        )
    earlier = serde.read(Profile, document)
    known = {recipe.id for recipe in now.recipes} | {NORM_PRECISION}
    strange = {error.recipe for site in earlier.sites for error in site.errors} - known
    for what, was, wanted in (
        ("model", earlier.model_digest, now.model),
        ("calibration rows", earlier.data_digest, now.data),
        ("number of rows", earlier.rows, now.rows),
        ("number of sensitivity rows", earlier.sensitivity_rows, now.sensitivity_rows),
        ("outputs", sorted(earlier.baseline_loss), sorted(now.outputs)),
        ("recipes", sorted(strange), []),
    ):
        if was != wanted:
            raise ConfigError(
                f"the profile was measured with other {what}",
                where="--only",
                evidence=f"'{document}' has {was}; the run file gives {wanted or 'none of these'}",
                remedy=remedy,
            )
    return earlier


def with_sites(earlier: Profile, later: Profile, order: Sequence[str]) -> Profile:
    """The earlier profile with the later one's sites in place of its own.

    Args:
        earlier: Every site.
        later: Some sites, measured on the same.
        order: Names of the sites in the model's order.
    """
    entries = {entry.site: entry for entry in (*earlier.sites, *later.sites)}
    seconds = {name: earlier.seconds.get(name, 0.0) + value for name, value in later.seconds.items()}
    return replace(earlier, sites=tuple(entries[name] for name in order), seconds=seconds)
