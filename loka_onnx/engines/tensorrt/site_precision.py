"""Precision of each planned site, read from a compiled graph.

A linear or interaction site runs in FP8 when all its compiled products multiply two FP8 tensors. A compiler
that cannot do so converts the operands and multiplies in the base precision: the engine is correct, but FP8
gains nothing, which is reported as a fallback.

A high-precision site may also be inside a fused kernel (attention; a product with one row). Its operands are
then the kernel's inputs, and the strongly typed network determines the inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.compiled_graph import CompiledGraph, Operation

PRODUCTS = frozenset({"fully_connected", "convolution", "einsum"})
KERNELS = frozenset({"function", "runtime_fusion"})
FLOAT8 = "fp8_e4m3"
COMPILED_TYPES = {
    Precision.FP8: FLOAT8,
    Precision.BF16: "bf16",
    Precision.FP16: "half",
    Precision.FP32: "float",
}
FLOATING = frozenset({*COMPILED_TYPES.values(), "fp8_e5m2"})


@dataclass(frozen=True)
class _Found:
    """An operation and its graph."""

    graph: CompiledGraph
    operation: Operation

    @property
    def label(self) -> str:
        return f"{self.operation.kind} '{self.operation.name}'"

    @property
    def factors(self) -> tuple[str, ...]:
        """Types of the two factors of a product."""
        return tuple(self.graph.type_of(tensor) for tensor in self.operation.inputs[:2])

    @property
    def floats(self) -> tuple[str, ...]:
        """Floating types of all inputs."""
        types = (self.graph.type_of(tensor) for tensor in self.operation.inputs)
        return tuple(kind for kind in types if kind in FLOATING)


def site_precisions(
    graphs: Sequence[CompiledGraph], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site, with the evidence."""
    return tuple(_site_precision(graphs, site, precision) for site, precision in planned)


def _site_precision(graphs: Sequence[CompiledGraph], site: Site, planned: Precision) -> SitePrecision:
    if not graphs:
        return SitePrecision(site.name, planned, (), False, "the engine carries no compiled graph to read")
    found = [
        _Found(g, operation) for g in graphs for operation in g.operations if site.name in operation.layers
    ]
    products = [each for each in found if each.operation.kind in PRODUCTS]
    if products and site.kind is not SiteKind.NORM:
        return _product(site, planned, products, found)
    kernels = [each for each in found if each.operation.kind in KERNELS]
    if kernels and planned is not Precision.FP8:
        return _kernel(site, planned, kernels[0])
    there = ", ".join(f"{each.label} of {' and '.join(each.floats) or 'no floats'}" for each in found)
    evidence = f"no product of it in the compiled graph, which has {there or 'nothing under its name'}"
    return SitePrecision(site.name, planned, kernels[0].floats if kernels else (), False, evidence)


def _product(
    site: Site, planned: Precision, products: Sequence[_Found], found: Sequence[_Found]
) -> SitePrecision:
    wanted = COMPILED_TYPES[planned]
    # A site can be in several programs of the engine; the worst one counts.
    worst = next((each for each in products if each.factors != (wanted, wanted)), products[0])
    types = worst.factors
    evidence = f"compiled graph: {worst.label}"
    if types != (wanted, wanted):
        evidence += f" multiplies {' by '.join(types)} where the plan says {wanted}"
        fused = next((each.label for each in found if each.operation.kind in KERNELS), "")
        return SitePrecision(
            site.name, planned, types, False, evidence + (f", inside {fused}" if fused else "")
        )
    if planned is Precision.FP32 and worst.graph.settings.get("tf32", "0") != "0":
        return SitePrecision(site.name, planned, types, False, f"{evidence}, with TF32 allowed")
    if _is_rounded_twice(worst, found):
        evidence += "; its sum is rounded to FP8 before the scales of the merged sites are applied"
    return SitePrecision(site.name, planned, types, True, evidence)


def _is_rounded_twice(product: _Found, found: Sequence[_Found]) -> bool:
    """Tell whether a product writes FP8 and another kernel of its site rescales that to FP8.

    Seen where merged sites are each followed directly by Q: one rounding more than in the ONNX graph.
    """

    def writes_float8(each: _Found) -> bool:
        return any(each.graph.type_of(tensor) == FLOAT8 for tensor in each.operation.outputs)

    graph = product.graph
    written = {graph.base_of(tensor) for tensor in product.operation.outputs}
    return writes_float8(product) and any(
        writes_float8(each) and written & {graph.base_of(tensor) for tensor in each.operation.inputs}
        for each in found
        if each.graph is graph and each.operation.kind in KERNELS
    )


def _kernel(site: Site, planned: Precision, kernel: _Found) -> SitePrecision:
    """Read a site inside a fused kernel: a norm with its neighbours, attention, a product with one row."""
    types = kernel.floats
    wanted = COMPILED_TYPES[planned]
    # A cast at the edge may be part of the kernel, so that one operand of the planned type is enough.
    engaged = site.kind is SiteKind.NORM or (wanted in types and FLOAT8 not in types)
    evidence = (
        f"compiled graph: part of {kernel.label}; operands are what enters it, its inside is bound by the "
    )
    return SitePrecision(site.name, planned, types, engaged, f"{evidence}strongly typed network")
