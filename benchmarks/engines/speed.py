"""How fast engines of one model are on a GPU, as ratios within one run.

Four kinds of engines of the same weights, which are random (speed only), all of the part of the model that
follows the embeddings:

- **today**: the exported model untouched, in BF16 (or FP16), compiled as PyTorch does by default;
- **BF16**: with all mods, and with the kernels of this project;
- **blanket FP8**: every linear site, with the same mods and kernels;
- **chosen**: FP8 where it pays, which is what the timings of this run say.

Each engine's outputs are compared with the exported model's. Batches lie on the device, requests are CUDA
graphs, engines take turns, and what is recorded is the median of the time of one request among many::

    python -m benchmarks.engines.speed --case wukong-large
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.engines.cases import CASES, RECIPES, Case, Exported, export_case
from benchmarks.recording import write_record
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Float8, Precision
from loka_onnx.core.fusions import fusions_of
from loka_onnx.core.plan import Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.core.rewrite import Declined
from loka_onnx.core.site import SiteKind
from loka_onnx.core.split import ModelSplit
from loka_onnx.engines.base import Backend
from loka_onnx.engines.inductor.compile import FUSE, STATIC
from loka_onnx.engines.inductor.fusions import fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BatchRange, BuildRequest, Limits
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.numerics.scales import amax_scale
from loka_onnx.pipeline.splitting import Source, source_of
from loka_onnx.planning.flops import useful_flops
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Resident
from loka_onnx.transforms.lookups.split_sparse import (
    DENSE_FILE,
    LOOKUP_FILE,
    describe_halves,
    split_sparse,
)
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_onnx.transforms.sequence import apply_mods

Arrays = Mapping[str, npt.NDArray[Any]]
CHECK_ROWS = 64
FEW = 64
"""Rows that scales are taken from: random weights ask for no more."""
LAUNCHES = 20
WORTH = 1 << 19
"""K·N from which FP8 pays on an H100 when its quantize step is fused (`records`)."""
NAMES = {
    "bf16": "BF16",
    "fp8-all": "blanket FP8",
    "fp8-outside": "FP8 outside of fused kernels",
    "fp8-pays": "FP8 at large sites outside of fused kernels",
}


@dataclass(frozen=True)
class Variant:
    """A model that plans are written into.

    Attributes:
        source: The part that follows the embeddings, and its plans.
        lookup: What gives its inputs.
    """

    source: Source
    lookup: Path


@dataclass(frozen=True)
class Engine:
    """One engine to time.

    Attributes:
        name: What it is, for the record.
        variant: Its model.
        plan: Its plan.
        backend: Its maker.
        options: Of the build.
    """

    name: str
    variant: Variant
    plan: PrecisionPlan
    backend: str = "inductor"
    options: tuple[tuple[str, int], ...] = ()


def cut(model: ModelArtifact, plans: PlanSet, directory: Path) -> Variant:
    """What follows the embeddings of a model, with its plans."""
    directory.mkdir(exist_ok=True)
    found = split_sparse(GraphModel.load(model.path))
    if isinstance(found, Declined):
        raise RuntimeError(f"{model.path}: {found}")
    found.lookup.save(directory / LOOKUP_FILE)
    found.dense.save(directory / DENSE_FILE)
    halves = describe_halves(found, model, directory)
    return Variant(source_of(model, plans, ModelSplit(model.digest, halves, None, None)), halves.lookup.path)


def wide_plan(model: ModelArtifact, precision: Precision) -> PrecisionPlan:
    """Everything in one precision, as who has no plan does."""
    decisions = tuple(
        Decision(site.name, precision, None, Verdict.NOT_JUDGED, "everything is") for site in model.sites
    )
    return PrecisionPlan(str(precision), model.digest, precision, decisions, {}, 0.0)


def float8_plan(
    name: str, graph: GraphModel, model: ModelArtifact, scales: Mapping[str, float], keep: Collection[str]
) -> PrecisionPlan:
    """FP8 at every linear site but some, BF16 elsewhere."""
    flops = {site.name: useful_flops(graph, site) for site in model.sites if site.is_fp8_able}
    decisions = []
    for site in model.sites:
        decision = Decision(site.name, Precision.BF16, None, Verdict.NOT_JUDGED, "kept")
        if site.weight is not None and site.kind is SiteKind.LINEAR and site.name not in keep:
            weight = values_of(graph.node(site.name).inputs[site.weight.index])
            decision = Decision(
                site.name,
                Precision.FP8,
                PER_TENSOR,
                Verdict.NOT_JUDGED,
                "asked for",
                scales[site.activation.tensor],
                (amax_scale(float(np.abs(weight).max()), Float8.E4M3FN),),
            )
        decisions.append(decision)
    chosen = sum(flops.get(d.site, 0) for d in decisions if d.precision is Precision.FP8)
    share = chosen / sum(flops.values())
    return PrecisionPlan(name, model.digest, Precision.BF16, tuple(decisions), {}, share)


def our_plans(model: ModelArtifact, exported: Exported, directory: Path) -> PlanSet:
    """Scales from a few rows; BF16, blanket FP8, and FP8 outside of what one of our kernels computes."""
    data = exported.data.open("calibration")
    probe = Probe(model, model.sites, data, PassOptions(recipes=RECIPES, batch_size=FEW, rows=FEW))
    (scales,) = scales_of(probe.ranges(directory), RECIPES).values()
    graph = GraphModel.load(model.path)
    wide = wide_plan(model, Precision.BF16)
    bf16 = apply_plan(model, wide, PlanForm(Precision.BF16), directory / "bf16/model.onnx")
    report = fuse(PlannedGraph.load(bf16.path))
    fused = {site for places in report.fused.values() for each in places for site in each.sites}
    small = {site.name for site in model.sites if site.k * site.n < WORTH}
    kept = {"fp8-all": set[str](), "fp8-outside": fused, "fp8-pays": fused | small}
    plans = {name: float8_plan(name, graph, model, scales, keep) for name, keep in kept.items()}
    unlike = {frozenset(plan.fp8_sites): plan for plan in reversed(plans.values())}
    return PlanSet((wide, *(plan for plan in plans.values() if plan in unlike.values())))


def inputs_of(variant: Variant, rows: Arrays, count: int) -> dict[str, npt.NDArray[Any]]:
    """What an engine takes, of so many rows."""
    few = {name: value[: min(count, len(value))] for name, value in rows.items()}
    looked_up = OnnxSession(variant.lookup).run(few)
    names = [spec.name for spec in variant.source.model.inputs]
    taken = {name: looked_up[name] if name in looked_up else few[name] for name in names}
    return {name: np.resize(value, (count, *value.shape[1:])) for name, value in taken.items()}


@dataclass(frozen=True)
class Built:
    """An engine that was built or was not.

    Attributes:
        artifact: What became of it.
        directory: What its path is relative to.
    """

    artifact: EngineArtifact
    directory: Path


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
    np.savez(sample, **inputs_of(engine.variant, rows, min(case.batches[0], 256)))
    request = BuildRequest(
        model=planned.path,
        plan=engine.plan,
        sites=engine.variant.source.model.sites,
        target=target,
        architecture=architecture,
        batch=BatchRange(1, max(case.batches), max(case.batches), tuple(sorted(case.batches))),
        output=place / "engine",
        sample=sample,
        limits=Limits(600.0, 100 << 30),
        options=dict(engine.options),
    )
    return Built(backend.build(request), request.output)


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


def limits() -> dict[str, float]:
    """What this device reaches at best: bytes copied a second, and products of FP8 and BF16."""
    if not torch.cuda.is_available():
        return {}
    from loka_onnx.engines.inductor.choosing import time_in_graph

    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copied_us = time_in_graph(partial(target.copy_, source))
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
    """Least time of the linear sites of a plan, at the device's measured rates.

    Memory: every weight is read once, and what each linear site reads and writes goes through it once.
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


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--target", default="nvidia-h100")
    parser.add_argument("--today", nargs="+", default=["bf16"], choices=["bf16", "fp16"])
    parser.add_argument("--batches", nargs="+", type=int, help="in place of those of the case")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="directory of the record, and of the logs of builds")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        try:
            case = CASES[options.case]
            if options.batches:
                case = replace(case, batches=tuple(sorted(options.batches)))
            figures = measure(case, options, Path(directory))
        finally:
            for log in Path(directory).rglob("*.log") if options.out is not None else ():
                shutil.copyfile(log, options.out / f"{options.case}-{log.parent.name}.log")
    settings = {
        "target": options.target,
        "device": device_facts(),
        "rounds": options.rounds,
        "launches": LAUNCHES,
        "weights": "random",
        "program for each batch size": options.static,
    }
    print(write_record(f"speed-{options.case}", figures, settings, options.out))


