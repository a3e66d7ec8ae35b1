"""Products of an activation and a constant with their epilogue, biases moved to them, and concatenations.

A product in FP8 or INT8 (A and W behind their DQ), BF16 or FP16, and operators behind it that need no other
element of its output, in this order, each optional::

    Z  =  A · W + b
    Z  =  relu(Z), leaky_relu(Z)    or, of a cross layer (arXiv 2008.13535, equation 1),   Z  =  x0 ⊙ Z + x
    Z, Q(Z)

become one node, even without an epilogue. The lowering computes it by one kernel, or by a library's product
and kernels of the compiler, whichever is faster at that shape. The other fusions are not timed on a GPU yet.

Linears merged into one product (`transforms.linears.merge_parallel_linears`), each with its own bias::

    [Z₁, …, Zₙ] = Split(A · W),   Yᵢ = Zᵢ + bᵢ      =      [Y₁, …, Yₙ] = Split(A · W + concat(b₁, …, bₙ))

have the same sums. Behind the Split, every part is read and written again only for its bias; in front of it,
the parts are views of the product's output, which `kernels.triton_attention` reads directly.

A concatenation of two matrices with the Q behind it, rounded to the type of X on reading; rows that ids look
up, as of merged embeddings, are read from their table::

    X  =  concat(A, B),    X, Q(X)

Inductor's own kernel took 35 µs, and 15 without the Q, for an unknown reason (DLRM-DCNv2 at 2048, H100).

Concatenations of more than 8 tensors, as of a ranker's features, are taken apart::

    concat(A₁, …, Aₙ)  =  concat(concat(A₁, …, A₈), concat(A₉, …), …)

Inductor computes up to 8 gathers and elementwise results in one kernel, and launches one for each of more: 9
of 46 launches of fuxictr-finalmlp (sm90). Results of products would be copied, so they are not grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    EIGHT_BITS,
    HALVES,
    DeclinedFusion,
    Fused,
    KernelOutputs,
    is_row,
    is_symmetric,
    only_reader,
    static,
    unrounded,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

MULTIPLE = 16
"""Rows of factors of our kernel (`kernels.triton_product`) are multiples of so many bytes; also the divisor
of K and N of cuBLASLt's FP8 products."""
MOST_JOINED = 8
"""Most tensors that Inductor computes in the kernel of their concatenation (`max_pointwise_cat_inputs`)."""
LEAST_COLUMNS = 32
"""Least columns of a tile of a program that looks rows of a table up: the common divisor of its sizes."""
_LAYOUT = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"})
_LIGHT = frozenset({"Add", "Cast", "Div", "Gather", "Mul", "Relu", "Sigmoid", "Slice", "Sub", "Where"})


def is_plain(node: Node) -> bool:
    """True for a MatMul, or a Gemm A · W + b or A · Wᵀ + b."""
    if node.op not in {"Gemm", "MatMul"} or not node.outputs:
        return False
    attrs = node.attrs
    return not attrs.get("transA", 0) and attrs.get("alpha", 1.0) == attrs.get("beta", 1.0) == 1.0


def _dequantized(node: Node) -> tuple[Node, Node] | None:
    """The two DQ of a product of an activation and a constant, both in one eight-bit type; or None."""
    if not is_plain(node):
        return None
    activation, weight = (node.reads(position).producer for position in (0, 1))
    if activation is None or weight is None:
        return None
    both = (activation, weight)
    if not all(each.op == "DequantizeLinear" and each.reads(1).is_constant for each in both):
        return None
    values, stored = activation.reads(0), weight.reads(0)
    if values.is_constant or not stored.is_constant or len(stored.shape or ()) != 2:
        return None
    # The product takes one scale, or one for each column.
    columns = 0 if node.attrs.get("transB", 0) else 1
    is_outer = weight.reads(1).values.size == 1 or weight.attrs.get("axis", 1) % 2 == columns
    if not is_outer or weight.attrs.get("block_size", 0):
        return None
    is_multiplied = values.kind == stored.kind and stored.kind in EIGHT_BITS and all(map(is_symmetric, both))
    return both if is_multiplied else None


