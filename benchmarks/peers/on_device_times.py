"""The engines of one model in turns, in a process of its own that holds the device.

What takes part: every engine that Inductor built, and ONNX Runtime on every graph as a tool wrote it. An
engine that does not load, or computes something else than its graph, is out, with its reason.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.plans import Arrays
from benchmarks.engines.timing import alone, device_clock, summary, timed_in_turns
from benchmarks.peers.on_device_models import EXACT, LOGITS, ROWS
from loka_onnx.core import serde
from loka_onnx.core.devices import CPU
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.onnxruntime.io_binding_session import open_io_binding
from loka_onnx.engines.onnxruntime.io_binding_settings import SETTINGS_FILE, settings_for, without_graphs
from loka_onnx.engines.onnxruntime.providers import host_blocker, provider_for
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import LokaError
from loka_onnx.sessions.onnx_session import OnnxSession, import_onnxruntime
from loka_onnx.sessions.runner import Runner

INDUCTOR = "inductor"
MOST_OFF = 0.1
"""Root mean square by which an engine may be off its own graph's outputs, over their spread: BF16 in another
order and values that fall on the other side of a step of FP8 make up to .06 of it.
"""
LOADING_SHARE = 0.6
"""Of the time that is left: after that no other engine is loaded, and those that are get their times."""


@dataclass(frozen=True)
class Candidate:
    """An engine that may be timed.

    Attributes:
        variant: Of the model.
        backend: `INDUCTOR` or ``onnxruntime``.
        path: The engine of Inductor; the graph for ONNX Runtime.
        artifact: What became of the build; None for ONNX Runtime, which builds nothing.
    """

    variant: str
    backend: str
    path: Path
    artifact: EngineArtifact | None = None

    @property
    def name(self) -> str:
        """Unlike any other of the model."""
        return f"{self.variant}/{self.backend}"


@dataclass(frozen=True)
class TimingJob:
    """What is timed in one go.

    Attributes:
        directory: Of the model: rows and exact logits.
        candidates: The engines.
        target: Device, as run files name it.
        batches: Batch sizes.
        rounds: Turns at each.
        end: `time.perf_counter()`, one clock for all processes, by which it has to be done.
    """

    directory: Path
    candidates: tuple[Candidate, ...]
    target: str
    batches: tuple[int, ...]
    rounds: int
    end: float = float("inf")


def time_model(job: TimingJob) -> dict[str, dict[str, Any]]:
    """Load, check and time the engines of a model.

    Returns:
        By name of the candidate: ``microseconds`` and ``quartiles`` by batch size, ``off`` and ``off_exact``
        (root mean square by which each output is off its own graph's and the exported model's, over the
        spread); or ``failure``.
    """
    rows, exact = _arrays(job.directory / ROWS), _arrays(job.directory / EXACT)
    found: dict[str, dict[str, Any]] = {each.name: {} for each in job.candidates}
    began = time.perf_counter()
    late = began + LOADING_SHARE * (job.end - began)
    with ExitStack() as stack:
        opened: dict[str, Runner] = {}
        for each in job.candidates:
            if time.perf_counter() > late:
                found[each.name]["failure"] = "time was over before it was loaded"
                continue
            try:
                opened[each.name] = stack.enter_context(_opened(each, job))
            # Libraries raise what they like when they do not take a graph: that is this engine's row.
            except Exception as error:
                found[each.name]["failure"] = _said(error)
        # Engines are loaded beside what others do there; from here on nobody else is on the device.
        stack.enter_context(alone(job.target))
        runners: dict[str, Runner] = {}
        for each in job.candidates:
            entry, runner = found[each.name], opened.get(each.name)
            if runner is None:
                continue
            try:
                got = _answers(runner, rows, max(job.batches))
                own = job.directory / each.variant / LOGITS
                entry["off_exact"] = _off(got, exact)
                entry["off"] = _off(got, _arrays(own)) if own.is_file() else entry["off_exact"]
                reason = _why_out(entry["off"])
                if reason:
                    entry["failure"] = reason
                else:
                    runners[each.name] = runner
            except Exception as error:
                entry["failure"] = _said(error)
        for batch in job.batches:
            _time_batch(runners, _repeated(rows, batch), job, found)
    return found


def _time_batch(
    runners: dict[str, Runner], inputs: Arrays, job: TimingJob, found: Mapping[str, dict[str, Any]]
) -> None:
    """One batch size; who fails is out from then on."""
    residents = {}
    for name, runner in list(runners.items()):
        try:
            residents[name] = runner.resident(inputs)
            residents[name]()
        except Exception as error:
            found[name]["failure"] = _said(error)
            del runners[name]
            residents.pop(name, None)
    if not residents:
        return
    batch = str(len(next(iter(inputs.values()))))
    for name, values in timed_in_turns(residents, job.rounds, device_clock).items():
        taken = summary(values)
        found[name].setdefault("microseconds", {})[batch] = taken["median_us"]
        found[name].setdefault("quartiles", {})[batch] = [taken["low_us"], taken["high_us"]]
        found[name]["on_device"] = residents[name].is_on_device


def _opened(candidate: Candidate, job: TimingJob) -> Runner:
    if candidate.artifact is not None:
        return get_backend(candidate.backend).open(candidate.artifact, candidate.path)
    return _onnxruntime(candidate.path, job)


def _onnxruntime(graph: Path, job: TimingJob) -> Runner:
    """ONNX Runtime on a graph as it is, with CUDA graphs where it can record them."""
    backend = get_backend("onnxruntime")
    (architecture,) = backend.architectures(job.target)
    provider = provider_for("onnxruntime", architecture)
    reason = host_blocker(provider, architecture)
    if reason:
        raise RuntimeError(f"ONNX Runtime cannot run here: {reason}")
    if architecture == CPU:
        return OnnxSession(graph)
    place = graph.parent / "onnxruntime"
    place.mkdir(exist_ok=True)
    engine = place / "engine.onnx"
    shutil.copyfile(graph, engine)
    plan = PrecisionPlan("as written", "", Precision.FP32, (), {}, 0.0)
    sizes = tuple(sorted(job.batches))
    batch = BatchSizes(1, max(sizes), max(sizes), sizes)
    request = BuildRequest(engine, plan, (), job.target, architecture, batch, place, job.directory / ROWS)
    settings = settings_for(provider, request, str(import_onnxruntime().__version__))
    simpler = without_graphs(settings)
    for each in (settings, simpler):
        serde.write(each, engine.with_name(SETTINGS_FILE))
        try:
            return open_io_binding(engine, "onnxruntime", architecture)
        except LokaError:
            if each == simpler:
                raise
    raise AssertionError("the loop returns or raises")


def _answers(runner: Runner, rows: Arrays, most: int) -> Arrays:
    """Outputs for all rows, in requests of at most so many."""
    count = len(next(iter(rows.values())))
    parts = [
        runner.run({name: np.ascontiguousarray(value[start : start + most]) for name, value in rows.items()})
        for start in range(0, count, most)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _off(found: Arrays, wanted: Arrays) -> dict[str, float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            name: float(np.sqrt(np.square(found[name].astype(np.float64) - value).mean()) / value.std())
            for name, value in wanted.items()
        }


def _why_out(off: Mapping[str, float]) -> str:
    """Why an engine that runs is not timed: a fast one that computes something else is worth nothing."""
    for name, value in off.items():
        if not np.isfinite(value):
            return f"output '{name}' is not finite"
        if value > MOST_OFF:
            return f"output '{name}' is off by {value:.2g} of its spread, at most {MOST_OFF} is allowed"
    return ""


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]


def _repeated(rows: Arrays, count: int) -> Arrays:
    return {name: np.resize(value, (count, *value.shape[1:])) for name, value in rows.items()}


def _arrays(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
