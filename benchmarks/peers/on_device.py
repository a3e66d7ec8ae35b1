"""The peers' graphs on a GPU: engines of every variant by Inductor and ONNX Runtime, timed in turns.

``pack`` and ``time`` need no network and nothing of the peers; rows come along, and are never committed. ::

    python -m benchmarks.peers.on_device pack MODELS OUT        # forms of all variants, in parts of 25 MB
    python -m benchmarks.peers.on_device unpack OUT DIRECTORY
    python -m benchmarks.peers.on_device time --models DIRECTORY --target nvidia-h100 --out RESULTS

``time`` builds side by side, what a comparison needs most first, and holds a model's engines against each
other in one process that has the device for itself. ``device.json`` is written after each model. When
``--seconds`` are nearly over, builds are ended and what there is is timed: an engine without a time says why.

Every graph goes through the same lowering; what is not FP8 is BF16, or what the tool wrote
(`on_device_graphs`). This project's kernels, and their choice, are for every graph that a tool quantized and
for this project's own, not for those of no tool. `on_device_models` says which variants there are.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.peers.on_device_archive import PARTS, pack, unpack
from benchmarks.peers.on_device_models import (
    ROWS,
    Variant,
    options_of,
    prepare,
    variants_in,
)
from benchmarks.peers.on_device_record import BEGAN, RECORD, Asked, Record, compared
from benchmarks.peers.on_device_times import INDUCTOR, Candidate, TimingJob, time_model
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.job import BatchSizes
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BuildLimits, BuildRequest

LEAST_SECONDS = 15.0
"""A build is not begun with less left than that."""
FIRST_SECONDS, MODEL_SECONDS = 20.0, 3.0
"""Kept back for timing: to load a dozen engines of the first models, and then for each model."""
SESSIONS = 4.0
"""Times as long it takes with the sessions of ONNX Runtime, which are twice as many."""
TIMERS = 3
"""Models that load their engines at once; they have the device one after the other."""
MEMORY_BYTES = 14 << 30


def tell(what: str) -> None:
    """Print with the time since the start."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", flush=True)


# Builds ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A build and what it took.

    Attributes:
        artifact: What became of it; None where it was not begun.
        path: The engine file.
        wall_seconds: Time from its start to its end, waiting for the device included.
        reason: Why it was not begun.
    """

    artifact: EngineArtifact | None
    path: Path
    wall_seconds: float = 0.0
    reason: str = ""


class Builds:
    """Engines of Inductor, side by side; graphs that are equal are built once.

    Args:
        variants: What to build, in this order.
        asked: How.
        out: Where engines go.
        deadline: `time.perf_counter()` from which no build goes on.
    """

    def __init__(self, variants: Sequence[Variant], asked: Asked, out: Path, deadline: float) -> None:
        self._asked, self._out, self._deadline = asked, out, deadline
        self._pool = ThreadPoolExecutor(asked.jobs)
        self._lock, self._done = threading.Lock(), 0
        self.first: dict[str, str] = {}
        self.futures: dict[tuple[str, str], Future[Made]] = {}
        by_key: dict[str, tuple[str, str]] = {}
        for each in variants:
            if each.takes(INDUCTOR) is None:
                continue
            key = digest_json({"graph": digest_file(each.directory / "inductor.onnx"), **self._options(each)})
            twin = by_key.setdefault(key, (each.model, each.name))
            if twin == (each.model, each.name):
                self.futures[twin] = self._pool.submit(self._build, each)
            else:
                self.first[f"{each.model}/{each.name}"] = twin[1]
                self.futures[each.model, each.name] = self.futures[twin]

    def of_model(self, model: str) -> list[Future[Made]]:
        """Its builds."""
        return [future for (name, _), future in self.futures.items() if name == model]

    def close(self) -> None:
        """Begin no other build."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _options(self, variant: Variant) -> dict[str, int]:
        return self._asked.options | options_of(variant)

    def _build(self, variant: Variant) -> Made:
        left = self._deadline - time.perf_counter()
        place = self._out / "engines" / variant.model / variant.name
        if left < LEAST_SECONDS:
            return Made(None, place, reason="time was over before it was built")
        began = time.perf_counter()
        artifact = _artifact(variant, self._asked, place, self._options(variant), left)
        took = time.perf_counter() - began
        with self._lock:
            self._done += 1
            done = f"{self._done} of {len({id(future) for future in self.futures.values()})}"
        what = f"{variant.model}/{variant.name}: {artifact.status} in {took:.0f} s ({done})"
        tell(what if artifact.is_built else f"{what}: {_short(artifact.detail, 200)}")
        path = place / "engine" / artifact.path if artifact.path is not None else place
        return Made(artifact, path, took)