def _is_half(node: Node) -> bool:
    if not is_plain(node):
        return False
    activation, weight = node.reads(0), node.reads(1)
    if activation.is_constant or not weight.is_constant or len(weight.shape or ()) != 2:
        return False
    sizes = [length or 1 for length in weight.shape or ()]
    is_whole = not any(2 * length % MULTIPLE for length in sizes)
    return activation.kind == weight.kind and weight.kind in HALVES and is_whole


def quantized_product(graph: PlannedGraph, node: Node) -> Fused | None:
    """Fuse a product of an activation and a constant in E4M3FN or INT8."""
    operands = _dequantized(node)
    if operands is None:
        return None
    activation, weight = operands
    if activation.reads(1).values.size != 1:
        raise DeclinedFusion("its activation has several scales")
    epilogue = _Epilogue.of(graph, node)
    stored = weight.reads(0)
    columns = stored.values.shape[0 if node.attrs.get("transB", 0) else 1]
    # Product of both scales for each column, computed once for all requests.
    both = [each.reads(1).values.astype(np.float32).reshape(-1) for each in (activation, weight)]
    scale = graph.constant(f"{node.name}/scale", np.broadcast_to(both[0] * both[1], (columns,)))
    factors = (activation.reads(0), activation.reads(1), _transposed(graph, node, stored), weight.reads(1))
    return epilogue.write(graph, node, "QuantizedProduct", *factors, scale)


def half_product(graph: PlannedGraph, node: Node) -> Fused | None:
    """Fuse a product of an activation and a constant in BF16 or FP16."""
    if not _is_half(node):
        return None
    epilogue = _Epilogue.of(graph, node)
    if epilogue.end.kind != node.reads(1).kind:
        raise DeclinedFusion("its result has another type than its factors")
    weight = _transposed(graph, node, node.reads(1))
    return epilogue.write(graph, node, "HalfProduct", node.reads(0), None, weight, None)


def _transposed(graph: PlannedGraph, node: Node, stored: Tensor) -> Tensor:
    """Transpose a product's weight to (N, K), in which matrix units read both factors along K. A weight that
    was not loaded is unchanged: such a graph is only analysed.
    """
    return stored if node.attrs.get("transB", 0) or not stored.is_read else graph.transposed(stored)


@dataclass
class _Epilogue:
    """Matched epilogue of a product."""

    end: Tensor
    bias: Tensor | None = None
    relu: bool = False
    slope: float = 0.0
    cross: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, graph: PlannedGraph, node: Node) -> _Epilogue:
        """Match the epilogue of a product."""
        match = cls(node.outputs[0])
        if node.op == "Gemm" and node.has(2):
            if not _is_bias(node.reads(2), match.end):
                raise DeclinedFusion("what it adds is not one number a column")
            match.bias = node.reads(2)
        reader = only_reader(graph, match.end)
        if match.bias is None and reader is not None and reader.op == "Add":
            other = _other(reader, match.end)
            if other is not None and _is_bias(other, match.end):
                match.bias, match.end = other, reader.outputs[0]
                reader = only_reader(graph, match.end)
        if reader is None:
            return match
        if reader.op in {"Relu", "LeakyRelu"}:
            match.relu, match.end = True, reader.outputs[0]
            match.slope = float(reader.attrs.get("alpha", 0.01)) if reader.op == "LeakyRelu" else 0.0
            return match
        factor = _other(reader, match.end) if reader.op == "Mul" else None
        total = None if factor is None else only_reader(graph, reader.outputs[0])
        if factor is None or total is None or total.op != "Add":
            return match
        term = _other(total, reader.outputs[0])
        if term is not None and _is_alike(factor, match.end) and _is_alike(term, match.end):
            match.cross, match.end = (factor, term), total.outputs[0]
        return match

    def write(self, graph: PlannedGraph, node: Node, op: str, *factors: Tensor | None) -> Fused:
        """Write the fused node under the site's name; the old node has no outputs left. `factors` are A, its
        scale, Wᵀ, its scale, and the product of both scales for each column.
        """
        ends = KernelOutputs.of(graph, self.end)
        inputs = [*factors[:4], self.bias, *(self.cross or (None, None)), ends.scale, *factors[4:]]
        attrs = {"relu": int(self.relu), "slope": self.slope, "base": self.end.kind, **ends.attributes}
        graph.replace(f"{DOMAIN}::{op}", node.name, inputs, ends.replaced(self.end), attrs)
        return Fused(node.name, (node.name,))


