"""Make the graph strongly typed in BF16 or FP16.

Every FP32 constant of a node in the base precision is rounded to it; a tensor that stays in FP32 is cast for
readers in the base precision, and the other way round. These stay in FP32:

- graph inputs and outputs, so that the interface stays that of the exported model. Cast reads an input as it
  enters: identifiers that arrive as floats would not survive the rounding;
- sites that the plan keeps in FP32, and other nodes that it names (`PrecisionPlan.wide`);
- embedding tables outside the model, whose rows are cast after the lookup, which gives the same values;
- operands that ONNX defined in the base precision after operator set 21 only, or not at all: engines lag
  behind (TensorRT for RTX 1.7.1 takes HardSwish, Mish and LpNormalization in FP32 and FP16, not in BF16);
- norms without a `stash_type` (InstanceNormalization, LpNormalization), which sum in the type of their input.

A Q/DQ scale must keep its value: the FP8 weights were stored for it. Scales are BF16 numbers
(`numerics.scales`), so BF16 always keeps them; FP16 does not below 2⁻¹⁴, where its numbers lose bits. The
statistics of the other norms stay in FP32 through their `stash_type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.rewrite import Applied, RewriteRecord
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, element_type, is_constant, values_of

_NUMPY = {Precision.BF16: ml_dtypes.bfloat16, Precision.FP16: np.float16}
_LIMITS: dict[Precision, Any] = {base: ml_dtypes.finfo(dtype) for base, dtype in _NUMPY.items()}  # type: ignore[no-untyped-call]
_FLOAT = onnx.TensorProto.FLOAT

_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_READS_ANY_TYPE = frozenset({"Cast", "Shape", "Size"})
"""Operators whose result does not depend on precision, or should come from the exact input."""
_TYPED_BY = 21
"""Operator set whose types every engine supports; a newer operator has its first types."""
_SUMMING = frozenset({"InstanceNormalization", "LpNormalization"})
"""Norms that take their statistics in the type of their input."""
_TYPE_ATTRIBUTES = {"Cast": "to", "EyeLike": "dtype"}


def cast_to_base(model: GraphModel, base: Precision, plan: PrecisionPlan) -> RewriteRecord:
    """Give every FP32 tensor between inputs and outputs the base precision, BF16 or FP16; in place.

    Raises TransformError if the graph has control flow, a constant overflows, a Q/DQ scale would change its
    value, or the type of a tensor is not known.
    """
    wide = _find_wide(model, base, plan)
    said = [_round_constants(model, base, wide), *wide.applied]
    for node in model.nodes:
        if node.outputs[0].name not in wide.tensors:
            _retarget_attributes(model, node, base)
    said += _cast_for_readers(model, base, wide)
    _widen_for_readers(model, wide)
    said += _cast_outputs(model, wide)
    # Inferred types of inner tensors are stale; loading infers them again.
    interface = {tensor.name for tensor in (*model.inputs, *model.outputs)}
    for name, tensor in model.tensors().items():
        if not is_constant(tensor) and name not in interface:
            tensor.dtype = None
    return RewriteRecord(f"cast-to-{base}", tuple(said), ())


def fp32_nodes(model: GraphModel, base: Precision, plan: PrecisionPlan) -> frozenset[str]:
    """Return names of nodes whose results stay in FP32 under `cast_to_base`; TransformError as there."""
    if base is Precision.FP32:
        return frozenset(node.name for node in model.nodes)
    tensors = _find_wide(model, base, plan).tensors
    return frozenset(node.name for node in model.nodes if any(t.name in tensors for t in node.outputs))


def stored_in(base: Precision, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values rounded to FP32, then to the base precision, in FP64; infinite beyond its range."""
    single = values.astype(np.float32)
    return (single if base is Precision.FP32 else _narrowed(single, base)).astype(np.float64)


def _narrowed(values: npt.NDArray[np.float32], base: Precision) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY[base])


@dataclass(frozen=True)
class _Wide:
    """Operands and tensors that stay in FP32, with the reasons in `applied`.

    `operands` are inputs, by identity of the node and position; `tensors` are computed or graph inputs.
    """

    operands: frozenset[tuple[int, int]]
    tensors: dict[str, Tensor]
    applied: tuple[Applied, ...]