def _artifact(
    variant: Variant, asked: Asked, place: Path, options: dict[str, int], seconds: float
) -> EngineArtifact:
    """A build in a process of its own; whatever it raises is a failed artifact."""
    backend, plan = get_backend(INDUCTOR), variant.plan
    try:
        (architecture,) = backend.architectures(asked.target)
        sizes = tuple(sorted(asked.batches))
        place.mkdir(parents=True, exist_ok=True)
        request = BuildRequest(
            model=variant.directory / "inductor.onnx",
            plan=plan,
            sites=variant.artifact.sites,
            target=asked.target,
            architecture=architecture,
            batch=BatchSizes(1, max(sizes), max(sizes), sizes),
            output=place / "engine",
            sample=variant.directory.parent / ROWS,
            limits=BuildLimits(seconds, MEMORY_BYTES),
            options=options,
        )
        return backend.build(request)
    except Exception:
        return backend.failed_artifact(plan, asked.target, "", traceback.format_exc())


# Times ----------------------------------------------------------------------------------------------------


class Timer:
    """Times models, each in a process of its own; the next ones load their engines meanwhile."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(TIMERS)
        self._processes: set[ProcessPoolExecutor] = set()

    def submit(self, job: TimingJob) -> Future[dict[str, dict[str, Any]]]:
        """`time_model` in a process.

        If that dies, it is tried once more without ONNX Runtime; then everyone has that as its reason.

        Args:
            job: What to time.
        """
        return self._threads.submit(self._time, job)

    def _time(self, job: TimingJob) -> dict[str, dict[str, Any]]:
        ours = tuple(each for each in job.candidates if each.backend == INDUCTOR)
        failed: dict[str, dict[str, Any]] = {}
        for some in dict.fromkeys((job.candidates, ours)):
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            self._processes.add(pool)
            try:
                done = pool.submit(time_model, replace(job, candidates=some))
                return failed | done.result(max(job.end - time.perf_counter(), 1.0))
            except BrokenProcessPool:
                why = "the process that timed this model died"
            except TimeoutError:
                why = "time was over before it was timed"
            finally:
                _end(pool)
            failed |= {each.name: {"failure": why} for each in some}
        return failed

    def close(self) -> None:
        """End every process, whatever it does."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._processes:
            _end(pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """End the process of a pool: a runner that hangs would keep it alive."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def candidates_of(variants: Sequence[Variant], builds: Builds, asked: Asked) -> list[Candidate]:
    """The engines of a model that there are, Inductor's first; equal graphs are one."""
    found = []
    for each in variants:
        future = builds.futures.get((each.model, each.name))
        if future is not None and future.done() and f"{each.model}/{each.name}" not in builds.first:
            made = future.result()
            if made.artifact is not None and made.artifact.is_built:
                found.append(Candidate(each.name, INDUCTOR, made.path, made.artifact))
    for each in variants if "onnxruntime" in asked.backends else ():
        graph = each.takes("onnxruntime")
        if graph is not None:
            found.append(Candidate(each.name, "onnxruntime", graph))
    return found


# The record -----------------------------------------------------------------------------------------------


def entries_of(
    variants: Sequence[Variant], builds: Builds, timed: dict[str, dict[str, Any]], asked: Asked
) -> dict[str, dict[str, Any]]:
    """What the record holds of each variant of a model, by backend."""
    found: dict[str, dict[str, Any]] = {}
    for each in variants:
        entry: dict[str, Any] = {}
        if INDUCTOR in asked.backends:
            twin = builds.first.get(f"{each.model}/{each.name}", each.name)
            entry[INDUCTOR] = _inductor_entry(each, builds, twin) | timed.get(f"{twin}/{INDUCTOR}", {})
        if "onnxruntime" in asked.backends and each.takes("onnxruntime") is not None:
            is_simulated = bool(each.info.get("fp8_in_graph"))
            entry["onnxruntime"] = {"simulated": is_simulated} | timed.get(f"{each.name}/onnxruntime", {})
        for times in entry.values():
            if "microseconds" not in times and "instead" not in times:
                times.setdefault("failure", "time was over before it was timed")
        found[each.name] = entry
    return found


def _inductor_entry(variant: Variant, builds: Builds, twin: str) -> dict[str, Any]:
    future = builds.futures.get((variant.model, variant.name))
    if future is None and "instead" in variant.info:
        return {"instead": variant.info["instead"]}
    if future is None:
        return {"failure": str(variant.info.get("not for inductor", "it has no graph for Inductor"))}
    keys = ("form", "base", "fp8_share", "products")
    entry: dict[str, Any] = {key: variant.info[key] for key in keys if key in variant.info}
    if twin != variant.name:
        entry["same_graph_as"] = twin
    if not future.done() or future.cancelled():
        return entry | {"failure": "time was over before it was built"}
    made = future.result()
    if made.artifact is None:
        return entry | {"failure": made.reason}
    planned = [site for site in made.artifact.sites if site.planned == "fp8"]
    entry |= {
        "build_seconds": made.artifact.build_seconds,
        "wall_seconds": made.wall_seconds,
        "simulated": made.artifact.simulated,
        "fp8_products": len(variant.info.get("fp8_products", ())),
        "fp8_products_engaged": sum(site.engaged for site in planned),
        "not_engaged": {site.site: _short(site.evidence, 200) for site in planned if not site.engaged},
    }
    if not made.artifact.is_built:
        entry["failure"] = _short(f"{made.artifact.status}: {made.artifact.detail}", 600)
    return entry


def time_all(directory: Path, asked: Asked, out: Path) -> Path:
    """Build and time everything that a directory holds, within the time that was asked for.

    Args:
        directory: What `unpack` wrote, or `prepare`.
        asked: What, and how.
        out: Where engines and the record go.

    Returns:
        The record.
    """
    from benchmarks.engines.timing import device_facts, limits

    end = time.perf_counter() + asked.seconds
    every = [v for v in variants_in(directory) if asked.takes(v)]
    names = list(dict.fromkeys(each.model for each in sorted(every, key=lambda v: v.model)))
    built = every if INDUCTOR in asked.backends else []
    timer, record = Timer(), Record(asked, out, {"facts": device_facts()})
    reserve = FIRST_SECONDS + MODEL_SECONDS * len(names)
    reserve *= SESSIONS if "onnxruntime" in asked.backends else 1.0
    builds = Builds(built, asked, out, max(end - reserve, time.perf_counter() + asked.seconds / 2))
    tell(f"{len(names)} models, {len(every)} variants, {asked.jobs} builds at once")
    waiting, timing = list(names), dict[str, Future[dict[str, dict[str, Any]]]]()
    mine = {name: [each for each in every if each.model == name] for name in names}
    try:
        while waiting or timing:
            for name in [n for n in waiting if all(future.done() for future in builds.of_model(n))]:
                waiting.remove(name)
                found = tuple(candidates_of(mine[name], builds, asked))
                tell(f"{name}: timing {len(found)} engines, {end - time.perf_counter():.0f} s left")
                job = TimingJob(directory / name, found, asked.target, asked.batches, asked.rounds, end)
                timing[name] = timer.submit(job)
            for name in [n for n, future in timing.items() if future.done()]:
                entries = entries_of(mine[name], builds, timing.pop(name).result(), asked)
                record.put(name, mine[name], entries)
                for batch in asked.batches:
                    tell(f"{name}, batch {batch}: {json.dumps(compared(mine[name], entries, batch))}")
            time.sleep(0.2)
        if end - time.perf_counter() > LEAST_SECONDS:
            record.put_limits(limits())
    finally:
        builds.close()
        timer.close()
    tell(f"written: {out / RECORD}")
    return out / RECORD


def _short(text: str, most: int) -> str:
    """A text on one line; of a long one both ends, because a message begins and a traceback ends with it."""
    line = " ".join(text.split())
    half = most // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"


def _told(info: Mapping[str, Any]) -> str:
    if "instead" in info:
        return f"'{info['instead']}' goes in its place: the same plan with the rest in BF16"
    return str(info.get("not for inductor") or "; ".join(info.get("form", ())))


def _option(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="prepare every variant and pack them")
    packing.add_argument("models", type=Path)
    packing.add_argument("out", type=Path)
    packing.add_argument("--prepared", type=Path, help="keep what is packed here too")
    packing.add_argument("--only", nargs="+", default=[], help="models to take")
    unpacking = verbs.add_parser("unpack", help="unpack what was packed")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("out", type=Path)
    timing = verbs.add_parser("time", help="build and time")
    timing.add_argument("--models", type=Path, required=True, help="what unpack wrote")
    timing.add_argument("--only", nargs="+", default=[], help="models to take")
    timing.add_argument("--variants", nargs="+", default=[], help="variants to take")
    timing.add_argument("--target", default="nvidia-h100")
    timing.add_argument("--batches", nargs="+", type=int, default=[256, 2048])
    timing.add_argument("--backends", nargs="+", default=[INDUCTOR, "onnxruntime"])
    timing.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 5 // 8))
    timing.add_argument("--seconds", type=float, default=400.0)
    timing.add_argument("--rounds", type=int, default=25)
    timing.add_argument("--option", nargs="+", type=_option, default=[], help="of Inductor, as static=0")
    timing.add_argument("--out", type=Path, required=True)
    return parser


def main(given: Sequence[str] | None = None) -> None:
    """Pack, unpack or time."""
    options = arguments().parse_args(given)
    if options.verb == "pack":
        prepared = options.prepared or options.out / "prepared"
        for each in prepare(options.models, prepared, options.only):
            tell(f"{each.model}/{each.name}: {_told(each.info)}")
        for part in pack(prepared, options.out / "parts"):
            tell(f"{part}: {part.stat().st_size / 1e6:.1f} MB")
        return
    if options.verb == "unpack":
        unpack(sorted(options.parts.glob(f"{PARTS}*")), options.out)
        tell(f"{len(variants_in(options.out))} variants in {options.out}")
        return
    # Each build starts a pool of compilers as large as the machine otherwise.
    threads = max(1, 2 * (os.cpu_count() or 1) // options.jobs)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    asked = Asked(
        options.target,
        tuple(sorted(options.batches)),
        tuple(options.backends),
        options.jobs,
        options.seconds,
        options.rounds,
        dict(options.option),
        tuple(options.only),
        tuple(options.variants),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    time_all(options.models.absolute(), asked, options.out.absolute())


if __name__ == "__main__":
    main()
