"""Lowering of the nodes that fusions write: to a kernel on CUDA, to the same arithmetic elsewhere.

Importing this module registers the lowerings (`lowering.node.OPERATORS`).
"""

from __future__ import annotations

from typing import Any

import onnx
import torch
from torch import Tensor
from torch.nn import functional

from loka_onnx.engines.inductor.fusions.attention import is_short
from loka_onnx.engines.inductor.fusions.base import DOMAIN
from loka_onnx.engines.inductor.lowering.node import Node, operator
from loka_onnx.engines.inductor.lowering.strategies import Epilogue, Factors, quantized
from loka_onnx.engines.inductor.lowering.values import TORCH_TYPES, Constant, Value, short_name
from loka_onnx.engines.inductor.package import CompiledSite

LOWEST = -1e38
"""Least finite mask value: still finite after multiplication by log2(e). With BF16's least number, a row that
is wholly masked gave zeros on an H100, where the graph gives the mean of V."""


def _record(node: Node, kind: torch.dtype) -> None:
    """Record the sites that one kernel computes together, with factors of a type."""
    products: list[str] = node.get("products", [])
    sites: dict[str, tuple[str, ...]] = dict.fromkeys(products, (short_name(kind),) * 2)
    if node.get("norm", ""):
        # The norm computes in FP32 whatever the type of its tensors.
        sites[node.get("norm", "")] = (short_name(TORCH_TYPES[node.get("norm_type", 1)]),)
    for name, types in sites.items():
        node.scope.sites[name] = CompiledSite(name, f"fused {node.op_type}", types, engaged=False)


def _number(node: Node, value: Value) -> float | None:
    if value is None:
        return None
    if isinstance(value, Constant) and value.array is not None and value.array.size == 1:
        return float(value.array.reshape(())[()])
    raise node.error("a scale is not a constant number", f"it is {type(value).__name__}")


def _narrow(node: Node) -> torch.dtype:
    return TORCH_TYPES[node.get("narrow", onnx.TensorProto.FLOAT8E4M3FN)]


def _inverse(scale: float | None) -> float:
    return 0.0 if scale is None else 1.0 / scale


@operator("FactorizationNorm", domain=DOMAIN, raw=True, wide=(4,))
def factorization_norm(
    node: Node, x: Value, y: Value, gamma: Value, beta: Value, out_scale: Value = None
) -> Any:
    """Lower to `triton_norms.factorization_norm`."""
    tokens, weight, factor, shift = (node.tensor(each) for each in (x, y, gamma, beta))
    epsilon, scale = float(node.get("epsilon", 1e-5)), _number(node, out_scale)
    _record(node, tokens.dtype)
    if tokens.is_cuda:
        from loka_onnx.engines.inductor.kernels import triton_norms as kernels

        ends = (epsilon, _inverse(scale), None if scale is None else _narrow(node))
        return kernels.factorization_norm(tokens.contiguous(), weight, factor, shift, *ends)
    product = torch.matmul(tokens, torch.matmul(tokens.transpose(1, 2), weight))
    flat = product.reshape(tokens.shape[0], -1).to(torch.float32)
    affine = (factor.to(torch.float32), shift.to(torch.float32))
    out = functional.layer_norm(flat, flat.shape[1:], *affine, epsilon)
    return out.to(tokens.dtype) if scale is None else quantized(out, scale, _narrow(node))


