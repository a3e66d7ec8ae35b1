"""Precision of each planned site, read from compiled graphs or from the layers of an engine.

A site runs in FP8, or in INT8, when every kernel that multiplies for it reads two such tensors. A compiler
that cannot do so converts the operands and multiplies in the base precision: the engine is correct, but eight
bits gain nothing, which is reported as a fallback. Weights stored in INT8 prove no INT8 product. The types of
a kernel's inputs count, not its name.

A high-precision site may also be inside a fused kernel (attention; a product with one row). Its operands are
then the kernel's inputs, and the strongly typed network determines the inside.

Among an inspector's layers, a library's GEMM or convolution multiplies. Its weight is listed as a constant,
or not at all; then the activation's type counts, because both factors of a matrix product have one type in a
strongly typed network (`IMatrixMultiplyLayer`). In a generated kernel (``kgen``) a product may be merged with
a conversion that the inspector does not show: FP8 or INT8 is not claimed there, even with such inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.compiled_graph import CompiledGraph, Operation
from loka_onnx.engines.tensorrt.inspector import EngineLayer

COMPILED_TYPES = {
    Precision.FP8: "fp8_e4m3",
    Precision.INT8: "int8",
    Precision.BF16: "bf16",
    Precision.FP16: "half",
    Precision.FP32: "float",
}
EIGHT_BITS = frozenset({"fp8_e4m3", "fp8_e5m2", "int8"})
OPERANDS = EIGHT_BITS.union(COMPILED_TYPES.values())
"""Types that are multiplied; other integers are ids, shapes and masks."""
PRODUCTS = frozenset({"fully_connected", "convolution", "einsum"})
KERNELS = frozenset({"function", "runtime_fusion"})
PRODUCT_KINDS = ("gemm", "matrixmultiply", "matmul", "convolution", "fullyconnected", "einsum")
"""Parts of the lower-case names of layer kinds that multiply."""
LIBRARY_TACTICS = ("gemm", "conv", "fprop")
"""Parts of tactic names by which a ``fusion`` counts as a product."""
ROUNDED_TWICE = "; its sum is rounded to eight bits before the scales of the merged sites are applied"

PlannedSites = Sequence[tuple[Site, Precision]]


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a site: types of all inputs in `OPERANDS`, and of the `factors` that it multiplies, empty
    where it is no product. `is_fused`: a generated kernel with more than a product; `tf32`: evidence that
    FP32 is rounded to TF32, if it is; `remark`: an addition to the report where it engages.
    """

    label: str
    types: tuple[str, ...]
    is_product: bool
    is_fused: bool
    factors: tuple[str, ...] = ()
    tf32: str = ""
    remark: str = ""


def site_precisions(graphs: Sequence[CompiledGraph], planned: PlannedSites) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site in compiled graphs, with the evidence."""
    if not graphs:
        evidence = "the engine carries no compiled graph to read"
        return tuple(SitePrecision(site.name, precision, (), False, evidence) for site, precision in planned)
    return tuple(
        _read("compiled graph", _kernels_in_graphs(graphs, s), s, planned_) for s, planned_ in planned
    )


def layer_precisions(layers: Sequence[EngineLayer], planned: PlannedSites) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site in an inspector's layers, with the evidence."""
    return tuple(
        _read(
            "engine inspector",
            [_kernel_of_layer(site, layer) for layer in layers if site.name in layer.nodes],
            site,
            precision,
        )
        for site, precision in planned
    )


