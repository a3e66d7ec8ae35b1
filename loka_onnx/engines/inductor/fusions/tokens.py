"""Mixers of tokens with what is behind them (Wukong, arXiv 2403.02545, section 3).

X (batch, n, d) holds tokens. Exporters write a mixer of tokens as Xᵀ · W, with a learned W (n, m), and mods
merge several that read the same Xᵀ into one product with a Split behind it.

The interaction half of a factorization machine block, with a learned Y (n, k), and the Q behind it::

    Q?(LN(flatten(X · (Xᵀ · Y))))   →   one kernel that reads X once

A residual block over tokens, with the block's own tokens F (batch, n_F, d) and W (n_L, n), n_F + n_L = n::

    LN(concat(F, W · X) + X)   →   one kernel that reads X and F once

Both keep the product and the sums in FP32 for the norm; the graph rounds them in between.

A mixer without a norm and other tokens F, or the mixer alone, flattened or not, with W (m, n)::

    Z  =  W · X,   concat(F, W · X)   or   concat(W · X, F),      Z, Q(Z)

Exporters write W · X as (Xᵀ · Wᵀ)ᵀ. A compiler makes both transposes strides: the product then runs on a
kernel for unaligned operands, and the cast or Q of Z reads across rows. With n = 11 and Z of 27 × 128 at
2,048 examples (MovieLens' columns in front of a DLRM-DCNv2, on an H100, record `trained-dlrm-dcnv2` of tree
005134e) the product took 22 µs, the cast of its input 7, and the concatenation 8, or 36 with a Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from loka_onnx.engines.inductor.fusions.base import (
    DOMAIN,
    HALVES,
    DeclinedFusion,
    Fused,
    KernelOutputs,
    is_quantize,
    only_reader,
    static,
    tiled,
    unrounded,
)
from loka_onnx.engines.inductor.fusions.planned import Node, PlannedGraph, Tensor

MOST_ELEMENTS = 1 << 15
"""Most elements of an operand, which a kernel holds whole, in 2 bytes each, in registers and shared memory:
two are 128 KiB, and a block has at most 163 KB on sm80, 227 KB on sm90 and sm100, 99 KB on sm89 and sm120
(CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"). Where that is too much, the
build of the candidate fails; sm89 and sm120 were not tried."""


def is_too_large(*sides: int) -> bool:
    """True if a tile of any two of some sides exceeds `MOST_ELEMENTS`."""
    return any(tiled(a) * tiled(b) > MOST_ELEMENTS for a, b in combinations(sides, 2))


def made_by(tensor: Tensor, op: str) -> Node | None:
    """Return the node of operator `op` that computes a tensor, ignoring casts to FP32; or None."""
    node = through_casts(tensor).producer
    return node if node is not None and node.op == op else None


def through_casts(tensor: Tensor) -> Tensor:
    """Return the tensor from which this one is widened to FP32 (kernels widen as they load), or itself."""
    node = tensor.producer
    while node is not None and node.op == "Cast" and node.reads(0).kind in HALVES:
        if tensor.kind != onnx.TensorProto.FLOAT:
            break
        tensor = node.reads(0)
        node = tensor.producer
    return tensor


@dataclass(frozen=True)
class TokenMix:
    """Xᵀ · W: the tensor X, the weight W (n, m), and the node, perhaps merged with others."""

    x: Tensor
    weight: npt.NDArray[Any]
    product: Node


def token_mix(tensor: Tensor) -> TokenMix | None:
    """Match a tensor (batch, d, m) as Xᵀ · W; or None."""
    tensor = through_casts(tensor)
    node, columns = tensor.producer, slice(None)
    if node is not None and node.op == "Split":
        part = _part(node, tensor)
        if part is None:
            return None
        columns, node = part, node.reads(0).producer
    if node is None or node.op != "MatMul" or not node.reads(1).is_constant:
        return None
    weight = node.reads(1).values
    x = untransposed(node.reads(0))
    if x is None or weight.ndim != 2 or node.reads(1).kind != x.kind:
        return None
    return TokenMix(x, weight[:, columns], node)


def untransposed(tensor: Tensor) -> Tensor | None:
    """Return the tensor of rank 3 whose last two axes this one transposes; None where it is no transpose."""
    node = made_by(tensor, "Transpose")
    return None if node is None or not swaps_tokens(node) else through_casts(node.reads(0))


def swaps_tokens(node: Node) -> bool:
    """True if a node transposes (batch, n, d) to (batch, d, n)."""
    return node.op == "Transpose" and list(node.attrs.get("perm", ())) == [0, 2, 1]


def _part(split: Node, tensor: Tensor) -> slice | None:
    """Columns that one output of a Split along the last axis holds; or None."""
    if split.attrs.get("axis", 0) not in {-1, 2} or not split.has(1) or not split.reads(1).is_constant:
        return None
    if len(split.reads(1).values) != len(split.outputs):
        return None
    ends = np.cumsum(split.reads(1).values)
    position = next(i for i, output in enumerate(split.outputs) if output is tensor)
    return slice(int(ends[position - 1]) if position else 0, int(ends[position]))


def _interaction(norm: Node) -> Node | None:
    """Match the product X · P that a norm reads flattened."""
    if norm.op != "LayerNormalization":
        return None
    for op in ("Reshape", "Flatten"):
        flat = made_by(norm.reads(0), op)
        if flat is not None:
            return made_by(flat.reads(0), "MatMul")
    return None


def factorization_norm(graph: PlannedGraph, norm: Node) -> Fused | None:
    """Fuse an interaction with its norm."""
    product = _interaction(norm)
    mix = None if product is None else token_mix(product.reads(1))
    if product is None or mix is None or through_casts(product.reads(0)) is not mix.x:
        return None
    x, (n, k) = mix.x, mix.weight.shape
    lengths = static(x, 3)
    if lengths is None or lengths[0] != n:
        raise DeclinedFusion("the shape of the tokens is not known")
    if x.kind not in HALVES:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    if product.outputs[0].kind != x.kind:
        raise DeclinedFusion("the plan keeps the product in FP32")
    if not _normalizes_last_axis(norm, (None, n * k)):
        raise DeclinedFusion("it does not normalize over all of the flattened product, and that alone")
    d = lengths[1]
    if is_too_large(n, d, k):
        raise DeclinedFusion(f"{n}×{d} tokens and rank {k} are too large for one program")
    name = graph.fresh_name(f"{norm.name}/factorization")
    weight = graph.constant(f"{name}.y", mix.weight)
    inputs = [x, weight, *_affine(graph, norm, name, n * k)]
    out = _rounded_output(graph, norm, x)
    reader = only_reader(graph, out)
    products = (mix.product.name, product.name)
    attrs = _attributes(norm, products)
    if reader is not None and is_quantize(reader):
        out = reader.outputs[0]
        inputs.append(reader.reads(1))
        attrs["narrow"] = out.kind
    elif out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    graph.replace(f"{DOMAIN}::FactorizationNorm", name, inputs, [out], attrs)
    return Fused(name, (*products, norm.name))


def _residual(norm: Node) -> tuple[Tensor, TokenMix] | None:
    """Match F and W · X of the sum that a norm reads."""
    total = made_by(norm.reads(0), "Add") if norm.op == "LayerNormalization" else None
    if total is None:
        return None
    both = (total.reads(0), total.reads(1))
    for joined, residual in (both, both[::-1]):
        concat = made_by(joined, "Concat")
        if concat is None or len(concat.inputs) != 2 or concat.attrs.get("axis") not in {1, -2}:
            continue
        mixed = untransposed(concat.reads(1))
        mix = None if mixed is None else token_mix(mixed)
        if mix is not None and mix.x is through_casts(residual):
            return through_casts(concat.reads(0)), mix
    return None


def token_residual_norm(graph: PlannedGraph, norm: Node) -> Fused | None:
    """Fuse a residual block with its norm."""
    block = _residual(norm)
    if block is None:
        return None
    own, mix = block
    x, (n, later) = mix.x, mix.weight.shape
    lengths, first = static(x, 3), static(own, 3)
    if lengths is None or first is None or lengths[0] != n or first != (n - later, lengths[1]):
        raise DeclinedFusion("the shape of the tokens is not known, or is another behind the block")
    if x.kind not in HALVES or own.kind != x.kind:
        raise DeclinedFusion("the kernel multiplies BF16 and FP16")
    d = lengths[1]
    if not _normalizes_last_axis(norm, (None, n, d)):
        raise DeclinedFusion("it does not normalize each token, and that alone")
    if is_too_large(n, later, d):
        raise DeclinedFusion(f"{n}×{d} tokens are too large for one program")
    name = graph.fresh_name(f"{norm.name}/residual")
    weight = graph.constant(f"{name}.w", mix.weight.T)
    inputs = [x, own, weight, *_affine(graph, norm, name, d)]
    out = _rounded_output(graph, norm, x)
    if out.kind != x.kind:
        raise DeclinedFusion("its output is read in another precision than that of the tokens")
    attrs = _attributes(norm, (mix.product.name,))
    graph.replace(f"{DOMAIN}::TokenResidualNorm", name, inputs, [out], attrs)
    return Fused(name, (mix.product.name, norm.name))


def _normalizes_last_axis(norm: Node, shape: tuple[int | None, ...]) -> bool:
    """True if a norm is over exactly the last axis of a tensor of that shape (None for the batch)."""
    read = norm.reads(0).shape or ()
    axis = norm.attrs.get("axis", -1)
    return len(norm.outputs) == 1 and read[1:] == shape[1:] and axis in {-1, len(shape) - 1}


def _affine(graph: PlannedGraph, norm: Node, name: str, size: int) -> list[Tensor]:
    """Constants γ and β of a norm over `size` values."""
    affine = [tensor for tensor in norm.inputs[1:] if tensor is not None]
    if not all(tensor.is_constant and tensor.values.size == size for tensor in affine):
        raise DeclinedFusion(f"its gain and shift are not {size} constants each")
    scale = affine[0].values.reshape(-1)
    shift = affine[1].values.reshape(-1) if len(affine) > 1 else np.zeros_like(scale)
    return [graph.constant(f"{name}.gamma", scale), graph.constant(f"{name}.beta", shift)]


def _rounded_output(graph: PlannedGraph, norm: Node, x: Tensor) -> Tensor:
    """Output of the cast to the tokens' type behind a norm, or that of the norm."""
    reader = only_reader(graph, norm.outputs[0])
    if reader is not None and reader.op == "Cast" and reader.outputs[0].kind == x.kind:
        return reader.outputs[0]
    return norm.outputs[0]


def _attributes(norm: Node, products: tuple[str, ...]) -> dict[str, object]:
    """Attributes of the new node; ``norm_type`` is the planned type, although the kernel computes in FP32."""
    return {
        "epsilon": float(norm.attrs.get("epsilon", 1e-5)),
        "products": list(products),
        "norm": norm.name,
        "norm_type": norm.outputs[0].kind,
    }


@dataclass(frozen=True)
class _TokenConcat:
    """A mix W · X, its end Z (batch, tokens, d), and F beside it, if any; `is_first`: the mix is before F."""

    mix: TokenMix
    end: Tensor
    beside: Tensor | None = None
    is_first: bool = True


def _mixed(graph: PlannedGraph, node: Node) -> _TokenConcat | None:
    """Match a Transpose whose output is W · X, and the Concat behind it; None for any other."""
    mixed = node.outputs[0]
    product = untransposed(mixed) if node.op == "Transpose" else None
    mix = None if product is None or product.kind not in HALVES else token_mix(product)
    if mix is None:
        return None
    reader = only_reader(graph, mixed)
    if reader is None or reader.op != "Concat" or len(reader.inputs) != 2:
        return _TokenConcat(mix, mixed)
    first, second = reader.reads(0), reader.reads(1)
    beside = second if first is mixed else first
    if first is second or reader.attrs.get("axis") not in {1, -2} or beside.is_constant:
        return _TokenConcat(mix, mixed)
    return _TokenConcat(mix, reader.outputs[0], beside, first is mixed)


def token_concat(graph: PlannedGraph, node: Node) -> Fused | None:
    """Fuse a token mixer without a norm."""
    match = _mixed(graph, node)
    if match is None:
        return None
    mix, beside = match.mix, match.beside
    declined = partial(DeclinedFusion, node=mix.product)
    n, m = mix.weight.shape
    lengths, others = static(mix.x, 3), None if beside is None else static(beside, 3)
    if lengths is None or lengths[0] != n or (beside is not None and others is None):
        raise declined("the shape of the tokens is not known")
    if mix.x.kind not in HALVES or match.end.kind != mix.x.kind:
        raise declined("the kernel multiplies BF16 and FP16")
    if not _is_all_mixed(mix.product):
        raise declined("something else reads the product, which would be computed twice")
    d = lengths[1]
    rows = [n, m, *(() if others is None else others[:1])]
    if others is not None and others[1] != d:
        raise declined("what it joins are not tokens of one length")
    if is_too_large(n, m, d) or is_too_large(max(rows), d):
        raise declined(f"{max(rows)}×{d} tokens are too large for one program")
    end = _flattened(graph, match.end, (m + (0 if others is None else others[0])) * d)
    ends = KernelOutputs.of(graph, end)
    name = graph.fresh_name(f"{mix.product.name}/tokens")
    tokens, weight = unrounded(graph, mix.x), graph.constant(f"{name}.w", mix.weight.T)
    inputs = [tokens, weight, None if beside is None else unrounded(graph, beside), ends.scale]
    attrs: dict[str, Any] = {"products": [mix.product.name], "mix_first": int(match.is_first)}
    attrs |= {"flat": int(end is not match.end), "base": match.end.kind, **ends.attributes}
    graph.replace(f"{DOMAIN}::TokenConcat", name, inputs, ends.replaced(end), attrs)
    return Fused(name, (mix.product.name,))


def _is_all_mixed(product: Node) -> bool:
    """True if all readers of a product and its parts are replaced by this fusion."""
    ends = list(product.outputs)
    while ends:
        for reader in ends.pop().readers:
            if reader.op in {"Split", "Cast"}:
                ends += reader.outputs
            elif not swaps_tokens(reader):
                return False
    return True


def _flattened(graph: PlannedGraph, end: Tensor, width: int) -> Tensor:
    """Return Z as one row per example where its only reader flattens it; else Z."""
    reader = only_reader(graph, end)
    flat = end if reader is None or reader.op not in {"Reshape", "Flatten"} else reader.outputs[0]
    return flat if static(flat, 2) == (width,) else end
