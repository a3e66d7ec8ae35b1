"""Mods that a run applies, in order."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from loka_onnx.config import RunConfig, WeightGranularity
from loka_onnx.core.recipe import Granularity
from loka_onnx.errors import ConfigError
from loka_onnx.numerics.product_error import Rounding
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.split_high_error_channels import SplitHighErrorChannels
from loka_onnx.transforms.sequence import DEFAULT_MODS
from loka_onnx.transforms.smoothing.choose_smoothing import ChooseSmoothing


class ChosenMods:
    """The mods of a run.

    Raises:
        ConfigError: `mods.skip` names no mod.
    """

    def __init__(self, config: RunConfig) -> None:
        known = {kind.name: kind for kind in DEFAULT_MODS}
        for index, name in enumerate(config.mods.skip):
            if name not in known:
                raise _unknown(name, index, list(known))
        self._config = config
        skipped = set(config.mods.skip)
        self._kinds = tuple(kind for name, kind in known.items() if name not in skipped)
        self._rounding = _rounding(config) if config.mods.smoothing else None

    @property
    def key(self) -> dict[str, Any]:
        """Settings that the result depends on, beside model and rows."""
        rounding = self._rounding
        return {
            "mods": [kind.name for kind in self._kinds],
            "smoothing": None if rounding is None else [rounding.format, *rounding.weights],
        }

    def make(self, rows: Mapping[str, npt.NDArray[Any]], scratch: Path) -> list[Mod[Any]]:
        """The mods, but for high-error channels, which are split off behind them."""
        mods: list[Mod[Any]] = [kind() for kind in self._kinds]
        if self._rounding is not None:
            mods.append(ChooseSmoothing([rows], scratch, self._rounding))
        return mods


def _rounding(config: RunConfig) -> Rounding:
    """Roundings that a plan may use."""
    wanted = config.plan.weight_granularity
    is_open = wanted is WeightGranularity.BEST
    return Rounding(
        config.plan.format.number_format, tuple(Granularity) if is_open else (Granularity(wanted),)
    )


def _unknown(name: str, index: int, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    if name == ChooseSmoothing.name:
        remedy = "write `mods.smoothing: false`"
    elif name == SplitHighErrorChannels.name:
        remedy = "write `mods.split_channels: false`"
    else:
        remedy = f"did you mean '{close[0]}'?" if close else "remove it"
    return ConfigError(
        f"`mods.skip[{index}]` names no mod: '{name}'",
        evidence=f"the mods are {', '.join(known)}",
        remedy=remedy,
    )
