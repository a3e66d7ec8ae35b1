"""Graphs that any tool wrote, in the form that this project's engine makers take.

A tool leaves a graph in FP32 (or FP16) with pairs of QuantizeLinear and DequantizeLinear in front of its
products. What becomes of it here:

1. Constants are folded, as every engine maker folds them: weights behind a Q become FP8, biases behind a DQ
   become floats. DQ of a matrix stays: a product multiplies the FP8 values.
2. A graph in FP32 gets the base precision BF16, by the same transform as this project's plans, with no node
   protected. Q/DQ take no part in it: their scales stay in FP32 to the bit, whatever BF16 can hold, and DQ
   says its type (operator set 23, `output_dtype`). A graph with BF16 or FP16 in it stays as it was written.
3. A product of which both operands come from a DQ, directly or through what only moves values, is FP8; every
   other one is in the base precision. That is the plan.

Q/DQ elsewhere (at additions, at table rows) stay where the tool put them, and are computed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import E4M3FN, E5M2, NumberFormat, Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.errors import ModelError
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import model_digest
from loka_onnx.numerics.rounding import quantize
from loka_onnx.transforms.precision.explicit_casts import cast_to_base

Array = npt.NDArray[Any]
FLOAT8: Mapping[int, NumberFormat] = {
    TensorProto.FLOAT8E4M3FN: E4M3FN,
    TensorProto.FLOAT8E5M2: E5M2,
}
HALF: Mapping[int, Precision] = {TensorProto.BFLOAT16: Precision.BF16, TensorProto.FLOAT16: Precision.FP16}
MOVING = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Split"})
"""Operators that move the values of their first input."""
_OPSET = 23
"""From here on a DQ may have another type than its scale (ONNX, DequantizeLinear-23)."""


@dataclass(frozen=True)
class Form:
    """A graph as it goes to an engine maker.

    Attributes:
        model: The file, and its sites.
        plan: What it runs where.
        notes: What was done to it.
    """

    model: ModelArtifact
    plan: PrecisionPlan
    notes: tuple[str, ...]


def formed(source: Path, target: Path, name: str, base: Precision = Precision.BF16) -> Form:
    """Bring a graph into the form that an engine maker takes.

    Args:
        source: What a tool wrote.
        target: Where the form goes.
        name: Id of the plan.
        base: Precision of everything that is not FP8, of a graph in FP32.

    Raises:
        ModelError: Q/DQ of another type than FP8 stand at an activation or a matrix.
        TransformError: The graph cannot be typed in the base precision.
    """
    proto = onnx.load(os.fspath(source))
    _name_nodes(proto.graph)
    notes = [f"{count} constant nodes folded" for count in [fold_constants(proto)] if count]
    written = written_precision(proto)
    if written is None and base is not Precision.FP32:
        pairs = _take_pairs(proto.graph)
        proto = _cast(proto, base, target)
        _put_back(proto, pairs, base)
        notes.append(f"FP32 typed as {base} by this project, scales as they were written")
    else:
        notes.append(f"in {written or base}, as it was written")
    target.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, os.fspath(target))
    model = described(proto, target)
    plan = plan_of(proto, model, name, written or base)
    return Form(model, plan, tuple(notes))


def written_precision(proto: onnx.ModelProto) -> Precision | None:
    """The half precision that a graph already computes in; None where it is in FP32."""
    kinds = {t.data_type for t in proto.graph.initializer}
    kinds |= {int(a.i) for node in proto.graph.node for a in node.attribute if a.name == "to"}
    return next((precision for kind, precision in HALF.items() if kind in kinds), None)


def has_float8(proto: onnx.ModelProto) -> bool:
    """Whether a graph quantizes to FP8 anywhere."""
    return any(tensor.data_type in FLOAT8 for tensor in proto.graph.initializer)


# Folding --------------------------------------------------------------------------------------------------


def fold_constants(proto: onnx.ModelProto) -> int:
    """Compute what depends on constants alone, but for the DQ of a matrix; in place.

    Returns:
        How many nodes that were.
    """
    graph = proto.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kept: list[NodeProto] = []
    for node in graph.node:
        inputs = [stored.get(name) for name in node.input]
        is_constant = all(t is not None for t, name in zip(inputs, node.input, strict=True) if name)
        is_matrix = (
            node.op_type == "DequantizeLinear"
            and bool(inputs)
            and len(inputs[0].dims if inputs[0] else ()) > 1
        )
        if not is_constant or is_matrix or (not node.input and node.op_type != "Constant"):
            kept.append(node)
            continue
        for name, value in zip(node.output, _evaluated(proto, node, inputs), strict=True):
            stored[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
            stored[name].dims[:] = value.shape
    folded = len(graph.node) - len(kept)
    read = {name for node in kept for name in node.input} | {info.name for info in graph.output}
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.initializer.extend(tensor for name, tensor in stored.items() if name in read)
    return folded


def _evaluated(proto: onnx.ModelProto, node: NodeProto, inputs: list[TensorProto | None]) -> list[Array]:
    values = [None if tensor is None else numpy_helper.to_array(tensor) for tensor in inputs]
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return [_requantized(node, inputs, values)]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in inputs if t is not None],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output],
    )
    one = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    fed = {name: value for name, value in zip(node.input, values, strict=True) if name}
    done: list[Array] = ReferenceEvaluator(one).run(None, fed)  # type: ignore[assignment]
    return done


def _requantized(node: NodeProto, inputs: list[TensorProto | None], values: list[Array | None]) -> Array:
    x, scale = values[0], values[1]
    assert x is not None and scale is not None
    axis = _attribute(node, "axis", 1)
    spread = scale.astype(np.float32)
    if node.op_type == "DequantizeLinear":
        zero = values[2].astype(np.float32) if len(values) > 2 and values[2] is not None else 0.0
        return ((x.astype(np.float32) - zero) * spread).astype(scale.dtype)
    kind = inputs[2].data_type if len(inputs) > 2 and inputs[2] is not None else None
    kind = kind or _attribute(node, "output_dtype", TensorProto.UINT8)
    if kind not in FLOAT8:
        raise _not_float8(node)
    return quantize(x.astype(np.float32), spread, FLOAT8[kind], axis if spread.ndim else None)


# The base precision ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """A Q or DQ that is taken out while the graph is typed.

    Attributes:
        node: As it was.
        scale: Its scale.
        zero: Its zero point, if it has one.
        values: What it dequantizes, where that is constant.
    """

    node: NodeProto
    scale: TensorProto
    zero: TensorProto | None
    values: TensorProto | None


def _take_pairs(graph: onnx.GraphProto) -> dict[str, _Pair]:
    """Let an Identity of the same name stand for each Q and DQ, and FP32 of the same values for FP8.

    Typing then sees a graph of floats. Every FP8 number is a BF16 number.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    pairs: dict[str, _Pair] = {}
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        source, scale, *rest = node.input
        zero = stored.get(rest[0]) if rest else None
        values = stored.get(source)
        types = {tensor.data_type for tensor in (zero, values) if tensor is not None}
        if not types <= FLOAT8.keys():
            raise _not_float8(node)
        kept = NodeProto()
        kept.CopyFrom(node)
        pairs[node.name] = _Pair(kept, stored[scale], zero, values)
        if values is not None:
            name = f"{node.name}.values"
            graph.initializer.append(
                numpy_helper.from_array(numpy_helper.to_array(values).astype(np.float32), name)
            )
            source = name
        node.op_type = "Identity"
        del node.attribute[:]
        node.input[:] = [source]
    return pairs


