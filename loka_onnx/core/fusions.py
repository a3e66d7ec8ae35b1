"""What backends compute in one kernel, for whoever places operators between others.

A Q directly behind an operator of `quantized_in_place` costs no pass over memory. A residual sum stays
directly in front of a norm of `residual_norms`: a Q or anything else between the two would split their
kernel; a Q beside the norm does not. An operator of `moved_in_float8` that stands between a DQ and a product
moves FP8 values: the compiler commutes the two.

No mod joins the two into one operator: ONNX has none. ONNX Runtime has, and gains nothing by them on a CPU
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
    """What a backend is known to compute in one kernel.

    Attributes:
        quantized_in_place: Operators whose kernel also quantizes what they compute.
        residual_norms: Norms whose kernel also adds the residual in front of them, and the bias of the
            product in front of that.
        moved_in_float8: Operators that move the values of a DQ in FP8 where a product reads them behind.
        evidence: How this is known.
    """

    quantized_in_place: frozenset[str] = frozenset()
    residual_norms: frozenset[str] = frozenset()
    moved_in_float8: frozenset[str] = frozenset()
    evidence: str = "not known"


NOTHING_KNOWN = Fusions()
