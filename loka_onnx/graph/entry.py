"""Bring a foreign ONNX file into canonical form.

Canonical: default operator set 21 or later, no model-local functions, no constant expressions, every node
named after its module, every site node by its site name.

A model of FP16 or FP64 weights computes in FP32, the reference of errors, from here on: weights, inputs,
outputs, and every cast to those types. FP64 weights are rounded; FP16 embedding tables stay as stored, and
looked-up rows are cast. `export.preflight` compares the result with the original on rows: a model may need
the digits that FP32 lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx.inliner
import onnx_graphsurgeon as gs
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data
from onnx.helper import tensor_dtype_to_np_dtype
from onnx_graphsurgeon.logger import G_LOGGER

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.errors import ModelError
from loka_onnx.graph.detached import info_of, refill
from loka_onnx.graph.model import GraphModel, element_type, is_constant, producer, values_of
from loka_onnx.graph.naming import module_path, name_sites, unused
from loka_onnx.graph.parts import Typed, is_no_constant, mark_branches
from loka_onnx.graph.shape_values import read_dimensions
from loka_onnx.graph.sites import NORM_OPS, PRODUCT_OPS
from loka_onnx.graph.soundness import STANDARD_DOMAINS, check_message, check_sound, opset_of, parsing
from loka_onnx.graph.storage import (
    all_attributes,
    all_initializers,
    looked_up,
    read_external,
    read_proto,
    with_subgraphs,
)
from loka_onnx.sessions.model_files import nested_nodes
from loka_onnx.sessions.onnx_session import quiet_sessions

OPSET = 21
"""Lowest operator set written: FP8 Q/DQ is complete there in every engine."""
OLDEST_OPSET = 11
"""Oldest operator set accepted: the default of PyTorch 1.3 and its day's tf2onnx. Mods fuse its norms."""
GROUP_SCALES_END = 21
"""Operator set from which GroupNormalization has a scale for each channel; before, for each group."""
_PRODUCTS = ("QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger")
QUANTIZING = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", *_PRODUCTS})
"""Operators that round activations. A DequantizeLinear alone is a way to store weights."""


@dataclass(frozen=True)
class Canonical:
    """A model in canonical form; name and version of the original's `producer`; the conversions, in words."""

    model: GraphModel
    producer: str
    notes: tuple[str, ...]


def open_inputs(path: Path) -> tuple[TensorSpec, ...]:
    """Return the inputs of a foreign model with two axes, both dynamic; ModelError as `read_proto`."""
    proto = read_proto(path)
    check_message(proto, path)
    constants = {tensor.name for tensor in proto.graph.initializer}
    return tuple(
        TensorSpec(value.name, np.dtype(tensor_dtype_to_np_dtype(kind.elem_type)).name, (None, None))
        for value in proto.graph.input
        if len(dims := (kind := value.type.tensor_type).shape.dim) == 2
        and not any(dim.HasField("dim_value") for dim in dims)
        and value.name not in constants
    )


def canonicalize(path: Path, widths: Mapping[str, int] = MappingProxyType({})) -> Canonical:
    """Read and convert a foreign model; `widths` fixes axis 1 of `open_inputs`, by name. Raises ModelError if
    it cannot be read or converted, is unsound, quantized or in BF16, has another opset, a custom operator or
    a weight beyond FP32, an input or output that is no tensor, or an output without a batch.
    """
    proto = read_proto(path)
    check_message(proto, path)
    notes: list[str] = []
    _read_attributes(proto, path.parent)
    if proto.functions:
        with parsing(path, "cleared of its functions"):
            proto = onnx.inliner.inline_local_functions(proto)
        notes.append("model-local functions inlined")
    _check_operators(proto, path)
    check_sound(proto, path)
    for node in nested_nodes(proto.graph.node):
        # Optional inputs that are left out at the end: optimizing them, ONNX Runtime 1.31 ends the process.
        is_known = onnx.defs.has(node.op_type, node.domain)
        least = onnx.defs.get_schema(node.op_type, node.domain).min_input if is_known else len(node.input)
        while len(node.input) > least and not node.input[-1]:
            node.input.pop()
        for attribute in node.attribute:
            if attribute.name in {"value_float", "value_floats"}:
                # onnx-graphsurgeon reads the numbers of a Constant as FP64.
                values = attribute.f if attribute.name == "value_float" else attribute.floats
                tensor = onnx.numpy_helper.from_array(np.array(values, np.float32))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    _name_nodes(proto.graph)
    notes += _fix_widths(proto.graph, widths)
    original = opset_of(proto)
    proto = _convert(proto, path)
    if opset_of(proto) != original:
        notes.append(f"converted from opset {original} to {opset_of(proto)}")
    with parsing(path, "read as a graph"):
        notes += to_dense(proto)
        notes += to_float32(proto, path)
        model = GraphModel.from_proto(proto, path.parent)
        _check_ends(model, path)
        before = len(model.nodes)
        # What is folded may fix the shapes of later tensors, as padding that a layer computes from its input.
        while _fold(model.graph) and _has_unknown_shapes(model):
            model = GraphModel.read_back(model.export())
        model.graph.cleanup(remove_unused_graph_inputs=False)
    folded = before - len(model.nodes)
    if folded:
        notes.append(f"{folded} constant nodes folded")
    spread = _spread_group_scales(model, path) if original < GROUP_SCALES_END else 0
    if spread:
        notes.append(f"the scales of {spread} GroupNormalizations repeated, from groups to channels")
    return Canonical(model, f"{proto.producer_name} {proto.producer_version}".strip(), tuple(notes))


