"""What every loaded engine is, whoever built it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from loka_onnx.errors import InternalError
from loka_onnx.sessions.dlpack import Borrowed

Arrays = dict[str, npt.NDArray[Any]]


Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Borrowed]
"""Makes an array of a shape and type on the device of the request, by the library that the request is of."""


@dataclass(frozen=True)
class Resident:
    """A batch that lies where the engine computes; calling it runs it once and waits.

    Attributes:
        launch: Runs it, or queues that; its outputs are fetched by nobody.
        wait: Returns when everything that was launched is done.
        is_on_device: Whether the batch lies there; False where it is handed over with each launch.
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
    """Names of an engine's inputs and outputs.

    Attributes:
        inputs: Of what it takes.
        outputs: Of what it answers.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Runner(ABC):
    """A loaded engine; a context manager that frees it."""

    @property
    def names(self) -> Names | None:
        """What its file calls inputs and outputs; None where it does not tell."""
        return None

    @abstractmethod
    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch: one array per graph input, the batch on axis 0; one array per graph output.

        Raises:
            EngineError: The engine fails on this batch.
        """

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """A batch to run again and again without handing it over each time, for timing on the device alone.

        It may overwrite what an earlier one reads: launch one at a time, and no `run` in between. Here, the
        whole request; engines with memory of their own do better.

        Raises:
            EngineError: As `run`.
        """
        return Resident(lambda: self.run(inputs), lambda: None, is_on_device=False)

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes that something is prepared for (buffers, a CUDA graph, a program), ascending.

        A request of fewer rows is padded to the next one where that is not too far.
        """
        return ()

    @property
    def device(self) -> int | None:
        """The CUDA device whose memory `run_on_device` takes; None where rows come from the host."""
        return None

    @property
    def stream(self) -> int:
        """CUDA stream that `run_on_device` reads and writes on, as a handle."""
        return 0

    def run_on_device(self, inputs: Mapping[str, Borrowed], allocate: Allocate) -> dict[str, Borrowed]:
        """Run one batch that lies on `device`, and leave the answer there; done when it returns.

        Args:
            inputs: One array per graph input, in its type, borrowed for `stream`.
            allocate: Makes the outputs.

        Raises:
            EngineError: As `run`.
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
