"""Model repositories of Triton: what the server would check, and what its backends would answer."""

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from cut_models import answer, cut_contents, request
from google.protobuf import text_format
from onnx_text import parsed
from sample_run import SampleRun, expectation, make_run
from triton_rules import check_repository, check_session, infer, open_session, parameters, pb
from typer.testing import CliRunner

from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.triton import RECORD_NAME, TritonRepository, export_triton
from loka_onnx.bundle.writer import BundleEngine, write_bundle
from loka_onnx.cli.bundle import bundle as bundle_verbs
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.manifest import Manifest
from loka_onnx.engines.triton.models import DATA_TYPES, TritonOptions, map_field, render
from loka_onnx.errors import ConfigError, OutputError
from loka_onnx.graph import storage

OPTIONS = TritonOptions("ranker", instances=2, queue_delay_us=250)
FP32, FP8 = "ranker-cpu-onnxruntime-cpu-fp32", "ranker-cpu-onnxruntime-cpu-fp8-safe"


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    measured = {e.engine: e for e in sample.report.evaluations.evaluations if e.split == "selection"}
    engines = tuple(replace(e, evaluation=measured.get(e.artifact.id)) for e in sample.contents.engines)
    place = tmp_path_factory.mktemp("whole") / "bundle"
    return write_bundle(replace(sample.contents, engines=engines), place)


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return verify_bundle(bundle)


