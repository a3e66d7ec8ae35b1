"""Latency per request, by wall clock around the call that a server would make.

A request comes either as arrays in host memory, and the copies to the device and back are timed; or as inputs
that already lie on the device, handed over before the clock starts.

Several engines are timed in turns, one request each, so that clock drift and neighbours affect all of them
alike. The order rotates by one engine every round, so that no engine always runs in the cache state left by
the same other one. One load of an engine does not give the confidence of a comparison, because loads differ:
`over_loads` combines several; each is a unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from loka_onnx.core.evaluation import InputPlace, Latency
from loka_onnx.core.progress import collector_paused
from loka_onnx.errors import EngineError, StageError
from loka_onnx.sessions.runner import Runner, to_users

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], object]
"""Runs one request and returns when its outputs can be read."""


@dataclass(frozen=True)
class Request:
    """A request ready to be timed: `call` answers it, with inputs in the place `inputs`."""

    call: Callable[[], object]
    inputs: InputPlace = InputPlace.HOST


Prepare = Callable[[Mapping[str, Array]], Request]
"""Makes a request of its inputs; not timed."""
MakeInputs = Callable[[int], Mapping[str, Array]]
"""Model inputs for a number of rows."""


def from_host(run: Run) -> Prepare:
    """Prepare requests from arrays on the host: copies to the device and back are timed."""
    return lambda inputs: Request(partial(run, inputs))


def prepared(runner: Runner, place: InputPlace, shared: Sequence[str] = ()) -> Prepare:
    """Prepare requests with inputs at `place`, or on the host if they must; `shared` inputs hold users."""
    if shared:
        return lambda inputs: Request(partial(runner.run, to_users(inputs, shared)))

    def resident(inputs: Mapping[str, Array]) -> Request:
        call = runner.resident(inputs)
        return Request(call, InputPlace.DEVICE if call.is_on_device else InputPlace.HOST)

    return resident if place is InputPlace.DEVICE else from_host(runner.run)


@dataclass(frozen=True)
class LatencyOptions:
    """Options of the measurement, per batch size.

    Attributes:
        warmup: Untimed first requests of each engine, for autotuning and first-touch costs.
        max_seconds: Time limit once `min_repeats` is reached; warm-up has its own equal limit, after at least
            one request each.
        input_sets: Different requests in turns, so that embedding rows are not all in cache.
        on_batch: Called when a batch size is done.
    """

    warmup: int = 10
    min_repeats: int = 20
    max_repeats: int = 500
    max_seconds: float = 3.0
    input_sets: int = 4
    clock_ns: Callable[[], int] = field(default=time.perf_counter_ns, repr=False)
    on_batch: Callable[[], None] = field(default=lambda: None, repr=False)


@dataclass(frozen=True)
class Interleaved:
    """Latencies by engine, one per finished batch size, and the errors that ended engines' measurements."""

    latencies: dict[str, tuple[Latency, ...]]
    failures: dict[str, str]


def measure_latency(
    prepare: Prepare,
    make_inputs: MakeInputs,
    batches: tuple[int, ...],
    options: LatencyOptions,
    device: str,
    counts_for_choice: bool,
) -> tuple[Latency, ...]:
    """Return the latency of one engine by batch size; EngineError if it fails. See `measure_interleaved`."""
    timed = measure_interleaved({"": prepare}, make_inputs, batches, options, device, counts_for_choice)
    for failure in timed.failures.values():
        raise EngineError(failure)
    return timed.latencies[""]


