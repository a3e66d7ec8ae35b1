"""A loaded engine: checks requests, answers them, and can say whether it still answers right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.split import Part
from loka_onnx.errors import DataError, EngineError, LokaError
from loka_onnx.sessions.bundle_files import Sample
from loka_onnx.sessions.runner import Arrays, Runner


@dataclass(frozen=True)
class Skipped:
    """An engine of the bundle that was preferred to the loaded one.

    Attributes:
        engine: Its id.
        reason: Why it does not run here.
    """

    engine: str
    reason: str


@dataclass(frozen=True)
class Health:
    """The result of a self-test.

    Attributes:
        ready: Whether the engine reproduces its expected outputs on the sample.
        detail: Why not; empty when ready.
        engine: Id of the loaded engine.
        backend: Its backend.
        plan: Its plan.
        architecture: Its architecture.
        simulated: Its FP8 is simulated.
        is_fallback: Whether it is the FP32 model because no emitted engine runs here.
        model_digest: Digest of the exported model.
        max_abs: Largest difference from the expected outputs of the sample, per output; empty when the
            engine failed.
        tolerance: What `max_abs` was held against.
        skipped: Engines that were preferred to this one.
        routes: Where several serve, by the largest number of rows that one takes, its id; empty where
            one takes all.
    """

    ready: bool
    detail: str
    engine: str
    backend: str
    plan: str
    architecture: str
    simulated: bool
    is_fallback: bool
    model_digest: str
    max_abs: dict[str, float]
    tolerance: dict[str, float]
    skipped: tuple[Skipped, ...]
    routes: dict[int, str] = field(default_factory=dict)


class Engine:
    """An engine of a bundle, loaded; made by `load`.

    Args:
        manifest: Manifest of its bundle.
        entry: The engine.
        runner: What it runs on.
        sample: What it is tried on.
        skipped: Engines that were preferred to it.
        part: ``whole`` for a runner that takes the model's own inputs, ``dense`` for one that takes looked-up
            rows in place of ids.

    Attributes:
        entry: The engine, as its manifest describes it.
        inputs: What a request holds.
        outputs: What an answer holds.
        skipped: Engines that were preferred to it.
        part: What it takes.
    """

    def __init__(
        self,
        manifest: Manifest,
        entry: EngineEntry,
        runner: Runner,
        sample: Sample,
        skipped: tuple[Skipped, ...],
        part: Part = Part.WHOLE,
    ) -> None:
        self.entry = entry
        self.part = part
        self.inputs = manifest.inputs_of(part)
        self.outputs = manifest.outputs
        self.skipped = skipped
        self._manifest = manifest
        self._runner = runner
        self._sample = sample
        self._routes: tuple[tuple[int, Engine], ...] = ()

    def infer(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Answers one request. Values are not checked, only their layout.

        Args:
            inputs: One array for each of `inputs`, the batch on axis 0.

        Returns:
            One array per graph output.

        Raises:
            DataError: A missing or unknown input, another type or shape, or a batch that the engine was
                not built for.
            EngineError: The engine fails on the batch.
        """
        rows = self._check(inputs)
        return self._engine_of(rows)._runner.run(inputs)

    def set_routes(self, routes: Sequence[tuple[int, Engine]]) -> None:
        """Hand requests to other engines by their size, from now on; this one owns them.

        Args:
            routes: Largest number of rows that an engine takes, ascending, and the engine, which may be this
                one; the last one takes larger requests too.
        """
        self._routes = tuple(routes)

    def close(self) -> None:
        """Frees what the engine holds, a GPU's memory above all; it answers nothing afterwards."""
        with ExitStack() as stack:
            stack.callback(self._runner.close)
            for engine in self._others:
                stack.callback(engine.close)

    def health(self) -> Health:
        """Runs the self-test: the sample through the engine, against its expected outputs."""
        detail, differences = "", {}
        try:
            known = {**self._sample.inputs, **self._sample.looked_up}
            request = {spec.name: known[spec.name] for spec in self.inputs}
            self._check(request)
            answer = self._runner.run(request)
            differences = {
                spec.name: _max_abs(answer[spec.name], self._sample.expected[spec.name], spec.name)
                for spec in self.outputs
            }
            # Written so that a NaN difference is a failure.
            wrong = [n for n, value in differences.items() if not value <= self.entry.tolerance[n]]
            detail = "; ".join(
                f"output '{n}' is off by {differences[n]:.3g}, the tolerance is {self.entry.tolerance[n]:.3g}"
                for n in wrong
            )
        except LokaError as error:
            detail = str(error)
        detail = "; ".join([*([detail] if detail else []), *self._ailing()])
        return Health(
            ready=not detail,
            detail=detail,
            engine=self.entry.id,
            backend=self.entry.backend,
            plan=self.entry.plan,
            architecture=self.entry.architecture,
            simulated=self.entry.simulated,
            is_fallback=self.entry == self._manifest.fallback,
            model_digest=self._manifest.model_digest,
            max_abs=differences,
            tolerance=dict(self.entry.tolerance),
            skipped=self.skipped,
            routes={rows: engine.entry.id for rows, engine in self._routes},
        )

    @property
    def _others(self) -> tuple[Engine, ...]:
        """The other engines that requests are handed to."""
        found = {id(engine): engine for _, engine in self._routes if engine is not self}
        return tuple(found.values())

    def _engine_of(self, rows: int) -> Engine:
        """The engine that takes a request of so many rows: that of the next size that has one."""
        last = self._routes[-1][1] if self._routes else self
        return next((engine for most, engine in self._routes if rows <= most), last)

    def _ailing(self) -> list[str]:
        """What is wrong with the other engines."""
        healths = (engine.health() for engine in self._others)
        return [f"engine '{health.engine}': {health.detail}" for health in healths if not health.ready]

    def _check(self, inputs: Mapping[str, npt.NDArray[Any]]) -> int:
        """Rows of a request that the engine takes.

        Raises:
            DataError: It does not take it.
        """
        names = {spec.name for spec in self.inputs}
        whose = "model" if self.part is Part.WHOLE else "dense part"
        if set(inputs) != names:
            raise DataError(
                f"the request does not hold the {whose}'s inputs",
                evidence=f"missing {sorted(names - set(inputs))}, unknown {sorted(set(inputs) - names)}",
                remedy=f"send {', '.join(sorted(names))}",
            )
        rows = {spec.name: _rows(inputs[spec.name], spec) for spec in self.inputs}
        batch = self.entry.batch
        if len(set(rows.values())) != 1 or not batch.min <= min(rows.values()) <= batch.max:
            raise DataError(
                "the request is not a batch that the engine was built for",
                evidence=f"rows {rows}, batches of {batch.min} to {batch.max}",
                remedy="send equally many rows of every input, and split larger requests",
            )
        return min(rows.values())


def _rows(value: npt.NDArray[Any], spec: TensorSpec) -> int:
    fits = (
        value.dtype == np.dtype(spec.dtype)
        and value.ndim == len(spec.shape)
        and value.ndim > 0
        and all(want in {None, got} for want, got in zip(spec.shape, value.shape, strict=True))
    )
    if not fits:
        raise DataError(
            f"input '{spec.name}' has another type or shape",
            evidence=f"{value.dtype}{value.shape}, the model takes {spec.dtype}{spec.shape}",
            remedy="None is the batch or another dynamic dimension; convert the array",
        )
    return int(value.shape[0])


def _max_abs(got: npt.NDArray[Any], expected: npt.NDArray[Any], name: str) -> float:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise EngineError(
            f"output '{name}' has another type or shape",
            evidence=f"{got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}",
        )
    if not got.size:
        return 0.0
    return float(np.max(np.abs(got.astype(np.float64) - expected.astype(np.float64))))
