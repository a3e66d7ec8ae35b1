"""Random graphs of operators that move values, products to quantize, and readers that want exact values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from random_graphs import GraphBuilder

START = 12


class MovementGraph(GraphBuilder):
    """Builds one model of `steps` blocks; every tensor between them is (batch, width)."""

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__(seed)
        self.widths["x"] = START
        self.unread = {"x"}
        kinds = (
            *(self.product, self.product, self.product, self.concat, self.concat, self.split, self.choose),
            *(self.turn, self.views, self.repeat, self.compute),
        )
        for _ in range(steps):
            kinds[self.random.integers(len(kinds))]()
        for tensor in sorted(self.unread):
            self.product(tensor)
        ends = sorted(self.unread)
        self.result = self.op("Tanh", [self.op("Concat", ends, sum(self.widths[t] for t in ends), axis=1)])

    def model(self) -> onnx.ModelProto:
        return self.built(
            self.result, helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", START])
        )

    # Parts ------------------------------------------------------------------------------------------

    def op(self, kind: str, inputs: list[str], width: int | None = None, **attributes: Any) -> str:
        output = super().op(kind, inputs, width, **attributes)
        self.unread -= set(inputs)
        self.unread.add(output)
        return output

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(values)
        return name

    def some(self) -> str:
        """One of the last tensors, so that paths become long and meet."""
        names = [name for name, width in self.widths.items() if width > 1]
        return names[int(self.random.integers(max(0, len(names) - 8), len(names)))]

    # Blocks -----------------------------------------------------------------------------------------

    def product(self, tensor: str = "") -> None:
        tensor = tensor or self.some()
        shape = (self.widths[tensor], int(self.random.choice([4, 8, 12])))
        values = self.random.normal(size=shape) / np.sqrt(shape[0])
        self.op("MatMul", [tensor, self.constant(values.astype(np.float32))], shape[1])

    def concat(self) -> None:
        parts = [self.some() for _ in range(int(self.random.integers(2, 4)))]
        self.op("Concat", parts, sum(self.widths[part] for part in parts), axis=1)

    def split(self) -> None:
        tensor = self.some()
        half = self.widths[tensor] // 2
        sizes = [half, self.widths[tensor] - half]
        first = self.op("Split", [tensor, self.constant(np.array(sizes, np.int64))], sizes[0], axis=1)
        second = f"{first}.second"
        self.nodes[-1].output.append(second)
        self.widths[second] = sizes[1]
        self.unread.add(second)

    def choose(self) -> None:
        tensor = self.some()
        width = self.widths[tensor]
        if self.random.random() < 0.5:
            chosen = self.random.integers(0, width, size=4)
            self.op("Gather", [tensor, self.constant(chosen)], 4, axis=1)
        else:
            bounds = [self.constant(np.array([value], np.int64)) for value in (1, width, 1)]
            self.op("Slice", [tensor, *bounds], width - 1)

    def turn(self) -> None:
        """Rank 3 and back, by a transposition or a product with it."""
        tensor = self.some()
        width = self.widths[tensor]
        rows = 2 if width % 2 == 0 else 1
        tokens = self.inner("Reshape", [tensor, self.constant(np.array([-1, rows, width // rows], np.int64))])
        turned = self.inner("Transpose", [tokens], perm=[0, 2, 1])
        if self.random.random() < 0.5:
            turned, width = self.inner("MatMul", [tokens, turned]), rows * rows
        self.op("Flatten", [turned], width, axis=1)

    def views(self) -> None:
        tensor = self.some()
        axis = self.constant(np.array([1], np.int64))
        self.op("Squeeze", [self.inner("Unsqueeze", [tensor, axis]), axis], self.widths[tensor])

    def inner(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """A tensor of rank 3, which no other block reads."""
        tensor = self.op(kind, inputs, 0, **attributes)
        del self.widths[tensor]
        self.unread.discard(tensor)
        return tensor

    def repeat(self) -> None:
        tensor = self.some()
        if self.widths[tensor] <= START:
            repeats = self.constant(np.array([1, 2], np.int64))
            self.op("Tile", [tensor, repeats], 2 * self.widths[tensor])

    def compute(self) -> None:
        self.op(str(self.random.choice(["Relu", "Tanh", "Sigmoid"])), [self.some()])
