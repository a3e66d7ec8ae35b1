"""Make the graph strongly typed in BF16 or FP16.

Engine makers that type strongly take precision from the graph alone. Every FP32 constant that a node
computes with is rounded to the base precision, graph inputs are cast after they enter and outputs cast back
before they leave, so that the interface stays FP32. Sites that the plan keeps in FP32 get a Cast on each
side. Embedding tables that stay outside the model are cast after the lookup, which gives the same values.

Scales of Q/DQ follow the activation's type; they are BF16 numbers already (`numerics.scales`), so no scale
changes its value. The statistics of a norm stay in FP32 through its `stash_type`.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.rewrite import Applied, RewriteRecord
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel, Node, Tensor, element_type, is_constant, values_of

_NUMPY = {Precision.BF16: ml_dtypes.bfloat16, Precision.FP16: np.float16, Precision.FP32: np.float32}

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def cast_to_base(model: GraphModel, base: Precision, plan: PrecisionPlan) -> RewriteRecord:
    """Give every FP32 tensor between inputs and outputs the base precision; in place.

    Args:
        model: An FP32 graph, with Q/DQ already in place.
        base: BF16 or FP16.
        plan: Names the sites that stay in FP32.

    Raises:
        TransformError: The graph has control flow, or a constant overflows FP16.
    """
    dtype = _NUMPY[base]
    _refuse_control_flow(model, base)
    exempt = {d.site for d in plan.decisions if d.precision is Precision.FP32}
    converted: dict[int, Tensor] = {}
    for node in model.nodes:
        if node.name in exempt:
            continue
        _retarget_attributes(model, node, base)
        for index, tensor in enumerate(node.inputs):
            if is_constant(tensor) and element_type(tensor.dtype) == onnx.TensorProto.FLOAT:
                if id(tensor) not in converted:
                    converted[id(tensor)] = _rounded(model, tensor, base)
                node.inputs[index] = converted[id(tensor)]
    applied = [Applied("model", f"{len(converted)} constants rounded to {base}")]
    applied += _cast_inputs(model, dtype)
    applied += _cast_lookups(model, dtype)
    for name in sorted(exempt):
        node = next((n for n in model.nodes if n.name == name), None)
        if node is not None:
            applied.append(_keep_in_fp32(model, node, dtype))
    applied += _cast_outputs(model)
    _forget_types(model)
    return RewriteRecord(f"cast-to-{base}", tuple(applied), ())


def _rounded(model: GraphModel, tensor: Tensor, base: Precision) -> Tensor:
    values = values_of(tensor)
    # The largest finite FP16 number; a larger constant would become an infinity.
    if base is Precision.FP16 and values.size and float(np.abs(values).max()) > 65504.0:
        raise TransformError(
            f"constant '{tensor.name}' does not fit FP16",
            evidence=f"its largest magnitude is {float(np.abs(values).max()):.4g}, FP16 ends at 65504",
            remedy="use the base precision bf16",
        )
    return model.constant(f"{tensor.name}.{base}", values.astype(_NUMPY[base]))


def _retarget_attributes(model: GraphModel, node: Node, base: Precision) -> None:
    """Let nodes that make FP32 tensors out of nothing make base-precision ones."""
    target = element_type(_NUMPY[base])
    if node.op == "Cast" and element_type(node.attrs["to"]) == onnx.TensorProto.FLOAT:
        node.attrs["to"] = target
    elif node.op in {"EyeLike", "RandomNormalLike", "RandomUniformLike"}:
        if node.attrs.get("dtype", onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT:
            node.attrs["dtype"] = target
    elif node.op == "ConstantOfShape":
        value = node.attrs.get("value")
        values = np.zeros(1, np.float32) if value is None else values_of(value)
        if values.dtype == np.float32:
            node.attrs["value"] = model.constant(f"{node.name}.value", values.astype(_NUMPY[base]))


def _cast_inputs(model: GraphModel, dtype: type) -> list[Applied]:
    applied = []
    for tensor in model.inputs:
        if element_type(tensor.dtype) != onnx.TensorProto.FLOAT:
            continue
        readers = list(tensor.outputs)
        cast = model.add("Cast", [tensor], f"{tensor.name}/cast", dtype, {"to": element_type(dtype)})
        model.replace_uses(tensor, cast, readers)
        applied.append(Applied(tensor.name, "input cast after it enters"))
    return applied


def _cast_lookups(model: GraphModel, dtype: type) -> list[Applied]:
    applied = []
    for node in model.nodes:
        if node.op == "Gather" and model.is_table(node.inputs[0]):
            rows = node.outputs[0]
            if element_type(rows.dtype) != onnx.TensorProto.FLOAT:
                continue
            readers = list(rows.outputs)
            cast = model.add("Cast", [rows], f"{node.name}/cast", dtype, {"to": element_type(dtype)})
            model.replace_uses(rows, cast, readers)
            applied.append(Applied(node.name, "table stays in FP32, its rows are cast"))
    return applied


def _keep_in_fp32(model: GraphModel, node: Node, dtype: type) -> Applied:
    for index, tensor in enumerate(node.inputs):
        if not is_constant(tensor):
            node.inputs[index] = model.add(
                "Cast", [tensor], f"{node.name}/to_fp32", np.float32, {"to": onnx.TensorProto.FLOAT}
            )
    output = node.outputs[0]
    readers = list(output.outputs)
    if model.is_output(output):
        return Applied(node.name, "kept in FP32; its output leaves as it is")
    back = model.add("Cast", [output], f"{node.name}/from_fp32", dtype, {"to": element_type(dtype)})
    model.replace_uses(output, back, readers)
    return Applied(node.name, "kept in FP32 between casts")


def _cast_outputs(model: GraphModel) -> list[Applied]:
    applied = []
    for tensor in model.outputs:
        if element_type(tensor.dtype) != onnx.TensorProto.FLOAT:
            continue
        name = tensor.name
        cast = model.add("Cast", [tensor], f"{name}/cast_back", np.float32, {"to": onnx.TensorProto.FLOAT})
        model.make_output(tensor, cast)
        applied.append(Applied(name, "cast back before it leaves"))
    return applied


def _forget_types(model: GraphModel) -> None:
    """Drop inferred types of inner tensors, which are stale now; loading infers them again."""
    interface: Sequence[Tensor] = [*model.inputs, *model.outputs]
    for tensor in model.tensors().values():
        if not is_constant(tensor) and not any(tensor is other for other in interface):
            tensor.dtype = None


def _refuse_control_flow(model: GraphModel, base: Precision) -> None:
    for node in model.nodes:
        if node.op in _CONTROL_FLOW:
            raise TransformError(
                f"node '{node.name}' is a {node.op}: graphs with control flow are not cast to {base}",
                evidence="its branches carry types of their own",
                remedy="plan fp32 for this model, or export it without control flow",
            )
