"""A loaded engine: checks requests, answers them, and runs its self-test.

All methods are thread-safe. ONNX Runtime on the CPU runs concurrent requests in parallel; sessions with
buffers (CUDA graphs, TensorRT, MIGraphX, AOTInductor packages) run them one after the other.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.bundle.format.files import Sample
from loka_onnx.core.manifest import EngineEntry, Manifest
from loka_onnx.core.rewrite import INDEX, Part
from loka_onnx.errors import DataError, EngineError, LokaError
from loka_onnx.runtime.health import Health, Skipped, in_line, largest_differences
from loka_onnx.runtime.metrics import EngineSeries, Metrics
from loka_onnx.runtime.requests import (
    HOST,
    NOT_PLAIN,
    TORCH_HOST,
    Kind,
    RequestSpec,
    allocator,
    common_kind,
    kind_of,
    plain_tensors,
    repeated,
    to_host,
    to_kind,
    typed,
)
from loka_onnx.sessions.dlpack import CUDA, borrow
from loka_onnx.sessions.runner import Arrays, Buffers, Runner, to_rows

WARM_UPS = 2
"""Runs of each batch size before an engine is returned: some sessions capture a graph in the second."""


@dataclass(frozen=True)
class Serving:
    """Options of a loaded engine.

    Attributes:
        warm_up: Run every batch size that is prepared, timed or routed before the engine is returned.
        sessions: Requests that are answered at a time on a GPU, each by a session with a stream, buffers and
            weights of its own.
    """

    warm_up: bool = True
    sessions: int = 1


class _Closed(EngineError):
    """The engine was closed; a request to it is the caller's mistake."""


class _Gate:
    """Admits requests until an engine is closed, and waits for those `inside`; thread-safe."""

    def __init__(self) -> None:
        # Taken directly by requests: a `Condition` adds two calls to that.
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self.inside, self.is_closed = 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self.is_closed:
                raise _Closed("the engine is closed", remedy="load the bundle again")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if self.is_closed and not self.inside:
                self._state.notify_all()

    def close(self) -> bool:
        """Admit no more requests and wait for the running ones; True for the call that closed it."""
        with self._state:
            is_first, self.is_closed = not self.is_closed, True
            self._state.wait_for(lambda: not self.inside)
        return is_first