def measure_interleaved(
    engines: Mapping[str, Prepare],
    make_inputs: MakeInputs,
    batches: tuple[int, ...],
    options: LatencyOptions,
    device: str,
    counts_for_choice: bool,
) -> Interleaved:
    """Time several engines at each batch size, one request each in turns; time limits are per engine.

    An engine that fails is left out from that batch size on; all are, if the inputs cannot be made. Only
    answering requests is timed. Latencies record the name of the `device`, and in `counts_for_choice` whether
    they are valid for the target.
    """
    left = dict(engines)
    failures: dict[str, str] = {}
    latencies: dict[str, tuple[Latency, ...]] = dict.fromkeys(engines, ())
    for batch in batches:
        try:
            requests = [make_inputs(batch) for _ in range(options.input_sets)]
        except StageError as error:
            failures |= dict.fromkeys(left, f"at batch {batch}, where its inputs are made: {error}")
            break
        timed = _time_in_turns(left, requests, options)
        for engine, failure in timed.failures.items():
            failures[engine] = f"at batch {batch}: {failure}"
            del left[engine]
        for engine in left:
            latencies[engine] += (timed.latency(engine, batch, device, counts_for_choice),)
        options.on_batch()
    return Interleaved(latencies, failures)


def over_loads(loads: Sequence[Sequence[Latency]]) -> tuple[Latency, ...]:
    """Return the medians over loadings of one engine, of batch sizes measured in every one, ascending."""
    by_batch: dict[int, list[Latency]] = {}
    for latency in (latency for load in loads for latency in load):
        by_batch.setdefault(latency.batch, []).append(latency)
    return tuple(
        replace(
            each[0],
            p50_us=median(load.p50_us for load in each),
            p90_us=median(load.p90_us for load in each),
            p99_us=median(load.p99_us for load in each),
            repeats=sum(load.repeats for load in each),
            host_load=max((load.host_load for load in each if load.host_load is not None), default=None),
            loads_us=tuple(load.p50_us for load in each),
            least_us=tuple(least for load in each for least in load.least_us),
        )
        for _, each in sorted(by_batch.items())
        if len(each) == len(loads)
    )


@dataclass
class _Turns:
    """Request times of the remaining engines at one batch size, and errors of those that failed."""

    nanoseconds: dict[str, list[int]]
    failures: dict[str, StageError]
    inputs: dict[str, InputPlace] = field(default_factory=dict)

    def add(
        self, engine: str, prepare: Prepare, inputs: Mapping[str, Array], clock_ns: Callable[[], int]
    ) -> None:
        """Time one request of an engine."""
        try:
            request = prepare(inputs)
            start = clock_ns()
            request.call()
            self.nanoseconds[engine].append(clock_ns() - start)
        except StageError as failure:
            self.failures[engine] = failure
        else:
            self.inputs[engine] = request.inputs

    def latency(self, engine: str, batch: int, device: str, counts_for_choice: bool) -> Latency:
        times_us = np.asarray(self.nanoseconds[engine], dtype=np.float64) / 1e3
        p50, p90, p99 = np.percentile(times_us, [50, 90, 99]).tolist()
        known = (batch, p50, p90, p99, times_us.size, device, counts_for_choice)
        load, least = psutil.getloadavg()[0] / (psutil.cpu_count() or 1), (float(times_us.min()),)
        inputs = self.inputs[engine]
        return Latency(*known, loads_us=(p50,), inputs=inputs, least_us=least, host_load=load)


def _time_in_turns(
    engines: Mapping[str, Prepare], requests: list[Mapping[str, Array]], options: LatencyOptions
) -> _Turns:
    turns = _Turns({engine: [] for engine in engines}, {})
    warm = _Turns({engine: [] for engine in engines}, turns.failures)
    limit_ns = options.max_seconds * 1e9 * len(engines)
    phases = ((warm, 1, options.warmup), (turns, options.min_repeats, options.max_repeats))
    with collector_paused():  # as `timeit` does: collections would show in the tail percentiles
        for phase, least, most in phases:
            start = options.clock_ns()
            for number in range(most):
                left = [engine for engine in engines if engine not in turns.failures]
                for position in range(len(left)):
                    engine = left[(position + number) % len(left)]
                    phase.add(engine, engines[engine], requests[number % len(requests)], options.clock_ns)
                if options.clock_ns() - start > limit_ns and number + 1 >= least:
                    break
    return turns
