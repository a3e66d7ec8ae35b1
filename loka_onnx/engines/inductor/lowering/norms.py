"""Normalizations.

torch computes the statistics of BF16 and FP16 tensors in FP32 and rounds once, after the affine step, which
meets ``stash_type``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from loka_onnx.engines.inductor.lowering.node import Node
from loka_onnx.engines.inductor.lowering.registry import OPERATORS

Tensor = torch.Tensor


@OPERATORS.operator("LayerNormalization")
def layer_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
    """(x − mean) / √(variance + ε) · scale + bias over the axes from ``axis``; mean and 1/σ if requested."""
    axis, epsilon = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    lengths = list(x.shape[axis:])
    is_whole = list(scale.shape) == lengths and (bias is None or list(bias.shape) == lengths)
    if is_whole and not (node.wants(1) or node.wants(2)):
        return functional.layer_norm(x, lengths, scale, bias, epsilon)
    axes = list(range(axis, x.dim()))
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    mean = wide.mean(axes, keepdim=True)
    centered = wide - mean
    inverse = torch.rsqrt((centered * centered).mean(axes, keepdim=True) + epsilon)
    result = (centered * inverse).to(x.dtype) * scale
    return (result if bias is None else result + bias), mean, inverse


@OPERATORS.operator("RMSNormalization")
def rms_normalization(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    """Compute x / √(mean(x²) + ε) · scale over the axes from ``axis``."""
    axis, epsilon = node.get("axis", -1) % x.dim(), node.get("epsilon", 1e-5)
    lengths = list(x.shape[axis:])
    if list(scale.shape) == lengths:
        return functional.rms_norm(x, lengths, scale, epsilon)
    return functional.rms_norm(x, lengths, None, epsilon) * scale


@OPERATORS.operator("GroupNormalization")
def group_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize groups of channels; before operator set 21 scale and bias are per group."""
    groups, epsilon = node.attributes["num_groups"], node.get("epsilon", 1e-5)
    channels = x.shape[1]
    if scale.shape[0] != channels:
        scale = scale.repeat_interleave(channels // groups)
        bias = bias.repeat_interleave(channels // groups)
    return torch.group_norm(x, groups, scale, bias, epsilon)


@OPERATORS.operator("InstanceNormalization")
def instance_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalize each channel of each example."""
    return torch.group_norm(x, x.shape[1], scale, bias, node.get("epsilon", 1e-5))


@OPERATORS.operator("BatchNormalization")
def batch_normalization(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """Normalize channels by stored statistics."""
    if node.get("training_mode", 0):
        raise node.error("BatchNormalization in training mode is not lowered", "training_mode is 1")
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))


@OPERATORS.operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Tensor:
    """Divide x by its L1 or L2 norm along an axis; 0 where the norm is 0."""
    axis = node.get("axis", -1)
    absolute = x.abs() if node.get("p", 2) == 1 else x * x
    norm = absolute.sum(axis, keepdim=True)
    norm = norm if node.get("p", 2) == 1 else norm.sqrt()
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@OPERATORS.operator("MeanVarianceNormalization")
def mean_variance_normalization(node: Node, x: Tensor) -> Tensor:
    """(x − mean) / (σ + 1e−9) over some axes."""
    axes = node.get("axes", [0, 2, 3])
    mean = x.mean(axes, keepdim=True)
    variance = (x * x).mean(axes, keepdim=True) - mean * mean
    return (x - mean) / (variance.sqrt() + 1e-9)
