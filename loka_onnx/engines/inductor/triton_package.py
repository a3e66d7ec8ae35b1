"""Packages of AOTInductor in the form that Triton's PyTorch backend loads.

The backend asks a package for the program called ``model`` and gives it tensors by position, as ``INPUT__0``
and so on (`src/pt2/model_state.cc` of triton-inference-server/pytorch_backend). This project's programs are
called after the rows that they take. The name is that of a directory inside the archive alone, so that the
program itself stays as it was compiled.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.engines.inductor.package import InductorEngine
from loka_onnx.errors import BundleError

PROGRAM = "model"
"""Name of the program that the backend loads."""


def why_not_native(engine: InductorEngine) -> str:
    """Why Triton's PyTorch backend cannot run an engine by itself; empty when it can."""
    if engine.packages:
        names = ", ".join(package.distribution for package in engine.packages)
        return f"its programs call operators of {names}, which a server without Python does not register"
    if len(engine.programs) > 1:
        return f"it has {len(engine.programs)} programs, for batches of one size each, and one is loaded"
    if engine.is_static or engine.minimum > 1:
        return f"batches smaller than the {engine.programs[0].minimum} rows of its program have to be padded"
    return ""


def rename_program(package: Path, program: str, target: Path) -> None:
    """Write a package whose only program has the name that the backend asks for.

    Args:
        package: The ``.pt2`` file.
        program: Name of its program.
        target: File to write.

    Raises:
        BundleError: The file has no such program.
    """
    old, new = f"/data/aotinductor/{program}/", f"/data/aotinductor/{PROGRAM}/"
    renamed = 0
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(target, "w") as archive:
        for member in source.infolist():
            # Names begin with the name of the archive.
            place, inside, rest = member.filename.partition(old)
            renamed += bool(inside)
            copied = zipfile.ZipInfo(f"{place}{new}{rest}" if inside else member.filename, member.date_time)
            copied.compress_type, copied.external_attr = member.compress_type, member.external_attr
            # Weights may be larger than memory, and an archive must know of more than 4 GiB beforehand.
            copied.file_size = member.file_size
            with source.open(member) as reader, archive.open(copied, "w") as writer:
                shutil.copyfileobj(reader, writer, CHUNK_BYTES)
    if not renamed:
        raise BundleError(
            f"the package has no program '{program}'", where=str(package), remedy="build the engine again"
        )