@operator("TokenResidualNorm", domain=DOMAIN)
def token_residual_norm(node: Node, x: Tensor, f: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Any:
    """Lower to `triton_norms.token_residual_norm`."""
    epsilon = float(node.get("epsilon", 1e-5))
    _record(node, x.dtype)
    if x.is_cuda:
        from loka_onnx.engines.inductor.kernels import triton_norms as kernels

        return kernels.token_residual_norm(x.contiguous(), f.contiguous(), w, gamma, beta, epsilon)
    joined = torch.cat([f, torch.matmul(w, x)], dim=1).to(torch.float32) + x.to(torch.float32)
    affine = (gamma.to(torch.float32), beta.to(torch.float32))
    return functional.layer_norm(joined, joined.shape[-1:], *affine, epsilon).to(x.dtype)


@operator("Attention", domain=DOMAIN)
def attention(node: Node, q: Tensor, kt: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
    """Lower exact attention (formula in `fusions.attention`), with or without the axis of heads. q is (batch,
    heads, queries, d), kt (batch, heads, d, keys), v (batch, heads, keys, d). A float mask is added; a
    boolean one keeps where true, or with the attribute `drop` where false.
    """
    _record(node, q.dtype)
    if mask is not None:
        mask = mask.reshape((1,) * (q.dim() - mask.dim()) + mask.shape)
    scale, drops, has_heads = float(node.get("scale", 1.0)), bool(node.get("drop", 0)), q.dim() == 4
    if not has_heads:
        q, kt, v = q.unsqueeze(1), kt.unsqueeze(1), v.unsqueeze(1)
        mask = None if mask is None else mask.unsqueeze(1)
    if q.is_cuda and _is_short(q, kt, v, mask):
        from loka_onnx.engines.inductor.kernels import triton_attention as kernel

        q, kt, v = (_readable(each) for each in (q, kt, v))
        mask = None if mask is None else _readable(mask)
        fused = kernel.short_attention(q, kt, v, mask, scale, drops).transpose(1, 2)
    else:
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.logical_not(mask) if drops else mask
        elif mask is not None and mask.dtype is torch.bfloat16:
            mask = torch.where(torch.isinf(mask), mask, mask.clamp(min=LOWEST))
        k = kt.transpose(-1, -2)
        fused = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return fused if has_heads else fused.squeeze(1)


def _is_short(q: Tensor, kt: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True if our kernel computes this attention: sizes pass `is_short`, and only a mask is broadcast."""
    sizes = (q.shape[2], kt.shape[3], q.shape[3])
    if not all(isinstance(size, int) for size in sizes) or not is_short(*sizes):
        return False
    if not q.shape[:2] == kt.shape[:2] == v.shape[:2]:
        return False
    pairs = [] if mask is None else zip(mask.shape, (*q.shape[:3], kt.shape[3]), strict=True)
    return all(a == b or (isinstance(a, int) and a == 1) for a, b in pairs)


def _readable(tensor: Tensor) -> Tensor:
    """Copy a tensor unless our kernel can compile its strides in: static ones that fit 32 bits within an
    example. Some models keep the batch on another axis than the first.
    """
    steps = list(zip(tensor.stride(), tensor.shape, strict=True))
    fits = all(isinstance(stride, int) for stride, _ in steps)
    if fits and all(stride * length < 1 << 31 for stride, length in steps[1:]):
        return tensor
    return tensor.contiguous()


@operator("ConcatQuantize", domain=DOMAIN, raw=True, wide=(2,))
def concat_quantize(node: Node, a: Value, b: Value, out_scale: Value) -> tuple[Tensor, ...]:
    """Lower a Concat of columns (M, a) and (M, b) to X in the base type, if `wide`, and X / `out_scale`."""
    left, right = node.tensor(a), node.tensor(b)
    half, wide = TORCH_TYPES[node.get("base", 1)], bool(node.get("wide", 1))
    scale = _number(node, out_scale)
    if left.is_cuda:
        from loka_onnx.engines.inductor.kernels import triton_concats as kernels

        parts = (left.contiguous(), right.contiguous())
        return tuple(kernels.concat_quantize(*parts, _inverse(scale), half, wide, _narrow(node)))
    joined = torch.cat([left.to(half), right.to(half)], dim=1)
    return Epilogue(scale=scale, narrow=_narrow(node), is_wide=wide).apply(joined)


@operator("TokenConcat", domain=DOMAIN, raw=True, wide=(3,))
def token_concat(
    node: Node, x: Value, w: Value, f: Value = None, out_scale: Value = None
) -> tuple[Tensor, ...]:
    """Lower to `triton_concats.token_concat`."""
    tokens, weight = node.tensor(x), node.tensor(w)
    others, scale = None if f is None else node.tensor(f), _number(node, out_scale)
    half, wide = TORCH_TYPES[node.get("base", 1)], bool(node.get("wide", 1))
    mix_first = bool(node.get("mix_first", 0))
    _record(node, half)
    outputs: Any
    if tokens.is_cuda:
        from loka_onnx.engines.inductor.kernels import triton_concats as kernels

        beside = None if others is None else others.contiguous()
        ends = (mix_first, wide, None if scale is None else _narrow(node))
        outputs = kernels.token_concat(tokens.contiguous(), weight, beside, _inverse(scale), half, *ends)
    else:
        z = torch.matmul(weight, tokens.to(half))
        if others is not None:
            parts = (z, others.to(half))
            z = torch.cat(parts if mix_first else parts[::-1], dim=1)
        outputs = Epilogue(scale=scale, narrow=_narrow(node), is_wide=wide).apply(z)
    return tuple(each.flatten(1) if node.get("flat", 0) else each for each in outputs)


# Scales are multiplied in FP32; a BF16 graph would convert them in every run.
@operator("QuantizedProduct", "HalfProduct", domain=DOMAIN, raw=True, wide=(1, 3, 7, 8))
def product(node: Node, *inputs: Value) -> tuple[Tensor, ...]:
    """Lower a product with its epilogue (`fusions.products`)."""
    missing: list[Value] = [None] * (9 - len(inputs))
    a, scale_a, b, scale_b, bias, x0, x, out_scale, scale = [*inputs, *missing]
    parts = Epilogue(
        cross=() if x0 is None or x is None else (node.tensor(x0), node.tensor(x)),
        relu=bool(node.get("relu", 0)),
        slope=float(node.get("slope", 0.0)),
        scale=_number(node, out_scale),
        narrow=_narrow(node),
        is_wide=bool(node.get("wide", 1)),
    )
    factors = Factors(
        site=node.name,
        a=node.tensor(a),
        scale_a=_scale(node, scale_a),
        b=node.tensor(b).t(),
        scale_b=_scale(node, scale_b),
        bias=None if bias is None else node.tensor(bias).reshape(-1),
        dtype=TORCH_TYPES[node.get("base", 1)],
        scale=None if scale is None else node.tensor(scale),
    )
    whole = (*factors.a.shape[:-1], factors.b.shape[1])
    for each in parts.cross:
        if tuple(each.shape) != whole:
            what = "x0 and x must have the shape of the product"
            raise node.error(what, f"{tuple(each.shape)}, not {whole}")
    # The plan and the graph use the same name.
    outputs, node.scope.sites[node.name] = node.scope.products.multiply(factors, parts)
    return outputs


def _scale(node: Node, value: Value) -> Tensor:
    """Scale of a factor in FP32, of rank 0 or 1; 1 for a factor that is not quantized."""
    if value is None:
        return torch.ones((), dtype=torch.float32, device=node.scope.device)
    scale = node.tensor(value).to(torch.float32)
    return scale.reshape(() if scale.numel() == 1 else (-1,))
