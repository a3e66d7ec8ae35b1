"""Undo a Split whose parts are all concatenated again, in order.

With X split along its last axis into (x₁, …, xₘ)::

    Concat(…, x₁, …, xₘ, …)   =   Concat(…, X, …)                         along the same axis
    Concat(…, x₁[:, None], …, xₘ[:, None], …)   =   Concat(…, reshape(X, (batch, m, d)), …)   along axis 1

the second for X (batch, m·d) and parts of equal width d: the stack of embeddings that `merge_gathers` leaves.
Both move the same elements to the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer, shape_of, values_of
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.linears.pattern import made_by, static_dim


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
    """Concat of the parts of a Split → what was split."""

    name = "join-parts"

    def match(self, model: GraphModel) -> Found[Joined]:
        """Match Concats that hold all the parts of a Split, in order."""
        matches: list[Joined] = []
        declined: list[Declined] = []
        for node in model.nodes:
            if node.op != "Concat":
                continue
            runs = _runs(node)
            if runs and len(node.inputs) == runs[0].count and model.is_output(node.outputs[0]):
                declined.append(
                    Declined(node.name, "nothing is left to concatenate, and it leaves the graph")
                )
            elif runs:
                matches.append(Joined(node, runs))
            elif _holds_parts(node):
                declined.append(Declined(node.name, "it concatenates parts of a Split, but not all in order"))
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: Joined) -> Applied:
        """Let the Concat read the input of the Split; remove it when it reads nothing else."""
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
    rank = len(concat.outputs[0].shape or ())
    if not rank:
        return ()
    axis = int(concat.attrs["axis"]) % rank
    runs: list[Run] = []
    position = 0
    while position < len(concat.inputs):
        run = _plain_run(concat, position, axis, rank) or (
            _stacked_run(concat, position) if (axis, rank) == (1, 3) else None
        )
        if run is not None:
            runs.append(run)
        position += run.count if run is not None else 1
    return tuple(runs)


def _plain_run(concat: Node, first: int, axis: int, rank: int) -> Run | None:
    """The parts of a Split along the axis of the Concat."""
    split = _split_of(concat.inputs[first])
    if split is None or int(split.attrs.get("axis", 0)) % rank != axis:
        return None
    parts = concat.inputs[first : first + len(split.outputs)]
    if [id(part) for part in parts] != [id(part) for part in split.outputs]:
        return None
    return Run(first, len(parts), split, is_stacked=False)


def _stacked_run(concat: Node, first: int) -> Run | None:
    """The parts of a Split of (batch, m·d) into (batch, d), each with a new axis 1."""
    split = _split_of(_without_axis(concat.inputs[first]))
    if (
        split is None
        or len(split.inputs[0].shape or ()) != 2
        or int(split.attrs.get("axis", 0)) not in (1, -1)
    ):
        return None
    parts = [_without_axis(tensor) for tensor in concat.inputs[first : first + len(split.outputs)]]
    widths = {static_dim(part, 1) for part in split.outputs}
    if (
        [id(part) for part in parts] != [id(part) for part in split.outputs]
        or len(widths) > 1
        or None in widths
    ):
        return None
    return Run(first, len(parts), split, is_stacked=True)


def _split_of(tensor: Tensor | None) -> Node | None:
    node = None if tensor is None else producer(tensor)
    return node if node is not None and node.op == "Split" and len(node.outputs) > 1 else None


def _without_axis(tensor: Tensor) -> Tensor | None:
    """Return the (batch, d) of which an Unsqueeze or a Reshape made (batch, 1, d)."""
    node = producer(tensor)
    if node is None or len(node.inputs) < 2 or not is_constant(node.inputs[1]):
        return None
    source = node.inputs[0]
    values = [int(v) for v in values_of(node.inputs[1]).reshape(-1)]
    if len(source.shape or ()) != 2:
        return None
    is_unsqueeze = node.op == "Unsqueeze" and values in ([1], [-2])
    is_reshape = node.op == "Reshape" and values == [-1, 1, static_dim(source, 1)]
    return source if is_unsqueeze or is_reshape else None


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
