"""What a run chose, beside what a user gets without it, timed in turns.

That is the exported model untouched, everything in BF16 or in FP16, as Inductor compiles it. The engines of
the run without FP8, and with FP8 everywhere, stand beside it.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.timing import device_clock, timed_in_turns
from benchmarks.engines.zoo_figures import Finished, ratio_of
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.inductor.backend import FUSE
from loka_onnx.engines.registry import get_backend
from loka_onnx.engines.request import BatchRange, BuildRequest, Limits
from loka_onnx.sessions.runner import Resident
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_zoo.prepared import PreparedData

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
        data: Rows to ask engines for.
        directory: Where the other engines go.
        options: Of the command.
    """

    finished: Finished
    data: PreparedData
    directory: Path
    options: argparse.Namespace

    def figures(self) -> dict[str, Any]:
        """Status of the untouched engines, and times and ratios by batch size."""
        untouched = self.untouched
        return {
            "engines": {
                engine.plan: {
                    "status": str(engine.status),
                    "build_seconds": engine.build_seconds,
                    "detail": engine.detail[-400:],
                    "logit_difference": self.differences[engine.plan],
                }
                for engine in untouched
            },
            "batches": {str(batch): self._batch(batch) for batch in self.options.serve},
        }

    @cached_property
    def untouched(self) -> tuple[EngineArtifact, ...]:
        """The exported model as it is, compiled by Inductor in BF16 and FP16."""
        with ThreadPoolExecutor(len(TODAY)) as pool:
            return tuple(pool.map(self._build, TODAY))

    def _build(self, precision: Precision) -> EngineArtifact:
        model, backend = self.finished.exported, get_backend("inductor")
        plan = untouched_plan(model, precision)
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
            batch=BatchRange(1, serve[len(serve) // 2], max(serve), serve),
            output=place / "engine",
            sample=self.finished.directory / "calibration" / "sample.npz",
            limits=Limits(300.0, int(self.options.memory_gb * 1e9)),
            options={FUSE: 0},
        )
        try:
            return backend.build(request)
        except Exception:
            return backend.failure(plan, self.options.target, architecture, traceback.format_exc())

    @cached_property
    def differences(self) -> dict[str, float | None]:
        """How far the untouched engines are off; None for one that was not built, or gives no numbers."""
        return {e.plan: self._difference(e) if e.is_built else None for e in self.untouched}

    def _batch(self, batch: int) -> dict[str, Any]:
        chosen = self.finished.chosen_at(batch)
        ours = {
            "chosen": chosen,
            **{
                plan: engine
                for plan in ("bf16", "fp16", "fp8-all")
                if (engine := self.finished.fastest(plan))
            },
        }
        inputs = self._inputs(batch)
        with ExitStack() as stack:
            stack.enter_context(device_alone(chosen.architecture))
            runners = {
                name: stack.enter_context(get_backend(e.backend).open(e, self.finished.directory / e.path))
                for name, e in ours.items()
                if e.path is not None
            }
            for engine in self.untouched:
                # One that gives no numbers, as in FP16 that overflowed, is of no use to anybody.
                if self.differences[engine.plan] is not None:
                    place = self.directory / engine.plan / "engine" / str(engine.path)
                    runners[engine.plan] = stack.enter_context(
                        get_backend(engine.backend).open(engine, place)
                    )
            whole = {name: Resident(partial(runner.run, inputs), _waited) for name, runner in runners.items()}
            requests = timed_in_turns(whole, self.options.turns, _host_clock)
            residents = {name: runner.resident(inputs) for name, runner in runners.items()}
            alone = timed_in_turns(residents, self.options.turns, device_clock)
        return {
            "chosen": chosen.id,
            "request from host memory": _compared(requests),
            "inputs on the device": _compared(alone),
        }

    def _inputs(self, rows: int) -> dict[str, Any]:
        batch = next(self.data.open("selection").batches(rows))
        return {name: np.ascontiguousarray(value) for name, value in batch.inputs.items()}

    def _difference(self, engine: EngineArtifact) -> float | None:
        """Root mean square difference of the logit from the FP32 model's, over its standard deviation; None
        where a logit is not finite.
        """
        inputs = self._inputs(min(1024, max(self.options.serve)))
        exact = self.finished.exact(inputs)
        place = self.directory / engine.plan / "engine" / str(engine.path)
        with get_backend(engine.backend).open(engine, place) as runner:
            found = runner.run(inputs)["logit"].astype(np.float64)
        if not np.isfinite(found).all():
            return None
        return float(np.sqrt(np.square(found - exact).mean()) / exact.std())


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


def _compared(taken: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and what others took over what was chosen; of today's the faster one counts."""
    medians = {name: float(np.median(values)) for name, values in taken.items()}
    names = {"our BF16": "bf16", "our FP16": "fp16", "blanket FP8": "fp8-all"}
    today = [name for name in medians if name.startswith("today-")]
    if today:
        names["today"] = min(today, key=medians.__getitem__)
    ratios = {title: ratio_of(taken[name], taken["chosen"]) for title, name in names.items() if name in taken}
    return {"median_us": medians, "chosen over": ratios}