def _read(source: str, kernels: Sequence[_Kernel], site: Site, planned: Precision) -> SitePrecision:
    wanted = COMPILED_TYPES[planned]
    products = [kernel for kernel in kernels if kernel.is_product]
    fused = next((kernel for kernel in kernels if kernel.is_fused), None)

    def result(types: tuple[str, ...], engaged: bool, evidence: str) -> SitePrecision:
        return SitePrecision(site.name, planned, types, engaged, evidence)

    if products and site.kind is not SiteKind.NORM:
        # A site may be in several programs or optimization profiles; the worst one counts.
        worst = next((each for each in products if {*each.factors} != {wanted}), products[0])
        types, evidence = worst.factors, f"{source}: {worst.label}"
        if {*types} != {wanted}:
            multiplied = " by ".join(types) or "nothing that is listed"
            evidence += f" multiplies {multiplied} where the plan says {wanted}"
            return result(types, False, evidence + (f", inside {fused.label}" if fused else ""))
        if planned is Precision.FP32 and worst.tf32:
            return result(types, False, evidence + worst.tf32)
        return result(types, True, evidence + worst.remark)
    if fused is not None and not planned.is_quantized:
        # A cast at the edge may be part of the kernel, so that one operand of the planned type is enough.
        engaged = site.kind is SiteKind.NORM or (
            wanted in fused.types and not EIGHT_BITS.intersection(fused.types)
        )
        inside = "operands are what enters it, its inside is bound by the strongly typed network"
        return result(fused.types, engaged, f"{source}: part of {fused.label}; {inside}")
    there = ", ".join(f"{each.label} of {' and '.join(each.types) or 'no operands'}" for each in kernels)
    evidence = f"no product of it in the {source}, which has {there or 'nothing under its name'}"
    return result(fused.types if fused else (), False, evidence)


def _kernels_in_graphs(graphs: Sequence[CompiledGraph], site: Site) -> list[_Kernel]:
    kernels = []
    for graph in graphs:
        own = [operation for operation in graph.operations if site.name in operation.layers]
        for operation in own:
            types = tuple(graph.type_of(tensor) for tensor in operation.inputs)
            is_product = operation.kind in PRODUCTS
            kernel = _Kernel(
                f"{operation.kind} '{operation.name}'",
                tuple(kind for kind in types if kind in OPERANDS),
                is_product,
                operation.kind in KERNELS,
                types[:2],
                ", with TF32 allowed" if graph.settings.get("tf32", "0") != "0" else "",
                ROUNDED_TWICE if is_product and _is_rounded_twice(graph, operation, own) else "",
            )
            kernels.append(kernel)
    return kernels


def _is_rounded_twice(graph: CompiledGraph, product: Operation, own: Sequence[Operation]) -> bool:
    """True if a product writes eight bits that another kernel rescales: merged sites, each before a Q."""

    def is_narrow(operation: Operation) -> bool:
        return any(graph.type_of(tensor) in EIGHT_BITS for tensor in operation.outputs)

    written = {graph.base_of(tensor) for tensor in product.outputs}
    return is_narrow(product) and any(
        is_narrow(each) and written & {graph.base_of(tensor) for tensor in each.inputs}
        for each in own
        if each.kind in KERNELS
    )


def _kernel_of_layer(site: Site, layer: EngineLayer) -> _Kernel:
    kind, tactic = layer.kind.lower(), layer.tactic.lower()
    is_product = any(
        part in (tactic if kind == "fusion" else kind)
        for part in (LIBRARY_TACTICS if kind == "fusion" else PRODUCT_KINDS)
    )
    factors = _factors(site, layer)
    return _Kernel(
        f"{layer.kind} '{layer.name}'",
        tuple(tensor.type for tensor in layer.inputs if tensor.type in OPERANDS),
        is_product,
        not is_product or site.kind is SiteKind.NORM,
        factors,
        f", by '{layer.tactic}', which rounds to TF32" if "tf32" in tactic else "",
        "; its weight is not listed and has the type of the activation" if len(factors) == 1 else "",
    )


def _factors(site: Site, layer: EngineLayer) -> tuple[str, ...]:
    """Types of a product's factors; of the activation alone where the weight is not listed. Biases and scales
    are vectors. A residual of the layer has its output's shape, and follows the factors. A constant is the
    weight, alone or merged along N, where its size is a multiple of the site's.
    """
    outputs = [tensor.shape for tensor in layer.outputs]
    matrices = [tensor for tensor in layer.inputs if tensor.type in OPERANDS and len(tensor.shape) > 1]
    factors = [*matrices[:1], *(tensor for tensor in matrices[1:] if tensor.shape not in outputs)]
    if len(factors) < 2:
        weights = (tensor for tensor in layer.constants if tensor.type in OPERANDS and tensor.elements)
        factors += [tensor for tensor in weights if (tensor.elements or 0) % (site.k * site.n) == 0][:1]
    return tuple(tensor.type for tensor in factors)
