"""Add fitted constants to a planned model: behind sites, and to the logits of outputs.

Where the graph adds a constant already, the correction goes into it: into Gemm's third input (over ``beta``),
into the operand of the Add behind a MatMul, for an output into that of its last layer. That costs no
operation and splits no fusion. Elsewhere a new Add takes it, directly behind the product. A shared constant
is copied first.

Corrections are small, and a graph in BF16 or FP16 rounds its constants: between 2 and 4 BF16 numbers are 2⁻⁶
apart, so −2.3, −2.3 + .002 and −2.3 + .01 are all −2.296875. Hence, where the base is not FP32:

- the constant of an output goes into a constant only where every node from there to the output stays in FP32,
  else into an Add in FP32; the Sigmoid behind it, and operators that move its result, stay in FP32 too,
  because they would round the sum;
- the correction c of a site goes into a bias b that is rounded (R) only where
  ‖R(b + c) − R(b) − c‖² ≤ `MOST_LOST` · ‖c‖², over the channels. It is left out where more is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.correction import BiasCorrection, Corrections, OutputConstant
from loka_onnx.core.formats import Precision
from loka_onnx.core.rewrite import Applied, Declined, RewriteRecord
from loka_onnx.errors import InternalError
from loka_onnx.graph.biases import Bias, bias_of, score_bias, score_of
from loka_onnx.graph.model import GraphModel, Node, Tensor, consumers, producer, values_of
from loka_onnx.transforms.base import record
from loka_onnx.transforms.precision.explicit_casts import stored_in

Array = npt.NDArray[np.float64]

MOST_LOST = 0.25
"""Largest share of a correction's energy that rounding may take: half of its root mean square."""


@dataclass(frozen=True)
class Typing:
    """Types of the graph after casting: `base`, but FP32 for the nodes named `fp32`."""

    base: Precision = Precision.FP32
    fp32: frozenset[str] = frozenset()

    def of(self, node: Node) -> Precision:
        """Return the precision of a node and its constants."""
        return Precision.FP32 if node.name in self.fp32 else self.base


@dataclass(frozen=True)
class _Folded:
    """A constant plus a correction; rounding takes the share `lost` of its energy, inf beyond the range."""

    values: Array
    where: str
    lost: float


@dataclass(frozen=True)
class Corrected:
    """Corrections written and left out; `wide` names nodes that carry those of outputs, and stay in FP32."""

    record: RewriteRecord
    wide: tuple[str, ...]


