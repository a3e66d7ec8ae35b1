"""What a retrained checkpoint changed.

Where the decisions of the earlier run fail on the certification rows, a full run follows, and its engines are
held against the same rows: two looks, of which either may let an engine pass that harms. The error of 5 % is
divided between them before the first (Bonferroni): each has intervals of 97.5 %, and the probability that
what is emitted in the end passed and is beyond the budget is bounded as for one look at 95 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.intervals import Interval
from loka_onnx.core.serde import STRICT

DOCUMENT = "refresh.json"
"""Its file in the run directory."""
LOOKS = 2
"""Times that certification rows may be looked at for one retrained model."""


@dataclass(frozen=True)
class SiteMove:
    """How a site in FP8 moved.

    Attributes:
        site: Name of the site.
        activation: Scale of its activation now over the earlier one.
        weight: The same of its weight; of several channels, the ratio that is farthest from 1.
        kl_before: KL over the loss that it costs, by output, from the earlier profile.
        kl_now: The same from few rows, which makes the interval wide.
    """

    site: str
    activation: float
    weight: float
    kl_before: dict[str, Interval]
    kl_now: dict[str, Interval]


@dataclass(frozen=True)
class OutputMove:
    """How an emitted engine stands to the FP32 model on the certification split, before and now.

    Attributes:
        engine: Id of the engine that was judged.
        output: Name of the output.
        judged: What is judged, in words.
        before: Of the earlier run; None where it was not measured there.
        now: Of the retrained model.
        budget: Largest accepted value.
        status: A value of `BudgetStatus`.
    """

    engine: str
    output: str
    judged: str
    before: Interval | None
    now: Interval
    budget: float
    status: str


@dataclass(frozen=True)
class Refresh:
    """A refresh (`refresh.json`).

    Attributes:
        earlier: Directory of the run that was refreshed.
        earlier_model: Digest of its exported model.
        model: Digest of the retrained one.
        sites: Sites in FP8, those whose scales moved most first; empty where the plans have none.
        outputs: Outputs of the engines that were judged.
        fallback: Why everything was done anew; empty where it was not.
        confidence: Of each interval that was held against the budget on certification: less error for each
            look where there may be two, 0.95 for a full run behind a refresh that never looked.
        seconds: Wall time, that of a full run included where one was made.
        earlier_seconds: Wall time of the stages of the earlier run.
    """

    SCHEMA: ClassVar[str] = "refresh/2"
    __pydantic_config__ = STRICT

    earlier: Path
    earlier_model: str
    model: str
    sites: tuple[SiteMove, ...]
    outputs: tuple[OutputMove, ...]
    fallback: str
    confidence: float
    seconds: float
    earlier_seconds: float