def _find_wide(model: GraphModel, base: Precision, plan: PrecisionPlan) -> _Wide:
    """Find what stays in FP32; TransformError for control flow or a tensor of unknown type."""
    for node in model.nodes:
        if node.op in _CONTROL_FLOW:
            raise TransformError(
                f"E0606 node '{node.name}' is a {node.op}: graphs with control flow are not cast to {base}",
                evidence="its branches carry types of their own",
                remedy="plan fp32 for this model, or export it without control flow",
            )
    kept = {d.site: "" for d in plan.decisions if d.precision is Precision.FP32}
    kept |= {wide.node: f": {wide.reason}" for wide in plan.wide}
    operands: set[tuple[int, int]] = set()
    tensors = {tensor.name: tensor for tensor in model.inputs if _is_float(tensor)}
    applied: list[Applied] = []
    for name in kept:
        model.node(name)
    for node in model.nodes:
        reason = _why_whole(model, node, kept)
        inputs, outputs = _fp32_positions(node, base, model.opset, whole=bool(reason))
        operands |= {(id(node), i) for i in inputs}
        tensors |= {node.outputs[i].name: node.outputs[i] for i in outputs}
        if not reason and (inputs or outputs):
            reason = f"operator set {_TYPED_BY} defines no {base} for it: FP32 between casts"
        if reason:
            applied.append(Applied(node.name, reason))
    return _Wide(frozenset(operands), tensors, tuple(applied))


def _why_whole(model: GraphModel, node: Node, kept: Mapping[str, str]) -> str:
    """Return why all operands and results of a node stay in FP32; empty when they do not."""
    if node.name in kept:
        return f"kept in FP32 between casts{kept[node.name]}"
    if node.op in _SUMMING:
        return "takes its statistics in the type of its input: FP32 between casts"
    if node.op == "Gather" and model.is_table(node.inputs[0]):
        return "table stays in FP32, its rows are cast"
    return "an FP32 constant, cast for its readers" if node.op == "Constant" else ""


def _fp32_positions(node: Node, base: Precision, opset: int, *, whole: bool) -> tuple[list[int], list[int]]:
    """Return positions of inputs and outputs that are FP32 now and must stay so."""
    domain = node.domain or ""
    try:
        schema = onnx.defs.get_schema(node.op, min(opset, _TYPED_BY), domain)
    except onnx.defs.SchemaError:
        schema = onnx.defs.get_schema(node.op, opset, domain)
    narrow_type = f"tensor({np.dtype(_NUMPY[base]).name})"

    def must_stay(formal: Sequence[onnx.defs.OpSchema.FormalParameter], position: int) -> bool:
        """Return whether an operand may be FP32 but not of the base precision."""
        # The last formal parameter may be variadic.
        types = formal[min(position, len(formal) - 1)].types
        return whole or ("tensor(float)" in types and narrow_type not in types)

    inputs = [i for i, t in enumerate(node.inputs) if must_stay(schema.inputs, i) and _is_float(t)]
    outputs = [i for i, t in enumerate(node.outputs) if must_stay(schema.outputs, i) and _is_float(t)]
    return inputs, outputs


def _round_constants(model: GraphModel, base: Precision, wide: _Wide) -> Applied:
    rounded: dict[int, Tensor] = {}
    for node in model.nodes:
        for index, tensor in enumerate(node.inputs):
            is_float = is_constant(tensor) and element_type(tensor.dtype) == _FLOAT
            if not is_float or (id(node), index) in wide.operands:
                continue
            if node.op in _QUANTIZERS and index == 1:
                _check_scale(node, values_of(tensor), base)
            if id(tensor) not in rounded:
                rounded[id(tensor)] = _rounded(model, tensor.name, values_of(tensor), base)
            node.inputs[index] = rounded[id(tensor)]
    return Applied("model", f"{len(rounded)} constants rounded to {base}")


