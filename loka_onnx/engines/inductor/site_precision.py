"""Precision of each planned site, read from a package.

A site counts as FP8 when three readings agree: the lowering of its node, the element types that the exported
program multiplies there, and the number of calls in the generated code to the FP8 product (of a library or
an own kernel). Any other site counts as planned when everything that its node multiplies
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
from loka_onnx.engines.inductor.package import (
    CompiledSite,
    InductorEngine,
    Product,
    Program,
    read_engine,
    read_sources,
)

NO_NODE = "nothing of that name in the exported program"
TORCH_TYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_LIBRARY_CALL = re.compile(r"\baoti_torch_\w+?__scaled_mm\w*\(")
_TEMPLATE_CALL = re.compile(
    r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall_\w*triton_tem_\w*scaled_mm\w*\(", re.M
)
"""Calls of FP8 products in generated C++: of a library, or of an autotuned Triton template."""
_OWN_CALL = re.compile(r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall__loka_(\w+?)_kernel_\d+\(", re.M)
"""Calls of own kernels, whose Triton functions are named after their operators: Inductor numbers the variants
of a function and launches each by a function of that name (`torch._inductor.codegen.cpp_wrapper_gpu`)."""


def read_site_precisions(
    package: Path, planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Read the precision of each planned site, with the evidence.

    Raises:
        EngineError: The file is no engine of this backend.
    """
    engine = read_engine(package)
    calls = {each.name: product_calls(read_sources(package, each.name)) for each in engine.programs}
    return site_precisions(engine, calls, planned)


def product_calls(sources: Sequence[str]) -> Counter[str]:
    """Calls of FP8 products and of own kernels in generated C++, by operator of the exported program."""
    counts = Counter[str]()
    for text in sources:
        counts[SCALED] += len(_LIBRARY_CALL.findall(text)) + len(_TEMPLATE_CALL.findall(text))
        counts.update(f"{OWN_OPERATORS}{name}.default" for name in _OWN_CALL.findall(text))
    return counts


def site_precisions(
    engine: InductorEngine, calls: Mapping[str, Mapping[str, int]], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site; `calls` counts the generated code's calls by program."""
    compiled = {site.site: site for site in engine.sites}
    sites = []
    for site, precision in planned:
        lowered = compiled.get(site.name)
        if lowered is not None:
            engaged, evidence = _read_product(engine, calls, lowered, precision)
            sites.append(SitePrecision(site.name, precision, lowered.operands, engaged, evidence))
        elif site.kind is SiteKind.NORM and precision is not Precision.FP8:
            sites.append(_read_norm(engine, site.name, precision))
        else:
            evidence = "nothing of that name in the lowered graph"
            sites.append(SitePrecision(site.name, precision, (), False, evidence))
    return tuple(sites)


def _read_product(
    engine: InductorEngine, calls: Mapping[str, Mapping[str, int]], site: CompiledSite, planned: Precision
) -> tuple[bool, str]:
    """Return the verdict that a product runs as planned or not, with the evidence."""
    is_float8, fast = planned is Precision.FP8, False
    if is_float8 and not site.engaged:
        return False, f"lowered to {site.kernel}: {site.reason or 'not an FP8 product'}"
    for program in engine.programs:
        products = [product for product in program.products if product.node == site.site]
        fast |= any(product.fast_accumulation for product in products)
        reason = _why_not_float8(products) if is_float8 else ""
        reason = reason or _why_not_called(products, program, calls[program.name])
        if reason:
            return False, f"program '{program.name}': {reason}"
    if is_float8:
        how = f"exported program: {site.kernel}{' with fast accumulation' if fast else ''}"
        return True, f"{how}; {site.reason}" if site.reason else how
    is_planned = bool(site.operands) and {*site.operands} == {TORCH_TYPES[planned]}
    return is_planned, f"lowered to {site.kernel}{f': {site.reason}' if site.reason else ''}"


def _why_not_float8(products: Sequence[Product]) -> str:
    if not products:
        return "the exported program has no product of this site"
    for product in products:
        if not product.operands or any(kind not in FLOAT8 for kind in product.operands):
            return f"the exported program multiplies {' by '.join(product.operands) or 'nothing'} there"
    return ""


def _why_not_called(products: Sequence[Product], program: Program, calls: Mapping[str, int]) -> str:
    """Reason why the generated code lacks a site's product, for operators that appear there by name."""
    for operator in dict.fromkeys(product.operator for product in products):
        if operator != SCALED and not operator.startswith(OWN_OPERATORS):
            continue
        called = calls.get(operator, 0)
        expected = sum(product.operator == operator for product in program.products)
        if called < expected:
            what = "FP8 products" if operator == SCALED else f"kernels of '{operator}'"
            return f"the generated code calls {called} {what}, the exported program has {expected}"
    return ""


def _read_norm(engine: InductorEngine, site: str, planned: Precision) -> SitePrecision:
    """Read a norm by the types that enter it; constants beside them may be wider."""
    read = [program.entering.get(site, ()) for program in engine.programs]
    types = tuple(dict.fromkeys(kind for each in read for kind in each))
    engaged = all(TORCH_TYPES[planned] in each and not {*each} & {*FLOAT8} for each in read)
    evidence = "exported program: what its node reads" if types else NO_NODE
    return SitePrecision(site, planned, types, engaged, evidence)
