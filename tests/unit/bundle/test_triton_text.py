"""Text format against the parser of protobuf, and the verb."""

import pytest
import typer
from triton_rules import pb
from typer.testing import CliRunner

from loka_onnx.bundle.writer import write_bundle
from loka_onnx.cli.bundle import export_triton as export_triton_command
from loka_onnx.engines.triton.models import DATA_TYPES
from loka_onnx.engines.triton.text_format import Symbol, entries, render

text_format = pytest.importorskip(
    "google.protobuf.text_format", reason="needs protobuf: pip install protobuf"
)


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


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command("export-triton")(export_triton_command)
    made.callback()(lambda: None)
    return made


def test_the_verb_says_what_it_wrote_and_what_it_left_out(app, sample, tmp_path):
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
