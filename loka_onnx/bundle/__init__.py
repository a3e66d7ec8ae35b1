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
from loka_onnx.bundle.packing import pack_bundle
from loka_onnx.bundle.signing import PASSWORD_VARIABLE, KeyPair, sign_bundle, signer_of, write_key_pair
from loka_onnx.bundle.writer import FALLBACK_ID, write_bundle
from loka_onnx.core.manifest import BatchRange, Manifest
from loka_onnx.sessions.bundle_archive import unpack, unpacked, verify_path
from loka_onnx.sessions.bundle_files import Verified, verify_bundle
from loka_onnx.sessions.bundle_signature import verify_signature

__all__ = [
    "DEFAULT_TOLERANCE",
    "FALLBACK_ID",
    "FP8_TOLERANCE",
    "PASSWORD_VARIABLE",
    "BatchRange",
    "BundleContents",
    "BundleEngine",
    "BundleLookup",
    "Expectation",
    "KeyPair",
    "Manifest",
    "Verified",
    "describe",
    "inspect_bundle",
    "pack_bundle",
    "sign_bundle",
    "signer_of",
    "unpack",
    "unpacked",
    "verify_bundle",
    "verify_path",
    "verify_signature",
    "write_bundle",
    "write_key_pair",
]
