"""ONNX graphs as PyTorch modules: `lowering.model.lower`, and one function an operator.

Importing any module of this package but this one imports torch.
"""
