"""Manifest of an Inductor engine; reading it loads no code.

The engine is one ``.pt2`` package of AOTInductor: a zip archive of shared libraries, GPU kernels and weights
(`torch.export.pt2_archive`), with `engine.json` among its extra files. A host reads that first and refuses an
engine that it cannot run. Libraries are programs: load them only from someone who may run code here.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loka_onnx.core import serde
from loka_onnx.core.serde import STRICT
from loka_onnx.errors import EngineError, UserError
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.backends import release

RECORD = "engine.json"
"""Name of the manifest among the extra files of a package."""
MAX_DOCUMENT_BYTES = 64 << 20
_VECTOR_SETS = ("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpclmul", "sve", "asimd")


@dataclass(frozen=True)
class InputPort:
    """An input with the batch on axis 0; `fits_int32`: ids of int64, of which the tables hold only int32."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    fits_int32: bool = False


@dataclass(frozen=True)
class OutputPort:
    """An output; `batched` says that its axis 0 is the batch."""

    name: str
    batched: bool


@dataclass(frozen=True)
class Product:
    """A matrix product of a compiled program, and the ONNX node that it computes (empty where unknown): its
    operator, for example ``aten._scaled_mm.default``, and the PyTorch types of its two factors; simulated FP8
    is FP8. With `fast_accumulation`, its sums may keep fewer bits (`_scaled_mm`, ``use_fast_accum``).
    """

    node: str
    operator: str
    operands: tuple[str, ...]
    fast_accumulation: bool = False


@dataclass(frozen=True)
class Program:
    """One compiled program of a package, for `minimum` to `maximum` rows. `entering` are the PyTorch element
    types of the floating tensors that enter each site's node.
    """

    name: str
    minimum: int
    maximum: int
    products: tuple[Product, ...] = ()
    entering: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class CompiledSite:
    """Lowered form of a product of the ONNX graph (`engines.inductor.lowering`)."""

    site: str
    kernel: str
    operands: tuple[str, ...]
    engaged: bool
    reason: str = ""


@dataclass(frozen=True)
class InductorEngine:
    """Manifest of an engine for ``cpu`` or an NVIDIA architecture, compiled by a version of PyTorch, for host
    code with the vector instructions `instruction_sets`. It has one of `programs` for every batch size, or
    one for each of `sizes`, the served batch sizes, ascending, which have CUDA graphs.
    """

    SCHEMA: ClassVar[str] = "inductor-engine/1"
    __pydantic_config__ = STRICT

    torch: str
    architecture: str
    instruction_sets: tuple[str, ...]
    inputs: tuple[InputPort, ...]
    outputs: tuple[OutputPort, ...]
    minimum: int
    maximum: int
    sizes: tuple[int, ...]
    programs: tuple[Program, ...]
    sites: tuple[CompiledSite, ...] = ()
    options: dict[str, int] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        """True if each program takes a single batch size."""
        return all(program.minimum == program.maximum for program in self.programs)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes with CUDA graphs, ascending."""
        return tuple(p.maximum for p in self.programs) if self.is_static else self.sizes


def read_engine(package: Path) -> InductorEngine:
    """Read the manifest of a package; refuse a file that is none of this project."""
    refused = EngineError(
        "E0822 not an engine of the inductor backend", where=str(package), remedy="build the engine again"
    )
    kinds = (OSError, zipfile.BadZipFile, UnicodeDecodeError, UserError)
    with refused.in_place_of(*kinds), zipfile.ZipFile(package) as archive:
        name = next((n for n in archive.namelist() if f"/{n}".endswith(f"/extra/{RECORD}")), None)
        if name is None:
            raise UserError(f"E0820 it has no '{RECORD}' among its extra files")
        if archive.getinfo(name).file_size > MAX_DOCUMENT_BYTES:
            raise UserError(f"E0821 '{name}' is larger than {MAX_DOCUMENT_BYTES} bytes")
        return serde.loads(InductorEngine, archive.read(name).decode("utf-8"), where=name)


def read_sources(package: Path, program: str) -> tuple[str, ...]:
    """Generated C++ of a program in a ``.pt2`` package."""
    inside = re.compile(rf"(^|/)data/aotinductor/{re.escape(program)}/[^/]+\.cpp$")
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name) for name in archive.namelist() if inside.search(name)]
    return tuple(text.decode("utf-8", "replace") for text in sources)


def vector_instructions(cpu_info: Path = host_devices.CPUINFO) -> tuple[str, ...]:
    """Vector instruction sets of this processor, sorted; empty where Linux does not list them."""
    return tuple(
        sorted(flag for flag in host_devices.instruction_sets(cpu_info) if flag.startswith(_VECTOR_SETS))
    )


def check_host(engine: InductorEngine, torch_version: str, host: Sequence[str], package: Path) -> None:
    """Refuse an engine that would crash with this host's PyTorch (another release) or processor."""
    if release(engine.torch) != release(torch_version):
        raise EngineError(
            "E0823 the engine was compiled by another version of PyTorch",
            where=str(package),
            evidence=f"compiled by {engine.torch}, this host has {torch_version}",
            remedy=f"install PyTorch {release(engine.torch)}, or build the engine again",
        )
    missing = sorted({*engine.instruction_sets} - {*host})
    if missing:
        raise EngineError(
            "E0824 the engine was compiled for another processor",
            where=str(package),
            evidence=f"this host lacks {', '.join(missing)}",
            remedy="build the engine on a host with this processor",
        )
