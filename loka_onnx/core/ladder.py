"""The ladder of plans, and its judged rungs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class JudgedRung:
    """A rung that was judged on the selection split, in simulation.

    Attributes:
        rung: Its number, from 0: only sites that the user forced.
        fp8_share: Their share of the FP8-able FLOPs.
        output: The output nearest to its budget, or farthest beyond.
        change: Its judged quantity with the interval; None where nothing was measured.
        kl: KL over the loss there; None where nothing was measured.
        chance: Expected chance that all outputs pass certification.
        fits: Whether all are inside their budgets on selection, with the requested chance.
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
    """Result of climbing a ladder.

    Attributes:
        rung: Number of the chosen rung; 0 where no judged rung fits.
        confidence: Of the certification intervals.
        judged: The rungs that were judged, in order.
    """

    SCHEMA: ClassVar[str] = "climb/1"
    __pydantic_config__ = STRICT

    rung: int
    sites: tuple[str, ...]
    confidence: float
    chance: float
    judged: tuple[JudgedRung, ...]

    @property
    def taken(self) -> JudgedRung | None:
        """The chosen rung as judged; None where none fits."""
        return next((each for each in self.judged if each.rung == self.rung and each.fits), None)
