"""Constant folding and the layout of constants in buffers.

An FP8 weight that a product reads as its right factor (K, N) is stored as (N, K) and read transposed, because
cuBLASLt needs contiguous columns. The scale of a Q/DQ pair is stored in FP32, in which a BF16 graph computes
too: no kernel converts it at run time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from loka_onnx.engines.inductor.lowering.evaluating import Step, evaluate
from loka_onnx.engines.inductor.lowering.reading import constant_of
from loka_onnx.engines.inductor.lowering.types import FLOAT8, to_numpy, to_torch
from loka_onnx.engines.inductor.lowering.values import Constant, numbers_of

_LARGEST_GROWTH = 4
"""Largest ratio of a folded result's elements to those of its inputs; larger results are computed at run
time."""
_SMALL = 1 << 14
"""Number of elements up to which a result is always folded."""
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_SHAPES = frozenset({"Shape", "Size"})


def fold(steps: Iterable[Step], constants: dict[str, Constant]) -> list[Step]:
    """Fold nodes with constant inputs into `constants`, which is edited, and return the other nodes."""
    kept = []
    for step in steps:
        results = _folded(step, constants)
        if results is None:
            kept.append(step)
        else:
            constants |= results
    return kept


def _folded(step: Step, constants: Mapping[str, Constant]) -> dict[str, Constant] | None:
    node = step.node
    if node.op_type == "Constant" and not node.domain:
        held = constant_of(node)
        return None if held is None else {node.outputs[0]: held}
    # Dequantized weights stay FP8; operators of other domains may have kernels for one device only.
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


class Stored(NamedTuple):
    """Stored form of a constant; `columns` says that the buffer holds the transpose."""

    tensor: torch.Tensor
    columns: bool


def store(
    steps: Sequence[Step], constants: Mapping[str, Constant], outputs: Sequence[str]
) -> dict[str, Stored]:
    """Return the buffer of each constant that is read as a tensor, by its name."""
    readers: dict[str, list[tuple[Step, int]]] = defaultdict(list)
    for step, position, constant in _reads(steps, constants):
        readers[constant.name].append((step, position))
    for name in outputs:
        if name in constants:
            readers.setdefault(constants[name].name, [])
    right = _right_factors(steps)
    by_name = {constant.name: constant for constant in constants.values()}
    stored = {}
    for name, reads in readers.items():
        constant = by_name[name]
        if constant.array is None:
            continue
        tensor = to_torch(constant.array)
        is_wide = all(position in step.operator.wide for step, position in reads)
        columns = (
            tensor.dim() == 2
            and tensor.dtype in FLOAT8
            and any(position == 0 and step.node.outputs[0] in right for step, position in reads)
        )
        if reads and is_wide and tensor.is_floating_point():
            tensor = tensor.to(torch.float32)
        stored[name] = Stored(tensor.t().contiguous() if columns else tensor, columns)
    return stored


def _reads(steps: Sequence[Step], constants: Mapping[str, Constant]) -> Iterable[tuple[Step, int, Constant]]:
    """Yield every read of a constant's elements."""
    shapes: set[str] = set()
    for step in steps:
        node, operator = step.node, step.operator
        inputs = [constants.get(name) for name in node.inputs]
        if node.op_type in _SHAPES or (
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
            is_scalar = position in operator.scalars and constant.is_number
            is_zero = position == 2 and node.op_type in _QUANTIZERS and constant.dtype in FLOAT8
            if not is_scalar and not is_zero:
                yield step, position, constant


def _right_factors(steps: Sequence[Step]) -> set[str]:
    """Tensors that a product reads as an untransposed right factor."""
    return {
        step.node.inputs[1]
        for step in steps
        if step.node.op_type == "MatMul" or (step.node.op_type == "Gemm" and not step.node.get("transB", 0))
    }
