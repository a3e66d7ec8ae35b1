"""Where the environments of other tools are named."""

from __future__ import annotations

MODEL_OPTIMIZER_ENVIRONMENT = "LOKA_ONNX_MODEL_OPTIMIZER"
"""Variable that holds the Python of NVIDIA Model Optimizer's environment."""
