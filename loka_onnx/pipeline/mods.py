"""The stages of mods: those of the run file, then high-error channels as products of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.config import RunConfig, WeightGranularity
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_json
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.rewrite import HighErrorChannels, RewriteLog
from loka_onnx.errors import ConfigError, nearest
from loka_onnx.graph.storage import model_files
from loka_onnx.numerics.product_error import Rounding
from loka_onnx.pipeline.context import CHECK_ROWS, Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.plans import planned_formats, planned_recipes
from loka_onnx.pipeline.probing import Probing
from loka_onnx.planning.high_error_channels import errors_to_leave
from loka_onnx.planning.policy import PlanOptions
from loka_onnx.sessions.runner import Arrays
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.choose_smoothing import ChooseSmoothing
from loka_onnx.transforms.linears.split_high_error_channels import SplitHighErrorChannels
from loka_onnx.transforms.sequence import DEFAULT_MODS, Rewritten, apply_mods


@dataclass(frozen=True)
class MeasuredModel(Rewritten):
    """A model after mods, with its profile."""

    profile: Profile


@dataclass(frozen=True)
class SplitModel(Rewritten):
    """A model after all mods, with the error that split sites were to keep."""

    left: HighErrorChannels


HIGH_ERROR_CHANNELS = "model/loud-channels.json"
_MODIFIED = "model/modified.onnx"
_MERGED = {"model": "model/merged.json", "log": "model/merged-mods.json"}
MODS = DocumentStage("mods", _MERGED, Rewritten)
MEASURED_MODS = DocumentStage("mods", {**_MERGED, "profile": "calibration/merged.json"}, MeasuredModel)
HIGH_ERROR = DocumentStage(
    "loud channels",
    {"model": "model/modified.json", "log": "model/mods.json", "left": HIGH_ERROR_CHANNELS},
    SplitModel,
)


def modify(context: Context) -> Rewritten:
    """Apply the mods but for high-error channels, each checked on calibration rows → `model/merged.json`."""
    return context.directory.document(
        MODS, _reads(context), lambda: rewrite(context, context.path(_MODIFIED))
    )


def modify_and_measure(context: Context, profile: Profile, probing: Probing) -> MeasuredModel:
    """Apply the mods and measure what they changed → `model/merged.json`, `calibration/merged.json`."""
    reads = _reads(context)
    reads |= {"profile": digest_json(serde.to_plain(profile)), "measured": probing.key(context.exported)}

    def make() -> MeasuredModel:
        modified = rewrite(context, context.path(_MODIFIED))
        return MeasuredModel(modified.model, modified.log, probing.changed(modified.model, profile))

    return context.directory.document(MEASURED_MODS, reads, make)


def _reads(context: Context) -> dict[str, Any]:
    return {
        "model": context.exported,
        "data": context.splits.calibration,
        **ChosenMods(context.config).key,
        "rows": _rows(context.config),
    }


def split_high_error(context: Context, merged: Rewritten, left: Mapping[str, float]) -> SplitModel:
    """Split high-error channels off the sites that may keep the part `left` of it → `model/modified.json`."""
    formats = [format.of_weights for format in planned_formats(context.config)]

    def make() -> SplitModel:
        split = Rewritten(merged.model, RewriteLog(()))
        if left:
            target, rows = context.path("model/loud.onnx"), context.first_rows(_rows(context.config))
            mod = SplitHighErrorChannels(left, [rows], target.parent, formats)
            split = apply_mods(merged.model, [rows], target, [mod], context.progress)
        log = RewriteLog((*merged.log.records, *split.log.records))
        return SplitModel(split.model, log, HighErrorChannels(dict(left)))

    reads = {
        "model": merged.model,
        "data": context.splits.calibration,
        "left": left,
        "formats": [format.name for format in formats],
        "rows": _rows(context.config),
    }
    # A model that stays as it is, and its tables in any case, belong to the stage that wrote them.
    return context.directory.document(
        HIGH_ERROR, reads, make, lambda written: sorted({*written} - {*model_files(merged.model.path)})
    )


def allowed_errors(context: Context, merged: MeasuredModel) -> dict[str, float]:
    """Return, by site, the share of its eight-bit error energy (0 to 0.5) that may remain after a split.

    Listed are the sites above the rung that is expected to pass certification; of several formats a site has
    that of plan `mixed`. Empty if `mods.split_channels` is off.
    """
    chosen = context.config.plan
    if not context.config.mods.split_channels:
        return {}
    options = PlanOptions(keep=chosen.keep, force=chosen.force, protect=chosen.protect)
    rows = context.judged_rows
    recipes = planned_recipes(context.config)
    return errors_to_leave(merged.model, merged.profile, context.specs, recipes, options, rows)


def rewrite(context: Context, target: Path) -> Rewritten:
    """Apply the mods to the exported model and write it; high-error channels are split off later."""
    rows = context.first_rows(_rows(context.config))
    mods = ChosenMods(context.config).make(rows, target.parent)
    return apply_mods(context.exported, [rows], target, mods, context.progress)


def _rows(config: RunConfig) -> int:
    """Rows that mods are held against."""
    return min(CHECK_ROWS, config.calibration.rows or CHECK_ROWS)


class ChosenMods:
    """The mods of a run; `ConfigError` where `mods.skip` names none."""

    def __init__(self, config: RunConfig) -> None:
        known = {kind.name: kind for kind in DEFAULT_MODS}
        settings = {ChooseSmoothing.name: "smoothing", SplitHighErrorChannels.name: "split_channels"}
        for index, name in enumerate(config.mods.skip):
            if name not in known:
                setting = f"write `mods.{settings[name]}: false`" if name in settings else ""
                raise ConfigError(
                    f"E1520 `mods.skip[{index}]` names no mod: '{name}'",
                    evidence=f"the mods are {', '.join(known)}",
                    remedy=setting or nearest(name, list(known)) or "remove it",
                )
        self._kinds = tuple(kind for name, kind in known.items() if name not in config.mods.skip)
        granularity = config.plan.weight_granularity
        is_open = granularity is WeightGranularity.BEST
        weights = tuple(Granularity) if is_open else (Granularity(granularity),)
        formats = planned_formats(config) if config.mods.smoothing else ()
        self._roundings = tuple(Rounding(format, weights) for format in formats)

    @property
    def key(self) -> dict[str, Any]:
        """Settings that the result depends on, beside model and rows."""
        return {
            "mods": [kind.name for kind in self._kinds],
            "smoothing": [[rounding.format, *rounding.weights] for rounding in self._roundings],
        }

    def make(self, rows: Arrays, scratch: Path) -> list[Mod[Any]]:
        """Make the mods, with smoothing last."""
        mods: list[Mod[Any]] = [kind() for kind in self._kinds]
        if self._roundings:
            mods.append(ChooseSmoothing([rows], scratch, self._roundings))
        return mods
