"""Keys, and signing a bundle with them (Ed25519, RFC 8032).

A private key is a PEM file (PKCS8), encrypted where the environment holds a password; a public key is a PEM
file (SubjectPublicKeyInfo). Both are what `openssl genpkey -algorithm ed25519` makes.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loka_onnx.bundle.format.documents import pinned, read_document
from loka_onnx.bundle.format.files import verify_directory
from loka_onnx.bundle.format.replace import staged_file
from loka_onnx.bundle.format.signature import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_NAME,
    BundleSignature,
    KeySignature,
    fingerprint,
    parse_signature,
    read_key_file,
    require_cryptography,
)
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_bytes, seal
from loka_onnx.core.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from loka_onnx.errors import BundleError, ConfigError, OutputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSWORD_VARIABLE = "LOKA_ONNX_KEY_PASSWORD"
"""Environment variable with the password of a private key."""

_LOG = logging.getLogger("loka_onnx.bundle")


@dataclass(frozen=True)
class KeyPair:
    """A key pair on disk, as PEM files: PKCS8, for its owner only, and SubjectPublicKeyInfo."""

    private: Path
    public: Path
    fingerprint: str


def write_key_pair(directory: Path, name: str = "bundle") -> KeyPair:
    """Make a key pair, ``<name>.key`` and ``<name>.pub``, encrypted with the password in `PASSWORD_VARIABLE`
    if set; an OutputError if one of the files is there already, or cannot be written.
    """
    require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, password = Ed25519PrivateKey.generate(), _password()
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, encryption)
    public = key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    pair = KeyPair(directory / f"{name}.key", directory / f"{name}.pub", fingerprint(key.public_key()))
    for path in (pair.private, pair.public):
        if os.path.lexists(path):
            raise OutputError(
                f"E1219 '{path}' is there already",
                evidence="a private key that is overwritten is lost for good",
                remedy="choose another directory or name",
            )
    with OutputError(f"E1220 cannot write keys to '{directory}'").in_place_of(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        for path, data, mode in ((pair.private, private, 0o600), (pair.public, public, 0o644)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(descriptor)
    return pair


def sign_bundle(directory: Path, key: Path) -> str:
    """Verify a bundle, sign it with a private key (PEM, PKCS8), and return the key's fingerprint.

    Signatures of other keys stay. They cannot be verified without their public keys, so they are named in a
    warning; a reader needs one valid signature of an accepted key. Raises BundleInvalid if the bundle does
    not verify, BundleError if it was replaced while it was being signed, or has no room for one more
    signature, OutputError if the place cannot be written, and as `read_private_key`.
    """
    signer = read_private_key(key)
    place = Path(os.path.realpath(directory))
    with pinned(place) as pin:
        verified = verify_directory(pin.path)
    name, signed, earlier = fingerprint(signer.public_key()), verified.text, tuple[KeySignature, ...]()
    if verified.signature is not None:
        earlier = parse_signature(verified.signature, signed, place).signatures
    if others := ", ".join(sorted({*verified.claimed} - {name})):
        _LOG.warning("'%s' keeps signatures that nothing was checked of: key %s", place, others)
    text = signature_text(signed, signer, earlier)
    if len(text.encode()) > MAX_SIGNATURE_BYTES:
        raise BundleError(
            "E1221 the bundle has too many signatures to add one",
            where=str(place),
            evidence=f"{len(text.encode())} bytes, the limit is {MAX_SIGNATURE_BYTES}",
            remedy=f"remove '{SIGNATURE_NAME}' and sign it again",
        )

    def check() -> None:
        if read_document(place, MANIFEST_NAME, MAX_MANIFEST_BYTES) != signed:
            raise BundleError(
                "E1222 the bundle was replaced while it was being signed",
                where=str(place),
                remedy="sign it again",
            )

    with staged_file(place / SIGNATURE_NAME, beside=place, check=check) as file:
        file.write_text(text, encoding="utf-8")
    return name


def signature_text(manifest: bytes, key: Ed25519PrivateKey, earlier: Sequence[KeySignature] = ()) -> str:
    """Sign the bytes of a manifest; signatures of `earlier` stay, unless the key made them."""
    name, by_key = fingerprint(key.public_key()), {entry.key: entry for entry in earlier}
    by_key[name] = KeySignature(name, key.sign(manifest).hex())
    signatures = tuple(by_key[name] for name in sorted(by_key))
    return seal(serde.dumps(BundleSignature(digest_bytes(manifest), signatures)))


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 private key from a PEM file, or a ConfigError; warn where others can read it."""
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, password = read_key_file(path), _password()
    if b"PRIVATE KEY" not in data:
        raise ConfigError(
            f"E1223 '{path}' is not a private key in PEM",
            remedy="name the private half of a key pair of `loka-onnx bundle keygen`",
        )
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = "private key '%s' can be read or written by others (mode %o): chmod 600 %s"
        _LOG.warning(message, path, mode, path)
    is_encrypted, remedy = b"ENCRYPTED" in data, "make a key with `bundle keygen`"
    try:
        key = load_pem_private_key(data, password if is_encrypted else None)
    except Exception as error:
        # Beside ValueError and TypeError, OpenSSL's kinds of failure differ from version to version.
        remedy = f"set {PASSWORD_VARIABLE} to its password" if is_encrypted else remedy
        raise ConfigError(
            f"E1224 private key '{path}' cannot be read", evidence=str(error)[:200], remedy=remedy
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        evidence = type(key).__name__
        raise ConfigError(f"E1225 '{path}' is not an Ed25519 key", evidence=evidence, remedy=remedy)
    return key


def signer_of(path: Path) -> str:
    """Fingerprint of the key pair that a private key belongs to; raises as `read_private_key`."""
    return fingerprint(read_private_key(path).public_key())


def _password() -> bytes | None:
    return os.environ.get(PASSWORD_VARIABLE, "").encode() or None
