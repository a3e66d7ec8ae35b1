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

from collections.abc import Mapping
from dataclasses import dataclass

_ACTIVATIONS = (
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
_MOVEMENTS = (
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
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Abs", "Neg", "Sqrt", "Exp", "Erf")


@dataclass(frozen=True)
class Fusions:
    """Known kernel fusions of a backend.

    Attributes:
        residual_norms: Norms whose kernel also adds the residual in front of them, and the bias of the
            product in front of that.
        moved_in_float8: Operators that move the values of a DQ in FP8 in front of a product.
        evidence: Source of this knowledge.
    """

    quantized_in_place: frozenset[str] = frozenset()
    residual_norms: frozenset[str] = frozenset()
    moved_in_float8: frozenset[str] = frozenset()
    evidence: str = "not known"


FUSIONS: Mapping[str, Fusions] = {
    "tensorrt": Fusions(
        frozenset({"Add", "Relu"}),
        frozenset(),
        frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}),
        "NVIDIA's documentation of explicit quantization: Q is computed with a sum, or the activation of a "
        "product, in front of it, and DQ moves forward through what moves values; not read from engines",
    ),
    "tensorrt_rtx": Fusions(
        frozenset({*_ACTIVATIONS, *_ARITHMETIC, "LayerNormalization", "RMSNormalization"}),
        frozenset({"LayerNormalization", "RMSNormalization"}),
        frozenset(_MOVEMENTS),
        "read from compiled graphs of TensorRT for RTX 1.7.1 for sm89 (tests/contract/test_fusions.py)",
    ),
    "onnxruntime": Fusions(evidence="its CPU and CUDA providers run each Q and DQ alone: FP8 is simulated"),
    "onnxruntime_tensorrt": Fusions(evidence="declines FP8: what engages it cannot be read back"),
    "inductor": Fusions(
        frozenset({*_ACTIVATIONS, *_ARITHMETIC, "LayerNormalization", "RMSNormalization"}),
        frozenset({"LayerNormalization", "RMSNormalization"}),
        frozenset(_MOVEMENTS),
        "read from code that Inductor of PyTorch 2.13 generates (tests/contract/test_inductor.py)",
    ),
    "migraphx": Fusions(
        evidence="its kernels on GPUs were never seen, and it drops Q/DQ that are around no product"
    ),
}
"""By name of backend."""


def fusions_of(backend: str) -> Fusions:
    """Return the fusions of a backend; empty where unknown."""
    return FUSIONS.get(backend, Fusions())
