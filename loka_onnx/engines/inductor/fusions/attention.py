"""Exact attention as one call of PyTorch's (FlashAttention, arXiv 2205.14135) or of an own kernel.

With queries Q (batch, heads, q, d), Kᵀ (batch, heads, d, k) and V (batch, heads, k, d), also without heads::

    softmax(s · Q·Kᵀ + mask) · V

The mask is added, or selects −∞ (Where). A guard that turns NaN of wholly masked rows into 0 is dropped: the
kernels give 0 anyway. A row that a finite BF16 mask masks is uniform (`kernels.operators`); in FP16 only in
the graph, which rounds sums: the kernels add in FP32. Constant factors of Q or Kᵀ alone stay with them.

The compiler writes products and probabilities (batch, heads, q, k) to memory; a fused kernel keeps them on
the chip and sums in FP32. On a GPU it is an own kernel where the keys of a head fit one tile (`is_short`,
`kernels.triton_attention`), else PyTorch's choice: on an H100 cuDNN's, which pays from `LEAST` products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx

from loka_onnx.engines.inductor.fusions.base import DOMAIN, HALVES, DeclinedFusion, Fused, static, tiled
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

OP = f"{DOMAIN}::Attention"
MULTIPLE, MOST = 8, 256
"""Required divisor of d, and its largest value; PyTorch was not tried on others."""
LEAST = 3000
"""Fewest products of queries and keys of a head for which PyTorch's kernels pay on an H100: with 1024
examples of 8 heads of width 16, 2304 products took 165 µs fused and 137 otherwise, 3328 took 177 and 219."""
SHORT_KEYS = range(16, 257)
"""Numbers of keys in a tile of our kernel; fewer would be more than half padding."""
SHORT_QUERIES, SHORT_WIDTH, SHORT_ELEMENTS = 256, 128, 1 << 14
"""Most queries and head width of our kernel, and elements of its tile of keys (32 KiB), or values."""
_SHAPES = {"Expand", "Flatten", "Reshape", "Squeeze", "Tile", "Unsqueeze"}
MOVEMENTS = _SHAPES | {"Concat", "Gather", "Identity", "Slice", "Split", "Transpose"}
"""Operators through which the lowering passes quantized values."""


@dataclass(frozen=True)
class _Attention:
    """A matched attention: `inside` are all nodes but the last one, Q · Kᵀ last; `mask` is added, or a
    condition that is true where products stay (`keep`) or become −∞ (`drop`).
    """

    q: Tensor
    kt: Tensor
    v: Tensor
    out: Node
    inside: tuple[Node, ...]
    mask: Tensor | None = None
    keep: bool = False
    drop: bool = False
    scale: float = 1.0

    @property
    def softmax(self) -> Node:
        """The softmax node."""
        return next(node for node in self.inside if node.op == "Softmax")


def is_short(queries: int, keys: int, width: int) -> bool:
    """True if a GPU runs our own kernel for an attention, which is then fused below `LEAST` products too.

    The keys of a head are one tile, and at least two programs, with values, queries and probabilities, fit a
    multiprocessor. On an H100, 11 shapes of 200 to 10816 products took .37 to .97 of the unfused time
    (`benchmarks/records/attention-times.json`); more than 104 queries or keys were not timed. On a CPU, 2
    queries of 100 keys took 1.3 times the unfused time.
    """
    fits = tiled(keys) * tiled(width) <= SHORT_ELEMENTS
    return keys in SHORT_KEYS and queries <= SHORT_QUERIES and width <= SHORT_WIDTH and fits


def exact_attention(graph: PlannedGraph, out: Node) -> Fused | None:
    """Fuse a product whose first factor is a softmax of a product."""
    match = _matched(out) if out.op == "MatMul" else None
    if match is None:
        return None
    _check_precision(match)
    _check_shapes(match)
    _check_graph(graph, match)
    names = (match.inside[-1].name, out.name)
    name = graph.fresh_name(f"{out.name}/attention")
    attrs = {"products": list(names), "scale": match.scale, "keep": int(match.keep), "drop": int(match.drop)}
    graph.replace(OP, name, [match.q, match.kt, match.v, match.mask], [out.outputs[0]], attrs)
    return Fused(name, names)


def _matched(out: Node) -> _Attention | None:
    """Match the attention that a product ends; None where its first factor is no softmax of a product."""
    tensor, inside = _through_casts(out.reads(0), ())
    guard = _node(tensor, "Where")
    if guard is not None:
        test = _node(guard.reads(0), "IsNaN")
        if test is None or test.reads(0) is not guard.reads(2) or _number(guard.reads(1)) != 0.0:
            return None
        tensor, inside = _through_casts(guard.reads(2), (*inside, guard, test))
    softmax = _node(tensor, "Softmax")
    if softmax is None:
        return None
    start = _Attention(tensor, tensor, out.reads(1), out, (*inside, softmax))
    return next(_products(softmax.reads(0), start), None)


def _products(tensor: Tensor, match: _Attention) -> Iterator[_Attention]:
    """Yield matches of the product upstream of a softmax, with the scale and mask between them."""
    tensor, inside = _through_casts(tensor, match.inside)
    node = tensor.producer
    if node is None:
        return
    match = replace(match, inside=(*inside, node))
    if node.op == "MatMul":
        yield replace(match, q=node.reads(0), kt=node.reads(1))
    elif node.op in {"Mul", "Div"}:
        yield from _scaled(node, match)
    elif match.mask is None and match.scale == 1.0:
        # A factor downstream of the mask would scale the mask too.
        yield from _masked(node, match)


def _scaled(node: Node, match: _Attention) -> Iterator[_Attention]:
    for value, factor in ((0, 1), (1, 0))[: 1 if node.op == "Div" else 2]:
        number = _number(node.reads(factor))
        if number is not None and number > 0.0:
            scale = match.scale / number if node.op == "Div" else match.scale * number
            yield from _products(node.reads(value), replace(match, scale=scale))


def _masked(node: Node, match: _Attention) -> Iterator[_Attention]:
    if node.op == "Add":
        for value, mask in ((0, 1), (1, 0)):
            yield from _products(node.reads(value), replace(match, mask=node.reads(mask)))
    elif node.op == "Where":
        for value, lowest in ((1, 2), (2, 1)):
            if _number(node.reads(lowest)) == -np.inf:
                masked = replace(match, mask=node.reads(0), keep=value == 1, drop=value == 2)
                yield from _products(node.reads(value), masked)


def _node(tensor: Tensor, op: str) -> Node | None:
    node = tensor.producer
    return node if node is not None and node.op == op else None


def _through_casts(tensor: Tensor, inside: tuple[Node, ...]) -> tuple[Tensor, tuple[Node, ...]]:
    """Follow casts upstream; return the source and the nodes with the casts added."""
    while (node := _node(tensor, "Cast")) is not None:
        tensor, inside = node.reads(0), (*inside, node)
    return tensor, inside


def _number(tensor: Tensor) -> float | None:
    return float(tensor.values.item()) if tensor.is_read and tensor.values.size == 1 else None


def _check_precision(match: _Attention) -> None:
    kind = match.q.kind
    if kind not in HALVES or {match.kt.kind, match.v.kind, match.out.outputs[0].kind} != {kind}:
        raise DeclinedFusion("the kernels multiply BF16 and FP16")
    between = {tensor.kind for node in match.inside for tensor in node.outputs if node.op != "IsNaN"}
    if not between <= {kind, onnx.TensorProto.FLOAT}:
        raise DeclinedFusion("what is between its products is rounded to another type")
    if any(_is_dequantized(tensor) for tensor in (match.q, match.kt, match.v)):
        raise DeclinedFusion("a product of it is planned in eight bits")
    mask = match.mask
    wanted = onnx.TensorProto.BOOL if match.keep or match.drop else kind
    if mask is not None and mask.kind != wanted:
        raise DeclinedFusion(f"mask '{mask.name}' has another type than the products")


def _is_dequantized(tensor: Tensor) -> bool:
    """True if a tensor is dequantized, or moved from one that is."""
    pending = [tensor]
    while pending:
        node = pending.pop().producer
        if node is None:
            continue
        if node.op == "DequantizeLinear":
            return True
        if node.op in MOVEMENTS:
            read = node.inputs if node.op == "Concat" else node.inputs[:1]
            pending += [each for each in read if each is not None]
    return False


def _check_shapes(match: _Attention) -> None:
    rank = len(match.q.shape or ())
    lengths = [static(tensor, rank) for tensor in (match.q, match.kt, match.v, match.softmax.outputs[0])]
    if rank not in {3, 4} or None in lengths:
        raise DeclinedFusion("a shape is not known, or has neither heads nor one batch axis alone")
    q, kt, v = ((tensor.shape or ()) for tensor in (match.q, match.kt, match.v))
    if not q[:-2] == kt[:-2] == v[:-2]:
        raise DeclinedFusion("batches or heads are broadcast")
    queries, width, keys = q[-2] or 0, q[-1] or 0, kt[-1] or 0
    if v[-1] != width:
        raise DeclinedFusion(f"its keys have {width} numbers a head, its values {v[-1]}")
    if width % MULTIPLE or width > MOST:
        taken = f"multiples of {MULTIPLE} up to {MOST}"
        raise DeclinedFusion(f"a head has {width} numbers; the kernels take {taken}")
    if queries * keys < LEAST and not is_short(queries, keys, width):
        raise DeclinedFusion(f"{queries} queries of {keys} keys are too few to gain by it")
    if match.mask is not None and not _is_mask(match.mask, (*q[:-1], keys)):
        raise DeclinedFusion(f"mask '{match.mask.name}' is not one of {keys} keys")


def _is_mask(mask: Tensor, products: tuple[int | None, ...]) -> bool:
    """True if a mask has an element for every key, and its other axes match or are 1."""
    shape = mask.shape
    if not shape or len(shape) > len(products) or shape[-1] != products[-1]:
        return False
    behind = products[len(products) - len(shape) :]
    return all(length in (1, whole) for length, whole in zip(shape, behind, strict=True))


def _check_graph(graph: PlannedGraph, match: _Attention) -> None:
    if match.softmax.attrs.get("axis", -1) not in {-1, len(match.q.shape or ()) - 1}:
        raise DeclinedFusion("its softmax is not over the keys")
    inner = {id(node) for node in (*match.inside, match.out)}
    for tensor in (tensor for node in match.inside for tensor in node.outputs):
        others = [reader for reader in tensor.readers if id(reader) not in inner]
        if others or graph.is_output(tensor):
            who = others[0].name if others else "an output"
            raise DeclinedFusion(f"'{tensor.name}' is read by {who} as well")
