"""Writing, verifying and describing bundles: what is deployed."""

from loka_onnx.bundle.contents import (
    DEFAULT_TOLERANCE,
    FP8_TOLERANCE,
    BundleContents,
    BundleEngine,
    BundleLookup,
    Expectation,
)
from loka_onnx.bundle.inspection import describe, inspect_bundle
from loka_onnx.bundle.writer import FALLBACK_ID, write_bundle
from loka_onnx.core.manifest import BatchRange, Manifest
from loka_onnx.sessions.bundle_files import verify_bundle

__all__ = [
    "DEFAULT_TOLERANCE",
    "FALLBACK_ID",
    "FP8_TOLERANCE",
    "BatchRange",
    "BundleContents",
    "BundleEngine",
    "BundleLookup",
    "Expectation",
    "Manifest",
    "describe",
    "inspect_bundle",
    "verify_bundle",
    "write_bundle",
]
