"""Nodes whose precision is not a question of speed: a model's logit end, residual stream and divisors.

**Logit end.** Behind the last product of an output the tensors hold one number for each logit, and every
error goes into the loss undamped (in BF16 a logit between 2 and 4 has a spacing of 2⁻⁶). These nodes cost
next to nothing, so they stay in FP32: elementwise nodes, sums over at most `FEW` elements from which an
output is reached without another product, and calibration layers, a linear of as many outputs as inputs
(vector and matrix scaling, Guo et al., arXiv 1706.04599, section 4). The product that yields the logit is not
among them. A tensor that a further product reads as well belongs to the logit end only if it is no wider than
`FEW` (the CTR logit that the CVR tower reads).

**Residual stream.** A block adds to its own input: ``x' = x + f(x)``, with at least one product in f, as
DCNv2's cross layer ``x0 ⊙ (W·x + b) + x`` (arXiv 2008.13535, equation 1). Rounding the stream loses a part of
x in every block: BF16 2⁻⁹, FP8 nothing, because Q/DQ stand at the operands of products. FP32 for the stream
is offered for deep models, and is not the default. Bit sets hold the operands of Adds that a tensor depends
on, at all and through a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_

from onnx import TensorProto

from loka_onnx.graph.layout import LAYOUT_OPS, layout_root
from loka_onnx.graph.model import (
    GraphModel,
    Node,
    Tensor,
    consumers,
    element_type,
    is_constant,
    producer,
    values_of,
)
from loka_onnx.graph.sites import NORM_OPS, PRODUCT_OPS, is_site

FEW = 64
"""Most elements of one example that count as logits, or as terms of a sum of logits."""
LARGEST_CALIBRATION = 16
"""Fewer inputs and outputs make a square linear a calibration layer; FP8 starts here."""

MOVEMENTS = LAYOUT_OPS | {"Concat", "Expand", "Gather", "Slice", "Split"}
"""Operators that move or repeat unchanged values."""
# fmt: off
UNARY = frozenset({
    "Abs", "Ceil", "Cast", "Celu", "Clip", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Not", "PRelu", "Reciprocal", "Relu", "Round",
    "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu",
})
"""Operators that compute each element from one."""
_ELEMENTWISE = UNARY | {
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "LogSoftmax",
    "Max", "Mean", "Min", "Mul", "Or", "Pow", "Softmax", "Sub", "Sum", "Where",
}
# fmt: on
_SUMS = frozenset({"ReduceSum", "ReduceMean", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd"})
_JOINS = frozenset({"Add", "Sum"})
_BLOCKS = PRODUCT_OPS | {"Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "LSTM", "RNN"}
"""Operators that make a block of a residual stream."""


@dataclass(frozen=True)
class Protected:
    """Name of a node that should not lose precision; the reason, which is a part of a sentence."""

    node: str
    reason: str


def logit_ends(model: GraphModel) -> tuple[Protected, ...]:
    """Return the nodes of every logit end, in topological order, each with an output that it leads to.
    Movements and casts before the first node that computes are left out: they move less in a narrower type.
    """
    order = model.sorted_nodes()
    serves = _what_serves_outputs(model, order)
    ends: list[Protected] = []
    computes: set[int] = set()
    for node in order:
        output = serves.get(id(node))
        if output is None:
            continue
        sources = (producer(tensor) for tensor in node.inputs)
        if node.op in MOVEMENTS | {"Cast"} and not any(id(source) in computes for source in sources):
            continue
        computes.add(id(node))
        what = "calibrates" if is_site(node) else "is computed behind the last product of"
        ends.append(Protected(node.name, f"{what} output '{output}'"))
    return tuple(ends)


def _what_serves_outputs(model: GraphModel, order: list[Node]) -> dict[int, str]:
    """Map each node of the logit end, movements included, to its output, by identity."""
    outputs = {id(tensor): tensor.name for tensor in model.outputs}
    serves: dict[int, str] = {}
    for node in reversed(order):
        if not _may_be_behind_products(model, node):
            continue
        led_to: list[str] = []
        for tensor in node.outputs:
            readers = consumers(tensor)
            inside = [serves[id(reader)] for reader in readers if id(reader) in serves]
            if len(inside) < len(readers) and not _is_narrow(tensor):
                led_to = []
                break
            led_to += ([outputs[id(tensor)]] if id(tensor) in outputs else []) + inside
        if led_to:
            serves[id(node)] = led_to[0]
    return serves


def _may_be_behind_products(model: GraphModel, node: Node) -> bool:
    if node.domain not in (None, "", "ai.onnx"):
        return False
    if not any(is_fp32(tensor) for tensor in (*node.inputs, *node.outputs)):
        return False  # It computes a shape or an index.
    if node.op in _SUMS:
        return _is_narrow(node.inputs[0])
    if node.op == "Gather":
        return not is_constant(node.inputs[0]) and not model.is_table(node.inputs[0])
    return node.op in _ELEMENTWISE or node.op in MOVEMENTS or _is_calibration_layer(node)


def _is_calibration_layer(node: Node) -> bool:
    if node.op not in PRODUCT_OPS or not is_constant(node.inputs[1]) or is_constant(node.inputs[0]):
        return False
    shape = values_of(node.inputs[1]).shape
    return len(shape) == 2 and shape[0] == shape[1] < LARGEST_CALIBRATION


def _is_narrow(tensor: Tensor) -> bool:
    """Return whether an example has at most `FEW` elements of the tensor, as far as its shape is known."""
    if tensor.shape is None:
        return False
    fixed = [size for size in tensor.shape if isinstance(size, int)]
    return len(fixed) >= len(tensor.shape) - 1 and prod(fixed) <= FEW


def is_fp32(tensor: Tensor) -> bool:
    """True if a tensor is known to be FP32; False for an omitted input."""
    return bool(tensor.name) and tensor.dtype is not None and element_type(tensor.dtype) == TensorProto.FLOAT


def residual_streams(model: GraphModel) -> tuple[Protected, ...]:
    """Return Adds and Sums that join a block to its own input, and nodes that carry the result to the next of
    them (norms, activations, constant factors, movements), in topological order.
    """
    order = model.sorted_nodes()
    skipped = _skipped_inputs(model, order)
    carriers: set[int] = set()
    for tensors in skipped.values():
        for tensor in tensors:
            carriers |= _carriers(tensor, skipped, carriers)
    streams = []
    for node in order:
        if id(node) in skipped:
            streams.append(Protected(node.name, "adds a block to its own input: residual stream"))
        elif id(node) in carriers:
            streams.append(Protected(node.name, "carries the residual stream to the next block"))
    return tuple(streams)


def _skipped_inputs(model: GraphModel, order: list[Node]) -> dict[int, list[Tensor]]:
    """Map each Add that ends a block to its skipped operands, by identity."""
    joins = [node for node in order if node.op in _JOINS and len(node.inputs) > 1]
    starts = {id(t): _before_factors(t).name for node in joins for t in node.inputs if not is_constant(t)}
    bits = {name: 1 << position for position, name in enumerate(dict.fromkeys(starts.values()))}
    # For each tensor: starts that it depends on, and starts that it depends on through a product.
    known = {tensor.name: (bits.get(tensor.name, 0), 0) for tensor in model.inputs}
    readers = {id(tensor): len(tensor.outputs) for node in order for tensor in node.outputs}
    skipped: dict[int, list[Tensor]] = {}
    for node in order:
        inputs = [known.get(tensor.name, (0, 0)) for tensor in node.inputs]
        if node.op in _JOINS:
            past = [
                tensor
                for i, tensor in enumerate(node.inputs)
                if id(tensor) in starts
                and any(o[1] & bits[starts[id(tensor)]] for j, o in enumerate(inputs) if j != i)
            ]
            if past:
                skipped[id(node)] = past
        every = reduce(or_, (start for start, _ in inputs), 0)
        is_block = node.op in _BLOCKS and not all(map(is_constant, node.inputs[:2]))
        through = every if is_block else reduce(or_, (start for _, start in inputs), 0)
        for tensor in node.outputs:
            known[tensor.name] = (every | bits.get(tensor.name, 0), through)
        for tensor in node.inputs:
            if id(tensor) in readers:
                readers[id(tensor)] -= 1
                if not readers[id(tensor)]:
                    known.pop(tensor.name, None)
    return skipped


def _before_factors(tensor: Tensor) -> Tensor:
    """Return the tensor behind movements and constant factors."""
    while True:
        tensor = layout_root(tensor).tensor
        node = producer(tensor)
        if node is None or node.op not in ("Mul", "Div", "Cast"):
            return tensor
        computed = [each for each in node.inputs if each.name and not is_constant(each)]
        if len(computed) != 1 or computed[0] is not node.inputs[0]:
            return tensor
        tensor = computed[0]


def _carriers(tensor: Tensor, joins: dict[int, list[Tensor]], seen: set[int]) -> set[int]:
    """Return nodes between a skipped input and the Add that it comes from; empty without an Add."""
    path: set[int] = set()
    node = producer(tensor)
    while node is not None and id(node) not in joins and id(node) not in seen:
        path.add(id(node))
        passes = node.op in NORM_OPS | UNARY | MOVEMENTS | {"Mul", "Div"}
        # The first input is the only computed one.
        if not passes or not all(is_constant(each) or not each.name for each in node.inputs[1:]):
            return set()
        node = producer(node.inputs[0])
    return path if node is not None else set()


_POSITIONS = {"Div": 1, "Reciprocal": 0, "Log": 0}
"""Position of the operand that must not be 0."""
# fmt: off
_MAKERS = LAYOUT_OPS | {
    "Abs", "Add", "Cast", "Clip", "Exp", "Expand", "Max", "Mul", "Pow", "ReduceL1", "ReduceL2",
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "Reciprocal", "Sqrt", "Where",
}
# fmt: on
"""Operators of roots, sums of squares and their guards."""
_LONGEST = 24
"""Decomposed norms have fewer nodes; the bound keeps the search linear in the nodes of the graph."""


@dataclass(frozen=True)
class Divisor:
    """A computed operand that must not become 0, as it may in a narrower type; its reader and its makers."""

    reader: Node
    tensor: Tensor
    makers: tuple[Node, ...]


def divisors(model: GraphModel) -> tuple[Divisor, ...]:
    """Return computed divisors: of Div, Reciprocal, Log and Pow to a negative power, in node order."""
    positions = ((node, _position(node)) for node in model.nodes)
    operands = ((node, node.inputs[position]) for node, position in positions if position is not None)
    return tuple(Divisor(node, each, _makers(each)) for node, each in operands if producer(each) is not None)


def _position(node: Node) -> int | None:
    if node.op != "Pow":
        return _POSITIONS.get(node.op)
    exponent = node.inputs[1]
    return 0 if is_constant(exponent) and (values_of(exponent) < 0).any() else None


def _makers(tensor: Tensor) -> tuple[Node, ...]:
    makers: dict[int, Node] = {}
    waiting = [tensor]
    while waiting and len(makers) < _LONGEST:
        node = producer(waiting.pop())
        if node is None or id(node) in makers or node.op not in _MAKERS:
            continue
        makers[id(node)] = node
        waiting += [each for each in node.inputs if not is_constant(each)]
    return tuple(makers.values())
