"""Nodes with their lowerings: evaluation, constant folding, and the layout of constants in buffers.

An FP8 or INT8 weight that a product reads as its right factor (K, N) is stored as (N, K) and read transposed,
because matrix units read both factors along K. The scale of a Q/DQ pair is stored in FP32, in which a BF16
graph computes too: no kernel converts it at run time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch

from loka_onnx.engines.inductor.lowering.node import Node, Operator
from loka_onnx.engines.inductor.lowering.shape_arithmetic import ON_SHAPES, OnShapes
from loka_onnx.engines.inductor.lowering.values import (
    EIGHT_BITS,
    TORCH_TYPES,
    Constant,
    Dequantized,
    ShapeValue,
    Value,
    numbers_of,
    short_name,
    to_numpy,
    to_torch,
)
from loka_onnx.engines.inductor.site_precision import MARK
from loka_onnx.errors import LokaError

_LARGEST_GROWTH = 4
"""Largest ratio of a folded result's elements to those of its inputs; others are computed at run time."""
_SMALL = 1 << 14
"""Number of elements up to which a result is always folded."""


@dataclass(frozen=True)
class LoweredNode:
    """A node and its lowering; nothing reads the tensors of `last_uses` after it."""

    node: Node
    operator: Operator
    last_uses: tuple[str, ...] = ()

    @property
    def on_shapes(self) -> OnShapes | None:
        """Its function on `ShapeValue`; None where it has none."""
        return None if self.node.domain else ON_SHAPES.get(self.node.op_type)


def evaluate(step: LoweredNode, inputs: Sequence[Value]) -> tuple[Value, ...]:
    """The outputs of a node, whose operators are annotated with its name (`site_precision.MARK`). Raises
    EngineError if the node cannot be lowered, or torch refuses it.
    """
    try:
        done = _apply(step, inputs)
    except LokaError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        what = f"torch refuses the node: {type(error).__name__}: {error}"
        raise step.node.error(what, _describe(step.node, inputs)) from error
    return done if isinstance(done, tuple) else (done,)


def _apply(step: LoweredNode, inputs: Sequence[Value]) -> Any:
    if step.on_shapes is not None and any(isinstance(value, ShapeValue) for value in inputs):
        numbers = [numbers_of(value) if isinstance(value, Constant) else value for value in inputs]
        known = zip(numbers, inputs, strict=True)
        if all(value is None or isinstance(number, ShapeValue) for number, value in known):
            done = step.on_shapes(step.node, *numbers)
            if done is not NotImplemented:
                return done
    first = inputs[0] if inputs else None
    if not step.operator.moves or not isinstance(first, Dequantized) or first.axis is not None:
        return _lowered(step, inputs)
    moved = _lowered(step, [first.values, *inputs[1:]])
    if isinstance(moved, tuple):
        return tuple(replace(first, values=part) for part in moved)
    return replace(first, values=moved)


def _lowered(step: LoweredNode, inputs: Sequence[Value]) -> Any:
    """Call the operator's function on the kinds of values that it takes."""
    node, operator = step.node, step.operator
    arguments: list[Value] = list(inputs) if operator.raw else []
    for position, value in enumerate([] if operator.raw else inputs):
        numbers = numbers_of(value) if isinstance(value, Constant) else value
        is_number = isinstance(numbers, ShapeValue) and (
            position in operator.numbers or (position in operator.scalars and numbers.scalar)
        )
        arguments.append(numbers if value is None or is_number else node.tensor(value))
    with torch.fx.traceback.annotate({MARK: node.name}):
        return operator.lower(node, *arguments)


def _describe(node: Node, inputs: Sequence[Value]) -> str:
    parts = []
    for name, value in zip(node.inputs, inputs, strict=False):
        stored = value.values if isinstance(value, Dequantized) else value
        if isinstance(stored, ShapeValue):
            parts.append(f"'{name}' {list(stored.entries)}")
        elif stored is not None:
            parts.append(f"'{name}' {short_name(stored.dtype)}{list(stored.shape)}")
    return f"inputs {', '.join(parts) or 'none'}"


def fold(steps: Iterable[LoweredNode], constants: dict[str, Constant]) -> list[LoweredNode]:
    """Fold nodes with constant inputs into `constants`, which is edited, and return the other nodes."""
    kept = []
    for step in steps:
        if (results := _folded(step, constants)) is None:
            kept.append(step)
        else:
            constants |= results
    return kept


