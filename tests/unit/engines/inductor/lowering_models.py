"""Small graphs, and the two ways of running them that the tests of the lowering compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.engines.inductor.lowering.model import LoweredModel, lower
from loka_onnx.engines.inductor.lowering.strategies import ProductStrategy
from loka_onnx.engines.inductor.lowering.values import to_numpy, to_torch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Fixed:
    """An input of a node that is an initializer, not an input of the graph."""

    values: Any


@dataclass(frozen=True)
class Case:
    """One node and what it reads: arrays, `Fixed` for an initializer, None for an input that is left out."""

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 23
    outputs: int = 1

    def model(self) -> onnx.ModelProto:
        names = ["" if value is None else f"i{k}" for k, value in enumerate(self.inputs)]
        outputs = [f"o{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, "node", **self.attributes)
        fixed = [
            numpy_helper.from_array(np.asarray(value.values), f"i{k}")
            for k, value in enumerate(self.inputs)
            if isinstance(value, Fixed)
        ]
        kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in self.feeds.items()}
        infos = [helper.make_tensor_value_info(n, kinds[n], [None] * v.ndim) for n, v in self.feeds.items()]
        made = [helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = helper.make_graph([node], "g", infos, made, fixed)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    @property
    def feeds(self) -> dict[str, Array]:
        return {f"i{k}": value for k, value in enumerate(self.inputs) if isinstance(value, np.ndarray)}


def renamed(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """Give initializers names that the text form cannot write; edits the model."""
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return proto


def lowered(proto: onnx.ModelProto, folder: Path, products: ProductStrategy | None = None) -> LoweredModel:
    path = folder / "model.onnx"
    onnx.save(proto, path)
    return lower(path, products)


def run(model: Any, feeds: Mapping[str, Array]) -> list[Array]:
    with torch.no_grad():
        done = model(*(to_torch(value) for value in feeds.values()))
    return [to_numpy(value) for value in done]


def reference(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    return [np.asarray(value) for value in ReferenceEvaluator(proto).run(None, dict(feeds))]


def assert_same(found: Array, expected: Array, tolerance: float) -> None:
    """Type, shape, NaN and infinities are equal, and values within a tolerance of the scale."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not (np.issubdtype(expected.dtype, np.floating) or expected.dtype == ml_dtypes.bfloat16):
        np.testing.assert_array_equal(found, expected)
        return
    wide, target = found.astype(np.float64), expected.astype(np.float64)
    finite = target[np.isfinite(target)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    np.testing.assert_allclose(wide, target, rtol=tolerance, atol=tolerance * scale)


def exported(model: LoweredModel, feeds: Mapping[str, Array]) -> Any:
    """A module traced with a dynamic batch, as a function of tensors."""
    tensors = tuple(to_torch(value) for value in feeds.values())
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, tensors, dynamic_shapes=model.dynamic_shapes(batch))
    return program.module()
