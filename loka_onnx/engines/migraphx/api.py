"""Every call of MIGraphX's Python module.

The module is a parameter of each function, which makes the calls testable without it. Sources: MIGraphX
Python reference, and ``src/py/migraphx_py.cpp`` of ROCm/AMDMIGraphX for what the reference omits (walking a
module, pointers to literals). Releases 2.15 and 2.16.

The PyPI packages `migraphx` and `migraphx-libs` are placeholders: the library comes with ROCm.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.digests import digest_file
from loka_onnx.errors import EngineError, MissingPackage, ModelError, line_of

GPU, REFERENCE = "gpu", "ref"
PROBLEM_CACHE = "MIGRAPHX_PROBLEM_CACHE"
"""Environment variable with the file in which exhaustive tuning keeps its results."""
MAPS = Path("/proc/self/maps")
"""Linux's list of the files that a process has mapped."""
DEBUG_SYMBOLS = "use_debug_symbols"
_SYMBOLS = "debug_symbols"
_CONTROL_FLOW = frozenset({"if", "loop", "select_module", "run_on_target", "group"})
_PARAMETER = re.compile(r"^\s*\S+ = @param:(?P<name>.+?) -> ", re.MULTILINE)
INSTALL = "install ROCm with its package `migraphx`"


def import_migraphx() -> Any:
    """Import `migraphx`; a `MissingPackage` where it is not installed, or an empty placeholder."""
    with MissingPackage("E0839 MIGraphX is not installed", remedy=INSTALL).in_place_of(ImportError, OSError):
        module = importlib.import_module("migraphx")
    if not hasattr(module, "parse_onnx"):
        raise MissingPackage(
            "E0840 MIGraphX is not installed",
            evidence=f"'{getattr(module, '__file__', 'migraphx')}' is the placeholder of that name on PyPI",
            remedy=f"pip uninstall migraphx migraphx-libs, and {INSTALL}",
        )
    return module


def version_of(migraphx: Any) -> str:
    """Version of the library; unreleased builds (``dev``) also get its digest."""
    reported = str(getattr(migraphx, "__version__", "") or "unknown")
    if reported not in {"dev", "unknown"}:
        return reported
    library = _library_file(migraphx)
    return reported if library is None else f"{reported}+{digest_file(library)[:12]}"


def _library_file(migraphx: Any) -> Path | None:
    """Return the shared library that the process has loaded; elsewhere, the module's own file."""
    with suppress(OSError):
        mapped = (line.split(maxsplit=5)[5:] for line in MAPS.read_text(encoding="utf-8").splitlines())
        for path in (Path(path) for (path,) in filter(None, mapped)):
            if path.name.startswith("libmigraphx.so") and path.is_file():
                return path
    file = Path(getattr(migraphx, "__file__", None) or "")
    return file if file.is_file() else None


def why_no_target(migraphx: Any, target: str) -> str:
    """Reason why the module cannot compile for a target; empty when it can."""
    try:
        migraphx.get_target(target)
    except RuntimeError as error:
        return f"MIGraphX has no target '{target}': {line_of(error)}"
    return ""


def parse_onnx(migraphx: Any, model: Path, dims: Mapping[str, Sequence[int]]) -> Any:
    """Parse a model of the dialect for one batch size, with every axis of every input in `dims`: a range
    fails at the parse of LayerNormalization and Q/DQ, and a dynamic axis silently becomes 1. Instructions
    carry the names of ONNX nodes where this release supports it. Raises ModelError on a refusal.
    """
    options: dict[str, Any] = {}
    if DEBUG_SYMBOLS in (migraphx.parse_onnx.__doc__ or ""):
        options[DEBUG_SYMBOLS] = True
    with ModelError(
        "E0841 MIGraphX refuses the model",
        where=str(model),
        remedy="keep the site in the base precision, or choose another backend",
    ).in_place_of(RuntimeError, words=line_of):
        return migraphx.parse_onnx(
            os.fspath(model), map_input_dims={name: list(shape) for name, shape in dims.items()}, **options
        )


