"""Products with the weight on the left as convolutions of kernel size 1, for ONNX Runtime's CPU provider.

::

    W · X + b = Conv(X, W, b)        W (O, C), X (batch, C, P), b (O, 1)

with the same sums. The provider fuses bias and ReLU into a Conv, but not into a product with the weight on
the left, as `conv_to_matmul` leaves it: without this rewrite, a layer in FP32 would be slower than its
original Conv.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx


def write_convolutions(engine: Path) -> int:
    """Rewrite a model file in place and return the number of convolutions; external weights only change
    shape.

    Products in FP8, and those whose constants have other readers, are left alone.
    """
    model = onnx.load(os.fspath(engine), load_external_data=False)
    graph = model.graph
    inferred = onnx.shape_inference.infer_shapes(model).graph
    typed = (*inferred.input, *inferred.value_info, *inferred.output)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in typed if _is_fp32(value)}
    constants = {
        tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT
    }
    reads = Counter(_reads(graph))
    readers = {name: node for node in graph.node for name in node.input}
    makers = {name: node for node in graph.node for name in node.output}
    written, gone = 0, []
    for node in graph.node:
        if node.op_type != "MatMul" or node.domain:
            continue
        weight, source = constants.get(node.input[0]), node.input[1]
        if weight is None or len(weight.dims) != 2 or reads[weight.name] != 1 or ranks.get(source) != 3:
            continue
        if source in makers and makers[source].op_type == "DequantizeLinear":
            continue
        weight.dims.append(1)
        node.op_type = "Conv"
        node.input[:] = [source, weight.name]
        add = readers.get(node.output[0])
        if add is not None and reads[node.output[0]] == 1 and add.op_type == "Add":
            bias = constants.get(next(name for name in add.input if name != node.output[0]))
            if bias is not None and list(bias.dims) == [weight.dims[0], 1] and reads[bias.name] == 1:
                del bias.dims[1]
                node.input.append(bias.name)
                node.output[:] = add.output
                gone.append(add)
        written += 1
    if written:
        for add in gone:
            graph.node.remove(add)
        onnx.save(model, os.fspath(engine))
    return written


def _is_fp32(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return kind.elem_type == onnx.TensorProto.FLOAT and kind.HasField("shape")


def _reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every read of a tensor, including subgraphs' and the graph's outputs."""
    yield from (output.name for output in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _reads(inner)
