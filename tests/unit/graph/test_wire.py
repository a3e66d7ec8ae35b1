"""Values that are put into a serialized model: the bytes are those that protobuf writes of the whole."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.graph.detached import Array, fill, hold
from loka_onnx.graph.storage import all_initializers
from loka_onnx.graph.wire import spliced

KINDS = st.sampled_from([np.float32, np.float16, np.int8])
WEIGHTS = st.tuples(st.integers(0, 70_000), KINDS, st.booleans())
"""Size, type and whether the values are held; lengths of zero to three bytes."""
GRAPHS = st.recursive(
    st.tuples(st.lists(WEIGHTS, max_size=3), st.just([])),
    lambda inner: st.tuples(st.lists(WEIGHTS, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=6,
)
"""Weights of a graph, and the bodies of its nodes."""


def fill_graph(graph: onnx.GraphProto, of: tuple[list, list], held: list[Array]) -> None:
    weights, bodies = of
    for number, (size, kind, is_held) in enumerate(weights):
        values = (np.arange(size) % 100).astype(kind)
        tensor = graph.initializer.add(name=f"w{number}", doc_string="behind the values, as external data is")
        tensor.dims.append(size)
        tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        if is_held:
            hold(tensor, len(held))
            held.append(values)
        else:
            tensor.raw_data = values.tobytes()
    for body in bodies:
        node = graph.node.add(op_type="Loop", input=["a", ""], output=["b"])
        # Fields of every wire type that ONNX has, in front of the graph and behind it.
        node.attribute.add(name="alpha", f=0.5, type=onnx.AttributeProto.FLOAT)
        node.attribute.add(name="axes", ints=[-1, 1 << 40], type=onnx.AttributeProto.INTS)
        attribute = node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH)
        fill_graph(attribute.g, body, held)
        value = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
        value.t.double_data.extend([1.0, -2.0])


@given(GRAPHS)
def test_the_bytes_are_those_of_the_whole_message(of):
    model, held = onnx.ModelProto(ir_version=10, producer_name="x"), []
    fill_graph(model.graph, of, held)
    model.metadata_props.add(key="a", value="b")
    parts = spliced(model.SerializeToString(deterministic=True), held)
    for tensor in all_initializers(model.graph):
        fill(tensor, held)
    assert b"".join(parts) == model.SerializeToString(deterministic=True)
