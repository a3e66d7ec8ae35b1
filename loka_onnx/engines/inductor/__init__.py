"""ONNX graphs lowered to PyTorch and compiled by Inductor."""
