"""Fold BatchNorm into the neighbouring linear.

At inference BatchNorm is a factor and a summand for each channel (ONNX operator set 15, BatchNormalization)::

    s = γ / sqrt(variance + ε)      c = β − mean·s      BatchNorm(y) = s·y + c
    s·(x·W + b) + c   =   x·(W diag(s)) + (s·b + c)           behind a linear that nothing else reads
    (s·x + c)·W + b   =   x·(diag(s) W) + (b + c W)           before linears that are the only readers

TensorFlow exports s·y + c as Mul and Add. Behind a linear these count when a factor differs from channel to
channel: one number may be a temperature, which stays as precise as it is. Before a linear only the operator
is folded, and not on an input of the model, whose raw values would then be quantized. Layout operators may
stand in between (`channel_paths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.layout import LAYOUT_OPS, layout_root
from loka_onnx.graph.model import GraphModel, Node, Tensor, is_constant, producer, values_of
from loka_onnx.transforms.base import Mod, NotRewritten, find
from loka_onnx.transforms.linears.channel_paths import Reader, by_channel, linear_readers, moved, numbered
from loka_onnx.transforms.linears.pattern import (
    Vector,
    absorb_before,
    absorb_behind,
    is_candidate,
    read_linear,
)

_OP = "BatchNormalization"
_Affine = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Scale and shift of a node that computes scale·x + shift; they broadcast against x."""


@dataclass(frozen=True)
class FoldedBatchNorm:
    """Nodes that are removed, in order, and the linears that take them over.

    `behind` is the product whose output they scale and shift; None when they are folded into `readers`.
    """

    steps: tuple[Node, ...]
    behind: Node | None
    readers: tuple[Reader, ...]
    scale: Vector
    shift: Vector


class FoldBatchNorm(Mod[FoldedBatchNorm]):
    """BatchNorm beside a linear → a linear with other constants."""

    name = "fold-batch-norm"

    def _find(self, model: GraphModel) -> Iterator[FoldedBatchNorm | Declined]:
        taken: set[int] = set()
        for product in filter(is_candidate, model.nodes):
            match = _read_behind(model, product)
            if match is not None:
                taken |= {id(step) for step in match.steps}
                yield match
        rest = (node for node in model.nodes if node.op == _OP and id(node) not in taken)
        yield from find(rest, lambda node: _read_before(model, node))

    def rewrite(self, model: GraphModel, match: FoldedBatchNorm) -> Applied:
        """Let linears take over the scale and shift of the steps, in place; nothing reads the steps then."""
        first, last = match.steps[0], match.steps[-1]
        if match.behind is not None:
            absorb_behind(model, match.behind, match.scale, match.shift)
            for step in match.steps:
                # The maker of its input, which nothing else reads, makes its output.
                maker = next(p for p in map(producer, step.inputs) if p is not None)
                model.hand_over(step.outputs[0], model.renew_output(maker))
            behind, count = match.behind.name, len(match.steps)
            what = f"took over '{last.name}' behind it ({count} {'node' if count == 1 else 'nodes'})"
            return Applied(behind, what, {behind: (behind,)})
        for reader in match.readers:
            absorb_before(model, reader.node, match.scale[reader.channels], match.shift[reader.channels])
        model.replace_uses(first.outputs[0], first.inputs[0])
        sites: list[str] = [reader.node.name for reader in match.readers]
        names = ", ".join(f"'{site}'" for site in sites)
        what = f"{names} took over '{first.name}' in front"
        return Applied(sites[0], what, {site: (site,) for site in sites})


def _read_behind(model: GraphModel, product: Node) -> FoldedBatchNorm | None:
    """Return the nodes that scale and shift the outputs of a linear; None for none."""
    steps: list[Node] = []
    scale, shift = np.ones(()), np.zeros(())
    try:
        linear = read_linear(model, product)
        tensor = linear.result
        numbers = numbered(tensor, (linear.channel_axis,))
        while (reader := model.only_reader(tensor)) is not None:
            if reader.op in LAYOUT_OPS and reader.inputs[0] is tensor:
                (numbers,) = moved(reader, tensor, numbers)
            else:
                affine = _read_affine(reader, tensor)
                if affine is None:
                    break
                factor, summand = (by_channel(numbers, values, linear.n) for values in affine)
                scale, shift = factor * scale, factor * shift + summand
                steps.append(reader)
            tensor = reader.outputs[0]
    except NotRewritten:
        # The nodes so far can be folded.
        pass
    if all(step.op == "Add" for step in steps):
        return None
    return FoldedBatchNorm(tuple(steps), product, (), scale, shift)


def _read_affine(node: Node, tensor: Tensor) -> _Affine | None:
    """Return the scale and shift of a node; None for another operator or a single number."""
    if node.op == _OP:
        return _read_batch_norm(node) if node.inputs[0] is tensor else None
    if node.op not in {"Mul", "Add"} or len(node.inputs) != 2:
        return None
    constant = node.inputs[1] if node.inputs[0] is tensor else node.inputs[0]
    if not is_constant(constant) or values_of(constant).size < 2:
        return None
    values = values_of(constant).astype(np.float64)
    return (values, np.zeros(())) if node.op == "Mul" else (np.ones(()), values)


def _read_batch_norm(node: Node) -> _Affine | None:
    """Return scale and shift of a BatchNormalization at inference; None where not constant."""
    rank = len(node.inputs[0].shape or ())
    if rank < 2 or node.attrs.get("training_mode", 0) or not all(map(is_constant, node.inputs[1:5])):
        return None
    gamma, beta, mean, variance = (values_of(tensor).astype(np.float64) for tensor in node.inputs[1:5])
    scale = gamma / np.sqrt(variance + float(np.float32(node.attrs.get("epsilon", 1e-5))))
    shape = (-1, *(1,) * (rank - 2))
    return scale.reshape(shape), (beta - mean * scale).reshape(shape)


def _read_before(model: GraphModel, node: Node) -> FoldedBatchNorm:
    """Return the linears that can take over a BatchNormalization in front of them."""
    affine = _read_batch_norm(node)
    if affine is None:
        raise NotRewritten("its statistics are not constant, or the rank of its input is not known")
    try:
        source = layout_root(node.inputs[0]).tensor
        if producer(source) is None:
            raise NotRewritten(
                f"it normalizes the input '{source.name}', whose raw values would be quantized"
            )
        readers = linear_readers(model, node.outputs[0], numbered(node.inputs[0], (1,)))
    except NotRewritten as reason:
        raise NotRewritten(f"no linear in front of it takes it over; nor behind it: {reason}") from reason
    return FoldedBatchNorm((node,), None, readers, affine[0].reshape(-1), affine[1].reshape(-1))
