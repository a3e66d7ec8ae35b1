"""Requests per second that an engine answers in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.core.serde import STRICT

CHOSEN = "chosen"
HIGH_PRECISION = "best without FP8"
"""Values of `Throughput.role`."""


@dataclass(frozen=True)
class Trial:
    """An engine under one arrival rate; times are from intended arrival to answer.

    `over` is the share of requests beyond the limit, `over_upper` its one-sided upper end. `late_us` is the
    99th percentile of a request's wait for the load generator itself, while a stream was free.
    """

    rate_per_s: float
    requests: int
    p50_us: float
    p99_us: float
    over: float
    over_upper: float
    late_us: float
    passed: bool


@dataclass(frozen=True)
class Throughput:
    """The highest rate that an engine answers in time, at one batch size, with `streams` loaded copies of it.

    Its role is ``chosen``, or ``best without FP8`` where another one was chosen. `capacity_per_s` are
    requests without pause at any latency, 0 where it failed; `requests_per_s` the highest rate within the
    limit, 0 for none, each verdict one-sided with `confidence`. The last of the tried rates, `trials`, has
    other arrivals and confirms the result. With `inputs` on the device one batch is requested repeatedly.
    """

    engine: str
    plan: str
    target: str
    role: str
    batch: int
    streams: int
    p99_limit_us: float
    confidence: float
    seed: int
    capacity_per_s: float
    requests_per_s: float
    trials: tuple[Trial, ...]
    failure: str = ""
    inputs: InputPlace = InputPlace.HOST
    device: str = ""

    @property
    def best(self) -> Trial | None:
        """The last trial that passed at the highest rate; None for none."""
        passed = (t for t in reversed(self.trials) if t.passed and t.rate_per_s == self.requests_per_s)
        return next(passed, None)


@dataclass(frozen=True)
class Gain:
    """Requests per second of a chosen engine over those of the best engine without FP8."""

    target: str
    batch: int
    engine: str
    other: str
    ratio: float


@dataclass(frozen=True)
class ThroughputSet:
    """Every measurement of a run."""

    SCHEMA: ClassVar[str] = "throughput/1"
    __pydantic_config__ = STRICT

    measurements: tuple[Throughput, ...] = ()

    @property
    def gains(self) -> tuple[Gain, ...]:
        """Gains by target and batch size where both engines answer in time."""
        answering = [m for m in self.measurements if m.requests_per_s > 0.0]
        return tuple(
            Gain(
                ours.target, ours.batch, ours.engine, other.engine, ours.requests_per_s / other.requests_per_s
            )
            for ours in answering
            for other in answering
            if (ours.role, other.role) == (CHOSEN, HIGH_PRECISION)
            and (ours.target, ours.batch) == (other.target, other.batch)
        )
