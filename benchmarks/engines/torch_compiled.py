"""The PyTorch module as a user compiles it: `torch.compile` with max-autotune, a CUDA graph a batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from loka_onnx.sessions.runner import Arrays, Resident, Runner

MODE = "max-autotune-no-cudagraphs"
"""The graph is captured here: `max-autotune` copies the inputs of each request into its own."""
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 3


class TorchCompiled(Runner):
    """A module in one precision; each batch size is compiled and captured when it is first asked for.

    Args:
        module: In evaluation mode, with its weights in FP32; changed to `precision` in place.
        inputs: Names of its arguments, in order.
        outputs: Names of what it returns.
        precision: ``bf16`` or ``fp16``.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[str], outputs: Sequence[str], precision: str
    ) -> None:
        self.device_of_weights = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.type = TYPES[precision]
        self.module = module.to(self.device_of_weights, self.type)
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.compiled = torch.compile(self._forward, mode=MODE, dynamic=False)

    def _forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken = [value.to(self.type) if value.is_floating_point() else value for value in values]
        made = self.module(*taken)
        return tuple(each.float() for each in (made if isinstance(made, tuple) else (made,)))

    def run(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Without a CUDA graph: to compare outputs."""
        with torch.no_grad():
            made = self.compiled(*self._on_device(inputs))
        return {name: value.cpu().numpy() for name, value in zip(self.outputs, made, strict=True)}

    def resident(self, inputs: Mapping[str, npt.NDArray[Any]]) -> Resident:
        """A CUDA graph over a batch that lies on the device."""
        values = self._on_device(inputs)
        with torch.no_grad():
            for _ in range(WARM_UP):
                self.compiled(*values)
            if self.device_of_weights.type != "cuda":
                return Resident(lambda: self.compiled(*values), lambda: None, is_on_device=False)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept = self.compiled(*values)
        # The closure holds inputs and outputs: the graph reads and writes their memory.
        return Resident(lambda: (graph.replay(), values, kept), torch.cuda.synchronize)

    def _on_device(self, inputs: Mapping[str, npt.NDArray[Any]]) -> list[torch.Tensor]:
        arrays = [np.ascontiguousarray(inputs[name]) for name in self.inputs]
        return [torch.from_numpy(array).to(self.device_of_weights) for array in arrays]
