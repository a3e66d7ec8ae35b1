"""Add rows to a profile: measure them alone under the profile's own scales and merge exactly.

Errors measured under different scales do not add up, so scales stay. New rows beyond the old range widen the
profile's range; they saturate, are counted as saturated and are part of the measured error, as in the
quantized model. Where that costs too much, calibrate again on all rows for new scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.observers.arithmetic import NORM_PRECISION
from loka_onnx.core.artifact import ModelArtifact, OutputSpec
from loka_onnx.core.profile import ENTROPY, LOSS, Profile
from loka_onnx.core.progress import Progress, silent
from loka_onnx.data import Dataset
from loka_onnx.errors import CalibrationError

_AGAIN = "calibrate again on all rows"


@dataclass(frozen=True)
class ProfiledModel:
    """A model and its judged outputs, as a profile was measured on them."""

    model: ModelArtifact
    outputs: tuple[OutputSpec, ...]


def update(
    profile: Profile,
    subject: ProfiledModel,
    data: Dataset,
    scratch: Path,
    options: ProbeOptions,
    progress: Progress = silent,
) -> Profile:
    """Measure further rows and merge them into a profile.

    Groups of rows (`ProbeOptions.group`) must not be split between both sets. Of `options`, recipes, scales,
    sites and batch size are replaced by the profile's. Raises CalibrationError if the rows are already in the
    profile; the profile is of another model, of other outputs or of recipes that the options lack; or a value
    is not finite.
    """
    _check(profile, subject, data)
    changed = _options(profile, options)
    later = calibrate(subject.model, subject.outputs, data, scratch, changed, progress)
    return profile.merge(later)


def _options(profile: Profile, options: ProbeOptions) -> ProbeOptions:
    measured = {e.recipe for entry in profile.sites for e in entry.errors} - {NORM_PRECISION}
    recipes = tuple(recipe for recipe in options.recipes if recipe.id in measured)
    if missing := measured - {recipe.id for recipe in recipes}:
        raise CalibrationError(
            "E0513 rows cannot be added in other recipes than the profile's",
            evidence=f"it was measured in {_listed(measured)}, and {_listed(missing)} is not asked for",
            remedy=f"set `plan.format` and `plan.scale` back, or {_AGAIN}",
        )
    # A profile without activations does not constrain the batch size.
    sizes = [s.spread.rows for entry in profile.sites for s in entry.operands.values() if s.spread.batches]
    return replace(
        options,
        recipes=recipes,
        planned={entry.site: s.recipe for entry in profile.sites for s in entry.sensitivities},
        scales=profile.scales,
        only=frozenset(entry.site for entry in profile.sites),
        batch_size=sizes[0] if sizes else options.batch_size,
        magnitudes=bool(profile.tensors),
    )


def _check(profile: Profile, subject: ProfiledModel, data: Dataset) -> None:
    if profile.model_digest != subject.model.digest:
        raise CalibrationError(
            "E0514 the profile is of another model",
            evidence=f"it was measured on {profile.model_digest[:12]}, and this one is "
            f"{subject.model.digest[:12]}",
            remedy="name the model of the profile, or calibrate this one",
        )
    if data.digest in profile.data_digest.split("+"):
        raise CalibrationError(
            f"E0515 the rows of '{data.name}' are in the profile already, and would count twice",
            evidence=f"their digest is {data.digest[:12]}",
            remedy="give rows that it has not seen",
        )
    was = {(s.output, s.denominator) for entry in profile.sites for s in entry.sensitivities}
    now = {(spec.name, LOSS if spec.label is not None else ENTROPY) for spec in subject.outputs}
    if was != now:
        raise CalibrationError(
            "E0516 rows cannot be added for other outputs than the profile's, or relative to something else",
            evidence=f"it has {_listed(f'{o} relative to {d}' for o, d in was)}; "
            f"asked for is {_listed(f'{o} relative to {d}' for o, d in now)}",
            remedy=f"name the same outputs and labels, or {_AGAIN}",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
