"""Operators that backends compute in one kernel.

A Q directly behind an operator of `quantized_in_place` costs no pass over memory. A residual sum stays
directly in front of a norm of `residual_norms`: any node between the two would split their kernel; a Q beside
the norm does not. An operator of `moved_in_float8` between a DQ and a product moves FP8 values: the compiler
commutes the two.

No mod joins the two into one operator: ONNX has none. ONNX Runtime's own gain nothing on a CPU
(1.31.1, two threads, rows of 64 to 512): SkipLayerNormalization takes 2 to 9 times as long as Add and
LayerNormalization, SkipSimplifiedLayerNormalization 0.5 to 2 times as long as Add and RMSNormalization.
"""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = (
    "Relu",
    "LeakyRelu",
    "Elu",
    "Clip",
    "Sigmoid",
    "Tanh",
    "Gelu",
    "HardSigmoid",
    "Softplus",
    "Softmax",
)
MOVEMENTS = (
    "Concat",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
)
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Abs", "Neg", "Sqrt", "Exp", "Erf")


@dataclass(frozen=True)
class Fusions:
    """Known kernel fusions of a backend, with the source of this knowledge.

    Attributes:
        residual_norms: Norms whose kernel also adds the residual in front of them, and the bias of the
            product in front of that.
        moved_in_float8: Operators that move the values of a DQ in FP8 in front of a product.
    """

    quantized_in_place: frozenset[str] = frozenset()
    residual_norms: frozenset[str] = frozenset()
    moved_in_float8: frozenset[str] = frozenset()
    evidence: str = "not known"


NOTHING_KNOWN = Fusions()
