"""Backends by name, one line each, and operators that a backend computes in one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

GROUP = "loka_onnx.backends"
"""Entry points of this group: name of a backend, and where its spec is."""

_OWN: Mapping[str, str] = {
    "onnxruntime": "loka_onnx.engines.onnxruntime.spec:ONNXRUNTIME",
    "onnxruntime_tensorrt": "loka_onnx.engines.onnxruntime.spec:ONNXRUNTIME_TENSORRT",
    "tensorrt": "loka_onnx.engines.tensorrt.spec:TENSORRT",
    "tensorrt_rtx": "loka_onnx.engines.tensorrt.spec:TENSORRT_RTX",
    "migraphx": "loka_onnx.engines.migraphx.spec:MIGRAPHX",
    "inductor": "loka_onnx.engines.inductor.spec:INDUCTOR",
}


@cache
def spec_paths() -> Mapping[str, str]:
    """Import path (``module:value``) of each backend's spec, by name, in the order in which they compete."""
    return {**_OWN, **{e.name: e.value for e in entry_points(group=GROUP) if e.name not in _OWN}}


def backend_names() -> tuple[str, ...]:
    """Names of every backend, installed or not."""
    return tuple(spec_paths())


# fmt: off
ACTIVATIONS = (
    "Relu", "LeakyRelu", "Elu", "Clip", "Sigmoid", "Tanh", "Gelu", "HardSigmoid", "Softplus", "Softmax",
)
MOVEMENTS = (
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
)
# fmt: on
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Abs", "Neg", "Sqrt", "Exp", "Erf")


@dataclass(frozen=True)
class Fusions:
    """Known kernel fusions of a backend, with the source of this knowledge.

    No mod joins operators into one of these kernels: ONNX has none. ONNX Runtime's own gain nothing on a CPU
    (1.31.1, two threads, rows of 64 to 512): SkipLayerNormalization takes 2 to 9 times as long as Add and
    LayerNormalization, SkipSimplifiedLayerNormalization 0.5 to 2 times as long as Add and RMSNormalization.

    Attributes:
        quantized_in_place: Operators directly behind which a Q costs no pass over memory.
        residual_norms: Norms whose kernel also adds the residual directly in front, and the bias of the
            product in front of that. A node between the two would split it; a Q beside the norm does not.
        moved_in_float8: Operators between a DQ and a product that move FP8 values: compilers commute the two.
    """

    quantized_in_place: frozenset[str] = frozenset()
    residual_norms: frozenset[str] = frozenset()
    moved_in_float8: frozenset[str] = frozenset()
    evidence: str = "not known"


NOTHING_KNOWN = Fusions()
