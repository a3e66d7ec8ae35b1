"""Timing the engines of a run: in turns, on the device alone, as they are served, loaded several times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from loka_onnx.config import RunConfig
from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Evaluation, Latency
from loka_onnx.core.progress import Progress
from loka_onnx.core.rewrite import Part
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.errors import StageError
from loka_onnx.evaluation.latency import (
    Interleaved,
    LatencyOptions,
    MakeInputs,
    from_host,
    measure_interleaved,
    over_loads,
    prepared,
)
from loka_onnx.pipeline.sample import Arrays
from loka_onnx.pipeline.splitting import LOOKUP, beside_lookup
from loka_onnx.planning.choice import NOISE
from loka_onnx.planning.speed import FIRST_LOADS, LOADS, contenders
from loka_onnx.sessions.host_devices import device_of_architecture, is_target
from loka_onnx.sessions.runner import Runner

PER_LOAD = LatencyOptions(warmup=4, min_repeats=5, max_repeats=40, max_seconds=1.0 / LOADS)
"""Limits of timing one engine at one batch size in one load; one second over all loads."""


@dataclass(frozen=True)
class TimingBench:
    """Means to time the engines of a run.

    Attributes:
        open_engine: Loads an engine without the lookup before it.
        open_lookup: Loads the lookup of a model that was cut.
        generated: Generated inputs of the model for a number of rows, others at every call.
    """

    config: RunConfig
    progress: Progress
    open_engine: Callable[[EngineArtifact], Runner]
    open_lookup: Callable[[], Runner]
    generated: Callable[[int], Arrays]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        """Measure the latency of every engine that runs here, in turns with the others of its kind.

        Where the model was cut, each engine is timed alone, on looked-up rows, and the lookup beside them.
        On another device of the target's architecture it is timed as well, and that does not count.

        Returns:
            By engine id, latencies, and the errors of engines that do not open or fail, or whose lookup does.
        """
        ready = [e for e in engines if e.status is BuildStatus.READY]
        kinds = sorted({_kind(e) for e in ready}, key=str)
        sizes, done = len(kinds) * FIRST_LOADS * len(self.config.batch.serve), count(1)
        options = replace(PER_LOAD, on_batch=lambda: self.progress("latency", min(next(done), sizes), sizes))
        self.progress("latency", 0, sizes)
        found = Interleaved({}, {})
        for kind in kinds:
            timed = self._time_kind([e for e in ready if _kind(e) == kind], kind, options)
            found.latencies.update(beside_lookup(timed.latencies))
            found.failures.update(timed.failures)
        return found

    def _time_kind(
        self, engines: Sequence[EngineArtifact], kind: _Kind, options: LatencyOptions
    ) -> Interleaved:
        """Time all engines in the first loads, and then those that may still be the fastest."""
        loads: dict[str, list[tuple[Latency, ...]]] = {}
        failures: dict[str, str] = {}
        left = list(engines)
        with device_alone(engines[0].architecture):
            for index in range(LOADS if kind.counts else FIRST_LOADS):
                if index == FIRST_LOADS:
                    known = {name: over_loads(each) for name, each in loads.items() if name != LOOKUP}
                    close = contenders({n: t for n, t in known.items() if n not in failures}, NOISE)
                    left = [engine for engine in left if engine.id in close]
                if not left:
                    break
                # No engine is always the first to be loaded, where memory is left.
                turned = [*left[index % len(left) :], *left[: index % len(left)]]
                timed = self._load(turned, kind, options)
                failures |= timed.failures
                for name, latencies in timed.latencies.items():
                    loads.setdefault(name, []).append(latencies)
                left = [engine for engine in left if engine.id not in failures]
        return Interleaved({name: over_loads(each) for name, each in loads.items()}, failures)

    def _load(self, engines: Sequence[EngineArtifact], kind: _Kind, options: LatencyOptions) -> Interleaved:
        """Load engines once and time them in turns."""
        place = self.config.serving.inputs
        with ExitStack() as stack:
            opened = _open(engines, self.open_engine, stack)
            subjects = {name: prepared(runner, place) for name, runner in opened.runners.items()}
            if not subjects:
                return Interleaved({}, opened.failures)
            make_inputs: MakeInputs = self.generated
            if engines[0].part is Part.DENSE:
                try:
                    lookup = stack.enter_context(self.open_lookup())
                except StageError as error:
                    failure = f"the lookup before it does not open: {error}"
                    return Interleaved({}, {**opened.failures, **dict.fromkeys(subjects, failure)})
                subjects[LOOKUP] = from_host(lookup.run)
                make_inputs = partial(self._generated_and_looked_up, lookup)
            timed = measure_interleaved(
                subjects,
                make_inputs,
                self.config.batch.serve,
                options,
                device=kind.device,
                counts_for_choice=kind.counts,
            )
        return Interleaved(timed.latencies, {**opened.failures, **_with_lookups(timed.failures, subjects)})

    def _generated_and_looked_up(self, lookup: Runner, rows: int) -> Arrays:
        inputs = self.generated(rows)
        return {**inputs, **lookup.run(inputs)}


def _with_lookups(failures: Mapping[str, str], subjects: Iterable[str]) -> dict[str, str]:
    """Failures by engine; an engine whose lookup failed has failed by that."""
    if LOOKUP not in failures:
        return dict(failures)
    failed = dict.fromkeys(subjects, f"the lookup before it failed {failures[LOOKUP]}")
    return {name: failure for name, failure in {**failed, **failures}.items() if name != LOOKUP}


def counts_here(evaluations: Sequence[Evaluation], engines: Sequence[EngineArtifact]) -> bool:
    """Return True if this machine has the target of engines that were timed on a device of another full name.

    Run files name an H100 PCIe and an H100 80GB HBM3 alike; a time belongs to one of them.
    """
    timed = {e.engine: {latency.device for latency in e.latencies} for e in evaluations if e.latencies}
    return any(
        device_of_architecture(engine.architecture)
        and is_target(engine.target, engine.architecture)
        and timed[engine.id] != {device_of_architecture(engine.architecture)}
        for engine in engines
        if engine.id in timed and engine.status is BuildStatus.READY and not engine.simulated
    )


@dataclass(frozen=True)
class _Kind:
    """Engines that are timed in turns: of one target, on one device."""

    target: str
    device: str
    is_target: bool
    is_simulated: bool

    @property
    def counts(self) -> bool:
        """The latency is that of the target: its own device, nothing simulated."""
        return self.is_target and not self.is_simulated


def _kind(engine: EngineArtifact) -> _Kind:
    device = device_of_architecture(engine.architecture)
    return _Kind(
        engine.target,
        device or engine.target,
        is_target(engine.target, engine.architecture),
        engine.simulated,
    )


@dataclass
class _Opened:
    """Loaded engines by id, and why others do not load."""

    runners: dict[str, Runner] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def _open(
    engines: Sequence[EngineArtifact], open_engine: Callable[[EngineArtifact], Runner], stack: ExitStack
) -> _Opened:
    """Engines that open, until the stack closes; one that does not costs that engine its latency."""
    found = _Opened()
    for engine in engines:
        try:
            found.runners[engine.id] = stack.enter_context(open_engine(engine))
        except StageError as error:
            found.failures[engine.id] = f"it does not open: {error}"
    return found
