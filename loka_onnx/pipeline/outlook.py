"""Outlook of a run from its first rows: seconds of its stages, width of its intervals, room on this machine.

Every site is run in low precision on some rows of the selection split, under scales of these. That times
both models and shows the interval of the loss change, whose half width falls with the root of the rows.
Seconds of a stage are rows × passes × seconds a row, and a fixed part × what the load of the host adds.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from loka_onnx.calibration.effects.switchable import Switch, write_switchable
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.progress import silent
from loka_onnx.errors import LokaError
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs
from loka_onnx.evaluation.engines import Split, predict_split
from loka_onnx.evaluation.predictions import Predictions, Run
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import model_files
from loka_onnx.pipeline.building import available_memory
from loka_onnx.pipeline.context import CHECK_ROWS, Context
from loka_onnx.pipeline.correcting import FITTED_ROWS
from loka_onnx.pipeline.judging import PER_LOAD
from loka_onnx.pipeline.plans import buildable, competing_plans, planned_recipes
from loka_onnx.planning.speed import FIRST_LOADS
from loka_onnx.sessions.runner import stream_count

ROWS, REQUEST = 4096, 256
"""Most rows of the trial, and of one of its requests, which lie at even distances in the split."""
PASS_SECONDS = 1.0
"""Time limit of a pass of the trial, by which its rows are chosen."""
BUILD_SECONDS, LOAD_SECONDS = 0.5, 0.1
"""Of one engine of ONNX Runtime on an idle CPU; builds of other backends are not predicted."""
FIXED_SECONDS = {
    "calibrate": 0.6,
    "mods": 0.6,
    "recalibrate": 0.4,
    "ladder": 0.5,
    "correct": 0.1,
    "report": 0.3,
}
"""Fixed part of a stage, without its passes, on an idle host."""
SHARE = 2 / 3
"""Part of the budget that half an interval may take: the rest is for the change itself."""
LARGE_BUDGET = 0.01
"""From this budget on, the user may have meant a percentage."""
COPIES, TABLES = 35, 4
"""Bytes of a run directory per byte of its model without external tables, and per byte of those tables."""


@dataclass(frozen=True)
class TrialRun:
    """The exported model and its form in low precision, run on `rows` rows.

    Seconds are per row; `large_seconds` in requests of the largest timed size. `busy` is wall time over CPU
    time, at least 1. `half_widths` are of the loss intervals, by output; `unjudged` outputs changed as well.
    """

    rows: int
    exact_seconds: float
    low_seconds: float
    large_seconds: float
    busy: float
    half_widths: dict[str, float]
    unjudged: tuple[str, ...]


@dataclass(frozen=True)
class Outlook:
    """Expected seconds by stage of the record, without builds of `unknown` backends; and advice."""

    seconds: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield the advice, then the estimate in one line, if there is one, with the three longest stages."""
        yield from (f"! {each}" for each in self.advice)
        if self.seconds:
            longest = sorted(self.seconds, key=self.seconds.__getitem__)[:-4:-1]
            parts = ", ".join(f"{stage} {duration(self.seconds[stage])}" for stage in longest)
            builds = f"; builds of {', '.join(self.unknown)} are not counted" if self.unknown else ""
            yield f"about {duration(sum(self.seconds.values()))} in all ({parts}){builds}"


def look_ahead(context: Context) -> Outlook:
    """Try the model on the first rows and estimate the run; advice without seconds if the trial fails."""
    try:
        trial = _tried(context)
    except LokaError:
        # Calibration raises the error, on all rows.
        return Outlook(advice=(*_budgets(context), *_room(context)))
    blocked = {b.name: b.build_blocker(a) for _, b, a in buildable(context.config) if b.name != "onnxruntime"}
    unknown = tuple(name for name, blocker in blocked.items() if not blocker)
    advice = (*_budgets(context), *_accuracy(context, trial), *_room(context, unknown))
    return Outlook(_seconds(context, trial), unknown, advice)


def _tried(context: Context) -> TrialRun:
    began, used = time.perf_counter(), time.process_time()
    model, specs = context.exported, context.specs
    sites, recipe = tuple(s for s in model.sites if s.is_fp8_able), planned_recipes(context.config)[0]
    split = replace(context.selection, slices=(), most=REQUEST)
    exact = context.open_exported(threads=1).run
    _, first = _timed(context, split, exact)
    split = replace(split, most=max(split.batch_size, min(ROWS, int(PASS_SECONDS / first))))
    with TemporaryDirectory(prefix=".trial-", dir=model.path.parent) as folder:
        scratch, options = Path(folder), PassOptions(rows=split.rows)
        probe = Probe(model, sites, split.data, options, LocalExecutor(context.threads))
        scales = scales_of(probe.ranges(scratch), [recipe])
        switches = [Switch(site, recipe) for site in sites]
        file = write_switchable(GraphModel.load(model.path), switches, scales, scratch / "low.onnx")
        low = partial(file.open().run, on=file.sites)
    runs: tuple[Run, Run] = (exact, low)
    # A session allocates in its first pass.
    (known, exact_seconds), (moved, low_seconds) = (
        [_timed(context, split, run) for _ in range(2)][1] for run in runs
    )
    largest = max(context.config.batch.serve)
    served = context.open_exported().run
    _, large_seconds = _timed(context, replace(split, batch_size=largest, most=largest), served)
    units = Units.of(known.columns, split.group)
    judged = evaluate_outputs(known.outputs, moved.outputs, known.columns, specs, units)
    halves = {o.output: (d.judged.upper - d.judged.lower) / 2 for o in judged if (d := o.difference)}
    busy = max(1.0, (time.perf_counter() - began) / (time.process_time() - used))
    inputs = next(iter(split.batches())).inputs
    before, after = exact(inputs), low(inputs)
    others = sorted(before.keys() - known.outputs.keys())
    free = tuple(name for name in others if not np.array_equal(before[name], after[name]))
    return TrialRun(split.rows, exact_seconds, low_seconds, large_seconds, busy, halves, free)


