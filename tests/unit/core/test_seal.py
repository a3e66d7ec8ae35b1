import hashlib
import json

import pytest

from loka_onnx.core.digests import UNSEALED, seal, seal_problem


def document(**more: object) -> str:
    return json.dumps({"a": 1, "seal": UNSEALED, **more}, indent=1)


def test_a_seal_is_the_digest_of_the_text_with_zeros_in_its_place() -> None:
    sealed = seal(document())
    assert json.loads(sealed)["seal"] == hashlib.sha256(document().encode()).hexdigest()
    assert seal_problem(sealed.encode()) is None
    assert seal(sealed) == sealed


def test_every_byte_is_covered_spaces_too() -> None:
    sealed = seal(document(text="ein Maß")).encode()
    for place in range(len(sealed)):
        for bit in range(8):
            altered = bytearray(sealed)
            altered[place] ^= 1 << bit
            assert seal_problem(bytes(altered)) is not None, (place, bit)
    assert "sha256" in str(seal_problem(sealed + b"\n"))


def test_a_document_has_one_seal() -> None:
    for text in ("{}", document() + document(), '{"seal": "short"}', document(seal=UNSEALED[:-1])):
        with pytest.raises(ValueError, match="a document has one seal"):
            seal(text)
    assert seal_problem(b"{}") == "0 seals, there must be one"


def test_a_string_cannot_pass_for_the_seal() -> None:
    inner = f'"seal": "{"f" * 64}"'
    sealed = seal(document(text=inner))
    assert json.loads(sealed)["text"] == inner
    assert seal_problem(sealed.encode()) is None
