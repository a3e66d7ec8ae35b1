"""Building, checking and timing the engines of one case."""

from __future__ import annotations

import shutil
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engines.cases import Case
from benchmarks.engines.plans import BLANKET, NAMES, TODAY, Arrays, Engine, Variant, inputs_of
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.base import Backend
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.graph.model import GraphModel
from loka_onnx.planning.costs import useful_flops
from loka_onnx.sessions.backends import fusions_of
from loka_onnx.sessions.runner import Resident, Runner
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

LAUNCHES = 20
PROFILED = 10
MOST_KERNELS = 12
BUILD_SECONDS = 700.0
FARTHEST = 0.5
"""Root mean square of an output's error over its spread from which an engine counts as wrong. Blanket FP8
makes .1 to .2 at these sizes, and an output that has nothing to do with the right one at least 1."""


@dataclass(frozen=True)
class Built:
    """An engine that was built or was not.

    Attributes:
        artifact: What became of it.
        directory: What its path is relative to.
    """

    artifact: EngineArtifact
    directory: Path


def built_or_not(engine: Engine, case: Case, rows: Arrays, target: str, directory: Path) -> Built:
    """`build`, and a failed artifact where that raises: the other engines go on."""
    try:
        return build(engine, case, rows, target, directory)
    except Exception:
        failure = get_backend(engine.backend).failed_artifact(engine.plan, target, "", traceback.format_exc())
        return Built(failure, directory)


def build(engine: Engine, case: Case, rows: Arrays, target: str, directory: Path) -> Built:
    """Build one engine in a process of its own."""
    backend = get_backend(engine.backend)
    (architecture,) = backend.architectures(target)
    place = directory / "".join(c if c.isalnum() else "-" for c in engine.name)
    base = backend.base_precision(engine.plan)
    fusions = fusions_of(engine.backend)
    form = PlanForm(base, fusions) if engine.plan.fp8_sites else PlanForm(base)
    planned = apply_plan(engine.variant.source.model, engine.plan, form, place / "planned/model.onnx")
    sample = place / "sample.npz"
    few: dict[str, Any] = inputs_of(engine.variant, rows, min(case.batches[0], 256))
    np.savez(sample, **few)
    request = BuildRequest(
        model=planned.path,
        plan=engine.plan,
        sites=engine.variant.source.model.sites,
        target=target,
        architecture=architecture,
        batch=BatchSizes(1, max(case.batches), max(case.batches), tuple(sorted(case.batches))),
        output=place / "engine",
        sample=sample,
        limits=BuildLimits(BUILD_SECONDS, 100 << 30),
        options=dict(engine.options),
    )
    return Built(backend.build(request), request.output)


def alone(target: str) -> AbstractContextManager[None]:
    """Nobody else on the device for the block: not a build that times kernels, nor another benchmark."""
    (architecture,) = get_backend("inductor").architectures(target)
    return device_alone(architecture)