def _rounded(model: GraphModel, name: str, values: npt.NDArray[np.float32], base: Precision) -> Tensor:
    narrow = _narrowed(values, base)
    lost = np.isfinite(values) & ~np.isfinite(narrow.astype(np.float32))
    if lost.any():
        largest = float(_LIMITS[base].max)
        raise TransformError(
            f"E0603 constant '{name}' does not fit {base}",
            evidence=f"it holds {float(values[lost].flat[0]):.4g}, {base} ends at {largest:.6g}",
            remedy="use the base precision bf16"
            if base is Precision.FP16
            else "use a smaller constant, or plan fp32",
        )
    return model.constant(f"{name}.{base}", narrow)


def _check_scale(node: Node, scales: npt.NDArray[np.float32], base: Precision) -> None:
    # An exact subnormal counts as lost too: some devices flush it to zero and divide by it.
    normal = float(_LIMITS[base].smallest_normal)
    lost = np.atleast_1d((_narrowed(scales, base).astype(np.float32) != scales) | (scales < normal))
    if lost.any():
        first = int(np.argmax(lost))
        raise TransformError(
            f"E0604 a Q/DQ scale is not exact in {base}",
            where=f"node '{node.name}'",
            evidence=f"scale {first} of {lost.size} is {float(scales.flat[first]):.4g}, "
            f"normal {base} numbers begin at {normal:.4g}",
            remedy="use the base precision bf16, which holds every scale exactly",
        )


def _retarget_attributes(model: GraphModel, node: Node, base: Precision) -> None:
    """Let nodes with a FP32 type attribute make tensors of the base precision."""
    attribute = _TYPE_ATTRIBUTES.get(node.op)
    if attribute in node.attrs and element_type(node.attrs[attribute]) == _FLOAT:
        node.attrs[attribute] = element_type(_NUMPY[base])
    elif node.op == "ConstantOfShape":
        value = node.attrs.get("value")
        values = np.zeros(1, np.float32) if value is None else values_of(value)
        if values.dtype == np.float32:
            node.attrs["value"] = _rounded(model, f"{node.name}.value", values, base)


def _cast_for_readers(model: GraphModel, base: Precision, wide: _Wide) -> Iterator[Applied]:
    """Cast FP32 tensors for nodes in the base precision."""
    dtype = _NUMPY[base]
    for name, tensor in wide.tensors.items():
        readers = [
            (node, index)
            for node in consumers(tensor)
            for index, read in enumerate(node.inputs)
            if read is tensor and node.op not in _READS_ANY_TYPE and (id(node), index) not in wide.operands
        ]
        if readers:
            cast = model.add("Cast", [tensor], f"{name}/cast", dtype, {"to": element_type(dtype)})
            for node, index in readers:
                node.inputs[index] = cast
            if not tensor.inputs:
                yield Applied(name, "input cast after it enters")


def _widen_for_readers(model: GraphModel, wide: _Wide) -> None:
    """Cast base-precision tensors for nodes in FP32."""
    casts: dict[str, Tensor] = {}
    for node in model.nodes:
        for index, tensor in enumerate(node.inputs):
            is_ready = is_constant(tensor) or model.is_table(tensor) or tensor.name in wide.tensors
            if (id(node), index) not in wide.operands or is_ready:
                continue
            if tensor.name not in casts:
                name = f"{tensor.name}/to_fp32"
                casts[tensor.name] = model.add("Cast", [tensor], name, np.float32, {"to": _FLOAT})
            node.inputs[index] = casts[tensor.name]


def _cast_outputs(model: GraphModel, wide: _Wide) -> Iterator[Applied]:
    for tensor in model.outputs:
        name = tensor.name
        if _is_float(tensor) and name not in wide.tensors:
            cast = model.add("Cast", [tensor], f"{name}/cast_back", np.float32, {"to": _FLOAT})
            model.make_output(tensor, cast)
            yield Applied(name, "cast back before it leaves")


def _is_float(tensor: Tensor) -> bool:
    """Return whether a tensor was FP32 before casting; an omitted optional input was not."""
    if not tensor.name:
        return False
    if tensor.dtype is None:
        raise TransformError(
            f"E0605 the element type of tensor '{tensor.name}' is not known",
            evidence="type inference of ONNX stops before it",
            remedy="export the model again, or plan fp32",
        )
    return element_type(tensor.dtype) == _FLOAT