class Engine(AbstractContextManager["Engine"]):
    """A loaded engine of a bundle; made by `load`. A context manager that closes it.

    `inputs` and `outputs` are those of a request, of `part` of the model; `shared` inputs may have a row for
    each user (see `infer`). `skipped` are engines that were preferred to it. `metrics` is also a collector of
    `prometheus_client`; `release` is called once the engine is closed.
    """

    def __init__(
        self, manifest: Manifest, entry: EngineEntry, runner: Runner, sample: Sample, part: Part = Part.WHOLE
    ) -> None:
        self.entry, self.part = entry, part
        self.inputs, self.outputs = manifest.inputs_of(part), manifest.outputs
        self.skipped: tuple[Skipped, ...] = ()
        self.metrics = Metrics()
        self.served_sizes = runner.served_sizes
        """Prepared batch sizes, ascending; a smaller request is padded unless that is too far."""
        self._manifest, self._runner = manifest, runner
        self._is_fallback = entry == manifest.fallback
        self._request = typed({**sample.inputs, **sample.looked_up}, self.inputs)
        self._expected = typed(sample.expected, self.outputs)
        whose = "model" if part is Part.WHOLE else "dense part"
        self._layout = RequestSpec(self.inputs, entry.batch, whose)
        self.shared = manifest.shared
        self._series = EngineSeries(entry.id, runner.served_sizes, entry.batch.max)
        self._gate = gate = _Gate()
        # Not the engine itself: metrics that are registered somewhere must not keep it alive.
        self.metrics.running, self.metrics.is_fallback = (lambda: gate.inside), self._is_fallback
        self._order: tuple[str, ...] = ()
        self._trust = ""
        self._routes: tuple[tuple[int, Engine], ...] = ()
        self._route_sizes: tuple[int, ...] = ()
        self.release: Callable[[], object] = lambda: None
        self._warm: tuple[int, ...] = ()
        self._describe()

    def infer(self, inputs: Mapping[str, Any], *, like: Any = None) -> dict[str, Any]:
        """Answer one request. Only its layout is checked, not its values.

        Arrays may be of NumPy or of any library with DLPack; those in host memory, or on the engine's CUDA
        device where it reads them, are not copied. The answer has the library and device of the request where
        all of its arrays agree (PyTorch, CuPy), else NumPy's.

        Where the bundle has `shared` inputs, a request may also hold a row for each user in these, a row for
        each candidate in the others, and ``user_of_candidate``: the user's row of each candidate,
        (candidates,) int32 or int64.

        Args:
            inputs: One array for each of `inputs`, the batch on axis 0; not changed.
            like: Array whose kind the answer gets, in place of the request's; ``np.empty(0)`` for NumPy.

        Returns:
            One array per graph output, owned by the caller.

        Raises:
            DataError: A missing or unknown input, another type or shape, an unsupported batch size, or an
                object that is no array.
            EngineError: The engine fails on the batch, or was closed.
        """
        metrics = self.metrics
        began = perf_counter()
        try:
            with self._gate:
                if like is not None:
                    rows = NOT_PLAIN
                elif type(inputs) is Buffers and inputs.engine is self:
                    rows = inputs.rows
                else:
                    rows = self._layout.plain_rows(inputs)
                if rows == NOT_PLAIN:
                    return self._infer_others(inputs, like, began)
                return self._run_on_host(inputs, rows, HOST, began)
        except BaseException as error:
            metrics.failed(_kind_of_error(error))
            raise

    def buffers(self, rows: int) -> Mapping[str, npt.NDArray[Any]]:
        """Make arrays for requests of so many rows, in page-locked memory if the engine reads that: `infer`
        then copies them to the device without copying them on the host.

        Fill them, call `infer` with the mapping itself, and use them again when it has returned.

        Raises:
            DataError: An input has a dynamic axis besides the batch, or the engine takes no such batch.
            EngineError: The engine was closed.
        """
        tails = {spec.name: [n for n in spec.shape[1:] if n is not None] for spec in self.inputs}
        if any(len(tails[spec.name]) != len(spec.shape) - 1 for spec in self.inputs):
            raise DataError(
                "E1318 an input has a dynamic axis besides the batch",
                evidence=", ".join(f"'{spec.name}' {spec.shape}" for spec in self.inputs),
                remedy="send arrays of your own",
            )
        if not self.entry.batch.min <= rows <= self.entry.batch.max:
            raise DataError(
                "E1319 the engine takes no such batch",
                evidence=f"{rows} rows; batches of {self.entry.batch.min} to {self.entry.batch.max}",
                remedy="split larger requests",
            )
        with self._gate:
            buffers = self.engine_for(rows)._runner.buffers(rows)
        kinds = {spec.name: np.dtype(spec.dtype) for spec in self.inputs}
        # An engine may take fewer inputs than the model has, or others (a model that was cut).
        if buffers is None or {name: each.dtype for name, each in buffers.items()} != kinds:
            buffers = Buffers({name: np.zeros((rows, *tail), kinds[name]) for name, tail in tails.items()})
        buffers.engine = self
        return buffers

    def set_routes(self, routes: Sequence[tuple[int, Engine]]) -> None:
        """Route requests by their largest number of rows, ascending; this engine owns the others."""
        self._routes = tuple(routes)
        self._route_sizes = tuple(rows for rows, _ in routes)
        self._describe()

    def set_origin(self, skipped: Sequence[Skipped], order: tuple[str, ...], trust: str) -> None:
        """Store results of loading: the order of trial, and why programs may be loaded."""
        self.skipped, self._order, self._trust = tuple(skipped), order, trust
        self.metrics.skipped = tuple(each.cause for each in skipped)

    def engine_for(self, rows: int) -> Engine:
        """Engine for a request of so many rows: that of the next routed size."""
        if not self._routes:
            return self
        return self._routes[min(bisect_left(self._route_sizes, rows), len(self._routes) - 1)][1]

    def warm_up(self, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Run batches of the sample's rows, by default of `sizes`, so that no request pays for the first of
        its size; return the sizes that were run, ascending.
        """
        wanted = self.sizes if sizes is None else self._within(sizes)
        for size in wanted:
            batch = {name: repeated(value, size) for name, value in self._request.items()}
            with self._gate:
                for _ in range(WARM_UPS):
                    self.engine_for(size)._runner.run(batch)
        self._warm = tuple(sorted({*self._warm, *wanted}))
        return wanted

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that are prepared, timed or routed, ascending, within the engine's range."""
        sizes = {*self._route_sizes}
        for engine in (self, *self._others):
            sizes |= {*engine.served_sizes}
            timed = engine.entry.evaluation
            sizes |= set() if timed is None else {latency.batch for latency in timed.latencies}
        return self._within(sizes)

    def _within(self, sizes: Iterable[int]) -> tuple[int, ...]:
        least, most = self.entry.batch.min, self.entry.batch.max
        return tuple(sorted({min(max(size, least), most) for size in sizes}))

    def close(self) -> None:
        """Free the engine after running requests are answered; a second call does nothing."""
        if not self._gate.close():
            return
        with ExitStack() as stack:
            stack.callback(self.release)
            stack.callback(self._runner.close)
            for engine in self._others:
                stack.callback(engine.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def health(self) -> Health:
        """Run the self-test: the sample through the engine, compared with its expected outputs."""
        details, moved = list[str](), {}
        try:
            self._layout.rows_of(self._request)
            with self._gate:
                answer = self._runner.run(self._request)
            moved = largest_differences(self.outputs, answer, self._expected)
            # A NaN difference is a failure too.
            details += [
                f"output '{n}' is off by {value:.3g}, the tolerance is {self.entry.tolerance[n]:.3g}"
                for n, value in moved.items()
                if not value <= self.entry.tolerance[n]
            ]
        except LokaError as error:
            details.append(in_line(error))
        healths = (engine.health() for engine in self._others)
        details += [f"engine '{health.engine}': {health.detail}" for health in healths if not health.ready]
        return Health(
            ready=not details,
            detail="; ".join(details),
            engine=self.entry.id,
            backend=self.entry.backend,
            plan=self.entry.plan,
            architecture=self.entry.architecture,
            simulated=self.entry.simulated,
            is_fallback=self._is_fallback,
            model_digest=self._manifest.model_digest,
            max_abs=moved,
            tolerance=dict(self.entry.tolerance),
            skipped=self.skipped,
            routes={rows: engine.entry.id for rows, engine in self._routes},
            order=self._order,
            served_sizes=self.served_sizes,
            warm=self._warm,
            trust=self._trust,
        )

    @property
    def _others(self) -> tuple[Engine, ...]:
        engines = {id(engine): engine for _, engine in self._routes if engine is not self}
        return tuple(engines.values())

    def _infer_others(self, inputs: Mapping[str, Any], like: Any, began: float) -> dict[str, Any]:
        """Answer a request with arrays of another library, or refuse one."""
        # The exact type first, because isinstance of `Mapping` is slower.
        is_mapping = type(inputs) is dict or isinstance(inputs, Mapping)
        if is_mapping and self.shared and INDEX in inputs:
            return self._infer_request(inputs, like, began)
        if like is None and is_mapping and (tensors := plain_tensors(inputs)) is not None:
            rows = self._layout.plain_rows(tensors)
            rows = self._layout.rows_of(tensors) if rows == NOT_PLAIN else rows
            return self._run_on_host(tensors, rows, TORCH_HOST, began)
        self._layout.check_names(inputs)
        kinds = {name: kind_of(value) for name, value in inputs.items()}
        kind = common_kind(kinds.values() if like is None else [kind_of(like)])
        target = self._device_engine(inputs, kinds, kind)
        if target is None:
            host = {name: to_host(value, kinds[name]) for name, value in inputs.items()}
            rows = self._layout.rows_of(host)
            if not all(each.is_host for each in kinds.values()):
                self.metrics.copied()
            return self._run_on_host(host, rows, kind, began)
        stream = target._runner.stream
        borrowed = {name: borrow(value, stream) for name, value in inputs.items()}
        rows = self._layout.rows_of(borrowed)
        outputs = target._runner.run_on_device(borrowed, allocator(kind, stream))
        self.metrics.answered(target._series.of(rows), rows, perf_counter() - began)
        return {name: value.source for name, value in outputs.items()}

    def _infer_request(self, inputs: Mapping[str, Any], like: Any, began: float) -> dict[str, Any]:
        kinds = {name: kind_of(value) for name, value in inputs.items()}
        host = {name: to_host(value, kinds[name]) for name, value in inputs.items()}
        index = host[INDEX]
        users = [host[name] for name in self.shared if name in host and host[name].ndim]
        counts = sorted({len(values) for values in users})
        is_index = index.ndim == 1 and index.dtype.kind == "i" and len(counts) == 1
        if not is_index or (len(index) and not 0 <= index.min() <= index.max() < counts[0]):
            raise DataError(
                f"E1320 '{INDEX}' does not name the user of each candidate",
                evidence=f"{index.dtype}{index.shape} for {' or '.join(map(str, counts))} users",
                remedy="send a row for each user in all shared inputs, and their numbers, from 0, as int64",
            )
        host[INDEX] = index.astype(np.int64, copy=False)
        # Only types and shapes are looked at.
        plain = {name: host[name] for name in host if name != INDEX}
        like_rows = (
            (n, np.broadcast_to(plain[n][:1], (len(index), *plain[n].shape[1:])))
            for n in self.shared
            if n in plain
        )
        rows = self._layout.rows_of(plain | dict(like_rows))
        if self.engine_for(rows).entry.part is not Part.REQUEST:
            host = to_rows(host, self.shared)
        kind = common_kind(kinds.values() if like is None else [kind_of(like)])
        return self._run_on_host(host, rows, kind, began)

    def _run_on_host(self, inputs: Mapping[str, Any], rows: int, kind: Kind, began: float) -> dict[str, Any]:
        """Answer a checked request in host memory, in arrays of a kind."""
        target, metrics = self.engine_for(rows), self.metrics
        outputs: Arrays = target._runner.run_checked(inputs, rows)
        answer = outputs if kind is HOST else {name: to_kind(value, kind) for name, value in outputs.items()}
        metrics.answered(target._series.of(rows), rows, perf_counter() - began)
        return answer

    def _device_engine(
        self, inputs: Mapping[str, Any], kinds: Mapping[str, Kind], kind: Kind
    ) -> Engine | None:
        """Engine that reads the request on its device, if the answer is wanted there."""
        place = (kind.device_type, kind.device)
        if place[0] != CUDA or any((each.device_type, each.device) != place for each in kinds.values()):
            return None
        rows = next((int(value.shape[0]) for value in inputs.values() if value.shape), 0)
        engine = self.engine_for(rows)
        return engine if engine._runner.device == kind.device else None

    def _describe(self) -> None:
        self.metrics.engines = tuple(
            (each._series, (each.entry.id, each.entry.backend, each.entry.plan, each.entry.architecture))
            for each in (self, *self._others)
        )


def _kind_of_error(error: BaseException) -> str:
    if isinstance(error, _Closed):
        return "closed"
    if isinstance(error, DataError):
        return "request"
    return "engine" if isinstance(error, EngineError) else "internal"
