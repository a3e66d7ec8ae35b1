"""A document with the digest of its own text.

The seal is the SHA-256 of the file's bytes with the 64 digits of the seal as zeros. It covers every byte,
spaces included, and needs no canonical JSON: a reader in any language replaces the digits and hashes. It
finds accidents, not forgery: anyone who can rewrite the file can seal it again.
"""

from __future__ import annotations

import re

from loka_onnx.core.digests import digest_bytes

UNSEALED = "0" * 64
"""Seal of a document before sealing."""

# In a JSON string its quotes would be escaped, so that only a key can match.
_FIELD = re.compile(rb'"seal": "([0-9a-f]{64})"')


def seal(text: str) -> str:
    """Return a JSON document with its one key ``seal`` filled in; idempotent."""
    data = text.encode()
    found = len(_FIELD.findall(data))
    if found != 1:
        raise ValueError(f"a document has one seal, this one has {found}")
    return _replaced(data, digest_bytes(_replaced(data, UNSEALED))).decode()


def seal_problem(data: bytes) -> str | None:
    """Return why the seal of a document's bytes is invalid; None when it is valid."""
    found = _FIELD.findall(data)
    if len(found) != 1:
        return f"{len(found)} seals, there must be one"
    digest = digest_bytes(_replaced(data, UNSEALED))
    if digest.encode() == found[0]:
        return None
    return f"sha256 {digest[:16]}…, the seal says {found[0].decode()[:16]}…"


def _replaced(data: bytes, digits: str) -> bytes:
    return _FIELD.sub(f'"seal": "{digits}"'.encode(), data)
