"""Precision of each planned site, read from the layers of a TensorRT engine.

A site runs in FP8 when every layer that multiplies for it reads two FP8 tensors. TensorRT falls back
silently: it converts the operands and multiplies in the base precision, as reported for per-channel weight
    scales
(NVIDIA/TensorRT-Model-Connect, pull request 1386). The types of a layer's inputs count, not the name of its
tactic.

Layers that multiply are a library's GEMM or a convolution. Their weight is listed as a constant, or not at
all; then the activation's type counts, because both factors of a matrix product have one type in a strongly
typed network (`IMatrixMultiplyLayer`). In a generated kernel (``kgen``) a product may be merged with a
conversion that the inspector does not show: FP8 is not claimed there, even with FP8 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.tensorrt.inspector import EngineLayer, LayerTensor
from loka_onnx.engines.tensorrt.site_precision import COMPILED_TYPES, FLOAT8, FLOATING

PRODUCT_KINDS = ("gemm", "matrixmultiply", "matmul", "convolution", "fullyconnected", "einsum")
"""Parts of the lower-case names of layer kinds that multiply."""
LIBRARY_TACTICS = ("gemm", "conv", "fprop")
"""Parts of tactic names by which a ``fusion`` counts as a product."""


def layer_precisions(
    layers: Sequence[EngineLayer], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site, with the evidence."""
    return tuple(_site_precision(layers, site, precision) for site, precision in planned)


def _site_precision(layers: Sequence[EngineLayer], site: Site, planned: Precision) -> SitePrecision:
    found = [layer for layer in layers if site.name in layer.nodes]
    products = [layer for layer in found if _multiplies(layer)]
    if products and site.kind is not SiteKind.NORM:
        return _product(site, planned, products)
    if found and planned is not Precision.FP8:
        return _kernel(site, planned, found[0])
    if not found:
        evidence = "engine inspector: no layer of this name; what it became cannot be told"
        return SitePrecision(site.name, planned, (), False, evidence)
    kernel, read = found[0], _floats(found[0])
    evidence = (
        f"engine inspector: inside {_label(kernel)}, which reads {' and '.join(read) or 'no floats'}; "
        "what it multiplies in is not told"
    )
    return SitePrecision(site.name, planned, read, False, evidence)


def _product(site: Site, planned: Precision, products: Sequence[EngineLayer]) -> SitePrecision:
    wanted = COMPILED_TYPES[planned]

    def engages(layer: EngineLayer) -> bool:
        types = _factors(site, layer)
        return bool(types) and set(types) == {wanted}

    # Every optimization profile has its layers; the worst one counts.
    worst = next((layer for layer in products if not engages(layer)), products[0])
    types = _factors(site, worst)
    evidence = f"engine inspector: {_label(worst)}"
    if not engages(worst):
        read = " by ".join(types) or "no float that is told"
        evidence += f" multiplies {read} where the plan says {wanted}"
        return SitePrecision(site.name, planned, types, False, evidence)
    if planned is Precision.FP32 and "tf32" in worst.tactic.lower():
        evidence += f", by '{worst.tactic}'"
        return SitePrecision(site.name, planned, types, False, f"{evidence}, which rounds to TF32")
    if len(types) == 1:
        evidence += "; its weight is not listed and has the type of the activation"
    return SitePrecision(site.name, planned, types, True, evidence)


def _factors(site: Site, layer: EngineLayer) -> tuple[str, ...]:
    """Types of a product's factors; of the activation alone where the weight is not listed.

    Biases and scales are vectors. A residual of the layer has its output's shape, and follows the factors.
    """
    outputs = [tensor.shape for tensor in layer.outputs]
    matrices = [tensor for tensor in layer.inputs if _is_matrix(tensor)]
    factors = [*matrices[:1], *(tensor for tensor in matrices[1:] if tensor.shape not in outputs)]
    if len(factors) < 2:
        factors += [tensor for tensor in layer.constants if _holds_weight(site, tensor)][:1]
    return tuple(tensor.type for tensor in factors)


def _is_matrix(tensor: LayerTensor) -> bool:
    return tensor.type in FLOATING and len(tensor.shape) > 1


def _holds_weight(site: Site, tensor: LayerTensor) -> bool:
    """Tell whether a tensor can be a site's weight, alone or merged along N."""
    size, elements = site.k * site.n, tensor.elements or 0
    return tensor.type in FLOATING and elements > 0 and elements % size == 0


def _kernel(site: Site, planned: Precision, layer: EngineLayer) -> SitePrecision:
    """Read a high-precision site inside a generated kernel: a norm with its neighbours, attention."""
    types = _floats(layer)
    # A cast at the edge may be part of the kernel, so that one operand of the planned type is enough.
    engaged = site.kind is SiteKind.NORM or (COMPILED_TYPES[planned] in types and FLOAT8 not in types)
    evidence = (
        f"engine inspector: part of {_label(layer)}; operands are what enters it, its inside is bound by the "
        "strongly typed network"
    )
    return SitePrecision(site.name, planned, types, engaged, evidence)


def _multiplies(layer: EngineLayer) -> bool:
    kind, tactic = layer.kind.lower(), layer.tactic.lower()
    if kind == "fusion":
        return any(part in tactic for part in LIBRARY_TACTICS)
    return any(part in kind for part in PRODUCT_KINDS)


def _floats(layer: EngineLayer) -> tuple[str, ...]:
    return tuple(tensor.type for tensor in layer.inputs if tensor.type in FLOATING)


def _label(layer: EngineLayer) -> str:
    return f"{layer.kind} '{layer.name}'"
