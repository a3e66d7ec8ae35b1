"""Products of a planned graph in the form that MIGraphX multiplies in FP8 or INT8.

MIGraphX turns ``dot(DQ(a), DQ(b))`` into ``quant_dot(a, b)``, FP8 × FP8 with FP32 sums or INT8 × INT8 with
INT32 sums, and one multiplication by both scales, only where both factors come directly from a DQ with an
explicit zero point and a single FP32 scale; otherwise it deletes the pairs silently. These rules bring every
planned product into that form; each keeps the graph's real numbers up to the rounding in its docstring.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from loka_onnx.engines.draft import LAYOUT_OPS, Array, GraphDraft, Node, attribute
from loka_onnx.errors import ModelError
from loka_onnx.sessions.model_files import FLOAT8_TYPES

FLOAT = int(onnx.TensorProto.FLOAT)


@dataclass
class QuantizedMatMul:
    """A MatMul of quantized factors with the site's name; `tail` is the site's last operator, as a bias."""

    node: Node
    tail: Node


def gemm_to_matmul(draft: GraphDraft) -> tuple[QuantizedMatMul, ...]:
    """Rewrite ``α·op(A)·op(B) + β·C`` of dequantized factors as MatMul, Mul and Add.

    ::

        Gemm(A, B, C) = MatMul(A', B')·α + β·C

    A' and B' are the factors, transposed according to ``transA`` and ``transB``: a constant in its stored
    form, so that nothing is between its DQ and the product, others behind their DQ. α and β are exact where
    they are 1, as in every exported layer; β is multiplied into a constant C in float64. In a graph that is
    not FP32, the sum is rounded more often than Gemm's, which `float32_products` undoes.

    Returns every product of two dequantized factors, including original MatMuls.
    """
    products = []
    for node in list(draft.nodes):
        makers = [draft.behind_layout(name) for name in node.input[:2]]
        if node.op_type in {"MatMul", "Gemm"} and all(
            maker is not None and maker.op_type == "DequantizeLinear" and is_quantized(draft, maker)
            for maker in makers
        ):
            products.append(QuantizedMatMul(node, _ungemmed(draft, node) if node.op_type == "Gemm" else node))
    return tuple(products)


def _ungemmed(draft: GraphDraft, node: Node) -> Node:
    alpha, beta = (float(attribute(node, name, 1.0)) for name in ("alpha", "beta"))
    transposed = [bool(attribute(node, name, 0)) for name in ("transA", "transB")]
    bias = list(node.input[2:3])
    for index, is_transposed in enumerate(transposed):
        if is_transposed:
            node.input[index] = _transposed(draft, node, index)
    node.op_type = "MatMul"
    del node.attribute[:]
    del node.input[2:]
    tail = node
    if alpha != 1.0:
        factor = _number(draft, node, "alpha", alpha)
        tail = draft.follow(tail, "Mul", [factor], f"{node.name}/by_alpha")
    if bias and bias[0]:
        tail = draft.follow(tail, "Add", [_weighted(draft, node, bias[0], beta)], f"{node.name}/bias")
    return tail


def _transposed(draft: GraphDraft, node: Node, index: int) -> str:
    """Transpose a factor: a constant in its stored values, others behind their DQ."""
    source = node.input[index]
    dequantize = draft.dequantize(source)
    if dequantize is None or dequantize.input[0] not in draft.constants:
        return draft.insert(node, "Transpose", [source], f"{node.name}/in{index}/transposed", perm=[1, 0])
    stored = dequantize.input[0]
    values = draft.add_constant(f"{stored}/transposed", draft.values(stored).T)
    # A scale for each row becomes one for each column.
    axis = 1 - attribute(dequantize, "axis", 1) % 2
    inputs = [values, *dequantize.input[1:]]
    return draft.insert(node, "DequantizeLinear", inputs, f"{node.name}/in{index}/dq", axis=axis)


def _weighted(draft: GraphDraft, node: Node, bias: str, beta: float) -> str:
    if beta == 1.0:
        return bias
    if bias in draft.constants:
        values = draft.values(bias)
        return draft.add_constant(f"{bias}/by_beta", (values.astype(np.float64) * beta).astype(values.dtype))
    factor = _number(draft, node, "beta", beta)
    return draft.insert(node, "Mul", [bias, factor], f"{node.name}/by_beta")


def scales_behind_products(draft: GraphDraft, products: Iterable[QuantizedMatMul]) -> None:
    """Multiply by per-channel scales of a weight behind the product instead of in its DQ.

    ::

        x · (W₈ · diag(s)) = (x · W₈) · s         s along the columns of W₈, shape (N,)
        (diag(s) · W₈) · x = (W₈ · x) · s         s along the rows, with an axis behind it

    The weight's DQ keeps the scale 1. Release 2.15 matches scales with axes only by their number, and
    silently takes the wrong axis of a square weight; 2.16 throws. In FP32 the two sides differ by one
    rounding of a product with s instead of one for each weight (2⁻²⁴ relative each). Scales along the axis
    that the product sums over are a `ModelError`.
    """
    for product in products:
        for index in (0, 1):
            scale = _channel_scale(draft, product.node, index)
            if scale is None:
                continue
            behind = draft.follow(product.node, "Mul", [scale], f"{product.node.name}/in{index}/by_scale")
            if product.tail is product.node:
                product.tail = behind


def _channel_scale(draft: GraphDraft, product: Node, index: int) -> str | None:
    """Replace a per-channel scale in a factor's DQ by 1 and return it; None for a single scale."""
    dequantize = draft.dequantize(product.input[index])
    if dequantize is None or dequantize.input[1] not in draft.constants:
        return None
    scale = draft.values(dequantize.input[1])
    if scale.size == 1:
        return None
    stored = dequantize.input[0]
    rank = draft.values(stored).ndim if stored in draft.constants else draft.rank(stored) or 2
    axis = attribute(dequantize, "axis", 1) % rank
    outer = rank - 1 if index == 1 else rank - 2
    if scale.ndim != 1 or axis != outer:
        raise ModelError(
            "E0856 MIGraphX cannot multiply a weight with scales along the axis that is summed over",
            where=f"site '{product.name}'",
            evidence=f"scales {scale.shape} along axis {axis} of input {index}",
            remedy="plan the site with one scale for the tensor, or for each output channel",
        )
    one = draft.add_constant("one", np.ones((), scale.dtype))
    like = dequantize.input[2] if len(dequantize.input) > 2 else stored
    zero = draft.add_constant("zero_point", np.zeros((), draft.values(like).dtype))
    product.input[index] = draft.insert(
        product, "DequantizeLinear", [stored, one, zero], f"{product.name}/in{index}/dq"
    )
    return draft.add_constant(f"{product.name}/in{index}/scale", scale if index == 1 else scale[:, None])