def reread_float8(migraphx: Any, program: Any) -> Any:
    """Rebuild a program with FP8 constants retyped from E4M3FNUZ to E4M3FN, bits unchanged. All other types
    follow from the inputs'; a Q takes its type from its zero point. Names of ONNX nodes are lost in releases
    whose `add_instruction` does not take them. An `EngineError` where programs cannot be walked.
    """
    source = program.get_main_module()
    instructions = list(source)
    _check_walkable(instructions)
    # Release 2.15 only prints the names of parameters, in the order of the instructions.
    names = iter(match["name"] for match in _PARAMETER.finditer(str(source)))
    result = migraphx.program()
    main = result.get_main_module()
    passes_names = _SYMBOLS in (main.add_instruction.__doc__ or "")
    rebuilt: dict[Any, Any] = {}
    for instruction in instructions:
        kind, inputs = instruction.name(), [rebuilt[each] for each in instruction.inputs()]
        if kind == "@literal":
            rebuilt[instruction] = _add_literal(migraphx, main, instruction)
        elif kind == "@param":
            rebuilt[instruction] = main.add_parameter(next(names), instruction.shape())
        elif kind == "@return":
            rebuilt[instruction] = main.add_return(inputs)
        else:
            names_of = {}
            if passes_names and hasattr(instruction, "get_debug_symbols"):
                names_of[_SYMBOLS] = sorted(instruction.get_debug_symbols())
            rebuilt[instruction] = main.add_instruction(instruction.op(), inputs, **names_of)
    return result


def _add_literal(migraphx: Any, main: Any, instruction: Any) -> Any:
    value, shape = instruction.get_literal(), instruction.shape()
    if shape.type_string() == "fp8e4m3fnuz_type":
        like = migraphx.shape(type="fp8e4m3fn_type", lens=shape.lens(), strides=shape.strides())
        # The pointer is into `value`, which lives until the literal is copied.
        return main.add_literal(migraphx.argument_from_pointer(like, value.data_ptr()))
    return main.add_literal(value)


def _check_walkable(instructions: Sequence[Any]) -> None:
    needed = ("name", "inputs", "shape", "op", "get_literal")
    missing = [name for name in needed if instructions and not hasattr(instructions[0], name)]
    if missing:
        raise EngineError(
            "E0842 this release of MIGraphX cannot take E4M3FN: its programs cannot be walked",
            evidence=f"an instruction has no {', '.join(missing)}",
            remedy="install MIGraphX 2.16 or later, or plan this device without FP8",
        )
    inner = sorted({each.name() for each in instructions} & _CONTROL_FLOW)
    if inner:
        raise EngineError(
            "E0843 a program with control flow cannot take E4M3FN", evidence=f"it has {', '.join(inner)}"
        )


def compile_program(
    migraphx: Any, program: Any, target: str, *, exhaustive_tune: bool = False, fast_math: bool = True
) -> None:
    """Compile a program in place; target ``gpu`` requires a GPU here. A failure is an `EngineError`."""
    with EngineError(
        "E0844 MIGraphX could not compile the program",
        where=f"target '{target}'",
        remedy="the log of the build has every message",
    ).in_place_of(RuntimeError, words=line_of):
        program.compile(
            migraphx.get_target(target),
            offload_copy=True,
            fast_math=fast_math,
            exhaustive_tune=exhaustive_tune,
        )


def save_program(migraphx: Any, program: Any, path: Path) -> None:
    """Write a compiled program."""
    migraphx.save(program, os.fspath(path))


def load_program(migraphx: Any, path: Path) -> Any:
    """Read a compiled program; an `EngineError` where MIGraphX does not load it."""
    with EngineError(
        "E0845 MIGraphX does not load the program",
        where=str(path),
        remedy="build it again: a program belongs to one version of MIGraphX and one GPU architecture",
    ).in_place_of(RuntimeError, words=line_of):
        program = migraphx.load(os.fspath(path))
    if not program.is_compiled():
        raise EngineError(
            "E0846 the program was never compiled", where=str(path), remedy="build the engine again"
        )
    return program


def parameters_of(program: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a program's parameters by name."""
    shapes = program.get_parameter_shapes()
    return {name: tuple(int(n) for n in shape.lens()) for name, shape in shapes.items()}


def run_program(
    migraphx: Any, program: Any, inputs: Mapping[str, npt.NDArray[Any]]
) -> list[npt.NDArray[Any]]:
    """Run a compiled program on every parameter, in its type and shape; return copies of its outputs.
    `migraphx.argument` does not keep inputs alive: they are held here. Raises EngineError.
    """
    held = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
    arguments = {name: migraphx.argument(value) for name, value in held.items()}
    try:
        return [np.array(result) for result in program.run(arguments)]
    except RuntimeError as error:
        raise EngineError("E0847 MIGraphX failed on a batch", evidence=line_of(error)) from error
    finally:
        del arguments, held
