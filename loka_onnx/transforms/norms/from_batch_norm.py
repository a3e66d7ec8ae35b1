"""Read the LayerNorm of Keras 2: a BatchNormalization over rows.

`tf_keras.layers.LayerNormalization` reshapes its input to (1, rows, K, 1) and calls the fused kernel of batch
normalization in training mode, whose channels are the rows. tf2onnx writes the statistics out and hands them
to the inference form of the operator::

    z = Reshape(x, (1, −1, K, 1))    m = mean(z) over axes 0, 2, 3    v = sum((z − m)²) / K
    Reshape(BatchNormalization(z, ones, zeros, m, v; ε), shape(x))   =   LayerNormalization(x; axis, ε)

where the axes from `axis` on hold K elements.
"""

from __future__ import annotations

from math import prod

import numpy as np

from loka_onnx.graph.model import Node, Tensor, consumers, is_constant, producer, values_of
from loka_onnx.graph.shape_values import dimensions, read_dimensions
from loka_onnx.transforms.norms.pattern import DecomposedNorm, module_of, nodes_between
from loka_onnx.transforms.norms.statistics import centred_or_none, read_mean, read_moment
from loka_onnx.transforms.norms.walk import NotANorm, Walk, scalar

_ALL_BUT_ROWS = (-4, -2, -1)


def read_batch_norm_of_rows(node: Node) -> DecomposedNorm:
    """Read the norm of a BatchNormalization with computed statistics and the Reshape behind it."""
    if node.attrs.get("training_mode", 0) or is_constant(node.inputs[3]):
        raise NotANorm("statistics of training")
    rows = node.inputs[0]
    reshape = producer(rows)
    readers = consumers(node.outputs[0])
    if reshape is None or reshape.op != "Reshape" or len(readers) != 1 or readers[0].op != "Reshape":
        raise NotANorm("no rows")
    source = reshape.inputs[0]
    axes = _normalized_axes(source, read_dimensions(reshape.inputs[1]))
    shape = dimensions(source)
    is_back = shape is not None and read_dimensions(readers[0].inputs[1]) == shape
    if axes is None or not is_back or not _is_normalized(node, rows):
        raise NotANorm("a normalization of something else")
    result = readers[0].outputs[0]
    return DecomposedNorm(
        source,
        axes,
        float(node.attrs.get("epsilon", 1e-5)),
        is_centred=True,
        is_mean=True,
        scale=None,
        bias=None,
        result=result,
        module=module_of(node),
        inner=nodes_between(source, result),
    )


def _normalized_axes(source: Tensor, target: tuple[int | str, ...] | None) -> tuple[int, ...] | None:
    """Return the last axes of the source that a reshape to (1, rows, K, 1) joins in K."""
    if source.shape is None or target is None or len(target) != 4 or (target[0], target[3]) != (1, 1):
        return None
    for count in range(1, len(source.shape)):
        lengths = source.shape[-count:]
        if not all(isinstance(length, int) for length in lengths):
            return None
        if prod(lengths) == target[2]:
            return tuple(range(-count, 0))
    return None


def _is_normalized(node: Node, rows: Tensor) -> bool:
    """Return whether each row is normalized by its own mean and variance, without scale and shift."""
    if not (_is_filled(node.inputs[1], 1.0) and _is_filled(node.inputs[2], 0.0)):
        return False
    mean = read_mean(node.inputs[3], Walk(is_vector=True))
    walk = Walk(is_vector=True)
    variance = read_moment(walk.to(node.inputs[4]), walk)
    deviation = centred_or_none(variance.squared)
    source = deviation.source if deviation is not None else variance.squared if variance.is_central else None
    is_of_rows = mean.source is rows and source is rows and variance.is_mean
    deviates = deviation is None or deviation.axes == _ALL_BUT_ROWS
    return is_of_rows and deviates and mean.axes == variance.axes == _ALL_BUT_ROWS


def _is_filled(tensor: Tensor, value: float) -> bool:
    """Return whether every element has that value."""
    if is_constant(tensor):
        return bool(np.all(values_of(tensor) == value))
    node = producer(tensor)
    return node is not None and node.op == "Expand" and scalar(node.inputs[0]) == value
