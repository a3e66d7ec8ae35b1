"""What every loaded engine is, whoever built it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


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


class Runner(ABC):
    """A loaded engine; a context manager that frees it."""

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

    def close(self) -> None:
        """Free the engine; the runner is unusable afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