def _fold(graph: gs.Graph) -> bool:
    """Compute constants and static shapes; edits the graph, and returns whether it folded a shape. Shapes are
    read here: onnx-graphsurgeon (0.6) ignores `start` and `end` of a Shape, and computes in integers what is
    between two casts of integers.
    """

    # It computes constants in a session without settings, and prints what goes wrong to standard output.
    def compute() -> None:
        with G_LOGGER.suppress(G_LOGGER.ERROR), quiet_sessions():
            graph.fold_constants(
                fold_shapes=False, error_ok=True, should_exclude_node=is_no_constant, flatten_subgraphs=False
            )

    within = [graph, *(each for node in graph.nodes for each in node.subgraphs(recursive=True))]
    for node in (node for each in within for node in each.nodes):
        _write_plainly(node)
    compute()
    chosen = [_inline_branches(each) for each in reversed(within)]  # inner ones first
    mark_branches(graph)
    folded = [_fold_shape(node) for each in within for node in each.nodes]
    if any(chosen) or any(folded):
        compute()
    return any(chosen) or any(folded)


def _write_plainly(node: gs.Node) -> None:
    """Write a CastLike of a known type, and what reads a listed sequence, in operators of all engines."""
    if node.op == "CastLike" and node.inputs[1].dtype is not None:
        node.attrs["to"] = element_type(node.inputs[1].dtype)
        node.op, node.inputs = "Cast", node.inputs[:1]
    listed = producer(node.inputs[0]) if node.op in {"SequenceAt", "ConcatFromSequence"} else None
    if listed is None or listed.op != "SequenceConstruct":
        return
    if node.op == "SequenceAt" and is_constant(node.inputs[1]):
        node.op, node.inputs = "Identity", [listed.inputs[int(values_of(node.inputs[1]))]]
    elif node.op == "ConcatFromSequence" and not node.attrs.get("new_axis", 0):
        node.attrs.pop("new_axis", None)
        node.op, node.inputs = "Concat", list(listed.inputs)


def _inline_branches(graph: gs.Graph) -> bool:
    """Put the branch that is taken in place of each If of a known condition; return whether there was one.
    (onnx-graphsurgeon's own loses an output that no node of the branch computes.)
    """
    index, found = 0, False
    while index < len(graph.nodes):
        node = graph.nodes[index]
        if node.op != "If" or not node.outputs or not is_constant(node.inputs[0]):
            index += 1
            continue
        found, outputs = True, list(node.outputs)
        branch, other = node.attrs["then_branch"], node.attrs["else_branch"]
        if not values_of(node.inputs[0]).all():
            branch, other = other, branch
        made = {id(out) for each in branch.nodes for out in each.outputs}
        for tensor in branch.tensors().values():
            if id(tensor) in made or is_constant(tensor):  # another branch may use the name
                tensor.name = f"{tensor.name}_{outputs[0].name}"
        names = {each.name for each in graph.nodes}
        for gone in (node, *(each for part in (other, *other.subgraphs(True)) for each in part.nodes)):
            gone.name = f"gone {id(gone)}"  # readers are removed by equality
            gone.inputs.clear()
        node.outputs.clear()
        ends = zip(branch.outputs, outputs, strict=True)
        inside = [*branch.nodes, *(gs.Node("Identity", "", {}, [end], [out]) for end, out in ends)]
        for each in inside:
            each.name = unused(each.name or f"{outputs[0].name}/{each.op.lower()}", names)
            names.add(each.name)
        graph.nodes[index : index + 1] = inside
    return found


