"""Origin of a bundle: Ed25519 signatures (RFC 8032) over the exact bytes of its manifest.

The manifest holds the digest of every other file, so that its signature covers the whole bundle.
`signature.json` is beside it, with one or more keys (for example during a change of keys).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loka_onnx.bundle.format.documents import parse_document, pinned, read_document, refuse
from loka_onnx.core.digests import UNSEALED, digest_bytes
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from loka_onnx.core.serde import STRICT
from loka_onnx.errors import ConfigError, MissingPackage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE_NAME = "signature.json"
MAX_SIGNATURE_BYTES = 64 << 10
MAX_KEY_BYTES = 64 << 10

_KEY, _SIGNATURE = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{128}")
_SIGN = "sign it: `loka-onnx bundle sign DIR --key KEY`"
_ORIGIN = "do not load it before you know where it comes from"


@dataclass(frozen=True)
class KeySignature:
    """The signature of one key, named by its fingerprint: SHA-256 of the 32 bytes of the public key."""

    __pydantic_config__ = STRICT

    key: str
    signature: str


@dataclass(frozen=True)
class BundleSignature:
    """Signatures of a manifest (`signature.json`), named by the SHA-256 of its bytes."""

    SCHEMA: ClassVar[str] = "bundle-signature/1"
    __pydantic_config__ = STRICT

    manifest: str
    signatures: tuple[KeySignature, ...]
    seal: str = UNSEALED

    @property
    def keys(self) -> tuple[str, ...]:
        """Fingerprints of the keys that it claims to be signed with, unverified."""
        return tuple(entry.key for entry in self.signatures)


def verify_signature(directory: Path, keys: Sequence[Path]) -> str:
    """Verify that one of the public `keys` (PEM, SubjectPublicKeyInfo) signed a bundle's manifest; return
    that key's fingerprint. `verify_bundle` checks the files. Raises BundleInvalid if it is not signed, or
    only with other keys, or was altered since; ConfigError without a key, or for another than an Ed25519
    public key; MissingPackage without `cryptography`.
    """
    with pinned(directory) as pin:
        manifest = read_document(pin.path, MANIFEST_NAME, MAX_MANIFEST_BYTES)
        return check_signature(signature_bytes(pin.path), manifest, keys, pin.path)


def read_signature(directory: Path) -> BundleSignature | None:
    """Read the signature of a bundle, checked as far as possible without a key; None where there is none."""
    data = signature_bytes(directory)
    if data is None:
        return None
    return parse_signature(data, read_document(directory, MANIFEST_NAME, MAX_MANIFEST_BYTES), directory)


def signature_bytes(directory: Path) -> bytes | None:
    """Unchecked bytes of a bundle's signature; None where there is none."""
    if not os.path.lexists(directory / SIGNATURE_NAME):
        return None
    return read_document(directory, SIGNATURE_NAME, MAX_SIGNATURE_BYTES)


def check_signature(signature: bytes | None, manifest: bytes, keys: Sequence[Path], where: Path) -> str:
    """Verify documents that are already read; see `verify_signature`."""
    accepted = {fingerprint(key): key for key in map(read_public_key, keys)}
    if not accepted:
        raise ConfigError("E1206 no key to verify a signature with was given", remedy="name a public key")
    if signature is None:
        refuse(where, "the bundle is not signed", f"there is no '{SIGNATURE_NAME}'", f"{_ORIGIN}, or {_SIGN}")
    document = parse_signature(signature, manifest, where)
    known = [entry for entry in document.signatures if entry.key in accepted]
    if not known:
        evidence = f"signed with {', '.join(document.keys)}; accepted {', '.join(accepted)}"
        remedy = f"{_ORIGIN}, or name the right public key"
        refuse(where, "the bundle is signed with another key", evidence, remedy)
    from cryptography.exceptions import InvalidSignature

    # One valid signature is enough: anyone could have added an invalid one before.
    holding = list[str]()
    for entry in known:
        with contextlib.suppress(InvalidSignature):
            accepted[entry.key].verify(bytes.fromhex(entry.signature), manifest)
            holding.append(entry.key)
    if not holding:
        keys_named = ", ".join(entry.key for entry in known)
        refuse(where, "the signature does not verify", f"key {keys_named}", _ORIGIN)
    return holding[0]


def parse_signature(data: bytes, manifest: bytes, where: Path) -> BundleSignature:
    """Parse a signature of a bundle (`where`) and check it as far as possible without a key."""
    document = parse_document(BundleSignature, data, SIGNATURE_NAME, where)
    keys = list(document.keys)
    for entry in document.signatures:
        if not _KEY.fullmatch(entry.key) or not _SIGNATURE.fullmatch(entry.signature):
            refuse(where, "the signature holds what is no key or no signature", f"key {entry.key[:80]!r}")
    if not keys or keys != sorted(set(keys)):
        refuse(where, "the signature names no key, or keys out of order", f"keys {keys}")
    digest = digest_bytes(manifest)
    if document.manifest != digest:
        evidence = f"sha256 {digest[:16]}…, signed was {document.manifest[:16]}…"
        refuse(where, "the manifest was altered since it was signed", evidence, f"{_ORIGIN}, or {_SIGN}")
    return document


def read_public_key(path: Path) -> Ed25519PublicKey:
    """Read an Ed25519 public key, PEM (SubjectPublicKeyInfo, RFC 8410); `ConfigError` for others."""
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    remedy = "name the public half of a key pair of `loka-onnx bundle keygen`"
    data = read_key_file(path)
    if b"PRIVATE KEY" in data:
        raise ConfigError(f"E1207 '{path}' is a private key, a public one is needed", remedy=remedy)
    try:
        key = load_pem_public_key(data)
    except Exception as error:
        # Besides ValueError, OpenSSL's errors differ between versions.
        raise ConfigError(
            f"E1208 '{path}' is not a public key in PEM", evidence=str(error)[:200], remedy=remedy
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"E1209 '{path}' is not an Ed25519 key", evidence=type(key).__name__, remedy=remedy)
    return key


def read_key_file(path: Path) -> bytes:
    """Read a key file; `ConfigError` if it cannot be read or is too large for a key."""
    with ConfigError(f"E1210 key '{path}' cannot be read").in_place_of(OSError), path.open("rb") as stream:
        data = stream.read(MAX_KEY_BYTES + 1)
    if len(data) > MAX_KEY_BYTES:
        raise ConfigError(f"E1211 '{path}' is not a key", evidence=f"it has more than {MAX_KEY_BYTES} bytes")
    return data


def fingerprint(key: Ed25519PublicKey) -> str:
    """SHA-256 of the 32 bytes of a public key, hexadecimal."""
    return digest_bytes(key.public_bytes_raw())


def require_cryptography() -> None:
    """Raise `MissingPackage` where signatures cannot be made or checked."""
    with MissingPackage(
        "E1212 signatures need the package 'cryptography'", remedy="pip install 'loka-onnx[sign]'"
    ).in_place_of(ImportError):
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401
