"""The C++ compiler of a build, and its caches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from loka_onnx.core.cache_directory import cache_directory

SYSTEM = ("/usr/bin/g++", "/usr/bin/gcc")
"""C++ and C compilers that are preferred to those of the environment."""


@dataclass(frozen=True)
class Compilers:
    """Compilers of C++ and of C, as commands."""

    cxx: str
    cc: str


def find_compilers(
    environment: Mapping[str, str] | None = None, system: tuple[str, str] = SYSTEM
) -> Compilers | None:
    """Return the compilers to build with; None where there are none.

    The system's GCC comes first, even where ``CXX`` names another compiler. A package whose host part was
    compiled by another tool chain, with its own C++ library, builds without an error and crashes with a
    segmentation fault when it is loaded (seen with PyTorch 2.11).

    Args:
        environment: Environment variables; None: those of this process.
    """
    variables = os.environ if environment is None else environment
    pairs = [
        system,
        (variables.get("CXX", ""), variables.get("CC", "")),
        ("g++", "gcc"),
        ("clang++", "clang"),
    ]
    path = variables.get("PATH")
    for cxx, cc in pairs:
        found = [
            shutil.which(command.split()[0], path=path) if command.split() else None for command in (cxx, cc)
        ]
        if found[0] and found[1]:
            return Compilers(found[0], found[1])
    return None


def build_environment(compilers: Compilers) -> dict[str, str]:
    """Return the variables to set before PyTorch reads them.

    Generated kernels, autotuning results and compiler probes stay in the caches that the environment names,
    else in this user's: plans of one model share most kernels.
    """
    variables = {"CXX": compilers.cxx, "CC": compilers.cc}
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        if name not in os.environ:
            variables[name] = str(cache_directory() / folder)
    return variables