def _folded(step: LoweredNode, constants: Mapping[str, Constant]) -> dict[str, Constant] | None:
    node = step.node
    if node.op_type == "Constant" and not node.domain:
        return _value_of(node)
    # Dequantized weights stay in eight bits; operators of other domains may have kernels for one device only.
    if node.domain or node.op_type == "DequantizeLinear":
        return None
    inputs = [constants.get(name) if name else None for name in node.inputs]
    if any(name and value is None for name, value in zip(node.inputs, inputs, strict=True)):
        return None
    results = {}
    read = sum(constant.array.size for constant in inputs if constant and constant.array is not None)
    for name, value in zip(node.outputs, evaluate(step, inputs), strict=False):
        if isinstance(value, Constant):
            results[name] = value
            continue
        tensor = node.tensor(value)
        if tensor.numel() > max(_SMALL, _LARGEST_GROWTH * read):
            return None
        results[name] = Constant(name, tensor.dtype, tuple(tensor.shape), to_numpy(tensor))
    return results


def _value_of(node: Node) -> dict[str, Constant] | None:
    """The output of a Constant node; None for text and sparse tensors."""
    name = node.outputs[0]
    for key, value in node.attributes.items():
        if isinstance(value, Constant):
            return {name: replace(value, name=name)}
        if key in {"value_float", "value_floats", "value_int", "value_ints"}:
            array = np.array(value, np.float32 if "float" in key else np.int64)
            dtype = TORCH_TYPES[onnx.helper.np_dtype_to_tensor_dtype(array.dtype)]
            return {name: Constant(name, dtype, array.shape, array)}
    return None


Stored = tuple[torch.Tensor, bool]
"""Buffer of a constant, and whether it holds the transpose."""


def store(
    steps: Sequence[LoweredNode], constants: Mapping[str, Constant], outputs: Sequence[str]
) -> dict[str, Stored]:
    """Return the buffer of each constant that is read as a tensor, by its name."""
    readers: dict[str, list[tuple[LoweredNode, int]]] = defaultdict(list)
    for step, position, constant in _reads(steps, constants):
        readers[constant.name].append((step, position))
    for name in outputs:
        if name in constants:
            readers.setdefault(constants[name].name, [])
    multiplied = [step.node for step in steps if step.node.op_type in {"Gemm", "MatMul"}]
    right = {node.inputs[1] for node in multiplied if not node.get("transB", 0)}
    by_name = {constant.name: constant for constant in constants.values()}
    stored = {}
    for name, reads in readers.items():
        array = by_name[name].array
        if array is None:
            continue
        tensor = to_torch(array)
        is_wide = all(position in step.operator.wide for step, position in reads)
        columns = (
            tensor.dim() == 2
            and tensor.dtype in EIGHT_BITS
            and any(position == 0 and step.node.outputs[0] in right for step, position in reads)
        )
        if reads and is_wide and tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        stored[name] = (tensor.t().contiguous() if columns else tensor, columns)
    return stored


def _reads(
    steps: Sequence[LoweredNode], constants: Mapping[str, Constant]
) -> Iterable[tuple[LoweredNode, int, Constant]]:
    """Yield every read of a constant's elements."""
    shapes: set[str] = set()
    for step in steps:
        node, operator = step.node, step.operator
        inputs = [constants.get(name) for name in node.inputs]
        if node.op_type in {"Shape", "Size"} or (
            step.on_shapes is not None
            and any(name in shapes for name in node.inputs)
            and all(
                not name or name in shapes or (constant is not None and numbers_of(constant) is not None)
                for name, constant in zip(node.inputs, inputs, strict=True)
            )
        ):
            shapes |= set(node.outputs)
            continue
        for position, constant in enumerate(inputs):
            if constant is None or position in operator.numbers:
                continue
            is_number = not constant.shape and constant.array is not None
            is_scalar = position in operator.scalars and is_number
            is_quantizer = node.op_type in {"QuantizeLinear", "DequantizeLinear"}
            is_zero = is_quantizer and position == 2 and constant.dtype in EIGHT_BITS
            if not is_scalar and not is_zero:
                yield step, position, constant