def _cast(proto: onnx.ModelProto, base: Precision, target: Path) -> onnx.ModelProto:
    read = {name for node in proto.graph.node for name in node.input}
    used = [tensor for tensor in proto.graph.initializer if tensor.name in read]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(used)
    graph = GraphModel.from_proto(proto, target.parent)
    cast_to_base(graph, base, PrecisionPlan("typed", "", base, (), {}, 0.0))
    graph.save(target)
    return onnx.load(os.fspath(target))


def _put_back(proto: onnx.ModelProto, pairs: Mapping[str, _Pair], base: Precision) -> None:
    """Q and DQ in place of what stood for them; constants under names of their own, each once."""
    if not pairs:
        return
    graph, added = proto.graph, dict[str, TensorProto]()
    half = next(kind for kind, precision in HALF.items() if precision is base)

    def constant(tensor: TensorProto) -> str:
        name = f"{tensor.name}.written"
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = name
        added[name] = copy
        return name

    for node in graph.node:
        pair = pairs.get(node.name)
        if pair is None:
            continue
        node.op_type = pair.node.op_type
        source = node.input[0] if pair.values is None else constant(pair.values)
        zero = [] if pair.zero is None else [constant(pair.zero)]
        node.input[:] = [source, constant(pair.scale), *zero]
        node.attribute.extend(pair.node.attribute)
        if node.op_type == "DequantizeLinear":
            node.attribute.append(helper.make_attribute("output_dtype", half))
    graph.initializer.extend(added.values())
    read = {name for node in graph.node for name in node.input}
    used = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:], graph.value_info[:]
    graph.initializer.extend(used)
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = max(entry.version, _OPSET)
    proto.ir_version = max(proto.ir_version, 11)


# The plan -------------------------------------------------------------------------------------------------


def plan_of(proto: onnx.ModelProto, model: ModelArtifact, name: str, base: Precision) -> PrecisionPlan:
    """What a graph says of its products.

    Args:
        proto: A graph whose pairs are FP8.
        model: Its sites.
        name: Id of the plan.
        base: What it computes in otherwise.
    """
    graph = _Reader(proto)
    decisions = tuple(_decision(graph, site, base) for site in model.sites if site.kind is not SiteKind.NORM)
    able = {site.name: site.flops_per_example for site in model.sites if site.is_fp8_able}
    chosen = sum(able.get(d.site, 0) for d in decisions if d.precision is Precision.FP8)
    return PrecisionPlan(name, model.digest, base, decisions, {}, chosen / max(sum(able.values()), 1))


