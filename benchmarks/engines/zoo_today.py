"""What a run chose, beside what a user gets without it, timed in turns.

That is, in BF16 and in FP16: the exported model untouched, as Inductor compiles it by its defaults and by
max-autotune for each batch size, and where there is a module, `torch.compile` of it (max-autotune, a CUDA
graph). The engines of the run without FP8, and with FP8 everywhere, stand beside it.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.plans import TORCH, Arrays
from benchmarks.engines.timing import device_clock, timed_in_turns
from benchmarks.engines.zoo_figures import Finished, ratio_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.inductor.backend import FUSE, STATIC
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BuildLimits, BuildRequest
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.sessions.runner import Resident, Runner
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

TODAY = (Precision.BF16, Precision.FP16)
"""What the untouched model runs in."""


def untouched_plan(model: ModelArtifact, precision: Precision) -> PrecisionPlan:
    """Everything in one precision, as who has no plan does."""
    decisions = tuple(
        Decision(site.name, precision, None, Verdict.NOT_JUDGED, "everything is") for site in model.sites
    )
    return PrecisionPlan(f"today-{precision}", model.digest, precision, decisions, {}, 0.0)


@dataclass(frozen=True)
class Comparison:
    """The engines of a finished run beside what a user gets without it, timed in turns.

    Attributes:
        finished: The run.
        rows: Inputs by name, as many rows as the largest batch or more.
        directory: Where the other engines go.
        options: Of the command: `target`, `serve`, `memory_gb`, `turns`.
        module: Opens the PyTorch module compiled in ``bf16`` or ``fp16``; None where there is none.
        precisions: What the module and the export are compiled in.
        builds_export: Whether the export is compiled as well; by max-autotune that takes minutes.
        judge: The upper end of the loss's change over its budget, of outputs on `rows` and
            the FP32 model's; None for no judge.
    """

    finished: Finished
    rows: Arrays
    directory: Path
    options: argparse.Namespace
    module: Callable[[str], Runner] | None = None
    precisions: tuple[Precision, ...] = TODAY
    builds_export: bool = True
    judge: Callable[[Arrays, Arrays], float] | None = None

    def figures(self) -> dict[str, Any]:
        """Status of the untouched engines, and times and ratios by batch size."""
        with ExitStack() as stack:
            stack.enter_context(device_alone(self.finished.chosen_at(self.options.serve[0]).architecture))
            today = {name: stack.enter_context(runner) for name, runner in self._opened()}
            told = {name: self._told(runner) for name, runner in today.items()}
            able = {name: today[name] for name, facts in told.items() if facts["finite"]}
            inside = [name for name in able if (told[name]["upper over budget"] or 0.0) <= 1.0]
            batches = {str(batch): self._batch(batch, able, inside) for batch in self.options.serve}
        built = {
            engine.plan: {
                "status": str(engine.status),
                "build_seconds": engine.build_seconds,
                "detail": engine.detail[-400:],
            }
            for engine in self.untouched
        }
        engines = {name: built.get(name, {}) | told.get(name, {}) for name in {**built, **told}}
        return {"engines": engines, "batches": batches}

    @cached_property
    def untouched(self) -> tuple[EngineArtifact, ...]:
        """The exported model as it is, compiled by Inductor in BF16 and FP16."""
        wanted = [(precision, tuned) for precision in self.precisions for tuned in (False, True)]
        wanted = wanted if self.builds_export else []
        with ThreadPoolExecutor(len(wanted) or 1) as pool:
            return tuple(pool.map(lambda each: self._build(*each), wanted))

    def _opened(self) -> Iterator[tuple[str, Runner]]:
        for engine in self.untouched:
            if engine.is_built:
                place = self.directory / engine.plan / "engine" / str(engine.path)
                yield engine.plan, get_backend(engine.backend).open(engine, place)
        if self.module is not None:
            for precision in self.precisions:
                yield f"today-{TORCH}-{precision}", self.module(str(precision))

    def _build(self, precision: Precision, is_tuned: bool) -> EngineArtifact:
        model, backend = self.finished.exported, get_backend("inductor")
        plan = untouched_plan(model, precision)
        if is_tuned:
            plan = replace(plan, id=f"{plan.id}-max-autotune")
        place = self.directory / plan.id
        planned = apply_plan(model, plan, PlanForm(precision), place / "planned" / "model.onnx")
        (architecture,) = backend.architectures(self.options.target)
        serve = tuple(sorted(self.options.serve))
        request = BuildRequest(
            model=planned.path,
            plan=plan,
            sites=model.sites,
            target=self.options.target,
            architecture=architecture,
            batch=BatchSizes(1, serve[len(serve) // 2], max(serve), serve),
            output=place / "engine",
            sample=self.finished.directory / "calibration" / "sample.npz",
            limits=BuildLimits(300.0, int(self.options.memory_gb * 1e9)),
            options={FUSE: 0, STATIC: 1, "max_autotune": 1, "search_launches": 1} if is_tuned else {FUSE: 0},
        )
        try:
            return backend.build(request)
        except Exception:
            return backend.failed_artifact(plan, self.options.target, architecture, traceback.format_exc())

    def _batch(self, batch: int, today: Mapping[str, Runner], inside: Sequence[str]) -> dict[str, Any]:
        chosen = self.finished.chosen_at(batch)
        ours = {
            "chosen": chosen,
            **{
                plan: engine
                for plan in ("bf16", "fp16", "untouched", "fp8-all")
                if (engine := self.finished.fastest(plan))
            },
        }
        inputs = self._inputs(batch)
        with ExitStack() as stack:
            runners: dict[str, Runner] = {
                name: stack.enter_context(get_backend(e.backend).open(e, self.finished.directory / e.path))
                for name, e in ours.items()
                if e.path is not None
            }
            runners |= today
            residents = {name: runner.resident(inputs) for name, runner in runners.items()}
            alone = timed_in_turns(residents, self.options.turns, device_clock)
            # What `torch.compile` returns has no request from host memory of its own.
            whole = {
                name: Resident(partial(runner.run, inputs), _waited)
                for name, runner in runners.items()
                if TORCH not in name
            }
            requests = timed_in_turns(whole, self.options.turns, _host_clock)
        return {
            "chosen": chosen.id,
            "request from host memory": _compared(requests, inside),
            "inputs on the device": _compared(alone, inside),
        }

    def _inputs(self, rows: int) -> dict[str, Any]:
        return {
            name: np.ascontiguousarray(np.resize(value, (rows, *value.shape[1:])))
            for name, value in self.rows.items()
        }

    @cached_property
    def _exact(self) -> Arrays:
        return OnnxSession(self.finished.exported.path).run(self.rows)

    def _told(self, runner: Runner) -> dict[str, Any]:
        """How far outputs are from the FP32 model's: the largest root mean square difference over the spread,
        and what the judge says.
        """
        rows = len(next(iter(self.rows.values())))
        size = max(self.options.serve)
        parts = [
            runner.run({name: value[start : start + size] for name, value in self.rows.items()})
            for start in range(0, rows - rows % size, size)
        ]
        made = {name: np.concatenate([part[name] for part in parts]) for name in self._exact}
        found = {name: value.astype(np.float64).reshape(-1) for name, value in made.items()}
        if not all(np.isfinite(value).all() for value in found.values()):
            return {"finite": False, "difference": None, "upper over budget": None}
        off = []
        for name, value in found.items():
            exact = self._exact[name].astype(np.float64).reshape(-1)[: len(value)]
            off.append(float(np.sqrt(np.square(value - exact).mean()) / exact.std()))
        upper = None if self.judge is None else self.judge(made, self._exact)
        return {"finite": True, "difference": max(off), "upper over budget": upper}


def _waited() -> None:
    """Nothing to wait for: `Runner.run` returns when its outputs can be read."""


def _host_clock(request: Resident) -> float:
    """Microseconds of one request with its copies; the median of a few, because one is short."""
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        request()
        taken.append((time.perf_counter() - began) * 1e6)
    return float(np.median(taken))


def _compared(taken: Mapping[str, Sequence[float]], inside: Sequence[str]) -> dict[str, Any]:
    """Medians, and what others took over what was chosen; of today's the fastest inside the budget counts."""
    medians = {name: float(np.median(values)) for name, values in taken.items()}
    names = {"our BF16": "bf16", "our FP16": "fp16", "blanket FP8": "fp8-all"}
    today = [name for name in medians if name in inside]
    if today:
        names["today"] = min(today, key=medians.__getitem__)
    ratios = {title: ratio_of(taken[name], taken["chosen"]) for title, name in names.items() if name in taken}
    return {"median_us": medians, "today is": names.get("today"), "chosen over": ratios}
