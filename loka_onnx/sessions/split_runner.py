"""A lookup model and a dense engine in sequence, as one engine with the model's own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy.typing as npt

from loka_onnx.sessions.runner import Arrays, Runner


class SplitRunner(Runner):
    """Looks up ids with one engine, then runs the dense engine on the rows; owns both."""

    def __init__(self, lookup: Runner, dense: Runner) -> None:
        self.lookup, self.dense = lookup, dense

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Run one batch of the model's own inputs."""
        return self.dense.run(self.look_up(inputs))

    def look_up(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return the inputs together with the cut tensors."""
        return {**inputs, **self.lookup.run(inputs)}

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Sizes of the dense engine."""
        return self.dense.served_sizes

    def close(self) -> None:
        """Free both, even if freeing one fails."""
        with ExitStack() as stack:
            stack.callback(self.lookup.close)
            stack.callback(self.dense.close)