def measure(case: Case, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All engines of one case."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    exported = export_case(case, directory)
    tell(f"exported: {len(exported.model.sites)} sites")
    rows = exported.rows(CHECK_ROWS)
    modified = apply_mods(exported.model, [rows], directory / "modified.onnx")
    tell(f"mods: {len(modified.model.sites)} sites")
    untouched = [wide_plan(exported.model, Precision(name)) for name in options.today]
    plain = cut(exported.model, PlanSet(tuple(untouched)), directory / "plain")
    ours = cut(modified.model, our_plans(modified.model, exported, directory), directory / "ours")
    tell("planned")
    fixed = (STATIC, int(options.static))
    engines = [
        Engine(f"today, {plan.id}", plain, plan, options=((FUSE, 0), fixed))
        for plan in plain.source.plans.plans
    ]
    engines += [Engine(NAMES[plan.id], ours, plan, options=(fixed,)) for plan in ours.source.plans.plans]
    with ThreadPoolExecutor(len(engines)) as pool:
        made = pool.map(
            lambda engine: build(engine, case, rows, options.target, directory / "engines"), engines
        )
        built = {engine.name: each for engine, each in zip(engines, made, strict=True)}
    for name, each in built.items():
        tell(f"{name}: {each.artifact.status} {each.artifact.detail[-800:]}")
    best = limits()
    tell(json.dumps(best))
    found: dict[str, Any] = {"limits": best, "engines": {}, "batches": {}}
    for engine in engines:
        artifact = built[engine.name].artifact
        found["engines"][engine.name] = {
            "status": str(artifact.status),
            "fp8_share": engine.plan.fp8_share,
            "fallbacks": [site.site for site in artifact.fallbacks],
            "build_seconds": artifact.build_seconds,
            "detail": artifact.detail[-400:],
        }
    exact = OnnxSession(exported.model.path).run(rows)
    for engine in engines:
        found["engines"][engine.name]["difference"] = difference(engine, built[engine.name], rows, exact)
    tell(json.dumps({name: each["difference"] for name, each in found["engines"].items()}))
    for batch in case.batches:
        found["batches"][str(batch)] = time_batch(engines, built, (rows, batch, options.rounds), best)
        tell(f"batch {batch}: " + json.dumps(found["batches"][str(batch)]["ratios"]))
    return found


def difference(engine: Engine, made: Built, rows: Arrays, exact: Arrays) -> dict[str, float] | None:
    """How far an engine's outputs are from those of the exported model in FP32, relative to their spread.

    A fast engine that computes something else would be worth nothing.
    """
    if not made.artifact.is_built or made.artifact.path is None:
        return None
    with get_backend(engine.backend).open(made.artifact, made.directory / made.artifact.path) as runner:
        found = runner.run(inputs_of(engine.variant, rows, len(next(iter(rows.values())))))
    return {
        name: float(np.sqrt(np.square(found[name] - value).mean()) / value.std())
        for name, value in exact.items()
    }


def time_batch(
    engines: Sequence[Engine],
    built: Mapping[str, Built],
    what: tuple[Arrays, int, int],
    best: Mapping[str, float],
) -> dict[str, Any]:
    """All engines at one batch size, in turns."""
    rows, batch, rounds = what
    runners, residents = [], {}
    for engine in engines:
        made = built[engine.name]
        if not made.artifact.is_built or made.artifact.path is None:
            continue
        backend: Backend = get_backend(engine.backend)
        runner = backend.open(made.artifact, made.directory / made.artifact.path)
        runners.append(runner)
        residents[engine.name] = runner.resident(inputs_of(engine.variant, rows, batch))
    taken = timed_in_turns(residents, rounds, device_clock)
    for runner in runners:
        runner.close()
    times = {name: summary(values) for name, values in taken.items()}
    medians = {name: time["median_us"] for name, time in times.items()}
    today = min(us for name, us in medians.items() if name.startswith("today"))
    ours = {name: us for name, us in medians.items() if not name.startswith("today")}
    chosen = min(ours, key=lambda name: ours[name])
    plan = next(engine for engine in engines if engine.name == chosen)
    return {
        "times": times,
        "chosen": chosen,
        "ratios": {
            "chosen over today": today / ours[chosen],
            "chosen over our BF16": ours["BF16"] / ours[chosen] if "BF16" in ours else None,
            "chosen over blanket FP8": ours["blanket FP8"] / ours[chosen] if "blanket FP8" in ours else None,
            "spread of chosen": (times[chosen]["high_us"] - times[chosen]["low_us"]) / ours[chosen],
        },
        "floors": floors(plan.variant, plan.plan, batch, best),
    }


if __name__ == "__main__":
    main()
