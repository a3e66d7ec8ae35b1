"""What an exported program multiplies, read from its graph.

While a model is exported, every operator that a node of the ONNX graph was lowered to is marked with the
node's name (`marked`, PyTorch's `torch.fx.traceback.annotate`), so that the graph itself says which product
computes which site, and in which types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from loka_onnx.engines.inductor.operator_packages import PackageOperator, operator_called
from loka_onnx.engines.inductor.package import Product

MARK = "loka_onnx_node"
"""Key under which a node's name is kept (`torch.fx.Node.meta`, "custom")."""
OWN_OPERATORS = "loka."
"""What names of this project's own operators begin with."""
NO_PRODUCTS = frozenset({"loka.concat_quantize.default"})
"""Those that multiply nothing."""
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
"""Positions of the two factors of each product of PyTorch that a lowering makes."""
_FAST_ACCUMULATION = 7
"""Position of ``use_fast_accum`` of `_scaled_mm`."""


def marked(name: str, lower: Callable[..., Any], *arguments: Any) -> Any:
    """Call a lowering so that what it makes carries the name of its node."""
    import torch

    with torch.fx.traceback.annotate({MARK: name}):
        return lower(*arguments)


def products_of(graph: Any) -> tuple[Product, ...]:
    """The products of an exported graph, in its order.

    An operator of this project's own counts as a product of its first two tensors, one of another package
    (`operator_packages`) as one of its first two arguments.

    Args:
        graph: `torch.fx.Graph` of an exported program.
    """
    return tuple(_products(graph))


def _products(graph: Any) -> Iterator[Product]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operator = str(node.target)
        packaged = operator_called(operator)
        if packaged is not None:
            factors = list(node.args[:2])
        elif operator in _FACTORS:
            factors = [node.args[position] for position in _FACTORS[operator]]
        elif operator == "aten.einsum.default":
            factors = list(node.args[1])
        elif operator.startswith(OWN_OPERATORS) and operator not in NO_PRODUCTS:
            factors = [each for each in node.args if _dtype(each)][:2]
        else:
            continue
        types = tuple(_dtype(factor) for factor in factors)
        yield Product(_mark(node), operator, types, _is_fast(node, operator, types, packaged))


def _is_fast(node: Any, operator: str, types: Sequence[str], packaged: PackageOperator | None) -> bool:
    """Whether the sums of a product may be kept in fewer bits than FP32."""
    if operator == PRODUCT_KERNEL:
        return types[0] in FLOAT8 and not _is_exact(node)
    if packaged is None and operator != SCALED:
        return False
    position = _FAST_ACCUMULATION if packaged is None else packaged.fast_position
    # Export leaves out an argument that has its default: false of PyTorch's own, true of the others.
    default = packaged is not None
    positional = node.args[position] if len(node.args) > position else default
    return bool(node.kwargs.get("use_fast_accum", positional))


def entering_types(graph: Any, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Element types of the floating tensors that the operators of each node read from outside.

    Args:
        graph: `torch.fx.Graph` of an exported program.
        names: Nodes of the ONNX graph; one that nothing was lowered to is left out.
    """
    found: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        name = _mark(node)
        if node.op == "call_function" and name in names:
            types = (_dtype(source) for source in node.all_input_nodes if _mark(source) != name)
            found.setdefault(name, {}).update(dict.fromkeys(kind for kind in types if kind in _FLOATING))
    return {name: tuple(types) for name, types in found.items()}


def output_types(graph: Any) -> tuple[str, ...]:
    """Element types of the outputs of an exported graph."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return tuple(_dtype(value) for value in output.args[0])


def _is_exact(node: Any) -> bool:
    """Whether our FP8 kernel moves its sums to FP32 after each step (`kernels.products.Tile.numbers`)."""
    *_, is_exact, _ = node.args[-1]
    return bool(is_exact)


def _mark(node: Any) -> str:
    return str(node.meta.get("custom", {}).get(MARK, ""))


def _dtype(node: Any) -> str:
    """Element type of what a node computes; empty where that is no tensor."""
    dtype = getattr(getattr(node, "meta", {}).get("val"), "dtype", None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")
