"""How fast engines of one model are on a GPU, as ratios within one run.

Four kinds of engines of the same weights, which are random (speed only), all of the part of the model that
follows the embeddings, or with ``--whole`` of the model with tables of a few rows:

- **today**: the strongest that a user has without this project, in BF16 and in FP16: the exported model
  untouched, through Inductor by its defaults and by max-autotune for each batch size; with ``--whole`` also
  `torch.compile` (max-autotune) of the PyTorch module in a CUDA graph; with ``--onnxruntime`` ONNX Runtime;
- **BF16**: with all mods, and with the kernels of this project; and FP16 likewise;
- **blanket FP8**: every linear site, with the same mods and kernels;
- **chosen**: FP8 where it pays, which is what the timings of this run say.

Each engine's outputs are compared with the exported model's, and one that is far off is not timed. Batches
lie on the device, requests are CUDA graphs, engines take turns, and what is recorded is the median of the
time of one request among many::

    python -m benchmarks.engines.speed --case wukong-large dlrm

Engines of all cases are built side by side first; then the cases are timed one by one, and each has its
record as soon as it is done.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import psutil

from benchmarks.engines.cases import CASES, SPEC, Case, Exported, export_case, module_of
from benchmarks.engines.plans import (
    TODAY,
    TORCH,
    WORTH,
    Arrays,
    Engine,
    Variant,
    Wanted,
    cut,
    engines_of,
    float8_plan,
    inputs_of,
    wide_plan,
)
from benchmarks.engines.prediction import held_against
from benchmarks.engines.timing import (
    LAUNCHES,
    Built,
    alone,
    build,
    built_or_not,
    device_clock,
    device_facts,
    difference,
    floors,
    limits,
    open_engine,
    summary,
    time_batch,
    timed_in_turns,
    why_not_timed,
)
from benchmarks.engines.torch_compiled import TorchCompiled
from benchmarks.recording import write_record
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.engines.onnxruntime.providers import CUDA, why_no_provider
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Runner

__all__ = [
    "WORTH",
    "Built",
    "Engine",
    "Variant",
    "build",
    "cut",
    "device_clock",
    "device_facts",
    "difference",
    "float8_plan",
    "floors",
    "inputs_of",
    "limits",
    "summary",
    "time_batch",
    "timed_in_turns",
    "wide_plan",
]

Made = TypeVar("Made")
CHECK_ROWS = 64
BEGAN = time.perf_counter()
ENGINES = 8
"""About so many a case."""
JOB_BYTES = 10 << 30
"""What preparing or building the largest case takes."""


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, required=True)
    parser.add_argument("--target", default="nvidia-h100")
    parser.add_argument("--today", nargs="+", default=["bf16", "fp16"], choices=["bf16", "fp16"])
    parser.add_argument("--onnxruntime", action="store_true", help="ONNX Runtime on CUDA, FP16, as well")
    parser.add_argument("--batches", nargs="+", type=int, help="in place of those of the case")
    parser.add_argument(
        "--static", action=argparse.BooleanOptionalAction, default=True, help="as builds do for few sizes"
    )
    parser.add_argument(
        "--export", action=argparse.BooleanOptionalAction, default=True, help="compile it by max-autotune"
    )
    parser.add_argument("--whole", action="store_true", help="engines look embeddings up themselves")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--jobs", type=int, default=_jobs(), help="processes at a time")
    parser.add_argument("--out", type=Path, help="directory of the records, and of the logs of builds")
    options = parser.parse_args()
    if options.out is not None:
        # What is copied there first must not fail when all the work is done.
        options.out.mkdir(parents=True, exist_ok=True)
    if options.onnxruntime and (reason := why_no_provider(CUDA)):
        print(f"ONNX Runtime is not timed: {reason}", flush=True)
        options.onnxruntime = False
    cores, cases = os.cpu_count() or 1, dict.fromkeys(options.case)
    # Each build compiles kernels with as many processes as there are cores, if nobody says otherwise.
    threads = max(1, 2 * cores // min(options.jobs, ENGINES * len(cases)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    with TemporaryDirectory() as directory:
        started = start_all(cases, options, Path(directory))
        with alone(options.target):
            best = attempt("limits", limits) or {}
        tell(json.dumps(best))
        records = {each.name: attempt(each.name, partial(finish, each, options, best)) for each in started}
    failed = [name for name in cases if records.get(name) is None]
    if failed:
        sys.exit(f"no record of {', '.join(failed)}")


def _jobs() -> int:
    """As many as there are cores, and memory for."""
    free = int(psutil.virtual_memory().available)
    return max(1, min(os.cpu_count() or 1, free // JOB_BYTES))


@dataclass(frozen=True)
class Started:
    """A case with its engines.

    Attributes:
        name: Its name.
        case: The case.
        directory: Its files.
        exported: Its model.
        engines: What is built.
        made: By name of the engine, what became of it.
    """

    name: str
    case: Case
    directory: Path
    exported: Exported
    engines: tuple[Engine, ...] = ()
    made: Mapping[str, Built] = field(default_factory=dict)


def start_all(names: Collection[str], options: argparse.Namespace, directory: Path) -> list[Started]:
    """Prepare every case and build all of its engines, side by side; those that could be prepared.

    What compiles would disturb what is timed: nothing does when this returns. Each works in a process of its
    own, because what precedes the compiler is Python.
    """
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        preparing = {pool.submit(prepare, name, options, directory / name): name for name in names}
        building: dict[str, dict[str, Future[Built]]] = {}
        prepared: dict[str, Started] = {}

        def go_on(future: Future[Started]) -> None:
            each = future.result()
            tell(f"{each.name}: {len(each.exported.model.sites)} sites; {'; '.join(map(str, each.engines))}")
            rows, place = each.exported.rows(CHECK_ROWS), each.directory / "engines"
            work = partial(built_or_not, case=each.case, rows=rows, target=options.target, directory=place)
            prepared[each.name] = each
            building[each.name] = {
                engine.name: pool.submit(work, engine) for engine in each.engines if engine.backend != TORCH
            }

        for future in as_completed(preparing):
            attempt(preparing[future], partial(go_on, future))
        wait([future for futures in building.values() for future in futures.values()])
        tell("built")
        found = []
        for name in names:
            made = {
                engine: result
                for engine, future in building.get(name, {}).items()
                if (result := attempt(engine, future.result)) is not None
            }
            if made:
                found.append(replace(prepared[name], made=made))
        return found


def prepare(name: str, options: argparse.Namespace, directory: Path) -> Started:
    """Export a case and plan its engines."""
    case = CASES[name]
    if options.batches:
        case = replace(case, batches=tuple(sorted(options.batches)))
    directory.mkdir()
    exported = export_case(case, directory)
    wanted = Wanted(tuple(options.today), options.onnxruntime, options.static, options.whole, options.export)
    return Started(name, case, directory, exported, tuple(engines_of(case, exported, directory, wanted)))


def finish(started: Started, options: argparse.Namespace, best: Mapping[str, float]) -> Path:
    """Time a case and write its record."""
    try:
        with alone(options.target):
            figures = measure(started, options, best)
    finally:
        for log in started.directory.rglob("*.log") if options.out is not None else ():
            shutil.copyfile(log, options.out / f"{started.name}-{log.parent.name}.log")
    settings = {
        "target": options.target,
        "device": device_facts(),
        "rounds": options.rounds,
        "launches": LAUNCHES,
        "weights": "random",
        "program for each batch size": options.static,
        "embeddings are looked up": options.whole,
    }
    record = write_record(f"speed-{started.name}", figures, settings, options.out)
    tell(str(record))
    return record


def attempt(what: str, work: Callable[[], Made]) -> Made | None:
    """What it returns; None where it raises, which is printed: the other cases go on."""
    try:
        return work()
    except Exception:
        tell(f"{what} failed: {traceback.format_exc()}")
        return None


def tell(what: str) -> None:
    """Print with the time since the start."""
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {what}", flush=True)


def measure(started: Started, options: argparse.Namespace, best: Mapping[str, float]) -> dict[str, Any]:
    """All engines of one case.

    Raises:
        RuntimeError: No batch size could be timed.
    """
    case = started.case
    engines = [engine for engine in started.engines if engine.backend == TORCH or engine.name in started.made]
    checked = started.exported.rows(CHECK_ROWS)
    # As many rows as are timed at most: the same kernels then, and the same CUDA graph.
    rows = _resized(checked, max(case.batches))
    exact = _resized(OnnxSession(started.exported.model.path).run(checked), max(case.batches))
    found: dict[str, Any] = {"limits": dict(best), "engines": {}, "batches": {}}
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for engine in engines:
            made = started.made.get(engine.name)
            runner, off = None, None
            if made is None:
                runner = attempt(engine.name, partial(compiled, started, engine))
            elif made.artifact.is_built:
                runner = attempt(engine.name, partial(open_engine, engine, made))
            if runner is not None:
                stack.enter_context(runner)
                off = attempt(engine.name, partial(difference, engine, runner, rows, exact))
            artifact = None if made is None else made.artifact
            reason = why_not_timed(artifact, off)
            found["engines"][engine.name] = _facts(engine, artifact, off, reason)
            if artifact is not None:
                tell(f"{started.name}, {engine.name}: {artifact.status} {artifact.detail[-800:]}")
            tell(f"  off by {off}" + (f", not timed: {reason}" if reason else ""))
            if runner is not None and not reason:
                runners[engine.name] = runner
        able = [engine for engine in engines if engine.name in runners]
        for batch in case.batches:
            turns = partial(time_batch, able, runners, (checked, batch, options.rounds), best)
            done = attempt(f"{started.name}, batch {batch}", turns)
            if done is not None:
                found["batches"][str(batch)] = done
                tell(f"{started.name}, batch {batch}: {done['chosen']}: " + json.dumps(done["ratios"]))
    if not found["batches"]:
        raise RuntimeError("no batch size could be timed; see above")
    medians = {
        int(batch): {name: each["median_us"] for name, each in done["times"].items()}
        for batch, done in found["batches"].items()
    }
    ours = [engine for engine in able if not engine.name.startswith(TODAY)]
    found["prediction"] = attempt("prediction", partial(held_against, ours, medians, options.target))
    tell(f"{started.name}, predictions: {json.dumps(found['prediction'])}")
    return found


def compiled(started: Started, engine: Engine) -> Runner:
    """The PyTorch module of a case, as `torch.compile` runs it."""
    module = module_of(started.case, started.exported.data)
    names = list(inspect.signature(module.forward).parameters)
    return TorchCompiled(module, names, [SPEC.name], engine.plan.id)


def _facts(
    engine: Engine, artifact: EngineArtifact | None, off: Mapping[str, float] | None, reason: str
) -> dict[str, Any]:
    built = artifact and {
        "status": str(artifact.status),
        "fallbacks": [site.site for site in artifact.fallbacks],
        "build_seconds": artifact.build_seconds,
        "detail": artifact.detail[-400:],
    }
    return {
        **(built or {}),
        "fp8_share": engine.plan.fp8_share,
        "difference": None if off is None else {name: _number(value) for name, value in off.items()},
        "not_timed": reason,
    }


def _resized(rows: Arrays, count: int) -> dict[str, Any]:
    """The same rows over and over, so many in all."""
    return {name: np.resize(value, (count, *value.shape[1:])) for name, value in rows.items()}


def _number(value: float) -> float | None:
    """A number as JSON has it."""
    return value if np.isfinite(value) else None


if __name__ == "__main__":
    main()
