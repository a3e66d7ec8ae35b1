"""Base class of loaded engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import EngineError, InternalError
from loka_onnx.sessions.dlpack import Borrowed

Arrays = dict[str, npt.NDArray[Any]]


Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Borrowed]
"""Makes an array of a shape and type on the request's device, by the request's library."""


@dataclass(frozen=True)
class Resident:
    """A batch in the memory of the engine; calling it runs it once and waits.

    Attributes:
        launch: Runs or queues it; its outputs are not fetched.
        is_on_device: False where each launch passes the batch from the host.
    """

    launch: Callable[[], object]
    wait: Callable[[], None]
    is_on_device: bool = True

    def __call__(self) -> None:
        """Run it once."""
        self.launch()
        self.wait()


@dataclass(frozen=True)
class Names:
    """Names of an engine's inputs and outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def check_types(inputs: Mapping[str, Borrowed], types: Mapping[str, npt.DTypeLike]) -> None:
    """Check that borrowed inputs have the engine's types; an `EngineError` where one has not."""
    for name, kind in types.items():
        if inputs[name].dtype != kind:
            raise EngineError(
                f"E0922 input '{name}' has another type than the engine",
                evidence=f"{inputs[name].dtype} on the device, the engine takes {np.dtype(kind)}",
                remedy="send these rows from the host, where they are converted",
            )


class Runner(ABC):
    """A loaded engine; a context manager that frees it."""

    @property
    def names(self) -> Names | None:
        """Names in its file; None where the file does not state them."""
        return None

    @abstractmethod
    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch: one array per graph input, the batch on axis 0; one array per graph output.

        Raises:
            EngineError: The engine fails on this batch.
        """

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """Prepare a batch for repeated runs without passing it each time, to time the device alone.

        It may overwrite the inputs of an earlier one: launch one at a time, without `run` in between.
        """
        return Resident(lambda: self.run(inputs), lambda: None, is_on_device=False)

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes with prepared buffers, CUDA graphs or programs, ascending."""
        return ()

    @property
    def device(self) -> int | None:
        """CUDA device of `run_on_device`; None where rows come from the host."""
        return None

    @property
    def stream(self) -> int:
        """Handle of the CUDA stream of `run_on_device`."""
        return 0

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch on `device` and leave the answer there; complete on return.

        Inputs have the types of the graph's, and are borrowed for `stream`.
        """
        raise InternalError(
            f"{type(self).__name__} takes rows from the host", evidence=f"{len(inputs)} inputs"
        )

    def close(self) -> None:
        """Free the engine; the runner is unusable afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
