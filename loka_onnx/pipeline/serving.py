"""Throughput as a stage of a run: the chosen engines, and the best in high precision, under load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count

from loka_onnx.core.engine import BuildStatus, EngineArtifact
from loka_onnx.core.evaluation import Choice, InputPlace, TargetChoice
from loka_onnx.core.throughput import CHOSEN, HIGH_PRECISION, Throughput, ThroughputSet
from loka_onnx.errors import StageError
from loka_onnx.evaluation.latency import Run
from loka_onnx.evaluation.throughput import LoadOptions, find_highest_rate
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.judging import Judging
from loka_onnx.planning.evidence import Evidence
from loka_onnx.sessions.host_devices import device_of_architecture, is_target
from loka_onnx.sessions.runner import Arrays, Resident, Runner

LOAD = DocumentStage("throughput", "throughput.json", ThroughputSet)
INPUT_SETS = 4
"""Different requests that are taken in turns, so that embedding rows are not all in cache."""


@dataclass(frozen=True)
class Loaded:
    """One engine under load, with rows per request and its role (`core.throughput`)."""

    engine: EngineArtifact
    batch: int
    role: str


@dataclass(frozen=True)
class EngineCopies:
    """Copies of an engine as servers use them, and the place of their inputs."""

    runs: Sequence[Run]
    inputs: InputPlace

    @classmethod
    def of(cls, runners: Sequence[Runner], request: Arrays, wanted: InputPlace) -> EngineCopies:
        """Return copies that take inputs from the wanted place, or from the host if they must.

        On the device one batch stays before each copy: another would overwrite what a request reads.
        """
        if wanted is InputPlace.DEVICE:
            residents = [runner.resident(request) for runner in runners]
            if all(resident.is_on_device for resident in residents):
                return cls([_asked_again(resident) for resident in residents], wanted)
        return cls([runner.run for runner in runners], InputPlace.HOST)


def _asked_again(resident: Resident) -> Run:
    return lambda inputs: resident()


def measure_throughput(judging: Judging, results: Results, choice: Choice) -> ThroughputSet:
    """Measure requests per second if the run file limits the 99th percentile → `throughput.json`.

    If the model was cut, engines are loaded alone, on looked-up rows, as they are timed. Measurements stay
    valid on a host without the target, and are repeated on another device of the target.
    """
    config, directory = judging.context.config, judging.context.directory
    evidence = Evidence(results.evaluations, results.plans)
    wanted = tuple(under_load(results.engines.engines, evidence, choice, config.batch.serve))
    if config.serving.p99_ms is None or not wanted:
        directory.forget(LOAD.name)
        return ThroughputSet()

    def measure() -> ThroughputSet:
        on_target = (each for each in wanted if is_target(each.engine.target, each.engine.architecture))
        return ThroughputSet(tuple(_measure(judging, loaded) for loaded in on_target))

    reads = {
        "engines": [(each.engine.id, each.engine.digest, each.batch, each.role) for each in wanted],
        "serving": config.serving,
    }

    def counts_now(earlier: ThroughputSet) -> bool:
        """Return True if this machine has the target of an engine that was not measured on this device."""
        known = {each.engine: each.device for each in earlier.measurements}
        return any(
            device_of_architecture(engine.architecture) not in {"", known.get(engine.id, "")}
            and is_target(engine.target, engine.architecture)
            for engine in (each.engine for each in wanted)
        )

    return directory.document(LOAD, reads, measure, again=counts_now)


def under_load(
    engines: Sequence[EngineArtifact], evidence: Evidence, choice: Choice, batches: Sequence[int]
) -> Iterator[Loaded]:
    """Yield, at each batch size, the chosen engine and the best in high precision that really run here."""
    here = {
        engine.id: engine for engine in engines if engine.status is BuildStatus.READY and not engine.simulated
    }
    for target in choice.targets:
        exact = best_in_high_precision(target, here.values(), evidence)
        for batch in sorted(batches):
            chosen = here.get(target.route(batch))
            if chosen is not None:
                yield Loaded(chosen, batch, CHOSEN)
            if exact is not None and exact is not chosen:
                yield Loaded(exact, batch, HIGH_PRECISION)


def best_in_high_precision(
    target: TargetChoice, engines: Iterable[EngineArtifact], evidence: Evidence
) -> EngineArtifact | None:
    """Return the fastest engine in high precision that competed for a target, inside the budget if any is."""
    competed = {*target.engines, *(loser.engine for loser in target.losers)}
    ranked = [
        (not evidence.is_within_budget(engine), speed.per_row_us, engine)
        for engine in engines
        if engine.id in competed and not evidence.is_quantized(engine)
        if (speed := evidence.speed(engine)) is not None
    ]
    return min(ranked, key=lambda item: item[:2], default=(True, 0.0, None))[2]


def _measure(judging: Judging, loaded: Loaded) -> Throughput:
    context, engine = judging.context, loaded.engine
    serving, progress = context.config.serving, context.progress
    task, trials = f"throughput of {engine.plan} at batch {loaded.batch}", count(1)
    options = LoadOptions(
        p99_us=1e3 * (serving.p99_ms or 0.0),
        seconds=serving.trial_seconds,
        seed=serving.seed,
        # The number of trials of a bisection is not known before its end.
        on_trial=lambda: progress(f"{task}, trial {next(trials)}", 0, 0),
    )
    measured = Throughput(
        engine=engine.id,
        plan=engine.plan,
        target=engine.target,
        role=loaded.role,
        batch=loaded.batch,
        streams=serving.streams,
        p99_limit_us=options.p99_us,
        confidence=options.confidence,
        seed=serving.seed,
        capacity_per_s=0.0,
        requests_per_s=0.0,
        trials=(),
        device=device_of_architecture(engine.architecture),
    )
    progress(task, 0, 0)
    with ExitStack() as stack:
        try:
            runners = [stack.enter_context(judging.open_alone(engine)) for _ in range(serving.streams)]
            drawn = (context.requests.generated(loaded.batch) for _ in range(INPUT_SETS))
            inputs = [judging.taken_by_engines(each, engine.part) for each in drawn]
            served = EngineCopies.of(runners, inputs[0], serving.inputs)
            measured = replace(measured, inputs=served.inputs)
            rate = find_highest_rate(served.runs, inputs, options)
        except StageError as error:
            return replace(measured, failure=str(error))
    return replace(measured, **vars(rate))