def _timed(context: Context, split: Split, run: Run) -> tuple[Predictions, float]:
    """Predictions of a pass, and seconds of a row."""
    began = time.perf_counter()
    predictions = predict_split(split, run, context.specs, "", silent)
    return predictions, (time.perf_counter() - began) / max(1, split.rows)


def _seconds(context: Context, trial: TrialRun) -> dict[str, float]:
    config, rows = context.config, context.judged_rows
    calibration = min(context.splits.calibration.rows, config.calibration.rows or 1 << 60)
    formats = len({recipe.precision for recipe in planned_recipes(config)})
    sites = formats * sum(site.is_fp8_able for site in context.exported.sites)
    plans = [plan for plan in competing_plans(config) if plan.precisions]
    here = sum(not backend.build_blocker(a) for _, backend, a in buildable(config))
    engines, judged = here * (1 + len(plans)), sum(rows.values())
    exact, low, busy = trial.exact_seconds, trial.low_seconds, trial.busy
    fitting = min(calibration, FITTED_ROWS) + rows["selection"]
    calibrate = calibration * low * (1.0 + sites)
    streams = stream_count(context.threads)
    passes = {
        "calibrate": calibrate,
        "mods": CHECK_ROWS * exact * (4.0 + 0.6 * sites),
        "recalibrate": 0.1 * calibrate,
        "ladder": 1.5 * fitting * low * formats / streams,
        "correct": 0.6 * fitting * low * len(plans) / streams,
        "build": 0.0,
        "evaluate": (judged * exact + here * judged * (exact + len(plans) * low)) / streams,
        "report": 0.0,
    }
    loads = FIRST_LOADS * engines
    fixed = FIXED_SECONDS | {"build": BUILD_SECONDS * engines, "evaluate": LOAD_SECONDS * loads}
    passes["evaluate"] += engines * sum(_timing(size * trial.large_seconds) for size in config.batch.serve)
    return {stage: seconds + busy * fixed[stage] for stage, seconds in passes.items()}


def _timing(request: float) -> float:
    """Seconds of timing an engine at a size in the first loads, where a request takes so many."""
    able = int(PER_LOAD.max_seconds / request) + 1
    repeats = min(PER_LOAD.warmup, able) + min(PER_LOAD.max_repeats, max(PER_LOAD.min_repeats, able))
    return FIRST_LOADS * repeats * request


def _accuracy(context: Context, trial: TrialRun) -> Iterator[str]:
    for spec in context.specs:
        rows, half = context.judged_rows["certification"], trial.half_widths.get(spec.name, 0.0)
        width = half * math.sqrt(trial.rows / rows)
        if width > SHARE * spec.budget:
            needed = rows * (width / (SHARE * spec.budget)) ** 2
            yield (
                f"output '{spec.name}': with {rows:,} certification rows and every product in low precision, "
                f"the bound cannot come under about {float(f'{width:.1g}'):.2%}, and the budget is "
                f"{spec.budget:.3%}: give about {float(f'{needed:.1g}'):,.0f} rows, or fewer products can be"
            )
    if trial.unjudged:
        names = ", ".join(f"'{name}'" for name in trial.unjudged)
        yield f"low precision changes {names}, not under `outputs`: no budget bounds by how much"


def _budgets(context: Context) -> Iterator[str]:
    for spec in context.specs:
        if spec.budget > LARGE_BUDGET:
            yield f"output '{spec.name}': `budget: {spec.budget:g}` is {spec.budget:.3%} of the loss"


def _room(context: Context, unknown: Sequence[str] = ()) -> Iterator[str]:
    model, *tables = (file.stat().st_size for file in model_files(context.exported.path))
    needed, free = COPIES * model + TABLES * sum(tables), shutil.disk_usage(context.directory.path).free
    if needed > free:
        yield f"the run may write {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB of its disk are free"
    limit, memory = context.config.build.memory_gb, available_memory() / 1e9
    if unknown and limit > memory:
        yield f"a build may take {limit:g} GB (`build.memory_gb`), and {memory:.3g} GB of memory are free"


def duration(seconds: float) -> str:
    """Seconds, or minutes where they are many, in words."""
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
