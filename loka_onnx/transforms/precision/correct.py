"""Add fitted constants to a planned model: behind sites, and to the logits of outputs.

Where the graph adds a constant already, the correction goes into it: into Gemm's third input (over ``beta``),
into the operand of the Add behind a MatMul, for an output into that of its last layer. Then no operation
comes on top, and what an engine fuses with the product, it still fuses. Elsewhere a new Add takes it,
directly behind the product. A constant that other nodes read too is replaced for this one only.

`Correction.remove` takes everything back; the graph is then what it was, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.correction import BiasCorrection, Corrections, OutputConstant
from loka_onnx.core.rewrite import Applied, RewriteRecord
from loka_onnx.errors import InternalError
from loka_onnx.graph.biases import Bias, bias_of, score_bias, score_of
from loka_onnx.graph.model import GraphModel, Node, Tensor, values_of

Array = npt.NDArray[np.float64]


_NOTHING = RewriteRecord("correct", (), ())


@dataclass(frozen=True)
class _Before:
    """A node as it was."""

    node: Node
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> _Before:
        return cls(node, tuple(node.inputs), tuple(node.outputs), dict(node.attrs))

    def restore(self) -> None:
        self.node.inputs = list(self.inputs)
        self.node.outputs = list(self.outputs)
        self.node.attrs = dict(self.attrs)


@dataclass
class Correction:
    """Corrections in a graph.

    Attributes:
        model: The graph.
        record: What was written where.
        on_outputs: Names of new nodes that add a constant to an output: they belong in FP32.
    """

    model: GraphModel
    record: RewriteRecord = _NOTHING
    on_outputs: tuple[str, ...] = ()
    _before: list[_Before] = field(default_factory=list)
    _new: list[Node] = field(default_factory=list)
    _outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def remove(self) -> None:
        """Take every correction out of the graph again; it must not have been edited since."""
        for new, old in reversed(self._outputs):
            self.model.make_output(new, old)
        for node in self._new:
            node.inputs.clear()
            node.outputs.clear()
        for before in reversed(self._before):
            before.restore()
        self._before, self._new, self._outputs = [], [], []
        self.record, self.on_outputs = _NOTHING, ()

    def _bias(self, correction: BiasCorrection) -> Applied:
        node = self.model.node(correction.site)
        values = np.array(correction.values).reshape(correction.shape)
        bias = bias_of(self.model, node)
        what = f"{values.size} constants, up to {correction.largest:.3g},"
        if bias is not None and (where := self._fold(bias, values)):
            return Applied(correction.site, f"{what} {where}")
        self._insert_behind(node.outputs[0], values, correction.site)
        return Applied(correction.site, f"{what} in an Add of their own")

    def _constant(self, constant: OutputConstant) -> Applied:
        score = score_of(self.model, constant.output, constant.kind)
        if score is None:
            raise InternalError(
                f"output '{constant.output}' has a constant, and no logit to add it to",
                evidence="no Sigmoid computes it",
            )
        values = np.array(constant.value)
        what = f"the constant {constant.value:+.3g} on its {_unit(constant)}"
        tensor, sigmoid = score.tensor, score.sigmoid
        # What else reads the logit, or is computed from it, must not move.
        readers = len(tensor.outputs) + self.model.is_output(tensor)
        bias = score_bias(self.model, tensor) if readers == 1 else None
        if bias is not None and (where := self._fold(bias, values)):
            return Applied(constant.output, f"{what} {where}")
        if readers == 1 and tensor.inputs:
            self._insert_behind(tensor, values, constant.output)
        else:
            self._insert_beside(tensor, sigmoid, values, constant.output)
        self.on_outputs += (self._new[-1].name,)
        return Applied(constant.output, f"{what} in an Add of its own")

    def _fold(self, bias: Bias, values: Array) -> str:
        """Add to a constant of the graph; returns where, empty where it would grow."""
        node, index = bias.node, bias.index
        has_constant = len(node.inputs) > index and bool(node.inputs[index].name)
        old = values_of(node.inputs[index]) if has_constant else np.zeros((), np.float32)
        if node.op == "Gemm":
            values = values / float(node.attrs.get("beta", 1.0))
            # (1, N) as (N,), the form that engines fuse.
            values = values.reshape(-1) if values.size in values.shape[-1:] or not values.ndim else values
        total = old.astype(np.float64) + values
        if total.size > max(old.size, values.size):
            return ""
        self._before.append(_Before.of(node))
        constant = self.model.constant(f"{node.name}/corrected", total.astype(np.float32))
        if has_constant:
            node.inputs[index] = constant
        else:
            node.inputs = [*node.inputs[:index], constant]
        return f"{'in' if has_constant else 'as'} the constant of {node.op} '{node.name}'"

    def _insert_behind(self, tensor: Tensor, values: Array, name: str) -> None:
        maker = tensor.inputs[0]
        self._before.append(_Before.of(maker))
        constant = self.model.constant(f"{name}/correction", values.astype(np.float32))
        inner = self.model.insert_behind(tensor, "Add", [constant], f"{name}/correct")
        inner.shape = tensor.shape
        self._new.append(tensor.inputs[0])

    def _insert_beside(self, tensor: Tensor, sigmoid: Node | None, values: Array, name: str) -> None:
        """An Add for the Sigmoid alone, or for whoever runs the model."""
        constant = self.model.constant(f"{name}/correction", values.astype(np.float32))
        moved = self.model.add("Add", [tensor, constant], f"{name}/correct", np.float32)
        moved.shape = tensor.shape
        self._new.append(moved.inputs[0])
        if sigmoid is None:
            self.model.make_output(tensor, moved)
            self._outputs.append((moved, tensor))
        else:
            self._before.append(_Before.of(sigmoid))
            sigmoid.inputs[0] = moved


def correct(model: GraphModel, corrections: Corrections) -> Correction:
    """Add corrections to a graph in place.

    Args:
        model: An FP32 graph, with Q/DQ in place; edited.
        corrections: What is added.

    Raises:
        InternalError: A site or an output is not in the graph, or an output has no logit.
    """
    done = Correction(model)
    applied = [done._bias(each) for each in corrections.bias]
    applied += [done._constant(each) for each in corrections.constants]
    done.record = RewriteRecord("correct", tuple(applied), ())
    return done


def _unit(constant: OutputConstant) -> str:
    return "value" if constant.kind == "regression" else "logit"
