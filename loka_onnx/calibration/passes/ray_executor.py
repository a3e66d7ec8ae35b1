"""Executor on the machines of a Ray cluster.

A span is a task; each worker process loads a model once and runs its spans on one thread. Results come back
in order and are added up exactly here, so the profile equals that of one process to the last bit, as long as
the processors run the same FP32 kernels. The task of a dead worker runs again elsewhere: a batch has no
effect but its result.

Workers open files (models, tables, data) by the same path as this process: several machines need a shared
file system. They also need this package in the same version.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from loka_onnx.calibration.passes.executors import BatchExecutor, BatchResult, BatchWork, Span
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError, ConfigError, LokaError, MissingPackage, line_of

R = TypeVar("R")

RETRIES = 3
"""Retries of a span whose worker died."""
IN_FLIGHT = 2
"""Most spans of each worker that run or wait to be added up, which bounds memory."""

_numbers = count()


class RayExecutor(BatchExecutor):
    """Runs spans of batches as tasks of a Ray cluster, which it connects to at first use.

    `address` is of the cluster that this machine belongs to, as in ``10.0.0.5:6379``, or ``auto``; None
    starts one here, of so many `workers` (0 for one per core), which `close` ends. An existing connection of
    this process is used as it is. Raises ConfigError for an address of Ray Client; MissingPackage without
    Ray.
    """

    def __init__(self, address: str | None = None, workers: int = 0) -> None:
        if address is not None and "://" in address:
            raise ConfigError(
                f"E0508 '{address}' is an address of Ray Client, which every batch would pass through",
                remedy="run on a machine of the cluster, and give `auto` or an address as in 10.0.0.5:6379",
            )
        self.address, self.workers = address, workers
        self._ray = import_ray(
            MissingPackage(
                "E0511 Ray is not installed",
                remedy="pip install 'loka-onnx[ray]', or measure here with `--executor local`",
            )
        )
        self._is_ours = False

    def run(
        self, work: BatchWork[R], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[R]]:
        """See `BatchExecutor.run`. CalibrationError if a worker finds no file, or workers keep dying."""
        ray = self._connected()
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_span)
        key = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        shared = [ray.put(value) for value in (work, data)]
        rest = iter(spans)
        workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        waiting: deque[tuple[Span, Any]] = deque()
        try:
            while True:
                for span in islice(rest, IN_FLIGHT * workers - len(waiting)):
                    waiting.append((span, task.remote(key, *shared, span, batch_size)))
                if not waiting:
                    return
                span, result = waiting.popleft()
                yield from self._fetched(span, result)
        finally:
            for _, result in waiting:
                ray.cancel(result, force=False)

    def close(self) -> None:
        """End the cluster if this executor started it."""
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _connected(self) -> Any:
        ray = self._ray
        if ray.is_initialized():
            return ray
        try:
            if self.address is None:
                connect(ray, "local", num_cpus=self.workers or None, include_dashboard=False)
            else:
                connect(ray, self.address)
        except (OSError, RuntimeError, ValueError) as error:
            raise CalibrationError(
                f"E0517 no Ray cluster answers at '{self.address}'"
                if self.address
                else "E0518 a Ray cluster cannot be started on this machine",
                evidence=line_of(error),
                remedy="correct `calibration.ray_address`, or measure here with `--executor local`",
            ) from error
        self._is_ours = True
        return ray

    def _fetched(self, span: Span, result: Any) -> list[Any]:
        errors = self._ray.exceptions
        try:
            batches: list[Any] = self._ray.get(result)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LokaError):
                raise cause from None
            if isinstance(cause, errors.RayError):
                raise CalibrationError(
                    "E0509 a worker of the Ray cluster cannot read the work that it is sent",
                    evidence=line_of(cause, -1),
                    remedy="install the same versions of Python and of loka-onnx on every machine",
                ) from error
            raise
        except errors.RayError as error:
            raise CalibrationError(
                f"E0510 the Ray cluster cannot run rows {span.start} to {span.stop}: its workers keep dying",
                evidence=f"{line_of(error)} ({type(error).__name__}, after {RETRIES} retries)",
                remedy="look at `ray status` and the kernel's log of killed processes: a worker needs memory "
                "for a batch of activations; a smaller `calibration.batch_size` or fewer workers a machine "
                "need less",
            ) from error
        return batches


def import_ray(missing: MissingPackage) -> Any:
    """Import Ray; raises the given error where it is not installed."""
    with missing.in_place_of(ImportError):
        import ray
        import ray.exceptions
    return ray


def connect(ray: Any, address: str, **options: Any) -> None:
    """Connect this process to a cluster; OSError, RuntimeError or ValueError where none answers."""
    # Ray sends usage statistics by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        # Where nothing listens, Ray itself takes minutes to say so.
        socket.create_connection((host, int(port)), timeout=10.0).close()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)


_opened: dict[str, Callable[[Batch], Any]] = {}
"""Opened work of the last run; a worker process runs one task at a time."""


def _run_span(
    key: str, work: BatchWork[R], data: Dataset, span: Span, batch_size: int
) -> list[BatchResult[R]]:
    """Return the results of a span's batches; `key` names the run."""
    _check_files((work.path, data.path))
    if key not in _opened:
        _opened.clear()
        _opened[key] = work.open()
    run = _opened[key]
    batches: Iterator[Batch] = data.batches(batch_size, start=span.start, stop=span.stop)
    return [BatchResult(batch.rows, run(batch)) for batch in batches]


def _check_files(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise CalibrationError(
                f"E0512 '{path}' is not there on '{socket.gethostname()}', a machine of the Ray cluster",
                evidence="the process that started the run reads it",
                remedy="put the data and the run directory (`--output`) on a file system that all machines "
                "share, under the same path, or measure here with `--executor local`",
            )