class _Writer:
    """Adds corrections to a graph; `wide` as in `Corrected`."""

    def __init__(self, model: GraphModel, typing: Typing) -> None:
        self.model, self.typing = model, typing
        self.wide: tuple[str, ...] = ()

    def bias(self, correction: BiasCorrection) -> Applied | Declined:
        node = self.model.node(correction.site)
        values = np.array(correction.values).reshape(correction.shape)
        bias = bias_of(self.model, node)
        what = f"{values.size} constants, up to {correction.largest:.3g},"
        folded = None if bias is None else self._folded(bias, values)
        if bias is None or folded is None:
            self._insert_behind(node.outputs[0], values, correction.site)
            return Applied(correction.site, f"{what} in an Add of their own")
        if folded.lost <= MOST_LOST:
            self._fold(bias, folded)
            return Applied(correction.site, f"{what} {folded.where}")
        base = self.typing.of(bias.node)
        why = f"{what} do not fit {base} {folded.where}"
        if np.isfinite(folded.lost):
            lost = f"rounding to {base} takes {folded.lost:.0%} of their energy, more than {MOST_LOST:.0%}"
            why = f"{what} are lost {folded.where}: {lost}"
        return Declined(correction.site, why)

    def constant(self, constant: OutputConstant) -> Applied:
        score = score_of(self.model, constant.output, constant.kind)
        if score is None:
            raise InternalError(
                f"output '{constant.output}' has a constant, and no logit to add it to",
                evidence="no Sigmoid computes it",
            )
        values = np.array(constant.value)
        unit = "value" if constant.kind == "regression" else "logit"
        what = f"the constant {constant.value:+.3g} on its {unit}"
        tensor, sigmoid = score.tensor, score.sigmoid
        # A rounding of the sum on its way out would lose the constant.
        behind = _from(self.model, sigmoid)
        self.wide += tuple(node.name for node in behind if self.typing.of(node) is not Precision.FP32)
        # Other readers of the logit must not change.
        is_alone = len(tensor.outputs) + self.model.is_output(tensor) == 1
        bias = score_bias(self.model, tensor) if is_alone else None
        folded = self._folded(bias, values) if bias and self._is_exact(bias, tensor) else None
        if bias is not None and folded is not None:
            self._fold(bias, folded)
            return Applied(constant.output, f"{what} {folded.where}")
        if is_alone and tensor.inputs:
            self.wide += (self._insert_behind(tensor, values, constant.output),)
        else:
            self.wide += (self._insert_beside(tensor, sigmoid, values, constant.output),)
        return Applied(constant.output, f"{what} in an Add of its own")

    def _is_exact(self, bias: Bias, score: Tensor) -> bool:
        """Return whether nothing rounds to the base between a constant and its score."""
        node = producer(score)
        while node is not None and self.typing.of(node) is Precision.FP32:
            if node is bias.node:
                return True
            node = producer(node.inputs[0])
        return False

    def _folded(self, bias: Bias, values: Array) -> _Folded | None:
        """Return a constant of the graph with values added; None where it would grow."""
        node, has_constant = bias.node, _has_constant(bias)
        old = values_of(node.inputs[bias.index]).astype(np.float64) if has_constant else np.zeros(())
        if node.op == "Gemm":
            values = values / float(node.attrs.get("beta", 1.0))
            # (1, N) as (N,), the form that engines fuse.
            values = values.reshape(-1) if values.size in values.shape[-1:] or not values.ndim else values
        total = old + values
        if total.size > max(old.size, values.size):
            return None
        where = f"{'in' if has_constant else 'as'} the constant of {node.op} '{node.name}'"
        return _Folded(total, where, _lost(old, values, self.typing.of(node)))

    def _fold(self, bias: Bias, folded: _Folded) -> None:
        node = bias.node
        constant = self.model.constant(f"{node.name}/corrected", folded.values.astype(np.float32))
        if _has_constant(bias):
            node.inputs[bias.index] = constant
        else:
            node.inputs = [*node.inputs[: bias.index], constant]

    def _insert_behind(self, tensor: Tensor, values: Array, name: str) -> str:
        """Insert an Add for all readers; return its name."""
        constant = self.model.constant(f"{name}/correction", values.astype(np.float32))
        inner = self.model.insert_behind(tensor, "Add", [constant], f"{name}/correct")
        inner.shape = tensor.shape
        return str(tensor.inputs[0].name)

    def _insert_beside(self, tensor: Tensor, sigmoid: Node | None, values: Array, name: str) -> str:
        """Insert an Add for the Sigmoid alone, or for the graph output; return its name."""
        constant = self.model.constant(f"{name}/correction", values.astype(np.float32))
        moved = self.model.add("Add", [tensor, constant], f"{name}/correct", np.float32)
        moved.shape = tensor.shape
        if sigmoid is None:
            self.model.make_output(tensor, moved)
        else:
            sigmoid.inputs[0] = moved
        return str(moved.inputs[0].name)


def correct(model: GraphModel, corrections: Corrections, typing: Typing = Typing()) -> Corrected:
    """Add corrections, in place, to a graph that will have these types. InternalError if it lacks a site, or
    an output with a constant has no logit.
    """
    writer = _Writer(model, typing)
    said = [writer.bias(each) for each in corrections.bias]
    said += [writer.constant(each) for each in corrections.constants]
    return Corrected(record("correct", said), writer.wide)


def _lost(old: Array, values: Array, precision: Precision) -> float:
    """Return the share of the values' energy that is lost when constant + values is rounded."""
    if precision is Precision.FP32:
        return 0.0
    total = old + values
    wanted = np.broadcast_to(values, total.shape)
    with np.errstate(invalid="ignore"):
        error = stored_in(precision, total) - stored_in(precision, old) - wanted
    if not np.isfinite(error).all():
        return np.inf
    energy = float(np.sum(wanted**2))
    return float(np.sum(error**2)) / energy if energy else 0.0


def _has_constant(bias: Bias) -> bool:
    inputs = bias.node.inputs
    return len(inputs) > bias.index and bool(inputs[bias.index].name)


def _from(model: GraphModel, node: Node | None) -> Iterator[Node]:
    """Return the Sigmoid of an output, and the layout operators between the two."""
    while node is not None:
        yield node
        tensor = node.outputs[0]
        node = None if model.is_output(tensor) else consumers(tensor)[0]