@pytest.fixture(scope="module")
def repository(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("triton") / "repository"
    export_triton(bundle, place, OPTIONS)
    return place


@pytest.fixture(scope="module")
def cut_bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cut")
    return write_bundle(cut_contents(sample, root / "run"), root / "bundle")


def test_every_model_follows_the_rules_of_the_server(repository):
    configs = check_repository(repository)
    assert set(configs) == {"ranker", FP32, FP8, "ranker-fallback-fp32"}
    for name in (FP32, FP8, "ranker-fallback-fp32"):
        (group,) = configs[name].instance_group
        assert (group.count, group.kind) == (2, pb.ModelInstanceGroup.KIND_CPU)
        assert configs[name].dynamic_batching.max_queue_delay_microseconds == 250
        assert configs[name].max_batch_size == 4096
        assert parameters(configs[name])["share_session_between_instances"] == "true"
    assert set(DATA_TYPES.values()) <= set(pb.DataType.keys())
    (given,) = configs[FP32].input
    assert (given.name, given.data_type, list(given.dims)) == ("dense", pb.TYPE_FP32, [16])


def test_models_open_with_what_they_declare_and_answer_the_sample(repository, bundle, manifest):
    configs = check_repository(repository)
    behind = {FP32: manifest.engines[1], FP8: manifest.engines[2], "ranker-fallback-fp32": manifest.fallback}
    for name, entry in {**behind, "ranker": manifest.engines[1]}.items():
        rows = read_sample(bundle, manifest, entry)
        found = infer(repository, configs, name, rows.inputs)["ctr"]
        np.testing.assert_allclose(found, rows.expected["ctr"], rtol=0, atol=entry.tolerance["ctr"])
        assert found.shape == (8, 1)
        if name in behind:
            check_session(open_session(repository, configs[name]), configs[name])


def test_what_cannot_be_served_is_declined_with_the_reason(repository, bundle, tmp_path):
    record = serde.read(TritonRepository, repository / RECORD_NAME)
    (declined,) = record.declined
    rtx = "rtx-tensorrt_rtx-sm89-fp8-safe"
    assert declined.engine == rtx
    assert "does not load engines of TensorRT for RTX" in declined.reason
    engines = ["cpu-onnxruntime-cpu-fp32", "cpu-onnxruntime-cpu-fp8-safe", "fallback-fp32"]
    assert [model.engine for model in record.models] == engines
    assert (record.name, record.preferred) == ("ranker", engines[0])
    # An engine that was named must be served.
    for engine, message in (
        ("nobody", r"the bundle has no engine 'nobody'\n  evidence: it has .*fallback-fp32"),
        (rtx, r"Triton cannot serve engine 'rtx-.*'\n.*Triton's TensorRT"),
    ):
        with pytest.raises(ConfigError, match=message):
            export_triton(bundle, tmp_path / "repository", replace(OPTIONS, engines=(engine,)))
        assert not (tmp_path / "repository").exists()
    for changed, message in (
        *(({"name": name}, f"'{name}' cannot be the name of a model") for name in ("", "a/b", ".hidden")),
        ({"instances": 0}, "0 instances of a model cannot be served"),
        ({"queue_delay_us": -1}, "requests cannot wait -1 µs"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(OPTIONS, **changed)


def test_the_bias_of_an_fp8_product_keeps_its_value(tmp_path):
    """BASIC would round it to multiples of the product of the scales, unless a session is told otherwise."""
    run = make_run(tmp_path / "run")
    path = run.contents.root / "engines/cpu-onnxruntime-fp8-safe/engine.onnx"
    weight = np.linspace(-2, 2, 16)[:, None].astype(ml_dtypes.float8_e4m3fn)
    body = """
       q = QuantizeLinear(dense, one, zero)  d = DequantizeLinear(q, one, zero)
       w = DequantizeLinear(w8, one, zero)  h = Gemm(d, w, bias)
       r = QuantizeLinear(h, small, zero)  ctr = DequantizeLinear(r, small, zero)"""
    model = parsed(
        body,
        {"one": 1.0, "small": 0.001, "bias": [0.3]},
        inputs="float[batch,16] dense",
        outputs="float[batch,1] ctr",
    )
    for name, value in (("zero", np.zeros((), weight.dtype)), ("w8", weight)):
        float8 = onnx.TensorProto.FLOAT8E4M3FN
        model.graph.initializer.append(
            onnx.helper.make_tensor(name, float8, value.shape, value.tobytes(), raw=True)
        )
    onnx.save(model, path)
    rows = np.zeros((8, 16), np.float32)
    rows[:, 0] = np.arange(8) / 64
    exact = rows.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) @ weight.astype(np.float64) + 0.3
    exact = (exact / 0.001).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.001
    engine = replace(run.contents.engines[2].artifact, digest=digest_file(path), bytes=path.stat().st_size)
    known = expectation(exact[:, 0])
    contents = replace(
        run.contents, engines=(BundleEngine(engine, known),), sample={"dense": rows}, fallback=known
    )
    repository = tmp_path / "repository"
    export_triton(write_bundle(contents, tmp_path / "bundle"), repository, OPTIONS)
    configs = check_repository(repository)
    np.testing.assert_allclose(infer(repository, configs, FP8, {"dense": rows})["ctr"], exact, atol=1e-6)
    # With BASIC, the most that the backend could be told, the bias is lost.
    configs[FP8].optimization.graph.level = -1
    assert np.abs(infer(repository, configs, FP8, {"dense": rows})["ctr"] - exact).max() > 0.2


def test_the_ensemble_gives_the_expected_outputs(cut_bundle, tmp_path):
    repository = tmp_path / "repository"
    export_triton(cut_bundle, repository, OPTIONS)
    configs, manifest = check_repository(repository), verify_bundle(cut_bundle)
    entry = manifest.engines[0]
    rows, other = read_sample(cut_bundle, manifest, entry), request(5, seed=7)
    for name in ("ranker", FP32, "ranker-fallback-fp32"):
        for asked, expected, tolerance in (
            (rows.inputs, rows.expected["ctr"], entry.tolerance["ctr"]),
            (other, answer(other), 1e-5),
        ):
            sent = {"x": asked["x"], "item": asked["item"][:, None]}
            found = infer(repository, configs, name, sent)["ctr"]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_tables_are_in_a_repository_once(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    bundle = write_bundle(cut_contents(sample, tmp_path / "run", is_external=True), tmp_path / "bundle")
    repository = tmp_path / "repository"
    export_triton(bundle, repository, OPTIONS)
    lookup, fallback = (repository / f"ranker-{name}/1/tables.bin" for name in ("lookup", "fallback-fp32"))
    assert lookup.samefile(fallback)
    # A server's files do not change with the bundle's.
    assert not lookup.samefile(bundle / "lookup/tables.bin")
    asked = request(3)
    sent = {"x": asked["x"], "item": asked["item"][:, None]}
    found = infer(repository, check_repository(repository), "ranker", sent)["ctr"]
    np.testing.assert_allclose(found, answer(asked), atol=1e-5)


def test_an_old_repository_is_replaced_as_a_whole_and_anything_else_is_not(
    bundle, repository, cut_bundle, tmp_path
):
    written = Path(shutil.copytree(repository, tmp_path / "repository"))
    export_triton(cut_bundle, written, replace(OPTIONS, name="cut"))
    assert {name.partition("-")[0] for name in check_repository(written)} == {"cut"}
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]
    (tmp_path / "file").write_text("")
    (tmp_path / "other/theirs").mkdir(parents=True)
    for place, evidence in (
        (tmp_path / "file", "it is not a directory"),
        (tmp_path / "other", "it exists and is no repository that this project wrote"),
        (bundle, "is in the bundle"),
        (bundle / "triton", "is in the bundle"),
    ):
        with pytest.raises(OutputError, match=evidence):
            export_triton(bundle, place, OPTIONS)
    assert (tmp_path / "other/theirs").is_dir()
    verify_bundle(bundle)


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        *("theirs/file", "ranker/2/model.onnx", "ranker/1/notes.txt", "ranker/labels.txt"),
        *("ranker/__pycache__/x.py", "ranker/config.pbtxt", f"{FP32}/1/model.onnx"),
    ],
)
def test_what_a_user_put_into_a_model_is_not_deleted(bundle, repository, tmp_path, path, is_link):
    written = Path(shutil.copytree(repository, tmp_path / "repository"))
    theirs, elsewhere = written / path, tmp_path / "elsewhere"
    is_ours = theirs.exists()
    theirs.parent.mkdir(exist_ok=True)
    content = bytearray(theirs.read_bytes() if is_ours else b"theirs")
    content[-1] ^= 1  # of the same size
    (elsewhere if is_link else theirs).write_bytes(content)
    if is_link:
        theirs.unlink(missing_ok=True)
        theirs.symlink_to(elsewhere)
    with pytest.raises(OutputError, match="is in the way") as error:
        export_triton(bundle, written, OPTIONS)
    held = path.partition("/")[0] if path.startswith("theirs") else path
    held = held.rpartition("/")[0] if path.startswith("ranker/2") else held
    assert error.value.evidence == (
        f"'{path}' was changed after this project wrote it"
        if is_ours and not is_link
        else f"it holds '{held}', which this project did not write"
    )
    assert theirs.read_bytes() == content and theirs.is_symlink() == is_link


