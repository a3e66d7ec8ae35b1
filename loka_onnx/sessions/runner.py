"""What every loaded engine is, whoever built it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


class Runner(ABC):
    """A loaded engine; a context manager that frees it."""

    @abstractmethod
    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch: one array per graph input, the batch on axis 0; one array per graph output.

        Raises:
            EngineError: The engine fails on this batch.
        """

    def close(self) -> None:
        """Free the engine; the runner is unusable afterwards."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
