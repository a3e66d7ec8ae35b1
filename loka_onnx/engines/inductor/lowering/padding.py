"""Padding: Pad, and the padding of convolutions and pools."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS
from loka_onnx.engines.inductor.lowering.values import ShapeValue, Value

Tensor = torch.Tensor


def conv_padding(
    node: Node, x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]
) -> list[int]:
    """Padding of the spatial axes of (batch, channels, …) in the order of `torch.nn.functional.pad`.

    Source: ONNX operators, `Conv-11`, ``auto_pad`` and ``pads``.
    """
    spatial = len(kernel)
    mode = node.get("auto_pad", "NOTSET")
    pads: list[int] = node.get("pads", [0] * (2 * spatial))
    if mode == "VALID":
        pads = [0] * (2 * spatial)
    elif mode.startswith("SAME"):
        before, after = [], []
        for axis in range(spatial):
            length = x.shape[2 + axis]
            covered = (kernel[axis] - 1) * dilations[axis] + 1
            results = -(-length // strides[axis])
            total = max(0, (results - 1) * strides[axis] + covered - length)
            small, large = total // 2, total - total // 2
            before.append(small if mode == "SAME_UPPER" else large)
            after.append(large if mode == "SAME_UPPER" else small)
        pads = before + after
    return [pad for axis in reversed(range(spatial)) for pad in (pads[axis], pads[axis + spatial])]


@OPERATORS.operator("Pad", numbers=(1, 2, 3))
def pad(node: Node, x: Tensor, pads: Value = None, value: Value = None, axes: Value = None) -> Tensor:
    """Pad both ends of axes; negative amounts crop."""
    amounts = node.attributes["pads"] if pads is None else node.numbers(pads, "pads")
    chosen = list(range(x.dim())) if axes is None else [a % x.dim() for a in node.numbers(axes, "axes")]
    before, after = [0] * x.dim(), [0] * x.dim()
    for position, axis in enumerate(chosen):
        before[axis], after[axis] = amounts[position], amounts[position + len(chosen)]
    mode = node.get("mode", "constant")
    if mode == "constant":
        fill: Any = node.get("value", 0.0)
        if isinstance(value, ShapeValue):
            fill = node.number(value, "constant_value")
        pairs = [amount for axis in reversed(range(x.dim())) for amount in (before[axis], after[axis])]
        return functional.pad(x, pairs, value=fill)
    if mode not in {"edge", "reflect", "wrap"}:
        raise node.error(f"mode '{mode}' of Pad is not known", "known are constant, edge, reflect, wrap")
    for axis in range(x.dim()):
        if before[axis] or after[axis]:
            x = torch.index_select(x, axis, _padded_positions(x, axis, (before[axis], after[axis]), mode))
    return x


def _padded_positions(x: Tensor, axis: int, amounts: tuple[int, int], mode: str) -> Tensor:
    """Source positions of the elements of a padded axis."""
    length = x.shape[axis]
    positions = torch.arange(-amounts[0], length + amounts[1], device=x.device)
    if mode == "edge":
        return positions.clamp(0, length - 1)
    if mode == "wrap":
        return torch.remainder(positions, length)
    period = max(2 * (length - 1), 1)
    folded = torch.remainder(positions, period)
    return torch.minimum(folded, period - folded)
