"""FP8 formats and their constants.

Sources: "FP8 Formats for Deep Learning" (arXiv 2209.05433) table 1 for E4M3 and E5M2, "8-bit Numerical
Formats for Deep Neural Networks" (arXiv 2206.02915) for the FNUZ variants, and the ONNX specification,
"Float stored in 8 bits", for the encoding and the saturating cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Float8(StrEnum):
    """Name of an FP8 format in ONNX."""

    E4M3FN = "E4M3FN"
    E4M3FNUZ = "E4M3FNUZ"
    E5M2 = "E5M2"


@dataclass(frozen=True)
class Float8Spec:
    """Constants of one FP8 format.

    Attributes:
        max: Largest finite magnitude.
        mantissa_bits: Stored mantissa bits; the half-ulp of a normal value is 2**-(mantissa_bits+1)
            relative to its binade.
        min_normal: Smallest normal magnitude.
        min_subnormal: Smallest nonzero magnitude.
        onnx_type: Value of `onnx.TensorProto.DataType`.
        ml_dtype: Name of the type in the `ml_dtypes` package.
    """

    max: float
    mantissa_bits: int
    min_normal: float
    min_subnormal: float
    onnx_type: int
    ml_dtype: str


FLOAT8_SPECS: dict[Float8, Float8Spec] = {
    Float8.E4M3FN: Float8Spec(448.0, 3, 2.0**-6, 2.0**-9, 17, "float8_e4m3fn"),
    Float8.E4M3FNUZ: Float8Spec(240.0, 3, 2.0**-7, 2.0**-10, 18, "float8_e4m3fnuz"),
    Float8.E5M2: Float8Spec(57344.0, 2, 2.0**-14, 2.0**-16, 19, "float8_e5m2"),
}


class Precision(StrEnum):
    """Compute precision of a site."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
