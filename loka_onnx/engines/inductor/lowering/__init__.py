"""Lowering of ONNX graphs to PyTorch modules (`lowering.model.lower`), with one function for each operator.

Importing any other module of this package imports torch.
"""
