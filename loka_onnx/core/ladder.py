"""The ladder of plans, and how far its rungs were climbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT


@dataclass(frozen=True)
class JudgedRung:
    """A rung that was judged on the selection split, in simulation.

    Attributes:
        rung: Its number, from 0: sites that the user forced alone.
        sites: Sites that it has in FP8.
        fp8_share: Their share of the FP8-able FLOPs.
        output: The output that is nearest to its budget, or farthest beyond.
        change: What is judged of it, with the interval; None where nothing was measured.
        kl: KL over the loss there; None where nothing was measured.
        chance: Expected chance that all outputs pass certification.
        fits: Whether all are inside their budgets on selection, and the chance is what was asked for.
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
    """How far a ladder was climbed.

    Attributes:
        rung: Number of the rung that was taken; 0 where none that was judged fits.
        sites: Its sites.
        confidence: Of the intervals that certification will hold against the budgets.
        chance: Chance to pass that was asked for.
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
        """The rung that was taken as it was judged; None where none fits."""
        return next((each for each in self.judged if each.rung == self.rung and each.fits), None)