# Text format and the verb ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quote"', "back\\slash", "two\nlines\t", "naïve → 100 %", "\0\x7f7"]
)
def test_strings_come_back_as_they_went_in_and_maps_are_sorted(text):
    parameters = {"k": (("string_value", text),), "a": ()}
    written = render((("name", text), *map_field("parameters", parameters)))
    read = text_format.Parse(written, pb.ModelConfig())
    assert read.name == text
    assert read.parameters["k"].string_value == text
    # Equal values give equal text.
    turned = dict(reversed(parameters.items()))
    assert written == render((("name", text), *map_field("parameters", turned)))


def test_the_verb_says_what_it_wrote_and_what_it_left_out(bundle, tmp_path):
    place = tmp_path / "repository"
    done = CliRunner().invoke(bundle_verbs, ["export-triton", str(bundle), str(place), "--instances", "3"])
    assert done.exit_code == 0, done.output
    assert "bundle: engine 'cpu-onnxruntime-cpu-fp32'\n" in done.output
    assert "  bundle-fallback-fp32 (onnxruntime)\n" in done.output
    assert "– rtx-tensorrt_rtx-sm89-fp8-safe: Triton's TensorRT backend does not load" in done.output
    engine = "cpu-onnxruntime-cpu-fp8-safe"
    flags = ["--name", "ctr", "--engine", engine, "--queue-delay-us", "0"]
    done = CliRunner().invoke(bundle_verbs, ["export-triton", str(bundle), str(place), *flags])
    assert done.exit_code == 0, done.output
    models = {path.name for path in place.iterdir() if path.is_dir()}
    assert models == {"ctr", f"ctr-{engine}", "ctr-fallback-fp32"}
