r"""Reads the compiled graph that a TensorRT engine carries as text.

An engine built with `ProfilingVerbosity.DETAILED` holds, among its binary parts, the program that the graph
compiler produced; it is the only account of what is multiplied in which type that needs no GPU. Its form
(seen in TensorRT for RTX 1.7.1)::

    header {
      version = 5
      tf32=0
      accelerators={sm89 }
    }
    descriptors {
      tensor={ … const_payload_size=16384 dims={ 64 256 } name="Wq_constantFP8" … type=fp8_e4m3 }
      sub_tensor={ base="x.1" … dims={ … } name="x^deref" … type=fp8_e4m3 }
    }
    main {
     label bb1:
      fully_connected={ name="fc1" output={"b" } input={"a" "Wq_constantFP8" … } … layers="[ONNX Layer: f]" }
      function={ name=__myl_AddRelu … input_args={ "b" … } output_args={ "out.1" } … layers="…" }
      runtime_fusion={ name=__myl_CastMulFc input_args={ … } output_args={ … } layers="…" backbone=gemm }
    }

`layers` names the ONNX nodes behind an operation, separated by the control character 0x1f. A `runtime_fusion`
is a kernel generated on the device; what it computes is a second such text in the same engine (for
accelerator ``*``), where its products appear as `fully_connected` again.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loka_onnx.errors import EngineError

SECTION_START = re.compile(rb"header \{\s+version ?= ?\d+\s")
TEXT = re.compile(rb"[\t\n\r\x1f\x20-\x7e\x80-\xff]+")
OPENING = re.compile(r"\s*(\w+)\s*\{")
TOKEN = re.compile(r'"(?P<string>[^"]*)"|(?P<mark>[{}=])|(?P<word>[^\s{}="]+)')
ANY_ARCHITECTURE = "*"
LAYER = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f|$|\[ONNX Layer: )", re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the compiled graph, whose names are other than in the ONNX graph: its element type as the
    compiler spells it (``fp8_e4m3``, ``bf16``, ``half``, ``float``, …), its size as a constant of the engine,
    else 0, and the tensor of which it is a view (``sub_tensor``), or its own name.
    """

    type: str
    constant_bytes: int
    base: str


@dataclass(frozen=True)
class Operation:
    """An operation (``fully_connected``, ``function``, …); `layers` are its ONNX nodes."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled program; `architectures` is ``*`` in the program of a fusion."""

    architectures: tuple[str, ...]
    settings: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    operations: tuple[Operation, ...]

    def type_of(self, tensor: str) -> str:
        """Element type of a tensor; ``unknown`` when it is not described."""
        return self.tensors[tensor].type if tensor in self.tensors else "unknown"

    def base_of(self, tensor: str) -> str:
        """Tensor that holds the values of this one: itself, or the base of a view."""
        return self.tensors[tensor].base if tensor in self.tensors else tensor


@dataclass
class _Block:
    """A ``{…}``: entries ``key=value`` in order, and bare items."""

    entries: list[tuple[str, str | _Block]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)

    def text(self, key: str) -> str:
        return next((v for k, v in self.entries if k == key and isinstance(v, str)), "")

    def names(self, *keys: str) -> tuple[str, ...]:
        """Items of the first of these keys that is present and is a block."""
        blocks = (v for key in keys for k, v in self.entries if k == key and isinstance(v, _Block))
        return next((tuple(block.items) for block in blocks), ())


def read_compiled_graphs(engine: Path) -> tuple[CompiledGraph, ...]:
    """Parse every compiled graph of a serialized engine; empty when there is none."""
    return tuple(map(parse_compiled_graph, compiled_graph_texts(engine)))


def compiled_graph_texts(engine: Path) -> tuple[str, ...]:
    """Extract the text of every compiled graph from a serialized engine."""
    with engine.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        matches = (TEXT.match(data, start.start()) for start in SECTION_START.finditer(data))
        return tuple(match.group().decode("latin-1") for match in matches if match is not None)


def parse_compiled_graph(text: str) -> CompiledGraph:
    """Parse one compiled graph; an `EngineError` where it ends early or lacks a section."""
    sections: dict[str, _Block] = {}
    position = 0
    while (match := OPENING.match(text, position)) is not None:
        sections[match.group(1)], position = _parse_block(text, match.end())
    missing = [name for name in ("header", "descriptors", "main") if name not in sections]
    if missing:
        raise EngineError(
            f"E0894 the compiled graph in the engine has no section '{missing[0]}'",
            evidence=f"sections {', '.join(sections) or 'none'} in {len(text)} characters",
            remedy="this version of the engine maker writes another form; its precision cannot be verified",
        )
    header = sections["header"]
    tensors = {
        name: Tensor(
            value.text("type"), int(value.text("const_payload_size") or 0), value.text("base") or name
        )
        for key, value in sections["descriptors"].entries
        if key in {"tensor", "sub_tensor"} and isinstance(value, _Block) and (name := value.text("name"))
    }
    operations = tuple(
        Operation(
            key,
            value.text("name"),
            value.names("input", "input_args"),
            value.names("output", "output_args"),
            tuple(LAYER.findall(value.text("layers"))),
        )
        for key, value in sections["main"].entries
        if isinstance(value, _Block) and value.text("name")
    )
    settings = {key: value for key, value in header.entries if isinstance(value, str)}
    return CompiledGraph(header.names("accelerators"), settings, tensors, operations)


def _parse_block(text: str, position: int) -> tuple[_Block, int]:
    """Parse until the closing brace of the block; iterative, because deep graphs exceed Python's stack."""
    root = _Block()
    stack = [root]
    key = pending = ""
    for match in TOKEN.finditer(text, position):
        block, mark = stack[-1], match["mark"]
        if mark == "=":
            key, pending = pending, ""
        elif mark == "{":
            stack.append(_Block())
            block.entries.append((key, stack[-1]))
            key = ""
        elif mark == "}":
            if pending:
                block.items.append(pending)
            if key:
                # ``key=}`` is an empty value.
                block.entries.append((key, ""))
            key = pending = ""
            stack.pop()
            if not stack:
                return root, match.end()
        else:
            value = match["string"] if match["string"] is not None else match["word"]
            if key:
                block.entries.append((key, value))
                key = ""
                continue
            if pending:
                block.items.append(pending)
            pending = value
    raise EngineError(
        "E0895 the compiled graph in the engine breaks off",
        evidence=f"no closing brace in {len(text)} characters",
    )