def _other(node: Node, tensor: Tensor) -> Tensor | None:
    """The other operand of a commutative binary node; None where both operands are the same tensor."""
    others = [each for each in node.inputs if each is not None and each is not tensor]
    return others[0] if len(others) == 1 else None


def _is_bias(tensor: Tensor, end: Tensor) -> bool:
    return tensor.is_constant and is_row(tensor, end)


def _is_alike(tensor: Tensor, end: Tensor) -> bool:
    """True if a tensor certainly has the shape and type of another, so that nothing is broadcast."""
    if tensor.is_constant or tensor.shape is None or end.shape is None or tensor.kind != end.kind:
        return False
    return len(end.shape) == 2 and tensor.shape == end.shape


def _biased(graph: PlannedGraph, split: Node) -> list[tuple[Node, Tensor]]:
    """Nodes that add their bias to the parts of a product without one; [] unless all parts match."""
    whole = split.reads(0)
    product, shape = whole.producer, whole.shape
    if product is None or shape is None or not is_plain(product) or product.has(2):
        return []
    if only_reader(graph, whole) is not split or split.attrs.get("axis", 0) not in {-1, len(shape) - 1}:
        return []
    # A Split may omit an output.
    widths = [None if part.shape is None else part.shape[-1] for part in split.outputs]
    if None in widths or sum(width or 0 for width in widths) != shape[-1]:
        return []
    adds = []
    for part in split.outputs:
        add = only_reader(graph, part)
        bias = None if add is None or add.op != "Add" else _other(add, part)
        if add is None or bias is None or not bias.is_read or not is_row(bias, part):
            return []
        adds.append((add, bias))
    return adds


def merged_bias(graph: PlannedGraph, split: Node) -> Fused | None:
    """Move the biases behind the Split of a merged product in front of it; declines none."""
    adds = _biased(graph, split) if split.op == "Split" else []
    if not adds:
        return None
    whole = split.reads(0)
    rows = [bias.values.reshape(-1) for _, bias in adds]
    bias = graph.constant(f"{split.name}.bias", np.concatenate(rows))
    biased = Tensor(graph.fresh_name(f"{whole.name}.biased"), whole.kind, whole.shape)
    name = graph.fresh_name(f"{split.name}/biased")
    # The old Split would count as a reader of the product.
    split.outputs = []
    graph.replace("Add", graph.fresh_name(f"{split.name}/bias"), [whole, bias], [biased], {})
    outputs = [add.outputs[0] for add, _ in adds]
    graph.replace("Split", name, [biased, *split.inputs[1:]], outputs, split.attrs)
    return Fused(name)


def grouped_concat(graph: PlannedGraph, node: Node) -> Fused | None:
    """Concatenate neighbours that the compiler computes itself before the rest; declines none."""
    if node.op != "Concat" or len(node.inputs) <= MOST_JOINED:
        return None
    groups: list[list[Tensor]] = []
    for part in (node.reads(position) for position in range(len(node.inputs))):
        if groups and len(groups[-1]) < MOST_JOINED and _is_light(groups[-1][-1]) and _is_light(part):
            groups[-1].append(part)
        else:
            groups.append([part])
    if len(groups) == len(node.inputs):
        return None
    inputs = [group[0] if len(group) == 1 else _joined(graph, node, group) for group in groups]
    name = graph.fresh_name(f"{node.name}/groups")
    graph.replace("Concat", name, inputs, [node.outputs[0]], node.attrs)
    return Fused(name)


