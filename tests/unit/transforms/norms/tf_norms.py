"""Norms of TensorFlow and Keras, built and converted by tf2onnx; needs tensorflow, tf_keras and tf2onnx.

`tf_norm_forms.txt` holds what this module makes, as ONNX text, for machines that lack the three (1.6 GB);
``python tf_norms.py > tf_norm_forms.txt`` writes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import onnx
import onnx.printer

EPSILON = 1e-3
OPSETS = (13, 18)
"""Axes as an attribute, and as an input."""


@dataclass(frozen=True)
class Built:
    """A function of one tensor, and the shape and type of its rows."""

    call: Callable[[Any], Any]
    shape: tuple[int, ...]
    dtype: str = "float32"


NAMES = (
    "moments",
    "by_hand",
    "root_mean_square",
    "l2_normalize",
    "norm",
    "dense_batch_norm",
    "layer_norm",
    "layer_norm_of_rank_3",
    "layer_norm_of_two_axes",
    "layer_norm_without_affine",
    "layer_norm_without_mean",
    "layer_norm_in_float16",
    "rms_norm",
    "rms_norm_in_float16",
    "group_norm_of_first_channels",
    "group_norm_of_last_channels",
    "unit_norm",
    "keras_2_layer_norm",
    "keras_2_layer_norm_of_rank_3",
)


def build(name: str) -> Built:
    """The norm of that name."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import tensorflow as tf
    import tf_keras

    layers, old = keras.layers, tf_keras.layers
    gain = tf.Variable(_ramp((8,), 0.5))
    shift = tf.Variable(_ramp((8,), -1.0))

    def moments(x: Any) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return tf.nn.batch_normalization(x, mean, variance, shift, gain, EPSILON)

    def by_hand(x: Any) -> Any:
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True)
        return gain * (x - mean) / tf.sqrt(variance + EPSILON) + shift

    def root_mean_square(x: Any) -> Any:
        return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + EPSILON) * gain

    def dense_batch_norm(x: Any) -> Any:
        weight = tf.reshape(_ramp((48,), -1.0), (6, 8))
        return batch_norm(tf.matmul(x, weight), training=False)

    batch_norm = layers.BatchNormalization(epsilon=EPSILON)
    functions = {
        "moments": Built(moments, (8,)),
        "by_hand": Built(by_hand, (4, 8)),
        "root_mean_square": Built(root_mean_square, (8,)),
        "l2_normalize": Built(lambda x: tf.nn.l2_normalize(x, -1), (8,)),
        "norm": Built(lambda x: x / tf.norm(x, axis=-1, keepdims=True), (8,)),
        "dense_batch_norm": Built(dense_batch_norm, (6,)),
    }
    made = {
        "layer_norm": (lambda: layers.LayerNormalization(epsilon=EPSILON), (8,)),
        "layer_norm_of_rank_3": (lambda: layers.LayerNormalization(epsilon=EPSILON), (4, 8)),
        "layer_norm_of_two_axes": (lambda: layers.LayerNormalization([1, 2], EPSILON), (4, 8)),
        "layer_norm_without_affine": (
            lambda: layers.LayerNormalization(epsilon=EPSILON, center=False, scale=False),
            (8,),
        ),
        "layer_norm_without_mean": (
            lambda: layers.LayerNormalization(epsilon=EPSILON, rms_scaling=True),
            (8,),
        ),
        "layer_norm_in_float16": (
            lambda: layers.LayerNormalization(epsilon=EPSILON, dtype="mixed_float16"),
            (8,),
        ),
        "rms_norm": (lambda: layers.RMSNormalization(epsilon=EPSILON), (4, 8)),
        "rms_norm_in_float16": (
            lambda: layers.RMSNormalization(epsilon=EPSILON, dtype="mixed_float16"),
            (8,),
        ),
        "group_norm_of_first_channels": (lambda: layers.GroupNormalization(2, 1, EPSILON), (8, 6)),
        "group_norm_of_last_channels": (lambda: layers.GroupNormalization(2, -1, EPSILON), (6, 8)),
        "unit_norm": (layers.UnitNormalization, (8,)),
        "keras_2_layer_norm": (lambda: old.LayerNormalization(epsilon=EPSILON), (8,)),
        "keras_2_layer_norm_of_rank_3": (lambda: old.LayerNormalization(epsilon=EPSILON), (4, 8)),
    }
    if name in functions:
        if name == "dense_batch_norm":
            _fill(batch_norm, (8,))
        return functions[name]
    make, shape = made[name]
    layer = _fill(make(), shape)
    return Built(layer, shape, "float16" if name.endswith("float16") else "float32")


def versions() -> str:
    """Of what makes the models."""
    return ", ".join(
        f"{name} {metadata.version(name)}" for name in ("tensorflow-cpu", "keras", "tf_keras", "tf2onnx")
    )


def convert(name: str, opset: int) -> str:
    """The norm of that name, converted by tf2onnx, as ONNX text with tensors named t0, t1, …"""
    built = build(name)
    import tensorflow as tf
    import tf2onnx

    spec = (tf.TensorSpec((None, *built.shape), built.dtype, name="x"),)
    function = tf.function(lambda x: tf.identity(built.call(x)), input_signature=spec)
    model, _ = tf2onnx.convert.from_function(function, input_signature=spec, opset=opset)
    return str(onnx.printer.to_text(_renamed(model)))


def _ramp(shape: tuple[int, ...], start: float) -> np.ndarray[Any, Any]:
    """Multiples of 1/16, which a decimal number writes exactly."""
    return (start + np.arange(np.prod(shape)) / 16).reshape(shape).astype(np.float32)


def _fill(layer: Any, shape: tuple[int, ...]) -> Any:
    layer.build((None, *shape))
    for index, variable in enumerate(layer.weights):
        variable.assign(_ramp(tuple(variable.shape), 0.5 if "var" in variable.name else index - 1.0))
    return layer


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Only what is computed: names, which count the layers of a session, give way to numbers."""
    graph = onnx.GraphProto(name="g")
    names = {model.graph.input[0].name: "x", model.graph.output[0].name: "y", "": ""}
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        for tensor in node.input:
            # In the order of their use: their own order differs from run to run.
            if tensor not in names:
                names[tensor] = f"c{len(graph.initializer)}"
                graph.initializer.append(onnx.numpy_helper.from_array(constants[tensor], names[tensor]))
        for tensor in node.output:
            names.setdefault(tensor, f"t{len(graph.node)}")
        made = graph.node.add(op_type=node.op_type, attribute=node.attribute)
        made.input.extend(names[tensor] for tensor in node.input)
        made.output.extend(names[tensor] for tensor in node.output)
    for ours, theirs in ((graph.input, model.graph.input), (graph.output, model.graph.output)):
        for info in theirs:
            copy = ours.add()
            copy.CopyFrom(info)
            copy.name = names[info.name]
            copy.type.tensor_type.shape.dim[0].dim_param = "batch"
    standard = [entry for entry in model.opset_import if entry.domain in {"", "ai.onnx"}]
    return onnx.helper.make_model(graph, opset_imports=standard, ir_version=8)


if __name__ == "__main__":
    print(f"# Written by tf_norms.py with {versions()}.")
    for form in NAMES:
        for operator_set in OPSETS:
            print(f"# {form} {operator_set}")
            print(convert(form, operator_set).strip())
