"""Packages whose FP8 products Inductor can compile in beside PyTorch's own.

A package qualifies if its product is an operator of PyTorch's dispatcher with a schema and a meta
implementation and returns its result. Then `torch.export` keeps the call, AOTInductor calls it by name (proxy
executor), and the engine loads wherever importing a module registers that name.

- ``fbgemm-gpu-genai`` (FBGEMM GenAI) and its successor ``mslk-cuda`` (MSLK): CUTLASS products for Hopper and
  data-centre Blackwell, with the same schemas in the namespaces ``fbgemm`` and ``mslk``. The schemas are
  those of the wheels 1.9.0 and 1.1.0; limits of the kernels are in ``f8f8bf16_rowwise.cu``,
  ``f8f8bf16_rowwise_common.cuh`` and ``f8f8bf16.cu`` of their sources.

Unusable, by their sources:

- DeepGEMM and Transformer Engine register functions with Python (pybind11), not with the dispatcher.
- FlashInfer's ``register_custom_op`` returns the function unchanged, to save the dispatcher's time.
- SGLang leaves the meta implementation of ``fp8_scaled_mm`` to the server that uses it.
- vLLM's ``cutlass_scaled_mm`` writes into an argument and returns nothing.
- torchao's dense FP8 products call `torch._scaled_mm`, which is a candidate anyway.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata

from loka_onnx.engines.inductor.package import FBGEMM, MSLK, OPERATOR_MODULES, NeededPackage, Program
from loka_onnx.sessions.backends import release


@dataclass(frozen=True)
class PackageOperator:
    """An operator that multiplies (M, K) by the transpose of (N, K), both E4M3FN, and returns BF16.

    Attributes:
        per_channel: Whether its arguments are ``XQ, WQ, x_scale, w_scale, bias, use_fast_accum``, with a
            scale for each row and each column; otherwise ``XQ, WQ, scale, use_fast_accum``.
        capabilities: Compute capabilities of its kernels.
    """

    name: str
    per_channel: bool
    capabilities: tuple[int, ...]

    @property
    def fast_position(self) -> int:
        """Position of ``use_fast_accum``, which is true by default."""
        return 5 if self.per_channel else 3


OPERATORS = (PackageOperator("f8f8bf16_rowwise", True, (90, 100)), PackageOperator("f8f8bf16", False, (90,)))


@dataclass(frozen=True)
class OperatorPackage:
    """A package that registers such operators.

    Attributes:
        module: Module that registers them on import; one of `OPERATOR_MODULES`.
        built_for: PyTorch release of each of its releases, where published: its libraries may crash with
            another.
    """

    module: str
    namespace: str
    built_for: Mapping[str, str] = field(default_factory=dict)
    operators: tuple[PackageOperator, ...] = OPERATORS

    @property
    def distributions(self) -> tuple[str, ...]:
        """Distributions that provide it, the recommended one first."""
        return OPERATOR_MODULES[self.module]

    def installed(self) -> NeededPackage | None:
        """Return the first of its distributions that is installed, or None; imports nothing."""
        for distribution in self.distributions:
            with suppress(metadata.PackageNotFoundError):
                return NeededPackage(distribution, metadata.version(distribution), self.module)
        return None

    @property
    def exported(self) -> dict[str, PackageOperator]:
        """Its operators by their names in exported programs, such as ``fbgemm.f8f8bf16.default``."""
        return {f"{self.namespace}.{operator.name}.default": operator for operator in self.operators}


PACKAGES = (
    OperatorPackage(FBGEMM, "fbgemm", {f"1.{minor}": f"2.{minor + 5}" for minor in range(10)}),
    OperatorPackage(MSLK, "mslk", {"1.0": "2.10", "1.1": "2.11"}),
)


@dataclass(frozen=True)
class FoundPackage:
    """An installed package; `obstacle` says why its operators cannot be called, or is empty."""

    package: OperatorPackage
    obstacle: str = ""


def find_packages(
    torch_version: str, packages: Sequence[OperatorPackage] = PACKAGES
) -> tuple[FoundPackage, ...]:
    """Import the installed ones of `packages`."""
    installed = ((package, package.installed()) for package in packages)
    return tuple(
        FoundPackage(package, _why_not(package, here, torch_version)) for package, here in installed if here
    )


def _why_not(package: OperatorPackage, here: NeededPackage, torch_version: str) -> str:
    """Reason why an installed package is unusable, or an empty string; imports it where its release fits."""
    said, wanted = f"{here.distribution} {here.version}", package.built_for.get(release(here.version))
    if wanted is not None and wanted != release(torch_version):
        return f"{said} is built for PyTorch {wanted}, here is {torch_version}"
    try:
        importlib.import_module(package.module)
    except Exception as error:
        # Errors come from the dynamic linker, CUDA and PyTorch's registry.
        return f"{said} does not import: {str(error)[:200]}"
    return ""


def operator_called(exported: str) -> PackageOperator | None:
    """Operator of an exported name such as ``fbgemm.f8f8bf16.default``; None for any other."""
    return next((each.exported[exported] for each in PACKAGES if exported in each.exported), None)


def needed_packages(programs: Iterable[Program]) -> tuple[NeededPackage, ...]:
    """Packages whose operators the programs call, as installed here."""
    called = {product.operator for program in programs for product in program.products}
    here = (package.installed() for package in PACKAGES if called & package.exported.keys())
    return tuple(each for each in here if each is not None)
