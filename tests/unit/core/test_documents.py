"""Documents: equal values give equal text, everything comes back, anything strange is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, Parity, TensorSpec
from loka_onnx.core.digests import digest_files, digest_json
from loka_onnx.core.exact_sum import ExactSum
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.profile import (
    DeltaSums,
    Draws,
    Profile,
    Sampling,
    Sensitivity,
    SensitivityName,
    SiteGroup,
    SiteProfile,
    WeightedMean,
)
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.core.statistics import BatchSpread, BatchSums, ErrorStats, RangeStats
from loka_onnx.errors import OutputError, UserError

SITE = Site(
    "over.fc1",
    SiteKind.LINEAR,
    "Gemm",
    (Operand("x", 0, False, 1, (None, 32)), Operand("w", 1, True, 1, (64, 32))),
    "y",
    32,
    64,
    3,
    ("a", "b"),
)
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


@pytest.mark.parametrize(
    ("length", "is_taken"), [(serde.MOST_NAME_BYTES, True), (serde.MOST_NAME_BYTES + 1, False)]
)
def test_a_file_name_has_the_length_that_file_systems_take(length: int, is_taken: bool) -> None:
    # Two bytes a letter: it is bytes that count.
    name = "é" * (length // 2) + "x" * (length % 2)
    document = TypeAdapter(serde.InsidePath)
    if is_taken:
        assert document.validate_python(f"model/{name}") == Path("model") / name
    else:
        with pytest.raises(ValidationError, match="more than 255 bytes"):
            document.validate_python(f"model/{name}")


def moments(*sums: float) -> RatioMoments:
    return RatioMoments(50, 7, *(ExactSum.of([value]) for value in sums))


NAME = SensitivityName("r", "logit", "loss")
DELTA = DeltaSums(ExactSum.of([100.0]), ExactSum.of([-10.0]), ExactSum.of([1.0]))
# Seven units are too few for an interval: its ends are infinite.
KL = Sensitivity.of(NAME, DELTA, moments(1e-5, 1.0, 1e-10, 1e-5, 1.0), None, Draws(2, 1e-5, 2e-5, 2.0))
PROFILE = Profile(
    model_digest="m",
    data_digest="d",
    rows=100,
    error_rows=80,
    sampling=Sampling(50, 2, 16384, ("over.fc1",), may_stop_early=True),
    synthetic=False,
    sites=(
        SiteProfile(
            "over.fc1",
            {
                "x": RangeStats(
                    3,
                    0.1,
                    -0.1,
                    0.1,
                    ExactSum(),
                    ExactSum.of([1e-300]),
                    spread=BatchSpread(2, 50, {"amax": BatchSums(ExactSum.of([1.0, 1e-30]), ExactSum())}),
                )
            },
            (ErrorStats("r", None, 3, *(ExactSum.of([v]) for v in (1.0, 0.5, 1.5)), 0, 0, 0),),
            (KL,),
        ),
    ),
    baseline_loss={"logit": WeightedMean(ExactSum.of([0.6931471805599453]), ExactSum.of([1.0]))},
    scales={"e4m3fn/amax": {"x": 0.0078125}},
    seconds={"ranges": ExactSum.of([0.25])},
    groups=(SiteGroup("x", ("over.fc1", "over.fc2"), (KL,)),),
    weights=("w",),
)


@pytest.mark.parametrize("value", [ARTIFACT, PROFILE], ids=["model", "profile"])
def test_a_document_comes_back_equal(value, tmp_path):
    path = tmp_path / "sub" / "value.json"
    serde.write(value, path)
    assert serde.read(type(value), path) == value
    assert serde.dumps(serde.read(type(value), path)) == path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["value.json"]


def test_lookups():
    assert ARTIFACT.site("over.fc1") is SITE and ARTIFACT.linear_sites == (SITE,)
    assert SITE.flops_per_example == ARTIFACT.fp8_able_flops == 2 * 3 * 32 * 64
    found = PROFILE.site("over.fc1").sensitivity("r", "logit")
    assert (found.delta.rmse, found.delta.mean) == (pytest.approx(0.1), pytest.approx(-0.1))
    assert found.kl.upper == float("inf") and PROFILE.groups[0].sensitivity("logit") is KL
    for missing in (
        lambda: ARTIFACT.site("x"),
        lambda: PROFILE.site("x"),
        lambda: PROFILE.site("over.fc1").error("x"),
        lambda: PROFILE.site("over.fc1").sensitivity("r", "x"),
        lambda: PROFILE.groups[0].sensitivity("x"),
    ):
        with pytest.raises(KeyError):
            missing()


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
    assert (
        len({digest_files([one]), digest_files([two]), digest_files([one, two]), digest_files([two, one])})
        == 4
    )


@pytest.mark.parametrize("depth", [150, 900, 960, 980, 990, 995, 1000, 100_000])
@pytest.mark.parametrize("close", ["]", ""])
def test_a_document_that_is_nested_too_deep_is_refused(depth: int, close: str) -> None:
    nested = "[" * depth + close * depth
    for text in (nested, f'{{"schema": "{serde.schema_id(ModelArtifact)}", "value": {nested}}}'):
        with pytest.raises(UserError):
            serde.loads(ModelArtifact, text)
