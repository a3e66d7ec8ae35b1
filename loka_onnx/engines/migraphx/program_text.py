"""Parser of a printed MIGraphX program.

One line per instruction (``instruction::print`` in ``src/instruction.cpp`` of ROCm/AMDMIGraphX)::

    module: "main"
    x = @param:x -> float_type, {8, 64}, {64, 1}
    @1 = @literal{ ... } -> fp8e4m3fnuz_type, {64, 32}, {32, 1}
    @5 = quant_dot(@4,@1) -> float_type, {8, 32}, {32, 1}
    @7 = gpu::code_object[code_object=4832,symbol_name=mlir_quant_dot_mul,…](@4,@1,@6) -> float_type, …  # fc0

Name, operator with its attributes, inputs, element type, lengths and strides; newer releases add the names of
the instruction's ONNX nodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SHAPE = re.compile(r" -> (?P<type>\w+), \{(?P<lengths>[\d, ]*)\}, \{[\d, ]*\}(?:, target_id=\d+)?$")
_ASSIGNED = re.compile(r"^\s*(?P<name>\S+) = (?P<operation>\S.*)$")
_INPUTS = re.compile(r"\((?P<inputs>[^()]*)\)(?:, \[[^\]]*\])?$")
_SYMBOLS = re.compile(r"(?P<line>.*\})\s+# (?P<symbols>.+)$")
_KERNEL = re.compile(r"symbol_name=(?P<kernel>\w+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        operation: Operator, for example ``quant_dot`` or ``gpu::code_object``.
        type: Element type of its result, for example ``fp8e4m3fn``; empty where not printed.
        symbols: Names of its ONNX nodes, where the release prints them.
    """

    name: str
    operation: str
    attributes: str
    inputs: tuple[str, ...]
    type: str
    shape: tuple[int, ...]
    symbols: tuple[str, ...] = ()

    @property
    def operator(self) -> str:
        """Operator without its target: ``dot`` of ``ref::dot``, ``dot`` and ``gpu::dot``."""
        return self.operation.rpartition("::")[2]

    @property
    def kernel(self) -> str:
        """Kernel name of a code object; else operator and attributes."""
        found = _KERNEL.search(self.attributes)
        return found["kernel"] if found else f"{self.operation}{self.attributes}"

    @property
    def label(self) -> str:
        """Readable name: ``quant_dot @5``."""
        found = _KERNEL.search(self.attributes)
        return f"{found['kernel'] if found else self.operation} {self.name}"


@dataclass(frozen=True)
class ProgramText:
    """A printed program: its instructions by name, in order."""

    instructions: Mapping[str, Instruction]

    def inputs_of(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """Printed inputs of an instruction."""
        known = self.instructions
        return tuple(known[name] for name in instruction.inputs if name in known)

    @property
    def types(self) -> frozenset[str]:
        """Element types of all results."""
        return frozenset(each.type for each in self.instructions.values() if each.type)


def parse_program(text: str) -> ProgramText:
    """Parse a printed program; lines without an instruction are skipped."""
    found = (_parse_line(line) for line in text.splitlines())
    return ProgramText({each.name: each for each in found if each is not None})


def _parse_line(line: str) -> Instruction | None:
    symbols: tuple[str, ...] = ()
    with_symbols = _SYMBOLS.match(line)
    if with_symbols:
        line = with_symbols["line"]
        symbols = tuple(each.strip() for each in with_symbols["symbols"].split(",") if each.strip())
    assigned = _ASSIGNED.match(line.rstrip())
    if assigned is None:
        return None
    operation = assigned["operation"]
    shape = _SHAPE.search(operation)
    kind, lengths = "", ""
    if shape:
        kind, lengths = shape["type"].removesuffix("_type"), shape["lengths"]
        operation = operation[: shape.start()]
    inputs: tuple[str, ...] = ()
    # A literal's values and a parameter's name are no inputs.
    read = None if operation.startswith(("@literal", "@param")) else _INPUTS.search(operation)
    if read:
        inputs = tuple(each.strip() for each in read["inputs"].split(",") if each.strip())
        operation = operation[: read.start()]
    bare, bracket, rest = operation.partition("[")
    return Instruction(
        assigned["name"],
        bare.partition("{")[0],
        bracket + rest,
        inputs,
        kind,
        tuple(int(each) for each in lengths.split(",") if each.strip()),
        symbols,
    )
