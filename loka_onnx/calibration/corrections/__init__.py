"""Constants that are fitted to a quantized model."""
