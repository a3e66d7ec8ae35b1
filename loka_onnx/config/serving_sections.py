"""The sections of the run file about speed: refining plans on the device, and serving engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from loka_onnx.config.fields import Seconds, Seed, Strict
from loka_onnx.core.evaluation import InputPlace


class RefineConfig(Strict):
    """Plans made from measurements of built engines."""

    rounds: Annotated[int, Field(ge=0, le=20)] = Field(
        3,
        description="most rounds of building, timing and judging more plans, where a device here runs FP8; "
        "0 for none",
    )
    plans: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="most plans that are built in one round"
    )
    seconds: Seconds = Field(
        600.0, description="no round begins after so much time in rounds, for each device"
    )


class ServingConfig(Strict):
    """Serving of engines: one or several, and the load of throughput measurements."""

    by_batch: bool = Field(
        True,
        description="whether batch sizes may get engines of their own, which the bundle then carries all",
    )
    margin: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.03,
        description="least gain at a batch size, beyond what the measurement leaves open, that is worth one "
        "more engine; 0.03 is 3 %",
    )
    inputs: InputPlace = Field(
        InputPlace.HOST,
        description="where the inputs of a request lie when engines are timed, which decides what is chosen: "
        "host for arrays in memory of the process, as a loaded bundle takes them, with the copies to the "
        "device and back; device for servers that put them there themselves, which times the engine alone "
        "(an engine that cannot take them there is timed from the host, and the report says so)",
    )
    p99_ms: Annotated[float, Field(ge=1e-6, le=1e9)] | None = Field(
        None,
        description="limit on the 99th percentile of latency, in milliseconds, at which requests per second "
        "are measured for the chosen engine and the best one without FP8; null measures none",
    )
    streams: Annotated[int, Field(ge=1, le=64)] = Field(
        2, description="copies of an engine that answer at once under that load"
    )
    trial_seconds: Seconds = Field(2.0, description="time of one trial of that load; about ten make a result")
    seed: Seed = Field(0, description="seed of the arrivals")