def float32_products(draft: GraphDraft, products: Iterable[QuantizedMatMul]) -> None:
    """Compute every Q, DQ and product of dequantized factors in FP32 within a BF16 or FP16 graph.

    ::

        x₁₆ → Q₁₆ → DQ₁₆ → product₁₆ → y₁₆      becomes
        x₁₆ → Cast → Q₃₂ → DQ₃₂ → product₃₂ → scale, bias → Cast → y₁₆

    Every BF16 and FP16 number is an FP32 number; Q's division and the sum are rounded once, in FP32, instead
    of in 16 bits. MIGraphX computes garbage with FP16 scales, requires one type of x and scale, and throws
    when the factors of a quantized product are cast to BF16. The cast is behind the channels' scales because
    sums of unscaled weights do not fit FP16. Other readers of the DQ get the original type.
    """
    base = _make_pairs_float32(draft)
    for product in products:
        kind = next((base[name] for name in product.node.input if name in base), FLOAT)
        if kind == FLOAT:
            continue
        _widen_tail(draft, product)
        draft.follow(product.tail, "Cast", [], f"{product.node.name}/to_base", to=kind)
    _narrow_other_readers(draft, base, {id(product.node) for product in products})


def _make_pairs_float32(draft: GraphDraft) -> dict[str, int]:
    """Give every Q and DQ an FP32 scale; return the original types of tensors that become FP32."""
    base: dict[str, int] = {}
    for node in list(draft.nodes):
        if not is_quantized(draft, node) or (kind := draft.kind(node.input[1])) == FLOAT:
            continue
        scale = draft.values(node.input[1]).astype(np.float32)
        node.input[1] = draft.add_constant(f"{node.input[1]}/fp32", scale)
        if node.op_type == "QuantizeLinear":
            node.input[0] = draft.insert(node, "Cast", [node.input[0]], f"{node.name}/to_fp32", to=FLOAT)
        else:
            base[node.output[0]] = kind
    for node in draft.nodes:
        if node.op_type in LAYOUT_OPS and node.input[0] in base:
            base[node.output[0]] = base[node.input[0]]
    return base


def _widen_tail(draft: GraphDraft, product: QuantizedMatMul) -> None:
    """Cast the other inputs of the operators behind a product."""
    node = product.node
    while node is not product.tail:
        ((node, read),) = draft.readers(node.output[0])
        for index, name in enumerate(node.input):
            if index == read or (name in draft.constants and draft.kind(name) == FLOAT):
                continue
            if name in draft.constants:
                wide = draft.values(name).astype(np.float32)
                node.input[index] = draft.add_constant(f"{name}/fp32", wide)
            else:
                node.input[index] = draft.insert(node, "Cast", [name], f"{node.name}/to_fp32", to=FLOAT)


def _narrow_other_readers(draft: GraphDraft, base: Mapping[str, int], products: set[int]) -> None:
    for name, kind in base.items():
        if name in draft.outputs:
            raise ModelError(
                "E0857 dequantized values leave the graph",
                where=f"output '{name}'",
                remedy="plan this model for MIGraphX with the base precision fp32",
            )
        casts: list[str] = []
        for reader, index in draft.readers(name):
            if id(reader) in products or (reader.op_type in LAYOUT_OPS and index == 0):
                continue
            if not casts:
                casts.append(draft.insert(reader, "Cast", [name], f"{name}/to_base", to=kind))
            reader.input[index] = casts[0]


def is_quantized(draft: GraphDraft, node: Node) -> bool:
    """True for a Q or DQ of FP8, or of INT8 with the zero point 0, as plans have it."""
    if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
        return False
    kind, zero = draft.quantized_kind(node), "".join(node.input[2:3])
    is_symmetric = not zero or (zero in draft.constants and not np.any(draft.values(zero)))
    return kind in FLOAT8_TYPES or (kind == onnx.TensorProto.INT8 and is_symmetric)


def _number(draft: GraphDraft, product: Node, name: str, value: float) -> str:
    """Add a constant in the type of a product of dequantized factors: that of their scales."""
    maker = draft.behind_layout(product.input[0])
    kind = FLOAT if maker is None else draft.kind(maker.input[1])
    values: Array = np.array(value, np.float64).astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    return draft.add_constant(f"{product.name}/{name}", values)
