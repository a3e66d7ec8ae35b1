"""Undo a Split whose parts are all concatenated again, in order.

With X split along its last axis into (x₁, …, xₘ)::

    Concat(…, x₁, …, xₘ, …)   =   Concat(…, X, …)                         along the same axis
    Concat(…, x₁[:, None], …, xₘ[:, None], …)   =   Concat(…, reshape(X, (batch, m, d)), …)   along axis 1

the second for X (batch, m·d) and parts of equal width d: the stack of embeddings that `merge_gathers` leaves.
Both move the same elements to the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, producer, shape_of
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.pattern import constant_at, made_by, static_dim


@dataclass(frozen=True)
class Run:
    """Inputs of a Concat, from `first` on, that are the parts of one Split.

    The input of the Split is read when the run is rewritten: it may be a Concat that was removed.
    `is_stacked` if each part has a new axis 1, along which they are concatenated.
    """

    first: int
    count: int
    split: Node
    is_stacked: bool


@dataclass(frozen=True)
class Joined:
    """A Concat and the runs of parts in it."""

    concat: Node
    runs: tuple[Run, ...]


class JoinParts(Mod[Joined]):
    """Concat of the parts of a Split → the tensor that was split."""

    name = "join-parts"

    def _find(self, model: GraphModel) -> Iterator[Joined | Declined]:
        for node in (node for node in model.nodes if node.op == "Concat"):
            runs = _runs(node)
            if runs and len(node.inputs) == runs[0].count and model.is_output(node.outputs[0]):
                yield Declined(node.name, "nothing is left to concatenate, and it leaves the graph")
            elif runs:
                yield Joined(node, runs)
            elif _holds_parts(node):
                yield Declined(node.name, "it concatenates parts of a Split, but not all in order")

    def rewrite(self, model: GraphModel, match: Joined) -> Applied:
        """Let the Concat read the input of the Split; bypass the Concat when it reads nothing else."""
        node = match.concat
        inputs = list(node.inputs)
        for run in reversed(match.runs):
            source = _stack(model, node, run) if run.is_stacked else run.split.inputs[0]
            inputs[run.first : run.first + run.count] = [source]
        if len(inputs) == 1:
            model.replace_uses(node.outputs[0], inputs[0])
        else:
            node.inputs = inputs
        parts = sum(run.count for run in match.runs)
        return Applied(node.name, f"{parts} parts of {len(match.runs)} Split → what was split")


def _runs(concat: Node) -> tuple[Run, ...]:
    """Return runs of parts among the inputs of a Concat, from first to last."""
    stacked = [_without_axis(tensor) for tensor in concat.inputs]
    runs: list[Run] = []
    position = 0
    while concat.outputs[0].shape and position < len(concat.inputs):
        run = _run(concat, position, concat.inputs) or _run(concat, position, stacked, is_stacked=True)
        runs += [] if run is None else [run]
        position += 1 if run is None else run.count
    return tuple(runs)


def _run(concat: Node, first: int, sources: Sequence[Tensor | None], is_stacked: bool = False) -> Run | None:
    """The parts of a Split along the axis of the Concat, or of (batch, m·d), each with a new axis 1."""
    split = _split_of(sources[first])
    if split is None:
        return None
    parts = sources[first : first + len(split.outputs)]
    if [id(part) for part in parts] != [id(part) for part in split.outputs]:
        return None
    rank = len(concat.outputs[0].shape or ())
    axis, split_axis = int(concat.attrs["axis"]) % rank, int(split.attrs.get("axis", 0))
    if is_stacked:
        widths = {static_dim(part, 1) for part in split.outputs}
        is_matrix = len(split.inputs[0].shape or ()) == 2 and split_axis in (1, -1)
        fits = (axis, rank) == (1, 3) and is_matrix and len(widths) == 1 and None not in widths
    else:
        fits = split_axis % rank == axis
    return Run(first, len(parts), split, is_stacked) if fits else None


def _split_of(tensor: Tensor | None) -> Node | None:
    node = None if tensor is None else producer(tensor)
    return node if node is not None and node.op == "Split" and len(node.outputs) > 1 else None


def _without_axis(tensor: Tensor) -> Tensor | None:
    """Return the (batch, d) of which an Unsqueeze or a Reshape made (batch, 1, d)."""
    node = producer(tensor)
    values = None if node is None else constant_at(node, 1)
    if node is None or values is None or len(node.inputs[0].shape or ()) != 2:
        return None
    given, width = values.reshape(-1).tolist(), static_dim(node.inputs[0], 1)
    is_unsqueeze = node.op == "Unsqueeze" and given in ([1], [-2])
    return node.inputs[0] if is_unsqueeze or (node.op == "Reshape" and given == [-1, 1, width]) else None


def _holds_parts(concat: Node) -> bool:
    """Return whether two neighbouring inputs are parts of one Split."""
    makers = [_split_of(tensor) or _split_of(_without_axis(tensor)) for tensor in concat.inputs]
    return any(a is not None and a is b for a, b in pairwise(makers))


def _stack(model: GraphModel, concat: Node, run: Run) -> Tensor:
    """Return (batch, m·d) as (batch, m, d): the unflattened tensor, or a Reshape."""
    source = run.split.inputs[0]
    width = (static_dim(source, -1) or 0) // run.count
    earlier = made_by(source, "Reshape")
    if earlier is not None and list(earlier.inputs[0].shape or ())[1:] == [run.count, width]:
        return earlier.inputs[0]
    name = f"{concat.name}/stack"
    target = model.constant(f"{name}.shape", np.array([-1, run.count, width], np.int64))
    stacked = model.add("Reshape", [source, target], name)
    stacked.shape = [shape_of(source)[0], run.count, width]
    return stacked
