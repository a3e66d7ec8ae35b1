"""Number formats of quantized values, and precisions of sites.

Sources: "FP8 Formats for Deep Learning" (arXiv 2209.05433) table 1 for E4M3 and E5M2, "8-bit Numerical
Formats for Deep Neural Networks" (arXiv 2206.02915) for the FNUZ variants, and the ONNX specification,
"Float stored in 8 bits" and QuantizeLinear, for encodings and the saturating cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler


class Precision(StrEnum):
    """Compute precision of a site."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def is_quantized(self) -> bool:
        """True if a recipe says how operands are rounded."""
        return self in {Precision.FP8, Precision.INT8}


@dataclass(frozen=True)
class NumberFormat:
    """A format that operands are quantized to; documents hold its `name`.

    Attributes:
        id: Part of the ids of recipes, as in ``e4m3fn``.
        max: Largest value; the range of a symmetric tensor ends there on both sides.
        min: Smallest value, to which smaller ones saturate.
        onnx_type: Value of `onnx.TensorProto.DataType`.
        storage: Name of the type in NumPy or `ml_dtypes`.
        mantissa_bits: Stored ones above `min_normal`; None for integers, whose spacing is 1 throughout.
        min_normal: Smallest normal magnitude; 0 for integers.
        has_zero_point: Whether zero may be stored as another number (asymmetric quantization).
    """

    id: str
    bits: int
    max: float
    min: float
    onnx_type: int
    storage: str
    mantissa_bits: int | None = None
    min_normal: float = 0.0
    has_zero_point: bool = False

    @property
    def name(self) -> str:
        """Name in documents and run files, as in ONNX: ``E4M3FN``."""
        return self.id.upper()

    @property
    def is_float(self) -> bool:
        """True for floating formats, False for integers."""
        return self.mantissa_bits is not None

    @property
    def smallest(self) -> float:
        """Smallest nonzero magnitude: the smallest subnormal, or 1."""
        return 1.0 if self.mantissa_bits is None else self.min_normal * 2.0**-self.mantissa_bits

    @property
    def precision(self) -> Precision:
        """Precision of a site with operands in this format."""
        return Precision.FP8 if self.is_float else Precision.INT8

    @property
    def of_weights(self) -> NumberFormat:
        """Format of the weights beside activations in this one: without a zero point."""
        return INT8 if self.has_zero_point else self

    def has_zero(self, zero_point: int) -> bool:
        """True if zero may be stored as this number."""
        return zero_point == 0 or (self.has_zero_point and self.min <= zero_point <= self.max)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Read and write the `name`."""
        return core_schema.no_info_after_validator_function(
            lambda name: FORMATS[name.lower()],
            core_schema.literal_schema([format.name for format in FORMATS.values()]),
            serialization=core_schema.to_string_ser_schema(),
        )


E4M3FN = NumberFormat("e4m3fn", 8, 448.0, -448.0, 17, "float8_e4m3fn", 3, 2.0**-6)
E4M3FNUZ = NumberFormat("e4m3fnuz", 8, 240.0, -240.0, 18, "float8_e4m3fnuz", 3, 2.0**-7)
E5M2 = NumberFormat("e5m2", 8, 57344.0, -57344.0, 19, "float8_e5m2", 2, 2.0**-14)
INT8 = NumberFormat("int8", 8, 127.0, -128.0, 3, "int8")
UINT8 = NumberFormat("uint8", 8, 255.0, 0.0, 2, "uint8", has_zero_point=True)

FORMATS = {format.id: format for format in (E4M3FN, E4M3FNUZ, E5M2, INT8, UINT8)}
"""Every format by id."""
FLOATS = tuple(format for format in FORMATS.values() if format.is_float)