def _has_unknown_shapes(model: GraphModel) -> bool:
    """Return whether a Shape reads a tensor of unknown rank, or of an unknown length behind the batch, or the
    condition of an If became known.
    """
    if any(node.op == "If" and is_constant(node.inputs[0]) for node in model.nodes):
        return True
    read = [node.inputs[0].shape for node in model.nodes if node.op == "Shape"]
    return any(shape is None or any(not isinstance(n, int) for n in shape[1:]) for shape in read)


def _fold_shape(node: gs.Node) -> bool:
    """Make the result of a Shape or Size constant, or what Gather or Slice takes; return whether it is."""
    if (
        node.op == "Size"
        and node.outputs
        and all(isinstance(n, int) for n in node.inputs[0].shape or (None,))
    ):
        node.outputs[0].to_constant(np.array(np.prod(node.inputs[0].shape), np.int64))
        node.outputs[0].inputs.clear()
        return True
    chosen = node.op in {"Gather", "Slice"}
    source = producer(node.inputs[0]) if chosen else node
    if source is None or source.op != "Shape" or not node.outputs:  # computed already, as a constant's shape
        return False
    lengths = read_dimensions(node.outputs[0])
    if lengths is None or not all(isinstance(length, int) for length in lengths):
        return False
    shape = node.inputs[1].shape if node.op == "Gather" else (len(lengths),)
    node.outputs[0].to_constant(np.array(lengths, np.int64).reshape(shape))
    node.outputs[0].inputs.clear()
    return True


def _read_attributes(proto: onnx.ModelProto, directory: Path) -> None:
    """Load external node attributes; large weights are initializers."""
    bodies = (each for function in proto.functions for node in function.node for each in node.attribute)
    for attribute in (*all_attributes(proto.graph), *bodies):
        for tensor in (attribute.t, *attribute.tensors):
            if uses_external_data(tensor):
                read_external(tensor, directory)


def _fix_widths(graph: onnx.GraphProto, widths: Mapping[str, int]) -> list[str]:
    """Set axis 1 of inputs, and the axes of other tensors that have the same symbol and so the same size."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    sizes: dict[str, set[int | None]] = defaultdict(set)
    for name, axes in dims.items():
        for axis, dim in enumerate(axes):
            sizes[dim.dim_param].add(widths.get(name) if axis == 1 else None)
    for name, width in widths.items():
        dims[name][1].dim_value = width
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            # A symbol of the batch, or one that stands for several widths, is left.
            known = sizes.get(dim.dim_param, set()) if dim.dim_param else set()
            if len(known) == 1 and None not in known:
                dim.dim_value = next(size for size in known if size is not None)
    names = {size: sorted(n for n in widths if widths[n] == size) for size in sorted({*widths.values()})}
    return [
        f"axis 1 of {', '.join(repr(n) for n in each)} fixed to {size}, the width of every row of the data"
        for size, each in names.items()
    ]


def _check_ends(model: GraphModel, path: Path) -> None:
    for kind, ends in (("input", model.inputs), ("output", model.outputs)):
        for value in ends:
            if isinstance(value, Typed):
                raise ModelError(
                    f"E0301 {kind} '{value.name}' of '{path}' is no tensor",
                    where=f"{kind} '{value.name}'",
                    evidence=f"it is a {value.proto.WhichOneof('value').removesuffix('_type')}",
                    remedy="take it out of the model: rows are tensors with the batch on axis 0",
                )
    for tensor in model.outputs:
        if tensor.shape is not None and not len(tensor.shape):
            raise ModelError(
                f"E0302 output '{tensor.name}' of '{path}' has no batch",
                where=f"output '{tensor.name}'",
                evidence="it is one value for all rows",
                remedy="take it out of the model: requests are divided and joined by rows",
            )


def _check_operators(proto: onnx.ModelProto, path: Path) -> None:
    version = opset_of(proto)
    if version < OLDEST_OPSET:
        raise ModelError(
            f"E0303 '{path}' uses opset {version}",
            evidence=f"opsets {OLDEST_OPSET} and up are converted to {OPSET}",
            remedy=f"export the model again with opset_version={OPSET}",
        )
    if version > onnx.defs.onnx_opset_version():
        raise ModelError(
            f"E0304 '{path}' uses opset {version}",
            evidence=f"onnx {onnx.__version__} knows opsets up to {onnx.defs.onnx_opset_version()}",
            remedy=f"export the model again with opset_version={OPSET}, or install a newer onnx",
        )
    for node in nested_nodes(proto.graph.node):
        if node.domain not in STANDARD_DOMAINS or not onnx.defs.has(node.op_type, node.domain):
            raise ModelError(
                f"E0305 '{path}' uses the custom operator '{node.domain or 'ai.onnx'}::{node.op_type}'",
                where=f"node '{node.name or ''.join(node.output[:1])}'",
                evidence="no standard operator set defines it, so its FP8 error cannot be measured",
                remedy="export it as standard operators, or cut it off in front of the model",
            )
        if node.op_type in QUANTIZING:
            raise ModelError(
                f"E0306 '{path}' is quantized already",
                where=f"node '{node.name or ''.join(node.output[:1])}' ({node.op_type})",
                evidence="errors and budgets are relative to the model before it is quantized",
                remedy="give the FP32 model; it is quantized here, where that is accurate",
            )


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give site nodes their site names, and every other node ``<module path>/<op>``."""
    named = PRODUCT_OPS | NORM_OPS
    sites = name_sites(graph, [index for index, node in enumerate(graph.node) if node.op_type in named])
    taken = set(sites.values())
    ordinals: defaultdict[str, int] = defaultdict(int)
    for index, node in enumerate(graph.node):
        if index in sites:
            node.name = sites[index]
            continue
        base = name = f"{module_path(node)}/{node.op_type.lower()}"
        while name in taken:
            ordinals[base] += 1
            name = f"{base}_{ordinals[base]}"
        taken.add(name)
        node.name = name


