"""Former name of `loka_onnx.numerics.rounding`."""

from loka_onnx.numerics.rounding import dequantize, fake_quantize, quantize, storage_type

float8_dtype = storage_type

__all__ = ["dequantize", "fake_quantize", "float8_dtype", "quantize"]
