"""MIGraphX's calls, and sessions of an engine's document; neither a GPU nor the library is needed."""

import ctypes
import gc
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loka_onnx.core import serde
from loka_onnx.engines.migraphx import api
from loka_onnx.engines.migraphx import session as migraphx_session
from loka_onnx.engines.migraphx.session import (
    MigraphxEngine,
    MigraphxSession,
    ProgramFile,
    ProgramInput,
    ProgramOutput,
    open_migraphx,
    read_engine,
    why_not_run,
)
from loka_onnx.errors import EngineError, MissingPackage, ModelError

DOCUMENT = MigraphxEngine(
    "gfx942",
    "2.15.0",
    (ProgramFile(4, "rows-4.mxr"), ProgramFile(16, "rows-16.mxr")),
    (ProgramInput("x", "float32", (2,)), ProgramInput("ids", "int64", ())),
    (ProgramOutput("sum", True), ProgramOutput("version", False)),
)


class FakeProgram:
    """Sums the rows of ``x`` and adds ``ids``; takes exactly the batch that it was compiled for."""

    def __init__(self, rows: int, calls: list[int], columns: int = 2, outputs: int = 2) -> None:
        self.rows, self.calls, self.columns, self.outputs = rows, calls, columns, outputs

    def is_compiled(self) -> bool:
        return True

    def get_parameter_shapes(self) -> dict[str, Any]:
        def shape(*lens: int) -> SimpleNamespace:
            return SimpleNamespace(type_string=lambda: "float_type", lens=lambda: list(lens))

        return {"x": shape(self.rows, self.columns), "ids": shape(self.rows)}

    def run(self, arguments: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        x, ids = arguments["x"], arguments["ids"]
        assert (x.dtype, x.shape) == (np.float32, (self.rows, 2))
        assert (ids.dtype, ids.shape) == (np.int64, (self.rows,))
        self.calls.append(self.rows)
        return [(x.sum(axis=1) + ids).astype(np.float32), np.array([7.0])][: self.outputs]


def library(calls: list[int], version: str = "2.15.0", **others: Any) -> SimpleNamespace:
    def load(path: str) -> FakeProgram:
        return FakeProgram(int(Path(path).stem.removeprefix("rows-")), calls, **others)

    return SimpleNamespace(__version__=version, parse_onnx=None, load=load, argument=lambda array: array)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    serde.write(DOCUMENT, tmp_path / "engine.json")
    return tmp_path / "engine.json"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an MI300X and the library."""
    monkeypatch.setattr(migraphx_session, "list_amd_architectures", lambda: ("gfx942",))
    monkeypatch.setattr(migraphx_session, "import_migraphx", lambda: library([]))


def request(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.arange(2.0 * rows).reshape(rows, 2), "ids": np.arange(rows, dtype=np.int32)}


@pytest.mark.parametrize(
    ("rows", "programs"), [(1, [4]), (4, [4]), (9, [16]), (20, [16, 4]), (40, [16, 16, 16])]
)
def test_a_batch_is_converted_and_served_by_programs(engine: Path, rows: int, programs: list[int]) -> None:
    calls: list[int] = []
    with MigraphxSession(library(calls), engine, DOCUMENT) as session:
        answer = session.run(request(rows))
    np.testing.assert_array_equal(answer["sum"], request(rows)["x"].sum(axis=1) + np.arange(rows))
    np.testing.assert_array_equal(answer["version"], [7.0])
    assert calls == programs


def test_a_request_of_another_form_is_refused(engine: Path) -> None:
    session = MigraphxSession(library([]), engine, DOCUMENT)
    with pytest.raises(EngineError, match=r"input 'ids' does not fit(?s:.*)it is missing"):
        session.run({"x": np.zeros((1, 2))})
    with pytest.raises(EngineError, match=r"'x'(?s:.*)shape \(1, 3\); a row has shape \(2,\)"):
        session.run({"x": np.zeros((1, 3)), "ids": np.zeros(1)})


def test_a_program_that_takes_something_else_is_not_run(engine: Path) -> None:
    """The library would read beyond the buffer."""
    with pytest.raises(EngineError, match=r"rows-4\.mxr: a program takes something else(?s:.*)\(4, 3\)"):
        MigraphxSession(library([], columns=3), engine, DOCUMENT)


def test_a_program_with_other_outputs_is_refused(engine: Path) -> None:
    session = MigraphxSession(library([], outputs=1), engine, DOCUMENT)
    with pytest.raises(EngineError, match=r"another number of outputs(?s:.*)1 results, outputs sum, version"):
        session.run(request(2))


def test_a_closed_session_has_freed_its_programs(engine: Path) -> None:
    session = MigraphxSession(library([]), engine, DOCUMENT)
    session.close()
    with pytest.raises(KeyError):
        session.run(request(2))


@pytest.mark.usefixtures("host")
class TestOpening:
    def test_the_right_engine_opens(self, engine: Path) -> None:
        for version in ("", "2.15.0"):
            with open_migraphx(engine, "gfx942", version) as session:
                assert session.run(request(3))["sum"].shape == (3,)

    def test_another_version_or_architecture_is_refused(self, engine, monkeypatch):
        with pytest.raises(EngineError, match=r"built by 2\.16\.0, this host has 2\.15\.0"):
            open_migraphx(engine, "gfx942", "2.16.0")
        with pytest.raises(EngineError, match=r"asked for gfx950, the engine is for gfx942"):
            open_migraphx(engine, "gfx950")
        monkeypatch.setattr(migraphx_session, "import_migraphx", lambda: library([], version="2.16.0"))
        with pytest.raises(EngineError, match=r"built by 2\.15\.0, this host has 2\.16\.0"):
            open_migraphx(engine, "gfx942")

    def test_a_host_without_the_gpu_is_refused(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", tuple)
        with pytest.raises(EngineError, match="is for gfx942 and this host has no AMD GPU"):
            open_migraphx(engine, "gfx942")
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", lambda: ("gfx1100", "gfx942"))
        assert why_not_run("gfx942").endswith("gfx1100, gfx942, the first of which it would run on")
        assert why_not_run("gfx1100") == ""

    def test_the_reference_target_runs_anywhere(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", tuple)
        serde.write(replace(DOCUMENT, architecture="cpu"), engine)
        open_migraphx(engine, "cpu").close()


def test_a_document_survives_its_file_and_something_else_is_refused(engine: Path) -> None:
    assert read_engine(engine) == DOCUMENT
    assert json.loads(engine.read_text())["schema"] == "loka-onnx/migraphx-engine/1"
    engine.write_text("{}")
    with pytest.raises(EngineError, match=r"no engine of MIGraphX(?s:.*)unknown schema"):
        read_engine(engine)


@pytest.mark.parametrize("file", ["../rows-4.mxr", "/rows-4.mxr", "", ".."])
def test_programs_outside_the_directory_are_refused(engine: Path, file: str) -> None:
    serde.write(replace(DOCUMENT, programs=(ProgramFile(4, file),)), engine)
    with pytest.raises(EngineError, match="a program outside its directory"):
        read_engine(engine)


class Shape:
    def __init__(self, type: str, lens: list[int], strides: list[int]) -> None:
        self.type_string, self.lens, self.strides = (lambda: type), (lambda: lens), (lambda: strides)


class Argument:
    """As the vendor's: a pointer into memory that somebody else owns."""

    def __init__(self, shape: Shape, address: int, size: int) -> None:
        self.shape, self.address, self.size = shape, address, size

    def data_ptr(self) -> int:
        return self.address

    @property
    def bits(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


class Instruction:
    def __init__(self, name: str, inputs: list[Any], shape: Shape | None = None, literal: Any = None) -> None:
        self.name, self.inputs, self.op = (lambda: name), (lambda: inputs), (lambda: f"op {name}")
        self.shape, self.get_literal = (lambda: shape), (lambda: literal)


class Module:
    """Keeps what is added; copies literals, as the vendor's does."""

    def __init__(self, instructions: list[Instruction] | None = None, text: str = "") -> None:
        self.instructions, self.text = list(instructions or []), text

    def __iter__(self):
        return iter(self.instructions)

    def __str__(self) -> str:
        return self.text

    def _add(self, *what: Any) -> tuple[Any, ...]:
        self.instructions.append(what)
        return what

    def add_literal(self, argument: Argument) -> Any:
        return self._add("literal", argument.shape.type_string(), argument.shape.strides(), argument.bits)

    def add_parameter(self, name: str, shape: Shape) -> Any:
        return self._add("parameter", name, shape.lens())

    def add_instruction(self, op: str, inputs: list[Any]) -> Any:
        return self._add(op, inputs)

    def add_return(self, inputs: list[Any]) -> Any:
        return self._add("return", inputs)


class Program:
    def __init__(self, main: Module | None = None) -> None:
        self.main = main or Module()

    def get_main_module(self) -> Module:
        return self.main


def vendor(**others: Any) -> SimpleNamespace:
    def argument_from_pointer(shape: Shape, address: int) -> Argument:
        return Argument(shape, address, int(np.prod(shape.lens())))

    def get_target(name: str) -> str:
        if name != "ref":
            raise RuntimeError("Dynamic loading or symbol lookup failed with libmigraphx_gpu.so\nmore")
        return f"target {name}"

    parts = {"shape": Shape, "argument_from_pointer": argument_from_pointer, "program": Program}
    return SimpleNamespace(**{**parts, "get_target": get_target, **others})


def raising(said: str) -> Any:
    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(said)

    return fails


def literal(type: str, values: np.ndarray[Any, Any], held: list[Any]) -> Instruction:
    held.append(values)
    strides = [each // values.itemsize for each in values.strides]
    shape = Shape(type, list(values.shape), strides)
    return Instruction("@literal", [], shape, Argument(shape, values.ctypes.data, values.nbytes))


class TestRereading:
    def parsed(self, held: list[Any]) -> tuple[Program, np.ndarray[Any, Any]]:
        bits = np.array([[0x7E, 0x80, 0x01], [0xFE, 0x38, 0x00]], np.uint8)
        weight = literal("fp8e4m3fnuz_type", bits, held)
        scale = literal("float_type", np.array([0.5], np.float32), held)
        x = Instruction("@param", [], Shape("float_type", [4, 2], [2, 1]))
        other = Instruction("@param", [], Shape("float_type", [4], [1]))
        dequantized = Instruction("dequantizelinear", [weight, scale])
        dot = Instruction("dot", [x, dequantized])
        text = (
            'module: "main"\n'
            "x = @param:x -> float_type, {4, 2}, {2, 1}\n"
            "main:second = @param:main:second -> float_type, {4}, {1}\n"
        )
        everything = [weight, scale, x, other, dequantized, dot, Instruction("@return", [dot, other])]
        return Program(Module(everything, text)), bits

    def test_only_the_type_of_fp8_constants_changes(self) -> None:
        held: list[Any] = []
        program, bits = self.parsed(held)
        main = api.reread_float8(vendor(), program).get_main_module()
        weight, scale, x, other, dequantized, dot, returned = main.instructions
        # Every bit stays, -0 (NaN in E4M3FNUZ) and the strides included.
        assert weight == ("literal", "fp8e4m3fn_type", [3, 1], bits.tobytes())
        assert scale == ("literal", "float_type", [1], np.float32(0.5).tobytes())
        assert (x, other) == (("parameter", "x", [4, 2]), ("parameter", "main:second", [4]))
        assert dequantized == ("op dequantizelinear", [weight, scale])
        assert dot == ("op dot", [x, dequantized])
        assert returned == ("return", [dot, other])

    def test_names_of_onnx_nodes_are_handed_on_where_the_release_takes_them(self, monkeypatch):
        def add_instruction(self: Module, op: str, inputs: list[Any], debug_symbols: Any = None) -> Any:
            """add_instruction(op, args, debug_symbols: list = [])"""
            return self._add(op, debug_symbols)

        monkeypatch.setattr(Module, "add_instruction", add_instruction)
        program, _ = self.parsed([])
        for each in program.main.instructions:
            each.get_debug_symbols = {"fc0"}.copy if each.name() == "dot" else set  # type: ignore[attr-defined]
        main = api.reread_float8(vendor(), program).get_main_module()
        assert [added for added in main.instructions if added[0].startswith("op ")] == [
            ("op dequantizelinear", []),
            ("op dot", ["fc0"]),
        ]

    def test_a_release_that_cannot_be_walked_says_so(self) -> None:
        program = Program(Module([SimpleNamespace(shape=None, op=None)]))  # type: ignore[list-item]
        with pytest.raises(EngineError, match=r"has no name, inputs, get_literal(?s:.*)2\.16"):
            api.reread_float8(vendor(), program)

    def test_control_flow_is_refused(self) -> None:
        with pytest.raises(EngineError, match=r"control flow cannot take E4M3FN(?s:.*)it has if"):
            api.reread_float8(vendor(), Program(Module([Instruction("if", [])])))


class TestParsing:
    def test_every_dimension_is_given(self, tmp_path: Path) -> None:
        def parse(filename: str, **options: Any) -> dict[str, Any]:
            """parse_onnx(filename: str, map_input_dims: dict = {})"""
            return {"filename": filename, **options}

        asked = api.parse_onnx(vendor(parse_onnx=parse), tmp_path / "m.onnx", {"x": (8, 64)})
        assert asked == {"filename": str(tmp_path / "m.onnx"), "map_input_dims": {"x": [8, 64]}}

    def test_names_are_asked_for_where_the_release_has_them(self) -> None:
        def parse(filename: str, **options: Any) -> dict[str, Any]:
            """parse_onnx(filename: str, use_debug_symbols: bool = False)"""
            return options

        asked = api.parse_onnx(vendor(parse_onnx=parse), Path("m.onnx"), {})
        assert asked == {"map_input_dims": {}, "use_debug_symbols": True}

    def test_a_refusal_is_a_model_error(self) -> None:
        parse = raising("get_type: Prototensor data type 17 not supported\n  at ...")
        with pytest.raises(ModelError, match=r"m\.onnx: (?s:.*)type 17 not supported\n"):
            api.parse_onnx(vendor(parse_onnx=parse), Path("m.onnx"), {})


class TestCompiling:
    @pytest.mark.parametrize("tune", [False, True])
    def test_it_is_told_how(self, tune: bool) -> None:
        asked: dict[str, Any] = {}
        program = SimpleNamespace(compile=lambda target, **options: asked.update(options, target=target))
        api.compile_program(vendor(), program, "ref", exhaustive_tune=tune, fast_math=not tune)
        options = {"offload_copy": True, "fast_math": not tune, "exhaustive_tune": tune}
        assert asked == {"target": "target ref", **options}

    def test_a_missing_target_is_an_engine_error(self) -> None:
        said = r"target 'gpu': MIGraphX could not compile(?s:.*)failed with libmigraphx_gpu\.so\n"
        with pytest.raises(EngineError, match=said):
            api.compile_program(vendor(), SimpleNamespace(compile=None), "gpu")
        assert api.why_no_target(vendor(), "ref") == ""
        assert api.why_no_target(vendor(), "gpu").endswith("failed with libmigraphx_gpu.so")


class TestRunning:
    @pytest.mark.slow
    def test_buffers_live_until_the_run_returns(self) -> None:
        """The vendor's argument points to the buffer and does not keep it."""
        alive: list[weakref.ref[Any]] = []

        def argument(array: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...]]:
            assert array.flags.c_contiguous
            alive.append(weakref.ref(array))
            return array.ctypes.data, array.shape

        def run(arguments: dict[str, Any]) -> list[Any]:
            gc.collect()
            assert all(each() is not None for each in alive)
            address, shape = arguments["x"]
            read = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), shape)
            return [read * 2]

        x = np.arange(6, dtype=np.float32).reshape(3, 2).T
        (got,) = api.run_program(vendor(argument=argument), SimpleNamespace(run=run), {"x": x})
        np.testing.assert_array_equal(got, x * 2)
        gc.collect()
        assert [each() for each in alive] == [None]

    def test_outputs_are_copies(self) -> None:
        owned = np.ones(3, np.float32)
        program = SimpleNamespace(run=lambda arguments: [owned])
        (got,) = api.run_program(vendor(argument=lambda array: array), program, {})
        owned[:] = 0
        np.testing.assert_array_equal(got, np.ones(3))

    def test_a_failure_is_an_engine_error(self) -> None:
        program = SimpleNamespace(run=raising("eval: Parameter not found: x"))
        with pytest.raises(EngineError, match=r"failed on a batch(?s:.*)Parameter not found: x"):
            api.run_program(vendor(), program, {})


class TestLoading:
    def test_another_file_version_is_an_engine_error(self) -> None:
        load = raising("PROGRAM: Program version mismatch")
        with pytest.raises(EngineError, match=r"rows-8\.mxr: MIGraphX does not load(?s:.*)version mismatch"):
            api.load_program(vendor(load=load), Path("rows-8.mxr"))

    def test_a_program_that_was_not_compiled_is_refused(self) -> None:
        program = SimpleNamespace(is_compiled=lambda: False)
        with pytest.raises(EngineError, match="never compiled"):
            api.load_program(vendor(load=lambda path: program), Path("rows-8.mxr"))


class TestImporting:
    def test_the_placeholder_on_pypi_is_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        placeholder = SimpleNamespace(__file__="/site-packages/migraphx/__init__.py")
        monkeypatch.setitem(sys.modules, "migraphx", placeholder)
        with pytest.raises(MissingPackage, match=r"placeholder(?s:.*)pip uninstall migraphx"):
            api.import_migraphx()
