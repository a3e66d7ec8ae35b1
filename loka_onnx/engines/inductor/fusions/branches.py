"""Branches of one form as batched products: experts, towers, networks of a sequence of features.

Branches that compute the same with other constants, from E sources (batch, K)::

    yᵢ = f(xᵢ · Wᵢ + bᵢ; cᵢ)      =      Y = f(X · W + b; c)      X (E, batch, K), W (E, K, N), b (E, 1, N)

f is what follows in all branches alike: elementwise operators, sums over inner axes, further products. Where
the sources are neighbours of one Split (`transforms.linears.merge_parallel_linears`), X is a view, else a
Concat, for which branches of two products and more pay. A Concat of all branches reads Y.

E products become one, and a kernel of f; our own product would copy a part of a Split. Sums are rounded once
more than there: to the base before the bias is added. Not timed on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka_onnx.engines.inductor.fusions.base import HALVES, Fused, is_row
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
    """Batch a product and the nodes behind it with their twins in other branches; declines none."""
    first = _twins(graph, node) if _is_linear(node) else ()
    steps = _followed(first) if len(first) > 1 else []
    products = [step for step in steps if is_plain(step[0])]
    if len(products) < (1 if first and _place(first) is not None else 2):
        return None
    writer = _Writer(graph, graph.fresh_name(f"{node.name}/stacked"))
    # By the id of the first branch's tensor: that of all branches, (E, …).
    stacks = {id(first[0].reads(0)): writer.add_source(first)}
    for step in steps:
        stacks[id(_result(step))] = writer.add_step(step, stacks)
    inside = {id(each) for step in steps for each in step}
    for step in steps:
        stack = stacks[id(_result(step))]
        for join in [each for each in _result(step).readers if _is_join(each, step)]:
            writer.add_join(join, stack)
        for branch, each in enumerate(step):
            result = each.outputs[0]
            if graph.is_output(result) or any(id(r) not in inside for r in result.readers):
                writer.add_part(branch, stack, result)
    for each in (each for step in steps for each in step):
        each.outputs = []
    return Fused(writer.name, tuple(each.name for step in products for each in step))


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


def _twins(graph: PlannedGraph, node: Node) -> Step:
    """Linears like `node` whose sources are computed alike, none from the result of another."""
    twins, form = [node], _form(node)
    for other in graph.nodes:
        is_new = other.op == node.op and all(other.reads(0) is not each.reads(0) for each in twins)
        if is_new and _form(other) == form and not _depend([*twins, other]):
            twins.append(other)
    split = node.reads(0).producer
    if split is not None and split.op == "Split":
        places = {id(part): place for place, part in enumerate(split.outputs)}
        twins.sort(key=lambda each: places[id(each.reads(0))])
    return tuple(twins)


def _form(node: Node) -> tuple[Any, ...] | None:
    """Form of a linear and of the producer of its source; None for other nodes."""
    if not node.outputs or not _is_linear(node):
        return None
    maker = node.reads(0).producer
    source: Any = maker and (maker.op, maker.attrs, [each and each.shape for each in maker.inputs])
    source = id(maker) if maker is not None and maker.op == "Split" else source
    return node.op, node.attrs, [each and each.shape for each in node.inputs], source


def _place(first: Step) -> int | None:
    """First position of neighbouring parts of a matrix that one Split gives; None for other sources."""
    split = first[0].reads(0).producer
    if split is None or split.op != "Split" or split.attrs.get("axis", 0) not in {-1, 1}:
        return None
    parts = [id(part) for part in split.outputs]
    place = parts.index(id(first[0].reads(0)))
    return place if parts[place : place + len(first)] == [id(node.reads(0)) for node in first] else None


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
        for reader in _result(step).readers:
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
    """The reader of a tensor in a branch that computes the same as a node of the first branch."""

    def is_alike(mine: Tensor | None, theirs: Tensor | None) -> bool:
        if mine is None or theirs is None or not (mine.is_read and theirs.is_read):
            # All branches may read the same tensor, which is broadcast over them.
            return theirs is (packs[id(mine)][branch] if id(mine) in packs else mine)
        is_free = node.op in _ELEMENTWISE or is_plain(node)
        return mine.shape == theirs.shape and (is_free or mine.values.tobytes() == theirs.values.tobytes())

    for other in tensor.readers:
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
    is_all = node.op == "Concat" and [id(each) for each in node.inputs] == parts
    return is_all and node.attrs["axis"] % max(1, len(shape)) > 0 and None not in shape[1:]


@dataclass(frozen=True)
class _Writer:
    """Writes nodes of stacked branches, named after `name`."""

    graph: PlannedGraph
    name: str

    def add(self, op: str, inputs: Sequence[Tensor | None], like: Tensor, **attrs: Any) -> Tensor:
        """Add a node; return its output, of the type of another tensor."""
        name = self.graph.fresh_name(f"{self.name}/{op.lower()}")
        output = Tensor(self.graph.fresh_name(f"{name}.out"), like.kind)
        self.graph.replace(op, name, inputs, [output], attrs)
        return output

    def numbers(self, *values: int) -> Tensor:
        """Create a vector of integers."""
        return self.graph.constant(f"{self.name}.numbers", np.array(values, np.int64))

    def add_source(self, first: Step) -> Tensor:
        """Add the sources of all branches as one tensor (E, batch, K)."""
        like, place = first[0].reads(0), _place(first)
        split = like.producer
        if split is None or place is None:
            rows = [self.add("Unsqueeze", [node.reads(0), self.numbers(0)], like) for node in first]
            return self.add("Concat", rows, like, axis=0)
        widths = [(part.shape or (0,))[-1] or 0 for part in split.outputs]
        bounds = (sum(widths[:place]), sum(widths[: place + len(first)]), 1)
        part = self.add("Slice", [split.reads(0), *map(self.numbers, bounds)], like)
        apart = self.add("Reshape", [part, self.numbers(-1, len(first), widths[place])], like)
        return self.add("Transpose", [apart], like, perm=[1, 0, 2])

    def add_step(self, step: Step, stacks: dict[int, Tensor]) -> Tensor:
        """Add the results of a step as one tensor (E, …)."""
        node, result = step[0], _result(step)
        inputs = [each and stacks.get(id(each), each) for each in node.inputs]
        if is_plain(node):
            turned = bool(node.attrs.get("transB", 0))
            weights = [each.reads(1).values.T if turned else each.reads(1).values for each in step]
            weight = self.graph.constant(f"{self.name}.weight", np.stack(weights))
            product = self.add("MatMul", [inputs[0], weight], result, products=[each.name for each in step])
            return self.add("Add", [product, self.constants(step, 2, 2)], result) if node.has(2) else product
        if node.op in _AXES:
            axes = node.reads(1).values.reshape(-1).tolist()
            inputs[1] = self.numbers(*(axis if axis < 0 else axis + 1 for axis in axes))
        else:
            rank = len(result.shape or ())
            for i in (i for i, each in enumerate(inputs) if each is not None and each.is_constant):
                inputs[i] = self.constants(step, i, rank)
        return self.add(node.op, inputs, result, **node.attrs)

    def constants(self, step: Step, position: int, rank: int) -> Tensor:
        """Constants of all branches as one that broadcasts like each; the same one where all are equal."""
        values = [each.reads(position).values for each in step]
        if all(each.tobytes() == values[0].tobytes() for each in values):
            return step[0].reads(position)
        padded = [each.reshape((1,) * (rank - each.ndim) + each.shape) for each in values]
        return self.graph.constant(f"{self.name}.constant", np.stack(padded))

    def add_join(self, node: Node, stack: Tensor) -> None:
        """Replace a Concat of all branches by their stack, transposed and reshaped."""
        shape = [each or 0 for each in node.reads(0).shape or ()]
        axis = node.attrs["axis"] % len(shape)
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]
        shape[axis] *= len(node.inputs)
        inputs = [self.add("Transpose", [stack], stack, perm=order), self.numbers(-1, *shape[1:])]
        self.graph.replace(
            "Reshape", self.graph.fresh_name(f"{self.name}/joined"), inputs, [node.outputs[0]], {}
        )

    def add_part(self, branch: int, stack: Tensor, result: Tensor) -> None:
        """Replace the result of one branch by its slice of the stack."""
        bounds = [self.numbers(number) for number in (branch, branch + 1, 0)]
        inputs = [self.add("Slice", [stack, *bounds], stack), bounds[2]]
        self.graph.replace("Squeeze", self.graph.fresh_name(f"{self.name}/branch"), inputs, [result], {})