def _spread_group_scales(model: GraphModel, path: Path) -> int:
    """Give GroupNormalizations per-channel scale and bias; return how many had one for each group. The
    converter of onnx 1.23 has an adapter for this but does not call it.
    """
    count = 0
    for node in model.nodes:
        if node.op != "GroupNormalization":
            continue
        groups, shape = int(node.attrs["num_groups"]), node.inputs[0].shape
        channels = shape[1] if shape is not None and len(shape) > 1 else None
        if not isinstance(channels, int) or not all(is_constant(tensor) for tensor in node.inputs[1:3]):
            raise ModelError(
                f"E0307 '{path}' normalizes groups in a form that is not converted to opset {OPSET}",
                where=f"node '{node.name}'",
                evidence="its scale, bias or number of channels is not constant",
                remedy=f"export the model again with opset_version={OPSET}",
            )
        if channels == groups:
            continue
        for index in (1, 2):
            values = np.repeat(values_of(node.inputs[index]), channels // groups)
            node.inputs[index] = model.constant(f"{node.inputs[index].name}.channels", values)
        count += 1
    return count


def _convert(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Convert to opset 21 without the weights."""
    if opset_of(proto) >= OPSET:
        return proto
    light = onnx.ModelProto()
    light.CopyFrom(proto)
    inputs = {i.name for i in proto.graph.input}
    heavy = {t.name: t for t in proto.graph.initializer if uses_external_data(t) and t.name not in inputs}
    refill(light.graph.initializer, [t for t in light.graph.initializer if t.name not in heavy])
    light.graph.input.extend(map(info_of, heavy.values()))
    with parsing(path, f"converted from opset {opset_of(proto)} to {OPSET}"):
        converted = onnx.version_converter.convert_version(light, OPSET)
    refill(converted.graph.input, [i for i in converted.graph.input if i.name not in heavy])
    converted.graph.initializer.extend(heavy.values())
    return converted


_OTHERS: dict[int, str] = {
    TensorProto.FLOAT16: "FP16",
    TensorProto.DOUBLE: "FP64",
    TensorProto.BFLOAT16: "BF16",
}
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


def to_float32(proto: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Convert a model to FP32 if matrices, inputs or outputs are of another float type; edits it. Returns the
    conversions, in words. Raises ModelError if it computes in BF16, or a weight is beyond FP32.
    """
    # 16-bit embedding tables.
    stored, used = {TensorProto.FLOAT16, TensorProto.BFLOAT16}, looked_up(proto.graph)
    tables = frozenset(t.name for t in proto.graph.initializer if t.data_type in stored and t.name in used)
    kinds = _float_types(proto, tables)
    if not kinds:
        return ()
    if TensorProto.BFLOAT16 in kinds:
        raise ModelError(
            f"E0308 '{path}' computes in BF16",
            where=f"tensor '{kinds[TensorProto.BFLOAT16]}'",
            evidence="ONNX Runtime has no BF16 on the CPU, so that a conversion could not be held against it",
            remedy="export the model in FP32; `plan.base` lowers it to BF16 where that is asked for",
        )
    for tensor in all_initializers(proto.graph):
        if tensor.name not in tables:
            _widen(tensor, path)
    for graph in with_subgraphs(proto.graph):
        del graph.value_info[:]
        for info in (*graph.input, *graph.output):
            _retype(info.type)
    for attribute in all_attributes(proto.graph):
        _widen(attribute.t, path)
        _retype(attribute.tp)
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _OTHERS:
            attribute.i = TensorProto.FLOAT
    _cast_lookups(proto.graph, tables)
    names = " and ".join(sorted(_OTHERS[kind] for kind in kinds))
    return (f"converted from {names} to FP32, inputs and outputs among it",)


def to_dense(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Store sparse weights densely; edits a model. Returns the conversions, in words, () for none."""
    count = 0
    for graph in with_subgraphs(proto.graph):
        count += len(graph.sparse_initializer)
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        del graph.sparse_initializer[:]
    for attribute in all_attributes(proto.graph):
        if attribute.type == onnx.AttributeProto.SPARSE_TENSOR:
            attribute.CopyFrom(onnx.helper.make_attribute("value", _dense(attribute.sparse_tensor)))
            count += 1
    return (f"{count} sparse weights stored densely",) if count else ()


def _dense(sparse: onnx.SparseTensorProto) -> TensorProto:
    """Return a dense tensor; indices are offsets, or one for each axis (ONNX IR, SparseTensorProto)."""
    values, places = (onnx.numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if places.ndim == 1:
        dense.reshape(-1)[places] = values
    else:
        dense[tuple(places.T)] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)


def _float_types(proto: onnx.ModelProto, tables: frozenset[str]) -> dict[int, str]:
    """Return other float types of matrices, inputs and outputs, each with its first tensor."""
    constants = (a.t for a in all_attributes(proto.graph) if a.type == onnx.AttributeProto.TENSOR)
    tensors = (*all_initializers(proto.graph), *constants)
    kinds = [(t.data_type, t.name) for t in tensors if len(t.dims) > 1 and t.name not in tables]
    kinds += [(i.type.tensor_type.elem_type, i.name) for i in (*proto.graph.input, *proto.graph.output)]
    return {kind: name for kind, name in reversed(kinds) if kind in _OTHERS}


def _widen(tensor: TensorProto, path: Path) -> None:
    if tensor.data_type not in _OTHERS:
        return
    if uses_external_data(tensor):
        read_external(tensor, path.parent)
    values = onnx.numpy_helper.to_array(tensor)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.array_equal(np.isfinite(values), np.isfinite(narrow)):
        raise ModelError(
            f"E0309 a weight of '{path}' does not fit FP32",
            where=f"tensor '{tensor.name}'",
            evidence=f"its largest magnitude is {np.abs(values[np.isfinite(values)]).max():.4g}",
            remedy="rescale it, or export the model in FP32",
        )
    tensor.CopyFrom(onnx.numpy_helper.from_array(narrow, tensor.name))


def _retype(kind: onnx.TypeProto) -> None:
    """Replace other float types by FP32, in sequences and optionals too; edits it."""
    which = kind.WhichOneof("value")
    if which == "tensor_type" and kind.tensor_type.elem_type in _OTHERS:
        kind.tensor_type.elem_type = TensorProto.FLOAT
    elif which in {"sequence_type", "optional_type"}:
        _retype(getattr(kind, which).elem_type)


def _cast_lookups(graph: onnx.GraphProto, tables: frozenset[str]) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Gather" and node.input[0] in tables:
            name = node.output[0]
            node.output[0] = f"{name}.stored"
            cast = onnx.helper.make_node("Cast", [node.output[0]], [name], f"{node.name}/fp32")
            cast.attribute.append(onnx.helper.make_attribute("to", TensorProto.FLOAT))
            nodes.append(cast)
    refill(graph.node, [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes])
