"""Loaded engines: their base class, a lookup in front of one, and batches in parallel."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import INDEX
from loka_onnx.errors import EngineError, InternalError
from loka_onnx.sessions.dlpack import Borrowed

A = TypeVar("A")
B = TypeVar("B")
Arrays = dict[str, npt.NDArray[Any]]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Borrowed]
"""Makes an array of a shape and type on the request's device, by the request's library."""


@dataclass(frozen=True)
class Resident:
    """A batch in the memory of the engine; calling it runs it once and waits. `launch` runs or queues it
    without fetching outputs; without `is_on_device`, each launch passes the batch from the host.
    """

    launch: Callable[[], object]
    wait: Callable[[], None]
    is_on_device: bool = True

    def __call__(self) -> None:
        """Run it once."""
        self.launch()
        self.wait()


def check_types(inputs: Mapping[str, Borrowed], types: Mapping[str, npt.DTypeLike]) -> None:
    """Check that borrowed inputs have the engine's types; an `EngineError` where one has not."""
    for name, kind in types.items():
        if inputs[name].dtype != kind:
            raise EngineError(
                f"E0922 input '{name}' has another type than the engine",
                evidence=f"{inputs[name].dtype} on the device, the engine takes {np.dtype(kind)}",
                remedy="send these rows from the host, where they are converted",
            )


class Buffers(Mapping[str, npt.NDArray[Any]]):
    """Fixed arrays for the inputs of a request of `rows` rows, which an engine reads in place. `session` made
    them and reads `memory`; the runtime sets `engine`, whose requests they fit.
    """

    def __init__(
        self, arrays: Mapping[str, npt.NDArray[Any]], session: Runner | None = None, memory: Any = None
    ) -> None:
        self._arrays, self.session, self.memory = dict(arrays), session, memory
        self.rows = min((len(array) for array in self._arrays.values()), default=0)
        self.engine: object = None

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Runner(ABC):
    """A loaded engine; a context manager that frees it."""

    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    """Names in its file; neither where the file does not state them."""
    served_sizes: tuple[int, ...] = ()
    """Batch sizes with prepared buffers, CUDA graphs or programs, ascending."""
    device: int | None = None
    """CUDA device of `run_on_device`; None where rows come from the host."""

    @abstractmethod
    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch, on axis 0 of one array per input; one array per output, or an `EngineError`."""

    def run_checked(self, inputs: Mapping[str, npt.NDArray[Any]], rows: int) -> Arrays:
        """Run a batch of so many rows, whose names, types and shapes have been checked."""
        return self.run(inputs)

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Prepare a batch for repeated runs without passing it each time, to time the device alone. It may
        overwrite the inputs of an earlier one: launch one at a time, without `run` in between.
        """
        return Resident(lambda: self.run(inputs), lambda: None, is_on_device=False)

    def buffers(self, rows: int) -> Buffers | None:
        """Make memory for requests of so many rows that `run` reads in place; None where there is none."""
        return None

    @property
    def stream(self) -> int:
        """Handle of the CUDA stream of `run_on_device`."""
        return 0

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch on `device` and leave the answer there; complete on return. Inputs have the types of
        the graph's, and are borrowed for `stream`.
        """
        raise InternalError(
            f"{type(self).__name__} takes rows from the host", evidence=f"{len(inputs)} inputs"
        )

    def close(self) -> None:
        """Free the engine; the runner is unusable afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ParallelRunner(Runner):
    """Several sessions of one engine, which it owns: a request takes a free one, or waits for one. Requests
    on the device share the first one, whose stream they are ordered by.
    """

    def __init__(self, sessions: Sequence[Runner]) -> None:
        self.sessions = tuple(sessions)
        self._free: SimpleQueue[Runner] = SimpleQueue()
        for session in self.sessions:
            self._free.put(session)
        self._next = cycle(self.sessions)
        first = self.sessions[0]
        self.input_names, self.output_names = first.input_names, first.output_names
        self.served_sizes, self.device = first.served_sizes, first.device

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch in a free session, or in the one whose memory it lies in."""
        with self._taken(inputs) as session:
            return session.run(inputs)

    def run_checked(self, inputs: Mapping[str, npt.NDArray[Any]], rows: int) -> Arrays:
        """Run a checked batch likewise."""
        with self._taken(inputs) as session:
            return session.run_checked(inputs, rows)

    @contextmanager
    def _taken(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Iterator[Runner]:
        if type(inputs) is Buffers and inputs.session is not None:
            yield inputs.session
            return
        session = self._free.get()
        try:
            yield session
        finally:
            self._free.put(session)

    def buffers(self, rows: int) -> Buffers | None:
        """Make memory of each session in turn."""
        return next(self._next).buffers(rows)

    @property
    def stream(self) -> int:
        """Stream of the first session."""
        return self.sessions[0].stream

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch in the first session."""
        return self.sessions[0].run_on_device(inputs, allocate)

    def close(self) -> None:
        """Free all, even if freeing one fails."""
        with ExitStack() as stack:
            for session in self.sessions:
                stack.callback(session.close)


class SplitRunner(Runner):
    """Looks up ids with one engine, then runs the dense engine on the rows; owns both."""

    def __init__(self, lookup: Runner, dense: Runner) -> None:
        self.lookup, self.dense = lookup, dense
        self.served_sizes = dense.served_sizes

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch of the model's own inputs."""
        return self.dense.run({**inputs, **self.lookup.run(inputs)})

    def close(self) -> None:
        """Free both, even if freeing one fails."""
        with ExitStack() as stack:
            stack.callback(self.lookup.close)
            stack.callback(self.dense.close)


def to_users(inputs: Mapping[str, npt.NDArray[Any]], shared: Sequence[str]) -> Arrays:
    """Return plain rows as users, candidates and the index: a user is a run of rows that share all values."""
    rows = len(inputs[shared[0]])
    is_new = np.zeros(rows, bool)
    is_new[:1] = True
    for name in shared:
        values = inputs[name].reshape(rows, -1)
        is_new[1:] |= (values[1:] != values[:-1]).any(axis=1)
    first = np.flatnonzero(is_new)
    return {
        **inputs,
        **{name: inputs[name][first] for name in shared},
        INDEX: np.cumsum(is_new, dtype=np.int64) - 1,
    }


def to_rows(inputs: Mapping[str, npt.NDArray[Any]], shared: Sequence[str]) -> Arrays:
    """Return a request of users and candidates as plain rows."""
    rows = {name: values[inputs[INDEX]] if name in shared else values for name, values in inputs.items()}
    del rows[INDEX]
    return rows


def stream_count(threads: int) -> int:
    """Number of streams for a number of threads; all cores for 0."""
    return threads or len(os.sched_getaffinity(0))


def map_in_order(
    work: Callable[[A], B], items: Iterable[A], streams: int, per_stream: int = 2
) -> Generator[B, None, None]:
    """Apply a function to items in several threads and yield the results in order. One stream per core is
    faster than one stream on all cores, as an operator on a ranker's batch is too small to share, and a
    result does not depend on their number. At most `per_stream` items per stream are in flight, which bounds
    memory. After a failure no further item begins.
    """
    waiting: deque[Future[B]] = deque()
    with ThreadPoolExecutor(streams, thread_name_prefix="stream") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= per_stream * streams:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
