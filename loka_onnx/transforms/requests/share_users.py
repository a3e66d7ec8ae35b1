"""Compute what depends on a user alone once per request, and hand it to the request's candidates.

A ranking request is one user and many candidates. Inputs that are equal within a request become rows of
users, and an index holds the user's row of each candidate. With u of users, c of candidates and the index i::

    f(u[i])              =   f(u)[i]                      f computes every row by itself
    Concat(u[i], c)·W    =   (u·W_u)[i] + c·W_c           along K
    f(Concat(u[i], c))   =   Concat(f(u)[i], f(c))        f computes the parts by themselves

The Gather by i stands as late as these allow; any other node computes on candidates. Q/DQ stay beside their
products: a quantized product is not taken apart, and what a candidate's product reads is gathered in front of
its Q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from loka_onnx.core.rewrite import INDEX, USERS, Applied, Declined
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, shape_of
from loka_onnx.graph.parts import DRAWING
from loka_onnx.graph.shape_values import dimensions, read_dimensions, static_shape
from loka_onnx.transforms.base import NotRewritten
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, made_by, read_linear
from loka_onnx.transforms.requests.row_axis import RowAxis, row_axis

SHARE_USERS = "share-users"
"""Name of the transform in records."""
MOST_PARTS = 8
"""Most parts of a Concat that are computed apart: each costs an operator."""
_LAYOUT = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Reshape", "Transpose", "Concat"})
"""Operators that compute nothing."""
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def share_users(model: GraphModel, shared: Sequence[str]) -> list[Applied | Declined]:
    """Bring a graph with inferred types and shapes into request form; edits it.

    `shared` are inputs that are equal within a request. If the result holds only a `Declined`, nothing can
    be shared and the edited graph is to be thrown away.
    """
    others = [tensor for tensor in model.inputs if tensor.name not in shared]
    if not others:
        return [Declined("", "every input is shared: nothing is left that tells candidates apart")]
    if any(tensor.name == INDEX for tensor in others):
        return [Declined("", f"it has an input '{INDEX}' of its own")]
    for tensor in model.inputs:
        if not tensor.shape or isinstance(tensor.shape[0], int):
            return [Declined("", f"axis 0 of input '{tensor.name}' is not dynamic")]
    sharing = _Sharing(model, {id(t): RowAxis(0) for t in model.inputs if t.name in shared})
    said: list[Applied | Declined] = [*sharing.take_apart(), *sharing.gather(shape_of(others[0])[0])]
    if not any(isinstance(each, Applied) for each in said):
        return [Declined("", f"nothing is computed from {', '.join(shared)} alone")]
    return said


@dataclass
class _Sharing:
    """One graph on its way into request form; `axes` of users' rows and `fixed` tensors, by identity."""

    model: GraphModel
    axes: dict[int, RowAxis]
    fixed: set[int] = field(default_factory=set)
    _alive: list[Node | Tensor] = field(default_factory=list)
    """Owners of noted identities: nothing else may get their place in memory."""

    def is_fixed(self, tensor: Tensor) -> bool:
        """True if a tensor is the same for every row."""
        is_stored = not tensor.name or is_constant(tensor) or self.model.is_table(tensor)
        return is_stored or id(tensor) in self.fixed

    def is_users(self, tensor: Tensor) -> bool:
        """True if users alone decide a tensor, and its rows can be gathered."""
        rows = self.axes.get(id(tensor))
        return rows is not None and rows.each == 1

    def settle(self, node: Node) -> bool:
        """Note what users alone decide of a node's results; True if they do."""
        self._alive += [node, *node.outputs]
        axes = {at: self.axes[id(t)] for at, t in enumerate(node.inputs) if id(t) in self.axes}
        is_fixed = [self.is_fixed(tensor) for tensor in node.inputs]
        if not axes and all(is_fixed) and node.inputs and node.op not in DRAWING:
            self.fixed |= {id(tensor) for tensor in node.outputs}
        holds_branch = any(hasattr(value, "nodes") for value in node.attrs.values())
        if not axes or len(axes) + sum(is_fixed) < len(node.inputs) or holds_branch:
            return False
        rows = row_axis(self.model, node, axes)
        if rows is None or any(t.shape is None for t in node.outputs) or (len(node.outputs) > 1 < rows.each):
            return False
        self.axes |= {id(tensor): rows for tensor in node.outputs}
        return True

    # Taking concatenations apart -------------------------------------------------------------------

    def take_apart(self) -> Iterator[Applied]:
        """Move Concats of users and candidates behind what reads them, as far as that is exact."""
        for node in self.model.sorted_nodes():
            self._fix_shape(node)
            if self.settle(node) or len(node.outputs) != 1 or node.outputs[0].shape is None:
                continue
            if node.op == "Concat":
                self._flatten(node)
                continue
            varying = [at for at, tensor in enumerate(node.inputs) if not self.is_fixed(tensor)]
            concat = self._mixed(node.inputs[varying[0]]) if len(varying) == 1 else None
            if concat is None or node.op in _QUANTIZERS:
                continue
            applied = self._split_linear(node, concat)
            if applied is not None:
                yield applied
            else:
                self._push(node, varying[0], concat)

    def _fix_shape(self, node: Node) -> None:
        """Let a Reshape or Expand to the rows of another tensor keep its own."""
        if node.op not in {"Reshape", "Expand"} or is_constant(node.inputs[1]):
            return
        entries, source = read_dimensions(node.inputs[1]) or (), dimensions(node.inputs[0]) or ()
        named = [at - len(entries) for at, entry in enumerate(entries) if isinstance(entry, str)]
        is_kept = all(source[at : at + 1 or None] == (entries[at],) for at in named)
        if len(named) == 1 and (is_kept or node.op == "Reshape") and not {0, -1} & {*entries}:
            target = [e if isinstance(e, int) else -1 if node.op == "Reshape" else 1 for e in entries]
            node.inputs[1] = self.model.constant(f"{node.name}.shape", np.array(target, np.int64))

    def _flatten(self, concat: Node) -> None:
        """Let a Concat read the parts of Concats in front of it, neighbours of the users as one."""
        inner = [(tensor, self._mixed(tensor)) for tensor in concat.inputs]
        same = ((t, c if c is not None and _axis_of(c) == _axis_of(concat) else None) for t, c in inner)
        parts = [part for t, c in same for part in ([t] if c is None else c.inputs)]
        if any(map(self.is_users, parts)) and _is_known(parts, _axis_of(concat)):
            runs = [(users, list(run)) for users, run in groupby(parts, self.is_users)]
            concat.inputs = [
                t for users, run in runs for t in ([self._joined(run, concat)] if users else run)
            ]

    def _mixed(self, tensor: Tensor) -> Node | None:
        """Return the Concat of users and candidates that makes a tensor, if one does."""
        concat = made_by(tensor, "Concat")
        if concat is None or tensor.shape is None or not _is_known(concat.inputs, _axis_of(concat)):
            return None
        users = [part for part in concat.inputs if self.is_users(part)]
        is_apart = all(self.axes[id(part)].axis != _axis_of(concat) for part in users)
        return concat if 0 < len(users) < len(concat.inputs) and is_apart else None

    def _joined(self, parts: Sequence[Tensor], concat: Node) -> Tensor:
        """Return parts side by side along the axis of a Concat."""
        if len(parts) == 1:
            return parts[0]
        axis, shape = _axis_of(concat), list(shape_of(parts[0]))
        shape[axis] = sum(_length(part, axis) for part in parts)
        name, attrs = f"{concat.name}/part", {"axis": axis}
        return self._added("Concat", parts, name, parts[0], shape=shape, attrs=attrs)

    def _split_linear(self, node: Node, concat: Node) -> Applied | None:
        """Give a linear layer that reads users and candidates along K the product of each."""
        try:
            layer = read_linear(self.model, node) if is_candidate(node) else None
        except NotRewritten:
            return None
        if layer is None or layer.on_left or _axis_of(concat) != len(shape_of(layer.source)) - 1:
            return None
        (users, of_users), (others, of_others) = self._sides(concat)
        site, weight = str(node.name), layer.weight_kn()
        weights = [self.model.constant(f"{site}.weight", weight[rows]) for rows in (of_users, of_others)]
        if len(shape_of(layer.source)) == 2:
            self._add_in_gemm(layer, (users, others), weights)
        else:
            shape = shape_of(node.outputs[0])
            product = self._added("MatMul", [users, weights[0]], f"{site}.users", node.outputs[0])
            self.model.insert_behind(node.outputs[0], "Add", [product], f"{site}/sum").shape = shape
            node.inputs = [others, weights[1]]
        return Applied(site, f"K {layer.k} → {len(of_users)} of users + {len(of_others)} of candidates")

    def _add_in_gemm(self, layer: Linear, sides: tuple[Tensor, Tensor], weights: Sequence[Tensor]) -> None:
        """Replace a layer by a Gemm of the users, with the bias, and one of the candidates that adds it."""
        model, site, result = self.model, str(layer.node.name), layer.result
        bias = [] if layer.bias is None else [layer.bias]
        inputs = [sides[0], weights[0], *bias]
        product = self._added("Gemm", inputs, f"{site}.users", result)
        summed = model.add("Gemm", [sides[1], weights[1], product], f"{site}.candidates", result.dtype)
        model.hand_over(result, summed)
        if layer.add is not None:
            model.remove([layer.node])
        model.rename(result.inputs[0], site)

    def _sides(self, concat: Node) -> list[tuple[Tensor, list[int]]]:
        """Return users and candidates, each joined, with the positions that they have in a Concat."""
        axis, start = _axis_of(concat), 0
        tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
        positions: tuple[list[int], list[int]] = ([], [])
        for part in concat.inputs:
            side, end = 0 if self.is_users(part) else 1, start + _length(part, axis)
            tensors[side].append(part)
            positions[side].extend(range(start, end))
            start = end
        return [(self._joined(tensors[side], concat), positions[side]) for side in range(2)]

    def _push(self, node: Node, position: int, concat: Node) -> None:
        """Apply a node to each part of the Concat that it reads, and join the results."""
        result = node.outputs[0]
        parts = [self._joined(list(run), concat) for _, run in groupby(concat.inputs, self.is_users)]
        axis, lengths = _axis_of(concat), [_length(part, _axis_of(concat)) for part in parts]
        if node.op in {"Reshape", "Flatten"}:
            behind, lengths = 1, self._flattened(node, axis, lengths)
        else:
            rows = row_axis(self.model, node, {position: RowAxis(axis)})
            behind = -1 if rows is None or rows.each != 1 else rows.axis
        if behind < 0 or not lengths or (len(parts) > MOST_PARTS and node.op not in _LAYOUT):
            return
        site, done = str(node.name), []
        for part, length in zip(parts, lengths, strict=True):
            shape = [*shape_of(result)[:behind], length, *shape_of(result)[behind + 1 :]]
            inputs, op, attrs = list(node.inputs), node.op, dict(node.attrs)
            inputs[position] = part
            if op in {"Reshape", "Flatten"}:
                op, attrs = "Reshape", {}
                inputs = [part, self.model.constant(f"{site}.shape", np.array([-1, *shape[1:]], np.int64))]
            done.append(self._added(op, inputs, f"{site}/part", result, shape=shape, attrs=attrs))
        self.model.hand_over(result, self.model.add("Concat", done, f"{site}/joined", attrs={"axis": behind}))
        # A part of the candidates stands for the site.
        self.model.rename(next(t for t in done if not self.is_users(t)).inputs[0], site)

    def _flattened(self, node: Node, axis: int, lengths: Sequence[int]) -> list[int]:
        """Return lengths of parts behind a Reshape of (batch, n, …) into (batch, m, …), or none."""
        before, after = static_shape(node.inputs[0]), static_shape(node.outputs[0])
        if axis != 1 or len(after) < 2 or None in (*before[1:], *after[1:]) or before[0] is not None:
            return []
        inner, left = (int(np.prod([n or 0 for n in shape[2:]])) for shape in (before, after))
        behind = [n * inner // left for n in lengths]
        is_whole = sum(behind) == after[1] and not any(n * inner % left for n in lengths)
        return behind if is_whole else []

    def _added(self, op: str, inputs: Sequence[Tensor], name: str, like: Tensor, **changes: Any) -> Tensor:
        """Append a node; return its output, of the type of another and a `shape` or that of the other."""
        new = self.model.add(op, inputs, name, like.dtype, changes.get("attrs"))
        new.shape = list(changes.get("shape", shape_of(like)))
        self.settle(new.inputs[0])
        return new

    # Gathering -------------------------------------------------------------------------------------

    def gather(self, candidates: int | str) -> Iterator[Applied]:
        """Hand rows of users to candidates where these read them, by a new input with the user of each."""
        model = self.model
        model.graph.cleanup(remove_unused_graph_inputs=False)
        nodes = self._users_nodes()
        index = model.add_input(INDEX, np.int64, [candidates])
        computed = any(node.op not in _LAYOUT for node in nodes.values())
        for tensor in [*model.inputs, *(t for node in nodes.values() for t in node.outputs)]:
            rows = self.axes.get(id(tensor))
            if rows is None:
                continue
            readers = [node for node in tensor.outputs if id(node) not in nodes]
            is_output = model.is_output(tensor)
            if readers or is_output:
                name = f"{tensor.name}/of_candidate"
                gathered = model.add("Gather", [tensor, index], name, attrs={"axis": rows.axis})
                gathered.shape = list(shape_of(tensor))
                model.replace_uses(tensor, gathered, readers)
                if is_output:
                    model.make_output(tensor, gathered)
                if computed:
                    yield Applied(str(tensor.name), "a row for each user, gathered for candidates")
            shape = list(shape_of(tensor))
            shape[rows.axis] = USERS if rows.each == 1 else f"{USERS}*{rows.each}"
            tensor.shape = shape

    def _users_nodes(self) -> dict[int, Node]:
        """Return the nodes that compute on users, by identity.

        Rows that cannot be gathered are computed on candidates as well, where these read them.
        """
        users: dict[int, Node] = {}
        for node in reversed(self.model.sorted_nodes()):
            if not node.outputs or any(id(tensor) not in self.axes for tensor in node.outputs):
                continue
            first = node.outputs[0]
            others = [
                reader for tensor in node.outputs for reader in tensor.outputs if id(reader) not in users
            ]
            is_handed = bool(others) or any(map(self.model.is_output, node.outputs))
            if is_handed and (node.op in _QUANTIZERS or not self.is_users(first)):
                if len(others) == len(first.outputs):
                    continue
                copy = self.model.add_like(node, node.inputs, f"{node.name}/of_candidate")
                copy.shape = first.shape
                self.model.replace_uses(first, copy, others)
                if self.model.is_output(first):
                    self.model.make_output(first, copy)
            users[id(node)] = node
        return users


def _axis_of(concat: Node) -> int:
    return int(concat.attrs["axis"]) % len(shape_of(concat.outputs[0]))


def _is_known(parts: Sequence[Tensor], axis: int) -> bool:
    return all(static_shape(part)[axis : axis + 1] not in {(), (None,)} for part in parts)


def _length(tensor: Tensor, axis: int) -> int:
    return static_shape(tensor)[axis] or 0
