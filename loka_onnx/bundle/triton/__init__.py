"""A model repository of NVIDIA Triton Inference Server, made from a bundle."""

from loka_onnx.bundle.triton.record import (
    RECORD_NAME,
    DeclinedEngine,
    RepositoryFile,
    RepositoryModel,
    TritonRepository,
)
from loka_onnx.bundle.triton.repository import export_triton
from loka_onnx.engines.triton.models import TritonOptions

__all__ = [
    "RECORD_NAME",
    "DeclinedEngine",
    "RepositoryFile",
    "RepositoryModel",
    "TritonOptions",
    "TritonRepository",
    "export_triton",
]
