"""Model repositories of Triton: what the server would check, and what its backends would answer."""

import shutil
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import typer
from cut_models import answer, cut_contents, request
from google.protobuf import text_format
from sample_run import SampleRun, expectation, make_run
from triton_rules import check_repository, check_session, infer, open_session, parameters, pb
from typer.testing import CliRunner

from loka_onnx.bundle.format.files import read_sample, verify_bundle
from loka_onnx.bundle.triton import RECORD_NAME, TritonRepository, export_triton
from loka_onnx.bundle.writer import BundleEngine, write_bundle
from loka_onnx.cli.bundle import export_triton as export_triton_command
from loka_onnx.core import serde
from loka_onnx.core.digests import digest_file
from loka_onnx.core.manifest import Manifest
from loka_onnx.engines.triton.models import DATA_TYPES, Symbol, TritonOptions, entries, render
from loka_onnx.errors import BundleInvalid, ConfigError, OutputError
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


@pytest.fixture
def written(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository, tmp_path / "repository"))


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


def test_what_cannot_be_served_is_declined_with_the_reason(repository):
    record = serde.read(TritonRepository, repository / RECORD_NAME)
    (declined,) = record.declined
    assert declined.engine == "rtx-tensorrt_rtx-sm89-fp8-safe"
    assert "does not load engines of TensorRT for RTX" in declined.reason
    assert [model.engine for model in record.models] == [
        "cpu-onnxruntime-cpu-fp32",
        "cpu-onnxruntime-cpu-fp8-safe",
        "fallback-fp32",
    ]
    assert (record.name, record.preferred) == ("ranker", "cpu-onnxruntime-cpu-fp32")