def _is_light(tensor: Tensor) -> bool:
    """True for an input, a gather or an elementwise result, reshaped or not."""
    maker = tensor.producer
    while maker is not None and maker.op in _LAYOUT:
        maker = maker.reads(0).producer
    return not tensor.is_constant and (maker is None or maker.op in _LIGHT)


def _joined(graph: PlannedGraph, node: Node, parts: list[Tensor]) -> Tensor:
    shapes, axis = [part.shape for part in parts], node.attrs["axis"]
    known = [list(shape) for shape in shapes if shape is not None]
    shape: tuple[int | None, ...] | None = None
    if len(known) == len(shapes) and None not in (lengths := [each[axis] for each in known]):
        known[0][axis] = sum(length or 0 for length in lengths)
        shape = tuple(known[0])
    joined = Tensor(graph.fresh_name(f"{node.name}.group"), parts[0].kind, shape)
    graph.replace("Concat", graph.fresh_name(f"{node.name}/group"), parts, [joined], node.attrs)
    return joined


def quantized_concat(graph: PlannedGraph, node: Node) -> Fused | None:
    """Fuse a concatenation that a Q reads."""
    if node.op != "Concat":
        return None
    joined = node.outputs[0]
    ends = KernelOutputs.of(graph, joined)
    if ends.quantize is None:
        return None
    if joined.kind not in HALVES:
        raise DeclinedFusion("the kernel writes BF16 and FP16")
    if len(node.inputs) != 2:
        raise DeclinedFusion(f"it joins {len(node.inputs)} tensors, the kernel two")
    parts = [node.reads(0), node.reads(1)]
    if static(joined, 2) is None or any(static(part, 2) is None for part in parts):
        raise DeclinedFusion("what it joins are not matrices of known widths")
    if node.attrs.get("axis") not in {1, -1} or any(part.is_constant for part in parts):
        raise DeclinedFusion("it does not join computed columns")
    inputs: list[Tensor | None] = [*(unrounded(graph, part) for part in parts), ends.scale]
    name = graph.fresh_name(f"{node.name}/quantized")
    attrs = {"base": joined.kind, **ends.attributes}
    widths = [(static(part, 2) or (0,))[0] for part in parts]
    for position, part in enumerate(inputs[:2]):
        lookup = None if part is None else _lookup(graph, part)
        # A tile lies in one part, and in one row of the table.
        if lookup and not (widths[0] % LEAST_COLUMNS or (static(lookup[0], 2) or (1,))[0] % LEAST_COLUMNS):
            inputs[position], attrs["table"] = lookup[0], position
            inputs.append(lookup[1])
            break
    graph.replace(f"{DOMAIN}::ConcatQuantize", name, inputs, ends.replaced(joined), attrs)
    return Fused(name)


def _lookup(graph: PlannedGraph, part: Tensor) -> tuple[Tensor, Tensor] | None:
    """The table (r, d) and the ids (M, f) of columns (M, f · d) that nothing else reads."""
    flat = part.producer
    gather = flat.reads(0).producer if flat is not None and flat.op == "Reshape" else None
    if flat is None or gather is None or gather.op != "Gather" or gather.attrs.get("axis", 0):
        return None
    table, ids = gather.reads(0), gather.reads(1)
    if not table.is_constant or only_reader(graph, gather.outputs[0]) is not flat:
        return None
    depth, fields = static(table, 2), static(ids, 2)
    if depth is None or fields is None or static(part, 2) != (fields[0] * depth[0],):
        return None
    return (table, ids) if only_reader(graph, part) is not None else None