class _Reader:
    """Looks up what computes a tensor."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.stored = {tensor.name: tensor for tensor in proto.graph.initializer}
        self.producers = {name: node for node in proto.graph.node for name in node.output}
        self.nodes = {node.name: node for node in proto.graph.node}

    def dequantizers(self, tensor: str) -> tuple[NodeProto, ...]:
        """The DQ whose values a tensor holds; none where something else reaches it."""
        node = self.producers.get(tensor)
        if node is None:
            return ()
        if node.op_type == "DequantizeLinear":
            return (node,)
        if node.op_type == "Concat":
            parts = [self.dequantizers(name) for name in node.input]
            return tuple(each for part in parts for each in part) if all(parts) else ()
        return self.dequantizers(node.input[0]) if node.op_type in MOVING else ()

    def format(self, dequantize: NodeProto) -> NumberFormat | None:
        """FP8 format of what a DQ reads; None of another type."""
        if len(dequantize.input) > 2 and dequantize.input[2] in self.stored:
            return FLOAT8.get(self.stored[dequantize.input[2]].data_type)
        stored = self.stored.get(dequantize.input[0])
        if stored is not None:
            return FLOAT8.get(stored.data_type)
        quantize_node = self.producers.get(dequantize.input[0])
        kind = _attribute(quantize_node, "output_dtype", 0) if quantize_node is not None else 0
        return FLOAT8.get(kind)

    def scales(self, dequantize: NodeProto) -> tuple[float, ...]:
        """Scales of a DQ."""
        stored = self.stored.get(dequantize.input[1])
        values = np.ones(()) if stored is None else numpy_helper.to_array(stored)
        return tuple(values.astype(np.float64).reshape(-1).tolist())


def _decision(graph: _Reader, site: Site, base: Precision) -> Decision:
    node = graph.nodes[site.name]
    order = [operand.index for operand in site.operands]
    activation, weight = (graph.dequantizers(node.input[index]) for index in order)
    if not activation or not weight:
        missing = "both operands" if not activation and not weight else "one operand"
        return Decision(site.name, base, None, Verdict.NOT_JUDGED, f"{missing} without DequantizeLinear")
    format = graph.format(activation[0])
    if format is None or any(graph.format(each) != format for each in (*activation, *weight)):
        reason = "its operands are of different types, or not FP8"
        return Decision(site.name, base, None, Verdict.NOT_JUDGED, reason)
    scales = graph.scales(weight[0])
    granularity = Granularity.PER_CHANNEL if len(scales) > 1 else Granularity.PER_TENSOR
    recipe = Recipe.of(format, granularity)
    return Decision(
        site.name,
        Precision.FP8,
        recipe,
        Verdict.NOT_JUDGED,
        "both operands come from DequantizeLinear",
        graph.scales(activation[0])[0],
        scales,
    )


def described(proto: onnx.ModelProto, path: Path) -> ModelArtifact:
    """A graph with its sites, which are those that it has without Q/DQ.

    Args:
        proto: The graph.
        path: Where it is written.
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    _remove_pairs(plain.graph)
    graph = GraphModel.from_proto(plain, path.parent)
    (opset,) = (entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    return ModelArtifact(
        path=path,
        digest=model_digest(path),
        opset=opset,
        inputs=tuple(tensor_spec(tensor) for tensor in graph.graph.inputs),
        outputs=tuple(tensor_spec(tensor) for tensor in graph.graph.outputs),
        sites=find_sites(graph),
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
    )


def _remove_pairs(graph: onnx.GraphProto) -> None:
    """Let every reader of a DQ read what was quantized; constants become FP32 of the same shape."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    behind: dict[str, str] = {}
    kept: list[NodeProto] = []
    for node in graph.node:
        node.input[:] = [behind.get(name, name) for name in node.input]
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            kept.append(node)
            continue
        source = node.input[0]
        if source in stored:
            name = f"{node.name}.values"
            scale = stored.get(node.input[1])
            dtype = np.float32 if scale is None else numpy_helper.to_array(scale).dtype
            numbers = numpy_helper.to_array(stored[source]).astype(dtype)
            graph.initializer.append(numpy_helper.from_array(numbers, name))
            source = name
        behind[node.output[0]] = source
    kept.extend(
        helper.make_node("Identity", [behind[info.name]], [info.name], f"{info.name}.plain")
        for info in graph.output
        if info.name in behind
    )
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    read = {name for node in kept for name in node.input}
    used = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(used)


# Small things ---------------------------------------------------------------------------------------------


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own; sites are found again by it."""
    taken: set[str] = set()
    for number, node in enumerate(graph.node):
        name = base = node.name or f"{node.op_type.lower()}_{number}"
        while name in taken:
            name = f"{base}_{number}"
        node.name = name
        taken.add(name)


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), default)


def _not_float8(node: NodeProto) -> ModelError:
    return ModelError(
        f"node '{node.name}' quantizes to another type than E4M3FN and E5M2",
        evidence="FP8 products alone are compared",
        remedy="quantize to FP8",
    )
