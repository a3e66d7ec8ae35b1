"""LoKA-ONNX."""
