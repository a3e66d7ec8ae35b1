"""Pooling over the spatial axes of (batch, channels, …); `products` holds Conv."""

from __future__ import annotations

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.padding import conv_padding
from loka_onnx.engines.inductor.lowering.registry import OPERATORS

Tensor = torch.Tensor


@OPERATORS.operator("MaxPool")
def max_pool(node: Node, x: Tensor) -> Tensor:
    """The largest element of each window."""
    kernel, strides, dilations = _window(node)
    if node.get("ceil_mode", 0) or node.wants(1):
        raise node.error("this MaxPool is not lowered", "ceil_mode, or an output of indices")
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = functional.pad(x, conv_padding(node, x, kernel, strides, dilations), value=lowest)
    pool = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(kernel) - 1]
    result: Tensor = pool(padded, kernel, strides, 0, dilations)
    return result


@OPERATORS.operator("AveragePool")
def average_pool(node: Node, x: Tensor) -> Tensor:
    """The mean of each window; ``count_include_pad`` counts padding."""
    kernel, strides, dilations = _window(node)
    if node.get("ceil_mode", 0) or any(d != 1 for d in dilations):
        raise node.error("this AveragePool is not lowered", "ceil_mode, or dilations")
    pads = conv_padding(node, x, kernel, strides, dilations)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(kernel) - 1]
    total: Tensor = pool(functional.pad(x, pads), kernel, strides, 0)
    if not any(pads) or node.get("count_include_pad", 0):
        return total
    ones = functional.pad(torch.ones_like(x[:1, :1]), pads)
    return total / pool(ones, kernel, strides, 0)


def _window(node: Node) -> tuple[list[int], list[int], list[int]]:
    """Lengths, strides and dilations of a pool's window."""
    kernel: list[int] = node.attributes["kernel_shape"]
    strides: list[int] = node.get("strides", [1] * len(kernel))
    dilations: list[int] = node.get("dilations", [1] * len(kernel))
    return kernel, strides, dilations
