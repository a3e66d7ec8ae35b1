"""What a package runs each planned site in.

Three readings have to agree before a site counts as FP8: what the lowering made of its node, the element
types that the exported program multiplies there, and how often the generated code calls an FP8 product. Every
other site counts as planned when everything that its node multiplies, or reads, has the planned type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.inductor.exported import FLOAT8, OWN_OPERATORS, SCALED
from loka_onnx.sessions.inductor_package import (
    CompiledSite,
    InductorEngine,
    Product,
    Program,
    read_engine,
    read_sources,
)

TORCH_TYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_LIBRARY_CALL = re.compile(r"\baoti_torch_\w+?__scaled_mm\w*\(")
_TEMPLATE_CALL = re.compile(
    r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall_\w*triton_tem_\w*scaled_mm\w*\(", re.M
)
"""How the generated C++ calls an FP8 product: of a library, or a Triton template that won the autotuning."""


def read_site_precisions(
    package: Path, planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """What a package runs each planned site in, with where that was read.

    Raises:
        EngineError: The file is no engine of this backend.
    """
    engine = read_engine(package)
    calls = {program.name: float8_calls(read_sources(package, program.name)) for program in engine.programs}
    return site_precisions(engine, calls, planned)


def float8_calls(sources: Sequence[str]) -> int:
    """How many FP8 products generated C++ calls."""
    return sum(len(pattern.findall(text)) for text in sources for pattern in (_LIBRARY_CALL, _TEMPLATE_CALL))


def site_precisions(
    engine: InductorEngine, calls: Mapping[str, int], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """What an engine runs each planned site in.

    Args:
        engine: Its document.
        calls: FP8 products that the generated code of each program calls.
        planned: Sites and the precision that the plan asks for.
    """
    compiled = {site.site: site for site in engine.sites}
    return tuple(_site_precision(engine, calls, compiled, each) for each in planned)


def _site_precision(
    engine: InductorEngine,
    calls: Mapping[str, int],
    compiled: Mapping[str, CompiledSite],
    planned: tuple[Site, Precision],
) -> SitePrecision:
    site, precision = planned
    found = compiled.get(site.name)
    if precision is Precision.FP8:
        if found is None:
            evidence = "nothing of that name in the lowered graph"
            return SitePrecision(site.name, precision, (), False, evidence)
        return _float8_site(engine, calls, found)
    if site.kind is SiteKind.NORM and found is None:
        return _wide_site(engine, site.name, precision)
    return _wide_product(found, site.name, precision)


def _float8_site(engine: InductorEngine, calls: Mapping[str, int], found: CompiledSite) -> SitePrecision:
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
    """Products of the node of a site."""
    return tuple(product for product in program.products if product.node == found.site)


def _why_not_float8(found: CompiledSite, program: Program, calls: int) -> str:
    products = _products_at(found, program)
    if not products:
        return "the exported program has no product of this site"
    for product in products:
        if not product.operands or any(kind not in FLOAT8 for kind in product.operands):
            return f"the exported program multiplies {' by '.join(product.operands) or 'nothing'} there"
    expected = sum(product.operator == SCALED for product in program.products)
    if calls < expected and not all(p.operator.startswith(OWN_OPERATORS) for p in products):
        return f"the generated code calls {calls} FP8 products, the exported program has {expected}"
    return ""


def _wide_product(found: CompiledSite | None, site: str, planned: Precision) -> SitePrecision:
    if found is None:
        return SitePrecision(site, planned, (), False, "nothing of that name in the lowered graph")
    wanted = TORCH_TYPES[planned]
    engaged = bool(found.operands) and all(kind == wanted for kind in found.operands)
    evidence = f"lowered to {found.kernel}{f': {found.reason}' if found.reason else ''}"
    return SitePrecision(site, planned, found.operands, engaged, evidence)


def _wide_site(engine: InductorEngine, site: str, planned: Precision) -> SitePrecision:
    """A normalization: by the types that it reads; constants beside them may be wider."""
    read = [program.entering.get(site, ()) for program in engine.programs]
    types = tuple(dict.fromkeys(kind for each in read for kind in each))
    wanted = TORCH_TYPES[planned]
    engaged = all(wanted in each and not {*each} & {*FLOAT8} for each in read)
    said = (
        "exported program: what its node reads" if types else "nothing of that name in the exported program"
    )
    return SitePrecision(site, planned, types, engaged, said)
