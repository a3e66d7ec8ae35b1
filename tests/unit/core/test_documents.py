"""Documents: equal values give equal text, everything comes back, anything strange is refused; seals."""

import hashlib
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, Parity, TensorSpec
from loka_onnx.core.digests import UNSEALED, digest_files, digest_json, seal, seal_problem
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.errors import OutputError, UserError

OPERANDS = Operand("x", 0, False, 1, (None, 32)), Operand("w", 1, True, 1, (64, 32))
SITE = Site("over.fc1", SiteKind.LINEAR, "Gemm", OPERANDS, "y", 32, 64, 3, ("a", "b"))
ARTIFACT = ModelArtifact(
    Path("model/model.onnx"),
    "d" * 64,
    21,
    (TensorSpec("x", "float32", (None, 32)),),
    (TensorSpec("y", "float32", (None,)),),
    (SITE,),
    "pytorch 2.13",
    Parity(64, 1e-7, 1e-8, 1e-4),
    ("converted from opset 17 to 21",),
)


def test_a_file_name_has_the_length_that_file_systems_take() -> None:
    # Two bytes a letter: it is bytes that count.
    name, document = "é" * (serde.MOST_NAME_BYTES // 2), TypeAdapter(serde.InsidePath)
    assert document.validate_python(f"model/{name}x") == Path("model") / f"{name}x"
    with pytest.raises(ValidationError, match="more than 255 bytes"):
        document.validate_python(f"model/{name}é")


def test_a_document_comes_back_equal_and_finds_its_sites(tmp_path):
    path = tmp_path / "sub" / "model.json"
    serde.write(ARTIFACT, path)
    assert serde.read(ModelArtifact, path) == ARTIFACT
    assert serde.dumps(serde.read(ModelArtifact, path)) == path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["model.json"]
    assert ARTIFACT.site("over.fc1") is SITE and ARTIFACT.linear_sites == (SITE,)
    assert SITE.flops_per_example == ARTIFACT.fp8_able_flops == 2 * 3 * 32 * 64
    with pytest.raises(KeyError):
        ARTIFACT.site("x")


def edited(change) -> str:
    document = json.loads(serde.dumps(ARTIFACT))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run\.json: not a JSON document"),
        ("[]", "unknown schema(?s:.*)schema is None"),
        (
            edited(lambda d: d.update(schema="loka-onnx/model/3")),
            "schema is 'loka-onnx/model/3', this version reads",
        ),
        (edited(lambda d: d.update(more=1)), "unknown schema"),
        (edited(lambda d: d["value"].update(colour="red")), "at colour: Unexpected keyword argument"),
        (edited(lambda d: d["value"].update(opset="many")), "at opset: Input should be a valid integer"),
        (edited(lambda d: d["value"].pop("digest")), "at digest: Field required"),
        (edited(lambda d: d["value"]["sites"][0].update(kind="conv")), r"at sites\.0\.kind"),
    ],
)
def test_strange_documents_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        serde.loads(ModelArtifact, text, where="run.json")


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(UserError, match="cannot read the loka-onnx/model/2 document"):
        serde.read(ModelArtifact, tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        serde.write(ARTIFACT, tmp_path / "file" / "model.json")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.json"
    path.write_text("old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loka_onnx.core.serde.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        serde.write(ARTIFACT, path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.json"]


def test_digests_follow_names_order_and_content(tmp_path):
    assert digest_json({"b": 1, "a": [1, 2]}) == digest_json({"a": [1, 2], "b": 1})
    assert digest_json({"a": 1}) != digest_json({"a": "1"})
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("x")
    two.write_text("x")
    assert len({digest_files(files) for files in ((one,), (two,), (one, two), (two, one))}) == 4


@pytest.mark.parametrize("depth", [150, 900, 960, 980, 990, 995, 1000, 100_000])
@pytest.mark.parametrize("close", ["]", ""])
def test_a_document_that_is_nested_too_deep_is_refused(depth: int, close: str) -> None:
    nested = "[" * depth + close * depth
    for text in (nested, f'{{"schema": "{serde.schema_id(ModelArtifact)}", "value": {nested}}}'):
        with pytest.raises(UserError):
            serde.loads(ModelArtifact, text)


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


def test_a_document_has_one_seal_for_which_no_string_passes() -> None:
    for text in ("{}", document() + document(), '{"seal": "short"}', document(seal=UNSEALED[:-1])):
        with pytest.raises(ValueError, match="a document has one seal"):
            seal(text)
    assert seal_problem(b"{}") == "0 seals, there must be one"
    inner = f'"seal": "{"f" * 64}"'
    sealed = seal(document(text=inner))
    assert json.loads(sealed)["text"] == inner
    assert seal_problem(sealed.encode()) is None
