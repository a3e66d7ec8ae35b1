"""Small ONNX models written as text, and what the tests of transforms ask of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import all_initializers

Arrays = dict[str, np.ndarray[Any, Any]]


def parse(
    body: str,
    constants: Mapping[str, Any] | None = None,
    *,
    inputs: str = "float[batch,8] x",
    outputs: str = "float[batch,8] y",
    opset: int = 21,
) -> onnx.ModelProto:
    """A model as text; nodes without a name are named after their output, in module ``block``.

    Constants that it does not read are left out. Outputs without a type (y where there are none) are FP32
    tensors of inferred shape.
    """
    untyped = [] if "[" in outputs else (outputs or "y").split(", ")
    outputs = ", ".join(f"float {name}" for name in untyped) or outputs
    model = parsed(body, constants, inputs=inputs, outputs=outputs, opset=opset)
    for node in model.graph.node:
        node.name = node.name or f"block/{node.output[0]}"
    if untyped:
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=True)
        for output, known in zip(model.graph.output, inferred.graph.output, strict=True):
            output.CopyFrom(known)
    onnx.checker.check_model(model)
    return model


def artifact(model: onnx.ModelProto, path: Path) -> ModelArtifact:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    graph = GraphModel.load(path)
    return ModelArtifact(path, graph.save(path), graph.opset, (), (), find_sites(graph), "test")


def as_double(model: onnx.ModelProto) -> onnx.ModelProto:
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    del wide.graph.value_info[:]
    for info in (*wide.graph.input, *wide.graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    # A constant that a branch or body alone reads may be written there.
    for tensor in all_initializers(wide.graph):
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
            )
    return wide


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph in float64: constants, interface, conversions to FP32 and the statistics of norms."""
    wide = as_double(model)
    for node in wide.graph.node:
        for attribute in node.attribute:
            if (node.op_type, attribute.name) in {("Cast", "to"), ("GroupNormalization", "stash_type")}:
                # The reference evaluator takes the statistics of the other norms in the type of the input.
                attribute.i = TensorProto.DOUBLE if attribute.i == TensorProto.FLOAT else attribute.i
            if attribute.name == "value" and attribute.t.data_type == TensorProto.FLOAT:
                values = numpy_helper.to_array(attribute.t).astype(np.float64)
                attribute.t.CopyFrom(numpy_helper.from_array(values))
    return wide


def evaluate(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    names = [output.name for output in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))


def random_rows(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Standard normal FP32 values with a mean of 0.5, so that a forgotten mean shows."""
    values = np.random.default_rng(seed).normal(size=shape) + 0.5
    return values.astype(np.float32)


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def named(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def attribute(node: onnx.NodeProto, name: str) -> Any:
    return next(onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name)
