"""What is asked of MIGraphX's module, by a stand-in that keeps it; the module is not needed."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loka_onnx.engines.migraphx import api
from loka_onnx.errors import EngineError, MissingPackage, ModelError


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

    def test_names_of_onnx_nodes_are_handed_on_where_the_release_takes_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
