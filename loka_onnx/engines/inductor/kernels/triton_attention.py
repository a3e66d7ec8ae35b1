"""Attention whose keys fit one tile, with tensors of any strides.

softmax(s · Q·Kᵀ + mask) · V of each example and head, with all keys at once: no running maximum, no
rescaling. Computed in FP32 except the factors of both products, which are rounded as in the graph
(probabilities after division by their sum). A row that −∞ masks throughout gives 0.

A program holds a tile of queries of one head. Heads of a token are adjacent in memory, and so are their
programs, so that neighbours use the rest of a cache line. A head of 16 numbers is one sector of 32 bytes, the
least that is read; a loop over heads in one program would read no less. Strides are constants of the kernel,
so that views of one merged product load as wide as separate tensors, without a copy. The result's rows are
those of the next product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from loka_onnx.engines.inductor.fusions.base import tiled

MOST_QUERIES = 64
"""Most queries of a program: rows of one instruction of four warps on Hopper."""
MOST_PRODUCTS = 1 << 13
"""Most products of a program. On Hopper, 64 queries of 256 keys took 193 registers in each of eight warps."""
MOST_WARPS = 4
PRODUCTS, LOADED = 64, 128
"""Values of a thread where there are enough warps: FP32 products, and keys of half a register each."""


@dataclass(frozen=True)
class Tile:
    """Tile of a program; each side is a power of two of at least 16."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, queries: int, keys: int, width: int) -> Tile:
        """Tile for a number of queries, keys, and values of a head."""
        rows, columns, depth = (tiled(size) for size in (queries, keys, width))
        return cls(max(16, min(rows, MOST_QUERIES, MOST_PRODUCTS // columns)), columns, depth)

    @property
    def warps(self) -> int:
        """The fewest warps that hold it in registers: one warp needs no barriers."""
        products = self.queries * max(self.keys, self.width) // PRODUCTS
        lanes = max(products, self.keys * self.width // LOADED)
        return min(max(lanes // 32, 1), MOST_WARPS)


@triton.jit  # type: ignore[untyped-decorator]
def _loka_short_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kt_ptr, v_ptr, mask_ptr, out_ptr, scale,
    QB: tl.constexpr, QH: tl.constexpr, QQ: tl.constexpr, QD: tl.constexpr,
    KB: tl.constexpr, KH: tl.constexpr, KD: tl.constexpr, KK: tl.constexpr,
    VB: tl.constexpr, VH: tl.constexpr, VK: tl.constexpr, VD: tl.constexpr,
    MB: tl.constexpr, MH: tl.constexpr, MQ: tl.constexpr, MK: tl.constexpr,
    ADDED: tl.constexpr, KEEP: tl.constexpr, DROP: tl.constexpr,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    Q2: tl.constexpr, K2: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    TILES: tl.constexpr = (QUERIES + Q2 - 1) // Q2
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % TILES
    example = (tl.program_id(0) // (HEADS * TILES)).to(tl.int64)
    rows, keys, columns = tile * Q2 + tl.arange(0, Q2), tl.arange(0, K2), tl.arange(0, D2)
    in_rows, in_keys, in_d = rows < QUERIES, keys < KEYS, columns < D
    q = tl.load(
        q_ptr + example * QB + head * QH + rows[:, None] * QQ + columns[None, :] * QD,
        mask=in_rows[:, None] & in_d[None, :],
        other=0.0,
    )
    kt = tl.load(
        kt_ptr + example * KB + head * KH + columns[:, None] * KD + keys[None, :] * KK,
        mask=in_d[:, None] & in_keys[None, :],
        other=0.0,
    )
    v = tl.load(
        v_ptr + example * VB + head * VH + keys[:, None] * VK + columns[None, :] * VD,
        mask=in_keys[:, None] & in_d[None, :],
        other=0.0,
    )
    # The hardware has exp2. BF16's least number, as a mask, times log2(e) would be −∞ and no longer equal:
    # with an added mask, log2(e) is multiplied after the subtraction.
    factor = tl.cast(scale, tl.float32) * (1.0 if ADDED else LOG2E)
    scores = tl.dot(q, kt) * factor + tl.where(in_keys, 0.0, float("-inf"))[None, :]
    if ADDED or KEEP or DROP:
        mask_ptr += example * MB + head * MH
        if MQ == 0:
            mask = tl.load(mask_ptr + keys * MK, mask=in_keys, other=0)[None, :]
        else:
            inside = in_rows[:, None] & in_keys[None, :]
            mask = tl.load(mask_ptr + rows[:, None] * MQ + keys[None, :] * MK, mask=inside, other=0)
        if ADDED:
            scores += mask.to(tl.float32)
        elif KEEP:
            scores = tl.where(mask, scores, float("-inf"))
        else:
            scores = tl.where(mask, float("-inf"), scores)
    peak = tl.max(scores, 1)
    # Prevent ∞ − ∞ = NaN in a row that is masked throughout.
    scores -= tl.where(peak == float("-inf"), 0.0, peak)[:, None]
    shares = tl.exp2(scores * LOG2E if ADDED else scores)
    total = tl.sum(shares, 1)
    shares *= (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    result = tl.dot(shares.to(q.dtype), v)
    place = (example * QUERIES + rows[:, None]) * (HEADS * D) + head * D + columns[None, :]
    tl.store(out_ptr + place, result.to(q.dtype), mask=in_rows[:, None] & in_d[None, :])


@triton_op("loka::short_attention", mutates_args={})
def short_attention(
    q: Tensor, kt: Tensor, v: Tensor, mask: Tensor | None, scale: float, drop: bool
) -> Tensor:
    """Compute attention; returns (batch, queries, heads, d), of the type of q, contiguous.

    q (batch, heads, queries, d), kt (batch, heads, d, keys) and v (batch, heads, keys, d) are of one type,
    BF16 or FP16. Strides of all tensors are static, even with a symbolic batch. Every axis of the mask
    (batch, heads, queries, keys) but the last may have length 1. It is added, or, where it is boolean,
    selects products that become −∞: where it is true if `drop`, else where it is false.
    """
    (batch, heads, queries, d), keys = q.shape, v.shape[2]
    shape = Tile.of(queries, keys, d)
    out = torch.empty((batch, queries, heads, d), dtype=q.dtype, device=q.device)
    chooses = mask is not None and mask.dtype is torch.bool
    of_mask = (0,) * 4 if mask is None else broadcast_strides(mask)
    axes = {"Q": "BHQD", "K": "BHDK", "V": "BHKD", "M": "BHQK"}
    strides = {
        f"{name}{axis}": stride
        for name, values in zip(axes, (q.stride(), kt.stride(), v.stride(), of_mask), strict=True)
        for axis, stride in zip(axes[name], values, strict=True)
    }
    tiles = triton.cdiv(queries, shape.queries)
    masks = {"KEEP": chooses and not drop, "DROP": chooses and drop}
    masks["ADDED"] = mask is not None and not chooses
    sizes = {"HEADS": heads, "QUERIES": queries, "KEYS": keys, "D": d}
    sizes |= {"Q2": shape.queries, "K2": shape.keys, "D2": shape.width}
    # An unused pointer must be valid; q itself could make the compiler write a copy.
    read = (q, kt, v, q.new_empty(1) if mask is None else mask)
    wrap_triton(_loka_short_attention_kernel)[(batch * heads * tiles,)](
        *read, out, scale, **strides, **masks, **sizes, num_warps=shape.warps
    )
    return out


def broadcast_strides(tensor: Tensor) -> list[int]:
    """Strides for reading a tensor as broadcast: 0 along axes of length 1."""
    # A symbolic batch is not 1.
    return [
        0 if isinstance(length, int) and length == 1 else stride
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