def timed_in_turns(
    residents: Mapping[str, Resident], rounds: int, clock: Callable[[Resident], float]
) -> dict[str, list[float]]:
    """Microseconds of each, round by round, in an order that turns; two rounds first are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in residents}
    names = list(residents)
    for number in range(rounds + 2):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            took = clock(residents[name])
            if number >= 2:
                taken[name].append(took)
    return taken


def device_clock(resident: Resident) -> float:
    """Microseconds of one launch among `LAUNCHES`."""
    resident()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        resident.launch()
    resident.wait()
    return (time.perf_counter() - began) * 1e6 / LAUNCHES


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median_us": float(median), "low_us": float(low), "high_us": float(high)}


def kernel_times(resident: Resident) -> list[dict[str, Any]]:
    """What a request spends on its longest kernels on a GPU, microseconds; empty without one.

    Kernels of one name are taken together. In between the device waits: their sum is less than the whole.
    """
    if not torch.cuda.is_available():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            resident.launch()
        resident.wait()
    taken: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profile.events() or ():
        if str(event.device_type).endswith("CUDA"):
            taken[event.name] += event.device_time
            launches[event.name] += 1
    return [
        {"kernel": name[:100], "us": us / PROFILED, "launches": launches[name] / PROFILED}
        for name, us in taken.most_common(MOST_KERNELS)
    ]


def limits() -> dict[str, float]:
    """What this device reaches at best: bytes copied a second, and products of FP8 and BF16."""
    if not torch.cuda.is_available():
        return {}
    from loka_onnx.engines.inductor.choosing import time_in_graph

    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    # `copy_` in a CUDA graph is a memcpy node, which reaches two thirds of what a kernel does (H200).
    copied_us = time_in_graph(lambda: torch.add(source, 1, out=target))
    found = {"memory_gb_s": 2 * source.nbytes / copied_us / 1e3}
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    one = torch.ones((), device="cuda")
    narrow = a.to(torch.float8_e4m3fn)
    multiply = {
        "bf16_tflops": lambda: a @ a,
        "fp8_tflops": lambda: torch._scaled_mm(
            narrow, narrow.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    }
    return found | {name: 2 * n**3 / time_in_graph(run) / 1e6 for name, run in multiply.items()}


def device_facts() -> str:
    """Name, driver, power limit and clocks of the device as its driver tells them; empty without one."""
    asked = "name,driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.mem"
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def floors(variant: Variant, plan: PrecisionPlan, batch: int, best: Mapping[str, float]) -> dict[str, float]:
    """Time of the linear sites of a plan, each a kernel of its own, at the device's measured rates.

    Memory: every weight is read once, and what each linear site reads and writes goes through it once, its
    result in 2 bytes a number. Fused kernels, a result that is quantized at once, and what stays in the cache
    may take less than ``memory_us``.
    """
    if not best:
        return {}
    graph = GraphModel.load(variant.source.model.path)
    narrow = set(plan.fp8_sites)
    seconds, moved = 0.0, 0.0
    for site in variant.source.model.sites:
        if not site.is_fp8_able or site.weight is None:
            continue
        flops = useful_flops(graph, site) * batch
        seconds += flops / (best["fp8_tflops"] if site.name in narrow else best["bf16_tflops"]) / 1e12
        width = 1 if site.name in narrow else 2
        rows = flops / (2 * site.k * site.n)
        moved += width * (site.k * site.n + rows * site.k) + 2 * rows * site.n
    return {"arithmetic_us": seconds * 1e6, "memory_us": moved / best["memory_gb_s"] / 1e3}


def why_not_timed(artifact: EngineArtifact | None, off: Mapping[str, float] | None) -> str:
    """Why an engine is out: it is not there, or computes something else; empty for one that is timed.

    Args:
        artifact: What became of its build; None for one that has none.
        off: Error of each output over its spread; None where it could not be run.
    """
    if artifact is not None and not artifact.is_built:
        return f"it was not built: {artifact.status}"
    if off is None:
        return "it cannot be run"
    for name, value in off.items():
        if not np.isfinite(value):
            return f"output '{name}' is not finite"
        if value > FARTHEST:
            return f"output '{name}' is off by {value:.2g} of its spread, at most {FARTHEST} is allowed"
    return ""


def difference(engine: Engine, runner: Runner, rows: Arrays, exact: Arrays) -> dict[str, float]:
    """How far an engine's outputs are from those of the exported model in FP32, relative to their spread.

    A fast engine that computes something else would be worth nothing (`why_not_timed`).
    """
    found = runner.run(inputs_of(engine.variant, rows, len(next(iter(rows.values())))))
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            name: float(np.sqrt(np.square(found[name].astype(np.float64) - value).mean()) / value.std())
            for name, value in exact.items()
        }


def open_engine(engine: Engine, made: Built) -> Runner:
    """Load a built engine.

    Raises:
        RuntimeError: It was not built.
    """
    if not made.artifact.is_built or made.artifact.path is None:
        raise RuntimeError(f"{engine.name}: {made.artifact.status}")
    backend: Backend = get_backend(engine.backend)
    return backend.open(made.artifact, made.directory / made.artifact.path)


def time_batch(
    engines: Sequence[Engine],
    runners: Mapping[str, Runner],
    what: tuple[Arrays, int, int],
    best: Mapping[str, float],
) -> dict[str, Any]:
    """All engines at one batch size, in turns.

    Args:
        engines: The engines.
        runners: By name, the engine loaded.
        what: Rows to repeat, the batch size, rounds.
        best: `limits`.
    """
    rows, batch, rounds = what
    residents = {e.name: runners[e.name].resident(inputs_of(e.variant, rows, batch)) for e in engines}
    taken = timed_in_turns(residents, rounds, device_clock)
    times = {name: summary(values) for name, values in taken.items()}
    medians = {name: time["median_us"] for name, time in times.items()}
    ours = {name: us for name, us in medians.items() if not name.startswith(TODAY)}
    chosen = min(ours, key=lambda name: ours[name])
    plan = next(engine for engine in engines if engine.name == chosen)

    today = min((name for name in medians if name.startswith(TODAY)), key=lambda n: medians[n], default=None)

    def over(kind: str) -> float | None:
        """Time of the fastest engine whose name begins so, over the chosen one's."""
        of_kind = [us for name, us in medians.items() if name.startswith(kind)]
        return min(of_kind) / ours[chosen] if of_kind else None

    return {
        "times": times,
        "chosen": chosen,
        "fp8_share": plan.plan.fp8_share,
        "ratios": {
            "chosen over today": over(TODAY),
            "chosen over our BF16": over(NAMES["bf16"]),
            "chosen over blanket FP8": over(NAMES[BLANKET]),
            "spread of chosen": (times[chosen]["high_us"] - times[chosen]["low_us"]) / ours[chosen],
        },
        "floors": floors(plan.variant, plan.plan, batch, best),
        "kernels": {name: kernel_times(residents[name]) for name in (chosen, today) if name is not None},
    }
