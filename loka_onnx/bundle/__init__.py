"""Writing, verifying and describing bundles: what is deployed.

Each name is imported when it is first used: the runtime, which needs `bundle.format` alone, loads no writer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka_onnx.bundle.contents import (
        DEFAULT_TOLERANCE,
        FP8_TOLERANCE,
        BundleContents,
        BundleEngine,
        BundleLookup,
        Expectation,
    )
    from loka_onnx.bundle.format.archive import unpack, unpacked, verify_path
    from loka_onnx.bundle.format.files import Verified, verify_bundle
    from loka_onnx.bundle.format.signature import verify_signature
    from loka_onnx.bundle.inspection import describe, inspect_bundle
    from loka_onnx.bundle.packing import pack_bundle
    from loka_onnx.bundle.signing import PASSWORD_VARIABLE, KeyPair, sign_bundle, signer_of, write_key_pair
    from loka_onnx.bundle.writer import FALLBACK_ID, write_bundle
    from loka_onnx.core.manifest import BatchRange, Manifest

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

_HOMES = {
    "bundle.contents": (
        "DEFAULT_TOLERANCE",
        "FP8_TOLERANCE",
        "BundleContents",
        "BundleEngine",
        "BundleLookup",
        "Expectation",
    ),
    "bundle.format.archive": ("unpack", "unpacked", "verify_path"),
    "bundle.format.files": ("Verified", "verify_bundle"),
    "bundle.format.signature": ("verify_signature",),
    "bundle.inspection": ("describe", "inspect_bundle"),
    "bundle.packing": ("pack_bundle",),
    "bundle.signing": ("PASSWORD_VARIABLE", "KeyPair", "sign_bundle", "signer_of", "write_key_pair"),
    "bundle.writer": ("FALLBACK_ID", "write_bundle"),
    "core.manifest": ("BatchRange", "Manifest"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'loka_onnx.bundle' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"loka_onnx.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