def test_the_bias_of_an_fp8_product_keeps_its_value(sample, tmp_path):
    """BASIC would round it to multiples of the product of the scales, unless a session is told otherwise."""
    run = make_run(tmp_path / "run")
    path = run.contents.root / "engines/cpu-onnxruntime-fp8-safe/engine.onnx"
    weight = np.linspace(-2, 2, 16)[:, None].astype(ml_dtypes.float8_e4m3fn)
    model = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["" : 21]>
    m (float[batch,16] dense) => (float[batch,1] ctr) {
       q = QuantizeLinear(dense, one, zero)  d = DequantizeLinear(q, one, zero)
       w = DequantizeLinear(w8, one, zero)  h = Gemm(d, w, bias)
       r = QuantizeLinear(h, small, zero)  ctr = DequantizeLinear(r, small, zero)
    }""")
    stored = {
        "one": np.float32(1),
        "small": np.float32(0.001),
        "zero": np.zeros((), ml_dtypes.float8_e4m3fn),
        "w8": weight,
        "bias": np.array([0.3], np.float32),
    }
    for name, value in stored.items():
        array = np.asarray(value)
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.initializer.append(
            onnx.helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True)
        )
    onnx.save(model, path)
    rows = np.zeros((8, 16), np.float32)
    rows[:, 0] = np.arange(8) / 64
    exact = rows.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) @ weight.astype(np.float64) + 0.3
    exact = (exact / 0.001).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * 0.001
    engine = replace(run.contents.engines[2].artifact, digest=digest_file(path), bytes=path.stat().st_size)
    contents = replace(
        run.contents,
        engines=(BundleEngine(engine, expectation(exact[:, 0])),),
        sample={"dense": rows},
        fallback=expectation(exact[:, 0]),
    )
    bundle = write_bundle(contents, tmp_path / "bundle")
    export_triton(bundle, tmp_path / "repository", OPTIONS)
    configs = check_repository(tmp_path / "repository")
    found = infer(tmp_path / "repository", configs, FP8, {"dense": rows})["ctr"]
    np.testing.assert_allclose(found, exact, atol=1e-6)
    # With BASIC, the most that the backend could be told, the bias is lost.
    configs[FP8].optimization.graph.level = -1
    lost = infer(tmp_path / "repository", configs, FP8, {"dense": rows})["ctr"]
    assert np.abs(lost - exact).max() > 0.2


def test_the_ensemble_gives_the_expected_outputs(cut_bundle, tmp_path):
    repository = tmp_path / "repository"
    export_triton(cut_bundle, repository, OPTIONS)
    configs = check_repository(repository)
    manifest = verify_bundle(cut_bundle)
    entry = manifest.engines[0]
    rows = read_sample(cut_bundle, manifest, entry)
    for name in ("ranker", "ranker-cpu-onnxruntime-cpu-fp32", "ranker-fallback-fp32"):
        asked = {"x": rows.inputs["x"], "item": rows.inputs["item"][:, None]}
        found = infer(repository, configs, name, asked)["ctr"]
        np.testing.assert_allclose(found, rows.expected["ctr"], rtol=0, atol=entry.tolerance["ctr"])
        other = request(5, seed=7)
        asked = {"x": other["x"], "item": other["item"][:, None]}
        np.testing.assert_allclose(infer(repository, configs, name, asked)["ctr"], answer(other), atol=1e-5)


def test_tables_are_in_a_repository_once(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    bundle = write_bundle(cut_contents(sample, tmp_path / "run", is_external=True), tmp_path / "bundle")
    repository = tmp_path / "repository"
    export_triton(bundle, repository, OPTIONS)
    lookup, fallback = (
        repository / name / "1/tables.bin" for name in ("ranker-lookup", "ranker-fallback-fp32")
    )
    assert lookup.samefile(fallback)
    # A server's files do not change with the bundle's.
    assert not lookup.samefile(bundle / "lookup/tables.bin")
    configs = check_repository(repository)
    asked = request(3)
    found = infer(repository, configs, "ranker", {"x": asked["x"], "item": asked["item"][:, None]})["ctr"]
    np.testing.assert_allclose(found, answer(asked), atol=1e-5)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("nobody", r"the bundle has no engine 'nobody'\n  evidence: it has .*fallback-fp32"),
        ("rtx-tensorrt_rtx-sm89-fp8-safe", r"Triton cannot serve engine 'rtx-.*'\n.*Triton's TensorRT"),
    ],
)
def test_an_engine_that_was_named_must_be_served(bundle, tmp_path, engine, message):
    with pytest.raises(ConfigError, match=message):
        export_triton(bundle, tmp_path / "repository", replace(OPTIONS, engines=(engine,)))
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "'' cannot be the name of a model"),
        ({"name": "a/b"}, "'a/b' cannot be the name of a model"),
        ({"name": ".hidden"}, "cannot be the name of a model"),
        ({"instances": 0}, "0 instances of a model cannot be served"),
        ({"queue_delay_us": -1}, "requests cannot wait -1 µs"),
    ],
)
def test_options_out_of_range_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        replace(OPTIONS, **changed)


def test_a_bundle_that_does_not_verify_is_not_exported(bundle, tmp_path):
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (copy / "plans.json").write_bytes((copy / "plans.json").read_bytes().replace(b"fp8", b"fp9", 1))
    with pytest.raises(BundleInvalid, match=r"file 'plans\.json' was altered"):
        export_triton(copy, tmp_path / "repository", OPTIONS)
    assert not (tmp_path / "repository").exists()


def test_an_old_repository_is_replaced_as_a_whole(written, cut_bundle, tmp_path):
    export_triton(cut_bundle, written, replace(OPTIONS, name="cut"))
    assert {name.partition("-")[0] for name in check_repository(written)} == {"cut"}
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def test_what_is_no_repository_of_ours_is_not_replaced(bundle, written, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other/theirs").mkdir(parents=True)
    (written / "theirs").mkdir()
    for place, evidence in (
        (tmp_path / "file", "it is not a directory"),
        (tmp_path / "other", "it exists and is no repository that this project wrote"),
        (written, "it holds 'theirs', which this project did not write"),
    ):
        with pytest.raises(OutputError, match=evidence):
            export_triton(bundle, place, OPTIONS)
    assert (tmp_path / "other/theirs").is_dir() and (written / "theirs").is_dir()


@pytest.mark.parametrize(
    ("path", "evidence"),
    [
        ("ranker/2/model.onnx", "it holds 'ranker/2', which this project did not write"),
        ("ranker/1/notes.txt", "it holds 'ranker/1/notes.txt', which this project did not write"),
        ("ranker/labels.txt", "it holds 'ranker/labels.txt', which this project did not write"),
        ("ranker/__pycache__/x.py", "it holds 'ranker/__pycache__/x.py', which this project did not write"),
        ("ranker/config.pbtxt", "'ranker/config.pbtxt' was changed after this project wrote it"),
        (f"{FP32}/1/model.onnx", f"'{FP32}/1/model.onnx' was changed after this project wrote it"),
    ],
)
def test_what_a_user_put_into_a_model_is_not_deleted(bundle, written, path, evidence):
    theirs = written / path
    theirs.parent.mkdir(exist_ok=True)
    content = bytearray(theirs.read_bytes()) if theirs.exists() else bytearray(b"theirs")
    content[-1] ^= 1  # of the same size
    theirs.write_bytes(content)
    with pytest.raises(OutputError, match="is in the way") as error:
        export_triton(bundle, written, OPTIONS)
    assert error.value.evidence == evidence
    assert theirs.read_bytes() == content


@pytest.mark.parametrize("path", [FP32, "ranker/config.pbtxt"])
def test_links_of_a_user_are_neither_followed_nor_deleted(bundle, written, tmp_path, path):
    shutil.move(written / path, tmp_path / "elsewhere")
    (written / path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=f"it holds '{path}', which this project did not write"):
        export_triton(bundle, written, OPTIONS)
    assert (written / path).is_symlink()


def test_a_repository_is_not_written_into_its_bundle(bundle):
    for place in (bundle, bundle / "triton"):
        with pytest.raises(OutputError, match="is in the bundle"):
            export_triton(bundle, place, OPTIONS)
    verify_bundle(bundle)


# ---- text format and the verb ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quote"', "back\\slash", "two\nlines\t", "naïve → 100 %", "\0\x7f7"]
)
def test_strings_come_back_as_they_went_in(text):
    written = render((("name", text), *entries("parameters", {"k": (("string_value", text),)})))
    read = text_format.Parse(written, pb.ModelConfig())
    assert read.name == text
    assert read.parameters["k"].string_value == text


def test_messages_numbers_flags_and_repeated_fields_are_read_by_protobuf():
    fields = (
        ("max_batch_size", 7),
        ("version_policy", (("all", ()),)),
        ("input", (("name", "x"), ("data_type", Symbol("TYPE_INT64")), ("dims", 3), ("dims", -1))),
        ("input", (("name", "y"), ("reshape", ()))),
        ("optimization", (("cuda", (("graphs", True), ("busy_wait_events", False))),)),
    )
    read = text_format.Parse(render(fields), pb.ModelConfig())
    assert read.max_batch_size == 7
    assert read.version_policy.HasField("all")
    assert [each.name for each in read.input] == ["x", "y"]
    assert (read.input[0].data_type, list(read.input[0].dims)) == (pb.TYPE_INT64, [3, -1])
    assert read.input[1].HasField("reshape")
    assert (read.optimization.cuda.graphs, read.optimization.cuda.busy_wait_events) == (True, False)


def test_maps_are_sorted_so_that_equal_values_give_equal_text():
    one, other = ({"b": 1, "a": 2}, {"a": 2, "b": 1})
    assert render(entries("m", one)) == render(entries("m", other))
    assert render(entries("m", one)).index('"a"') < render(entries("m", one)).index('"b"')


def test_every_element_type_is_one_of_the_servers():
    assert set(DATA_TYPES.values()) <= set(pb.DataType.keys())


def test_the_verb_says_what_it_wrote_and_what_it_left_out(sample, tmp_path):
    app = typer.Typer()
    app.command("export-triton")(export_triton_command)
    app.callback()(lambda: None)
    bundle = write_bundle(sample.contents, tmp_path / "nightly")
    place = tmp_path / "repository"
    done = CliRunner().invoke(app, ["export-triton", str(bundle), str(place), "--instances", "3"])
    assert done.exit_code == 0, done.output
    assert "nightly: engine 'cpu-onnxruntime-cpu-fp32'\n" in done.output
    assert "  nightly-fallback-fp32 (onnxruntime)\n" in done.output
    assert "– rtx-tensorrt_rtx-sm89-fp8-safe: Triton's TensorRT backend does not load" in done.output
    engine = "cpu-onnxruntime-cpu-fp8-safe"
    flags = ["--name", "ctr", "--engine", engine, "--queue-delay-us", "0"]
    done = CliRunner().invoke(app, ["export-triton", str(bundle), str(place), *flags])
    assert done.exit_code == 0, done.output
    assert {path.name for path in place.iterdir() if path.is_dir()} == {
        "ctr",
        f"ctr-{engine}",
        "ctr-fallback-fp32",
    }
