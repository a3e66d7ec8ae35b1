"""Precision of each planned site, read from the exported program and the package.

During export every operator is annotated with the ONNX node that it was lowered from (`MARK`,
`torch.fx.traceback.annotate`), so that the graph shows which product computes which site, in which types.

A site counts as FP8 or INT8 when three readings agree: the lowering of its node, the element types that the
exported program multiplies there, and the number of calls in the generated code to such products (of a
library or an own kernel). Any other site counts as planned when everything that its node multiplies or reads
has the planned type and the generated code calls its own kernel, if it has one. Generated code has only the
name of an own kernel; its types are those of its tensors in the exported program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loka_onnx.core.devices import CPU
from loka_onnx.core.engine import SitePrecision
from loka_onnx.core.formats import Precision
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.engines.inductor.package import CompiledSite, InductorEngine, Product, Program

MARK = "loka_onnx_node"
"""Key of the node's name in `torch.fx.Node.meta["custom"]`."""
OWN_OPERATORS = "loka."
"""Prefix of this project's own operators."""
NO_PRODUCTS = frozenset({"loka.concat_quantize.default"})
"""Own operators that multiply nothing."""
SCALED, INTEGER = "aten._scaled_mm.default", "aten._int_mm.default"
_LIBRARY = {SCALED: "FP8 products", INTEGER: "INT8 products"}
PRODUCT_KERNEL = "loka.product.default"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
EIGHT_BITS = {Precision.FP8: FLOAT8, Precision.INT8: ("int8",)}
"""Element types of the factors of a quantized site."""
_NARROW = {*FLOAT8, "int8"}
_FLOATING = {*_NARROW, "bfloat16", "float16", "float32", "float64"}
_ORDERED = (
    "mm bmm matmul linear conv1d conv2d conv3d convolution scaled_dot_product_attention _scaled_mm _int_mm"
)
_FACTORS = {f"aten.{name}.default": (0, 1) for name in _ORDERED.split()} | {
    "aten.addmm.default": (1, 2),
    "aten.baddbmm.default": (1, 2),
}
"""Positions of the two factors in the arguments of PyTorch's products."""
_WIDENING = ("aten.to.dtype", "aten._to_copy.default")
"""Conversions of element types."""
_FAST_ACCUMULATION = 7
"""Position of `use_fast_accum` in the arguments of `_scaled_mm`."""
_TORCH_TYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_LIBRARY_CALL = re.compile(r"\baoti_torch_\w+?__(scaled|int)_mm\w*\(")
_TEMPLATE_CALL = re.compile(
    r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall_\w*triton_tem_\w*_(scaled|int)_mm\w*\(", re.M
)
"""Calls of FP8 and INT8 products in generated C++: of a library, or of an autotuned Triton template."""
_OWN_CALL = re.compile(r"^(?!.*\b(?:void|static|auto|template)\b).*\bcall__loka_(\w+?)_kernel_\d+\(", re.M)
"""Calls of own kernels, whose Triton functions are named after their operators: Inductor numbers the variants
of a function and launches each by a function of that name (`torch._inductor.codegen.cpp_wrapper_gpu`)."""


def products_of(graph: Any) -> tuple[Product, ...]:
    """Products of a `torch.fx.Graph`, in order; of our own operators, the first two tensors are factors."""
    products = []
    for node in graph.nodes:
        operator = str(node.target) if node.op == "call_function" else ""
        if operator in _FACTORS:
            factors = [node.args[position] for position in _FACTORS[operator]]
        elif operator == "aten.einsum.default":
            factors = list(node.args[1])
        elif operator.startswith(OWN_OPERATORS) and operator not in NO_PRODUCTS:
            factors = [each for each in node.args if _dtype(each)][:2]
        else:
            continue
        types = tuple(_factor_type(factor) for factor in factors)
        products.append(Product(_mark(node), operator, types, _is_fast(node, operator, types)))
    return tuple(products)


def _is_fast(node: Any, operator: str, types: Sequence[str]) -> bool:
    """True if the sums of a product may keep fewer bits than FP32."""
    if operator == PRODUCT_KERNEL:
        # `lowering.strategies.Tile.numbers`
        *_, is_exact, _ = node.args[-1]
        return types[0] in FLOAT8 and not is_exact
    # Export omits arguments with default values, here false.
    positional = any(node.args[_FAST_ACCUMULATION : _FAST_ACCUMULATION + 1])
    return operator == SCALED and bool(node.kwargs.get("use_fast_accum", positional))


def entering_types(graph: Any, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Types of the floating and INT8 tensors that enter the operators of each ONNX node from other nodes."""
    entering: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        name = _mark(node)
        if node.op == "call_function" and name in names:
            types = (_dtype(source) for source in node.all_input_nodes if _mark(source) != name)
            entering.setdefault(name, {}).update(dict.fromkeys(kind for kind in types if kind in _FLOATING))
    return {name: tuple(types) for name, types in entering.items()}


def output_types(graph: Any) -> tuple[str, ...]:
    """Element types of the outputs of an exported graph."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return tuple(_dtype(value) for value in output.args[0])


def _mark(node: Any) -> str:
    return str(node.meta.get("custom", {}).get(MARK, ""))


def _dtype(node: Any) -> str:
    """Element type of a node's value; empty where it is no tensor."""
    dtype = getattr(getattr(node, "meta", {}).get("val"), "dtype", None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _factor_type(node: Any) -> str:
    """Element type of a factor; on the CPU, of quantized values that are widened (`simulated_mm`), theirs."""
    is_widened = str(node.target) in _WIDENING and node.meta["val"].device.type == CPU
    narrow = [kind for kind in map(_dtype, node.all_input_nodes) if kind in _NARROW] if is_widened else []
    return narrow[0] if narrow else _dtype(node)


def product_calls(sources: Sequence[str]) -> Counter[str]:
    """Calls of quantized products and own kernels in generated C++, by operator of the exported program."""
    counts = Counter[str]()
    for text in sources:
        products = (*_LIBRARY_CALL.findall(text), *_TEMPLATE_CALL.findall(text))
        counts.update(f"aten._{kind}_mm.default" for kind in products)
        counts.update(f"{OWN_OPERATORS}{name}.default" for name in _OWN_CALL.findall(text))
    return counts


def site_precisions(
    engine: InductorEngine, calls: Mapping[str, Mapping[str, int]], planned: Sequence[tuple[Site, Precision]]
) -> tuple[SitePrecision, ...]:
    """Return the precision of each planned site; `calls` holds `product_calls` of each program."""
    compiled = {site.site: site for site in engine.sites}
    sites = []
    for site, precision in planned:
        lowered = compiled.get(site.name)
        if lowered is not None:
            engaged, evidence = _read_product(engine, calls, lowered, precision)
            sites.append(SitePrecision(site.name, precision, lowered.operands, engaged, evidence))
        elif site.kind is SiteKind.NORM and not precision.is_quantized:
            sites.append(_read_norm(engine, site.name, precision))
        else:
            evidence = "nothing of that name in the lowered graph"
            sites.append(SitePrecision(site.name, precision, (), False, evidence))
    return tuple(sites)


def _read_product(
    engine: InductorEngine, calls: Mapping[str, Mapping[str, int]], site: CompiledSite, planned: Precision
) -> tuple[bool, str]:
    """Return the verdict that a product runs as planned or not, with the evidence."""
    fast = False
    if planned.is_quantized and not site.engaged:
        return False, f"lowered to {site.kernel}: {site.reason or 'not a quantized product'}"
    for program in engine.programs:
        products = [product for product in program.products if product.node == site.site]
        fast |= any(product.fast_accumulation for product in products)
        reason = _why_wider(products, EIGHT_BITS[planned]) if planned.is_quantized else ""
        reason = reason or _why_not_called(products, program, calls[program.name])
        if reason:
            return False, f"program '{program.name}': {reason}"
    if planned.is_quantized:
        how = f"exported program: {site.kernel}{' with fast accumulation' if fast else ''}"
        return True, f"{how}; {site.reason}" if site.reason else how
    is_planned = bool(site.operands) and {*site.operands} == {_TORCH_TYPES[planned]}
    return is_planned, f"lowered to {site.kernel}{f': {site.reason}' if site.reason else ''}"


def _why_wider(products: Sequence[Product], types: Collection[str]) -> str:
    if not products:
        return "the exported program has no product of this site"
    wide = [each.operands for each in products if not each.operands or not {*each.operands} <= {*types}]
    return f"the exported program multiplies {' by '.join(wide[0]) or 'nothing'} there" if wide else ""


def _why_not_called(products: Sequence[Product], program: Program, calls: Mapping[str, int]) -> str:
    """Reason why the generated code lacks a site's product, for operators that appear there by name."""
    for operator in dict.fromkeys(product.operator for product in products):
        if operator not in _LIBRARY and not operator.startswith(OWN_OPERATORS):
            continue
        called = calls.get(operator, 0)
        expected = sum(product.operator == operator for product in program.products)
        if called < expected:
            what = _LIBRARY.get(operator) or f"kernels of '{operator}'"
            return f"the generated code calls {called} {what}, the exported program has {expected}"
    return ""


def _read_norm(engine: InductorEngine, site: str, planned: Precision) -> SitePrecision:
    """Read a norm by the types that enter it; constants beside them may be wider."""
    read = [program.entering.get(site, ()) for program in engine.programs]
    types = tuple(dict.fromkeys(kind for each in read for kind in each))
    engaged = all(_TORCH_TYPES[planned] in each and not {*each} & _NARROW for each in read)
    absent = "nothing of that name in the exported program"
    evidence = "exported program: what its node reads" if types else absent
    return SitePrecision(site, planned, types, engaged, evidence)
