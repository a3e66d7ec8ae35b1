"""Products of an exported program, read from its graph.

During export every operator is annotated with the ONNX node that it was lowered from (`marked`,
`torch.fx.traceback.annotate`), so that the graph shows which product computes which site, in which types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from loka_onnx.engines.inductor.package import Product

MARK = "loka_onnx_node"
"""Key of the node's name in `torch.fx.Node.meta["custom"]`."""
OWN_OPERATORS = "loka."
"""Prefix of this project's own operators."""
NO_PRODUCTS = frozenset({"loka.concat_quantize.default"})
"""Own operators that multiply nothing."""
SCALED = "aten._scaled_mm.default"
PRODUCT_KERNEL = "loka.product.default"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_FLOATING = {*FLOAT8, "bfloat16", "float16", "float32", "float64"}
_FACTORS = {
    "aten.mm.default": (0, 1),
    "aten.bmm.default": (0, 1),
    "aten.matmul.default": (0, 1),
    "aten.linear.default": (0, 1),
    "aten.addmm.default": (1, 2),
    "aten.baddbmm.default": (1, 2),
    "aten.conv1d.default": (0, 1),
    "aten.conv2d.default": (0, 1),
    "aten.conv3d.default": (0, 1),
    "aten.convolution.default": (0, 1),
    "aten.scaled_dot_product_attention.default": (0, 1),
    SCALED: (0, 1),
}
"""Positions of the two factors in the arguments of PyTorch's products."""
_FAST_ACCUMULATION = 7
"""Position of `use_fast_accum` in the arguments of `_scaled_mm`."""


def marked(name: str, lower: Callable[..., Any], *arguments: Any) -> Any:
    """Call a lowering and annotate its operators with the name of their node."""
    import torch

    with torch.fx.traceback.annotate({MARK: name}):
        return lower(*arguments)


def products_of(graph: Any) -> tuple[Product, ...]:
    """Products of a `torch.fx.Graph`, in order; the factors of an own operator are its first two tensors."""
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
        types = tuple(_dtype(factor) for factor in factors)
        products.append(Product(_mark(node), operator, types, _is_fast(node, operator, types)))
    return tuple(products)


def _is_fast(node: Any, operator: str, types: Sequence[str]) -> bool:
    """True if the sums of a product may keep fewer bits than FP32."""
    if operator == PRODUCT_KERNEL:
        # `kernels.products.Tile.numbers`
        *_, is_exact, _ = node.args[-1]
        return types[0] in FLOAT8 and not is_exact
    if operator != SCALED:
        return False
    # Export omits arguments with default values, here false.
    positional = node.args[_FAST_ACCUMULATION] if len(node.args) > _FAST_ACCUMULATION else False
    return bool(node.kwargs.get("use_fast_accum", positional))


def entering_types(graph: Any, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Element types of the floating tensors that enter the operators of ONNX nodes from other nodes.

    A node without operators is left out.
    """
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
