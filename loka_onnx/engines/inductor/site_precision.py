"""Precision of each planned site, read from a package.

A site counts as FP8 when three readings agree: the lowering of its node, the element types that the exported
program multiplies there, and the number of calls in the generated code to the FP8 product (of a library,
another package, or an own kernel). Any other site counts as planned when everything that its node multiplies
or reads has the planned type and, for an own kernel, the generated code calls it. Generated code has only the
name of an own kernel; its types are those of its tensors in the exported program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.inductor.exported import FLOAT8, OWN_OPERATORS, SCALED
from loka_onnx.engines.inductor.operator_packages import operator_called
from loka_onnx.engines.inductor.package import (
    CompiledSite,
    InductorEngine,
    Product,
    Program,
    read_called_operators,
    read_engine,
    read_sources,
)

TORCH_TYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_LIBRARY_CALL = re.compile(r"\baoti_torch_\w+?__scaled_mm\w*\(")
_TEMPLATE_CALL = re.compile(
    r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall_\w*triton_tem_\w*scaled_mm\w*\(", re.M
)
"""Calls of FP8 products in generated C++: of a library, or of an autotuned Triton template."""
_OWN_CALL = re.compile(r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall__loka_(\w+?)_kernel_\d+\(", re.M)
"""Calls of own kernels, whose Triton functions are named after their operators: Inductor numbers the variants
of a function and launches each by a function of that name (`torch._inductor.codegen.cpp_wrapper_gpu`)."""

_NUMBERED_CALL = re.compile(r"\baoti_torch_proxy_executor_call_function\(proxy_executor, (\d+),")
"""Calls of operators that the code knows only by name, such as those of `operator_packages`."""


def read_site_precisions(
    package: Path, planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Read the precision of each planned site, with the evidence.

    Raises:
        EngineError: The file is no engine of this backend.
    """
    engine = read_engine(package)
    calls = {
        name: product_calls(read_sources(package, name), read_called_operators(package, name))
        for name in (program.name for program in engine.programs)
    }
    return site_precisions(engine, calls, planned)


def product_calls(sources: Sequence[str], named: Sequence[str] = ()) -> Counter[str]:
    """Count the calls of FP8 products and of own kernels in generated C++, by operator of the exported
    program.

    Args:
        named: Operators called by number (`read_called_operators`).
    """
    found = Counter[str]()
    for text in sources:
        found[SCALED] += len(_LIBRARY_CALL.findall(text)) + len(_TEMPLATE_CALL.findall(text))
        found.update(f"{OWN_OPERATORS}{name}.default" for name in _OWN_CALL.findall(text))
        numbers = (int(number) for number in _NUMBERED_CALL.findall(text))
        called = (f"{named[number].replace('::', '.')}.default" for number in numbers if number < len(named))
        found.update(name for name in called if operator_called(name) is not None)
    return found


def site_precisions(
    engine: InductorEngine,
    calls: Mapping[str, Mapping[str, int]],
    planned: Sequence[tuple[Site, Precision]],
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site."""
    compiled = {site.site: site for site in engine.sites}
    return tuple(_site_precision(engine, calls, compiled, each) for each in planned)


def _site_precision(
    engine: InductorEngine,
    calls: Mapping[str, Mapping[str, int]],
    compiled: Mapping[str, CompiledSite],
    planned: tuple[Site, Precision],
) -> SitePrecision:
    site, precision = planned
    found = compiled.get(site.name)
    if found is None:
        if site.kind is SiteKind.NORM and precision is not Precision.FP8:
            return _wide_site(engine, site.name, precision)
        evidence = "nothing of that name in the lowered graph"
        return SitePrecision(site.name, precision, (), False, evidence)
    if precision is Precision.FP8:
        return _float8_site(engine, calls, found)
    return _wide_product(engine, calls, found, precision)


def _float8_site(
    engine: InductorEngine, calls: Mapping[str, Mapping[str, int]], found: CompiledSite
) -> SitePrecision:
    if not found.engaged:
        evidence = f"lowered to {found.kernel}: {found.reason or 'not an FP8 product'}"
        return SitePrecision(found.site, Precision.FP8, found.operands, False, evidence)
    for program in engine.programs:
        reason = _why_not_float8(found, program, calls[program.name])
        if reason:
            evidence = f"program '{program.name}': {reason}"
            return SitePrecision(found.site, Precision.FP8, found.operands, False, evidence)
    fast = any(product.fast_accumulation for p in engine.programs for product in _products_at(found, p))
    said = f"exported program: {found.kernel}{' with fast accumulation' if fast else ''}"
    if found.reason:
        said += f"; {found.reason}"
    return SitePrecision(found.site, Precision.FP8, found.operands, True, said)


def _products_at(found: CompiledSite, program: Program) -> tuple[Product, ...]:
    """Products of a site's node."""
    return tuple(product for product in program.products if product.node == found.site)


def _why_not_float8(found: CompiledSite, program: Program, calls: Mapping[str, int]) -> str:
    products = _products_at(found, program)
    if not products:
        return "the exported program has no product of this site"
    for product in products:
        if not product.operands or any(kind not in FLOAT8 for kind in product.operands):
            return f"the exported program multiplies {' by '.join(product.operands) or 'nothing'} there"
    return _why_not_called(products, program, calls)


def _why_not_called(products: Sequence[Product], program: Program, calls: Mapping[str, int]) -> str:
    """Reason why the generated code lacks a site's product, for operators that appear there by name."""
    for operator in dict.fromkeys(product.operator for product in products):
        packaged = operator_called(operator) is not None
        if operator != SCALED and not packaged and not operator.startswith(OWN_OPERATORS):
            continue
        called = calls.get(operator, 0)
        expected = sum(product.operator == operator for product in program.products)
        if called < expected:
            what = "FP8 products" if operator == SCALED else f"kernels of '{operator}'"
            return f"the generated code calls {called} {what}, the exported program has {expected}"
    return ""


def _wide_product(
    engine: InductorEngine,
    calls: Mapping[str, Mapping[str, int]],
    found: CompiledSite,
    planned: Precision,
) -> SitePrecision:
    wanted = TORCH_TYPES[planned]
    engaged = bool(found.operands) and all(kind == wanted for kind in found.operands)
    evidence = f"lowered to {found.kernel}{f': {found.reason}' if found.reason else ''}"
    for program in engine.programs:
        reason = _why_not_called(_products_at(found, program), program, calls[program.name])
        if reason:
            return SitePrecision(
                found.site, planned, found.operands, False, f"program '{program.name}': {reason}"
            )
    return SitePrecision(found.site, planned, found.operands, engaged, evidence)


def _wide_site(engine: InductorEngine, site: str, planned: Precision) -> SitePrecision:
    """Read a norm by the types that enter it; constants beside them may be wider."""
    read = [program.entering.get(site, ()) for program in engine.programs]
    types = tuple(dict.fromkeys(kind for each in read for kind in each))
    wanted = TORCH_TYPES[planned]
    engaged = all(wanted in each and not {*each} & {*FLOAT8} for each in read)
    said = (
        "exported program: what its node reads" if types else "nothing of that name in the exported program"
    )
    return SitePrecision(site, planned, types, engaged, said)
