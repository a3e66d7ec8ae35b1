"""A document that carries the digest of its own text.

The seal is the SHA-256 of the file's bytes with the 64 digits of the seal as zeros. It covers every byte of
the file, spaces included, and needs no canonical form of JSON: a reader in any language replaces the digits
and hashes. It finds accidents. Who can rewrite the file can seal it again, so it says nothing of the origin.
"""

from __future__ import annotations

import re

from loka_onnx.core.digests import digest_bytes

UNSEALED = "0" * 64
"""What stands in a document before it is sealed."""

# Inside a string of JSON its quotes would be escaped, so that only a key can match.
_FIELD = re.compile(rb'"seal": "([0-9a-f]{64})"')


def seal(text: str) -> str:
    """The text with its seal; sealing again gives the same.

    Args:
        text: A JSON document with one key ``seal`` and 64 hexadecimal digits as its value.

    Raises:
        ValueError: There is no such key, or more than one.
    """
    data = text.encode()
    found = len(_FIELD.findall(data))
    if found != 1:
        raise ValueError(f"a document has one seal, this one has {found}")
    return _replaced(data, digest_bytes(_replaced(data, UNSEALED))).decode()


def seal_problem(data: bytes) -> str | None:
    """Why the seal of a document's bytes does not hold; None when it does."""
    found = _FIELD.findall(data)
    if len(found) != 1:
        return f"{len(found)} seals, there must be one"
    digest = digest_bytes(_replaced(data, UNSEALED))
    if digest.encode() == found[0]:
        return None
    return f"sha256 {digest[:16]}…, the seal says {found[0].decode()[:16]}…"


def _replaced(data: bytes, digits: str) -> bytes:
    return _FIELD.sub(f'"seal": "{digits}"'.encode(), data)
