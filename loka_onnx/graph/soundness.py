"""Checks of foreign models, so that later code may trust the graph.

A model is refused where both onnx's checker (or its strict type and shape inference) and ONNX Runtime refuse
it. The checker alone is too strict: it wants nodes in order, shapes of outputs and names of graphs. ONNX
Runtime is asked only then, because it reads the whole file. The checker takes a model as one message of at
most 2 GiB, and opens external data by rules of its own: it gets the graph without its large weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path

import onnx
from onnx.external_data_helper import uses_external_data

from loka_onnx.errors import LokaError, ModelError
from loka_onnx.graph.detached import without_weights
from loka_onnx.graph.storage import all_initializers, stored_bytes, with_subgraphs
from loka_onnx.sessions.model_files import messages, nested_nodes
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

STANDARD_DOMAINS = frozenset({"", "ai.onnx"})


def opset_of(proto: onnx.ModelProto) -> int:
    """Return the version of the standard operator set; 0 without one."""
    versions = [int(entry.version) for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS]
    return versions[0] if versions else 0


@contextmanager
def parsing(path: Path, step: str) -> Iterator[None]:
    """Raise ModelError ("cannot be <step>") for any error inside the block but LokaError and MemoryError."""
    try:
        yield
    except (LokaError, MemoryError):
        raise
    except Exception as error:
        raise unsound(path, f"cannot be {step}", str(error) or type(error).__name__) from error


def unsound(path: Path, what: str, evidence: str, where: str = "") -> ModelError:
    """Return the error of an unsound model, to be raised: `what` is wrong, and the evidence."""
    lines = [line.strip() for line in evidence.splitlines() if line.strip()]
    return ModelError(
        f"E0310 '{path}' {what}",
        where=where,
        evidence=" ".join(lines)[:600],
        remedy="export the model again; `onnx.checker.check_model` and ONNX Runtime tell whether it is sound",
    )


def check_message(proto: onnx.ModelProto, path: Path) -> None:
    """Raise ModelError for a message with a text that is not UTF-8, or a function that calls itself."""
    for message in messages(proto):
        for descriptor, value in message.ListFields():
            # Protobuf returns bytes for a text that is not UTF-8.
            texts = (value,) if isinstance(value, bytes) else value
            if descriptor.type == descriptor.TYPE_STRING and any(isinstance(text, bytes) for text in texts):
                raise unsound(path, "is not an ONNX model", f"its field '{descriptor.name}' is not UTF-8")
    calls = {
        (function.domain, function.name): {(n.domain, n.op_type) for n in nested_nodes(function.node)}
        for function in proto.functions
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        name = "::".join(error.args[1][0])
        raise unsound(
            path, "has a function that calls itself", "ONNX forbids recursion", f"function '{name}'"
        ) from error


def check_sound(proto: onnx.ModelProto, path: Path) -> None:
    """Raise ModelError if a model without functions is unsound; `path` is its file, for ONNX Runtime."""
    for tensor in all_initializers(proto.graph):
        if uses_external_data(tensor) or not tensor.HasField("raw_data"):
            continue
        needed = stored_bytes(tensor)
        if len(tensor.raw_data) != needed:
            evidence = f"its type and shape need {needed} bytes, it has {len(tensor.raw_data)}"
            raise unsound(path, "holds a tensor that is not whole", evidence, f"tensor '{tensor.name}'")
    for graph in with_subgraphs(proto.graph):
        # ONNX Runtime takes the last of them, other libraries any.
        names = Counter(tensor.name for tensor in graph.initializer)
        if twice := [name for name, count in names.items() if count > 1]:
            raise unsound(
                path, "holds two tensors of one name", f"in graph '{graph.name}'", f"tensor '{twice[0]}'"
            )
    opset = opset_of(proto)
    for node in nested_nodes(proto.graph.node):
        for name in (attribute.ref_attr_name for attribute in node.attribute if attribute.ref_attr_name):
            # ONNX Runtime ignores the reference and takes the value beside it; other libraries have none.
            evidence = f"it is to be the value of '{name}', which only a node in a function has"
            raise unsound(path, "has an attribute without a value", evidence, f"node '{node.name}'")
        if missing := _missing_inputs(node, opset):
            # onnx's checker does not see them, and ONNX Runtime may end the process.
            where = f"node '{node.name or next(iter(node.output), '')}' ({node.op_type})"
            raise unsound(path, "leaves out an input that is not optional", f"input {missing[0]}", where)
    light = without_weights(proto)
    try:
        onnx.checker.check_model(light)
        light = onnx.shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        # ValidationError and InferenceError, and pybind11's errors for rejected arguments.
        try:
            OnnxSession(path, SessionOptions(threads=1, optimize=False))
        except ModelError as refusal:
            said = f"{error}\nONNX Runtime: {refusal.evidence}"
            raise unsound(path, "is not a sound ONNX model", said) from error
    _check_conditions(light, path)


def _missing_inputs(node: onnx.NodeProto, opset: int) -> list[int]:
    """Return the numbers of inputs without a name that the standard does not call optional."""
    if "" not in node.input or not onnx.defs.has(node.op_type, opset):
        return []
    formal = onnx.defs.get_schema(node.op_type, opset).inputs
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return [
        at
        for at, name in enumerate(node.input)
        if not name and formal and formal[min(at, len(formal) - 1)].option != optional
    ]


def _check_conditions(model: onnx.ModelProto, path: Path) -> None:
    """Refuse an If on more or less than one value, which no library detects before it runs."""
    graph = model.graph
    shapes: dict[str, Sequence[int]] = {tensor.name: tensor.dims for tensor in graph.initializer}
    for info in (*graph.value_info, *graph.input):
        kind = info.type.tensor_type
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shapes[info.name] = [dim.dim_value for dim in kind.shape.dim]
    for node in graph.node:
        if node.op_type == "If" and prod(shapes.get(node.input[0], ())) != 1:
            evidence = f"'{node.input[0]}' has the shape {[*shapes[node.input[0]]]}; an If takes one value"
            raise unsound(path, "has a condition of another size", evidence, f"node '{node.name}' (If)")
