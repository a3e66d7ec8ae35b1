"""Branches of one form as batched products: experts, towers, networks of a sequence of features.

Branches that compute the same with other constants, from E sources (batch, K)::

    yᵢ = f(xᵢ · Wᵢ + bᵢ; cᵢ)      =      Y = f(X · W + b; c)      X (E, batch, K), W (E, K, N), b (E, 1, N)

f is what follows in all branches alike: elementwise operators, sums over inner axes, further products. Where
the sources are neighbours of one Split (`transforms.linears.merge_parallel_linears`), X is a view, else a
Concat, for which branches of two products and more pay. A Concat of all branches reads Y.

E products become one, and a kernel of what follows; a part of a Split would be copied in front of our own
product. Sums are rounded to the base before the bias is added: one rounding more than our product makes. Not
timed on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from loka_onnx.engines.inductor.fusions.base import HALVES, Fused, is_row, only_reader
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor
from loka_onnx.engines.inductor.fusions.products import is_plain

MOST = 1 << 16
"""Most elements of a weight; a larger product fills a device by itself."""
_ELEMENTWISE = frozenset(
    {"Add", "Cast", "Div", "Elu", "Gelu", "LeakyRelu", "Mul", "PRelu", "Pow", "Relu", "Sigmoid", "Softplus"}
    | {"Sqrt", "Sub", "Tanh"}
)
_AXES = frozenset({"ReduceMean", "ReduceSum", "Unsqueeze"})
"""Operators with axes as their second input."""

Step = tuple[Node, ...]
"""A node of every branch; the first names it."""


def stacked_branches(graph: PlannedGraph, node: Node) -> Fused | None:
    """Compute a product and what follows it together with its twins in other branches; declines none."""
    if not _is_linear(node):
        return None
    split = node.reads(0).producer
    split = split if split is not None and split.op == "Split" else None
    first = _neighbours(graph, node, split) if split else _independent(graph, node)
    steps = _followed(first) if len(first) > 1 else []
    products = [step for step in steps if is_plain(step[0])]
    if len(products) < (1 if split else 2):
        return None
    name, place = graph.fresh_name(f"{node.name}/stacked"), node.reads(0)
    stacks = {id(place): _source(graph, name, first, split)}
    for step in steps:
        stacks[id(_result(step))] = _stacked(graph, name, step, stacks)
    inside = {id(each) for step in steps for each in step}
    for step in steps:
        stack = stacks[id(_result(step))]
        for join in [each for each in _result(step).readers if _is_join(each, step)]:
            _join(graph, name, join, stack)
        for branch, each in enumerate(step):
            result = each.outputs[0]
            if graph.is_output(result) or any(r.outputs and id(r) not in inside for r in result.readers):
                bounds = [_numbers(graph, name, number) for number in (branch, branch + 1, 0)]
                row = _add(graph, "Slice", name, [stack, *bounds], stack)
                graph.replace("Squeeze", graph.fresh_name(f"{name}/branch"), [row, bounds[2]], [result], {})
    for each in (each for step in steps for each in step):
        each.outputs = []
    return Fused(name, tuple(each.name for step in products for each in step))


def _is_linear(node: Node) -> bool:
    """True for a product of rows and a small constant matrix in BF16 or FP16."""
    if not is_plain(node) or len(node.reads(0).shape or ()) != 2:
        return False
    source, weight = node.reads(0), node.reads(1)
    if source.is_constant or not weight.is_read or source.kind != weight.kind or weight.kind not in HALVES:
        return False
    has_bias = not node.has(2) or (node.reads(2).is_read and is_row(node.reads(2), node.outputs[0]))
    sides = [length or 0 for length in weight.shape or ()]
    return has_bias and len(sides) == 2 and sides[0] * sides[1] <= MOST


def _neighbours(graph: PlannedGraph, node: Node, split: Node) -> Step:
    """Linears of the parts of a Split, from that of `node` on, as long as they are alike."""
    if split.attrs.get("axis", 0) not in {-1, 1} or node is not only_reader(graph, node.reads(0)):
        return ()
    places = [id(part) for part in split.outputs]
    parts = split.outputs[places.index(id(node.reads(0))) :]
    readers = (only_reader(graph, part) for part in parts)
    alike = takewhile(lambda each: each is not None and _form(each) == _form(node), readers)
    return tuple(each for each in alike if each is not None)


def _independent(graph: PlannedGraph, node: Node) -> Step:
    """Linears like `node` whose sources are computed alike, none from the result of another."""
    twins, form = [node], _form(node)
    for other in graph.nodes:
        is_new = other.op == node.op and all(other.reads(0) is not each.reads(0) for each in twins)
        if is_new and _form(other) == form and not _depend([*twins, other]):
            twins.append(other)
    return tuple(twins)


def _form(node: Node) -> tuple[Any, ...] | None:
    """Form of a linear, and of what makes its source; None for other nodes."""
    if not node.outputs or not _is_linear(node):
        return None
    maker = node.reads(0).producer
    made = None if maker is None else (maker.op, maker.attrs, [each and each.shape for each in maker.inputs])
    return node.op, node.attrs, [each and each.shape for each in node.inputs], made


def _depend(nodes: Sequence[Node]) -> bool:
    """True if one of some nodes is computed from the result of another."""
    goals, done = {id(node) for node in nodes}, set[int]()
    pending = [tensor.producer for node in nodes for tensor in node.inputs if tensor is not None]
    while pending:
        node = pending.pop()
        if node is not None and id(node) not in done:
            done.add(id(node))
            pending += [tensor.producer for tensor in node.inputs if tensor is not None]
    return bool(goals & done)


def _result(step: Step) -> Tensor:
    return step[0].outputs[0]


def _followed(first: Step) -> list[Step]:
    """Follow all branches from their first nodes as long as they are alike; producers come first."""
    steps, packs = [first], {id(_result(first)): [node.outputs[0] for node in first]}
    for step in steps:
        for reader in (each for each in _result(step).readers if each.outputs):
            twins = [
                reader,
                *(_twin(reader, node.outputs[0], i + 1, packs) for i, node in enumerate(step[1:])),
            ]
            nodes = tuple(node for node in twins if node is not None)
            is_new = len({id(node) for node in nodes}) == len(first) and id(reader.outputs[0]) not in packs
            if is_new and _is_batchable(reader, packs):
                packs[id(reader.outputs[0])] = [node.outputs[0] for node in nodes]
                steps.append(nodes)
    return steps


def _twin(node: Node, tensor: Tensor, branch: int, packs: dict[int, list[Tensor]]) -> Node | None:
    """The reader of a tensor that computes in a branch what a node computes in the first."""

    def is_alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
        if mine is None or theirs is None or not (mine.is_read and theirs.is_read):
            # All branches may read the same tensor, which is broadcast over them.
            return theirs is (packs[id(mine)][branch] if id(mine) in packs else mine)
        is_free = node.op in _ELEMENTWISE or is_plain(node)
        return mine.shape == theirs.shape and (is_free or mine.values.tobytes() == theirs.values.tobytes())

    for other in (each for each in tensor.readers if each.outputs):
        is_same = (node.op, node.attrs, len(node.inputs)) == (other.op, other.attrs, len(other.inputs))
        if is_same and all(is_alike(*pair) for pair in zip(node.inputs, other.inputs, strict=True)):
            return other
    return None


def _is_batchable(node: Node, packs: dict[int, list[Tensor]]) -> bool:
    """True for a node that computes the same behind a new first axis of branches."""
    computed = [each for each in node.inputs if each is not None and not each.is_constant]
    rank = len(node.outputs[0].shape or ())
    if node.op in _ELEMENTWISE:
        return rank > 0 and all(len(each.shape or ()) == rank for each in computed)
    if node.op in _AXES:
        return rank > 0 and len(node.inputs) == 2 and node.reads(1).is_read and node.reads(1).values.size > 0
    return _is_linear(node) and len(computed) == 1


def _is_join(node: Node, step: Step) -> bool:
    """True for a Concat of all branches, in order, behind the batch axis."""
    parts = [id(each.outputs[0]) for each in step]
    shape = _result(step).shape or ()
    is_all = node.op == "Concat" and bool(node.outputs) and [id(each) for each in node.inputs] == parts
    return is_all and node.attrs["axis"] % max(1, len(shape)) > 0 and None not in shape[1:]


def _add(
    graph: PlannedGraph, op: str, name: str, inputs: Sequence[Tensor | None], like: Tensor, **attrs: Any
) -> Tensor:
    """Add a node; return its output, of the type of another tensor."""
    made = Tensor(graph.fresh_name(f"{name}/{op.lower()}.out"), like.kind)
    graph.replace(op, graph.fresh_name(f"{name}/{op.lower()}"), inputs, [made], attrs)
    return made


def _numbers(graph: PlannedGraph, name: str, *values: int) -> Tensor:
    return graph.constant(f"{name}.numbers", np.array(values, np.int64))


def _source(graph: PlannedGraph, name: str, first: Step, split: Node | None) -> Tensor:
    """All sources as one tensor (E, batch, K)."""
    like, axis = first[0].reads(0), _numbers(graph, name, 0)
    if split is None:
        rows = [_add(graph, "Unsqueeze", name, [node.reads(0), axis], like) for node in first]
        return _add(graph, "Concat", name, rows, like, axis=0)
    widths = [(part.shape or (0,))[-1] or 0 for part in split.outputs]
    begin = next(i for i, part in enumerate(split.outputs) if part is like)
    bounds = (sum(widths[:begin]), sum(widths[: begin + len(first)]), 1)
    part = _add(graph, "Slice", name, [split.reads(0), *(_numbers(graph, name, b) for b in bounds)], like)
    shape = _numbers(graph, name, -1, len(first), widths[begin])
    return _add(
        graph, "Transpose", name, [_add(graph, "Reshape", name, [part, shape], like)], like, perm=[1, 0, 2]
    )


def _stacked(graph: PlannedGraph, name: str, step: Step, stacks: dict[int, Tensor]) -> Tensor:
    """Results of a step as one tensor."""
    node, result = step[0], _result(step)
    inputs = [each and stacks.get(id(each), each) for each in node.inputs]
    if is_plain(node):
        weights = (
            each.reads(1).values.T if each.attrs.get("transB", 0) else each.reads(1).values for each in step
        )
        weight = graph.constant(f"{name}.weight", np.stack([*weights]))
        sites = [each.name for each in step]
        made = _add(graph, "MatMul", name, [inputs[0], weight], result, products=sites)
        if not node.has(2):
            return made
        bias = _constants(graph, name, (each.reads(2) for each in step), 2)
        return _add(graph, "Add", name, [made, bias], result)
    if node.op in _AXES:
        axes = node.reads(1).values.reshape(-1).tolist()
        inputs[1] = _numbers(graph, name, *(axis if axis < 0 else axis + 1 for axis in axes))
    else:
        rank = len(result.shape or ())
        for i in (i for i, each in enumerate(inputs) if each is not None and each.is_constant):
            inputs[i] = _constants(graph, name, (each.reads(i) for each in step), rank)
    return _add(graph, node.op, name, inputs, result, **node.attrs)


def _constants(graph: PlannedGraph, name: str, tensors: Iterable[Tensor], rank: int) -> Tensor:
    """Constants of all branches as one that broadcasts like each; the same one where all are equal."""
    first, *others = tensors
    values = [each.values for each in (first, *others)]
    if all(each.tobytes() == values[0].tobytes() for each in values):
        return first
    padded = [each.reshape((1,) * (rank - each.ndim) + each.shape) for each in values]
    return graph.constant(f"{name}.constant", np.stack(padded))


def _join(graph: PlannedGraph, name: str, node: Node, stack: Tensor) -> None:
    """Compute a Concat of all branches from their stack."""
    shape, count = [each or 0 for each in node.reads(0).shape or ()], len(node.inputs)
    axis = node.attrs["axis"] % len(shape)
    turned = _add(
        graph,
        "Transpose",
        name,
        [stack],
        stack,
        perm=[*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)],
    )
    shape[axis] *= count
    target = _numbers(graph, name, -1, *shape[1:])
    graph.replace("Reshape", graph.fresh_name(f"{name}/joined"), [turned, target], [node.outputs[0]], {})
