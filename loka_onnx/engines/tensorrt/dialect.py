"""Form of a planned model that TensorRT for RTX (1.7.1) compiles best; built engines confirm both rules.

`keep_tables_once`: the compiler moves Q across Concat, Transpose and Gather into the table, Q(rows(E)) =
rows(Q(E)), and stores a table that only that Q reads in half the bytes. A table with other readers would be
stored twice. There zero is added behind the lookup, across which the compiler does not move Q::

    Q(rows(E)) = Q(rows(E) + 0)    exactly, for every value, NaN and infinities included (-0 becomes +0)

The sum is computed in the lookup's kernel; behind Concat it would cost two more kernels in Wukong.

`split_by_heads`: sites that share an input are one product and a Split of its columns, and attention reads
each part by heads. Behind FP8 with a scale per output channel, the compiler cuts that product along the parts
and multiplies in the base precision. It does not when they are split by heads, the same movement::

    q, k, v = Split(p),  H·D columns each;     Reshape(q) : (…, H, D),  …
    Split(Reshape(p) : (…, ΣH, D)),  H heads each
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from loka_onnx.engines.draft import GraphDraft, Node, attribute, drop_attributes

MOVEMENTS = frozenset(
    {
        *("Concat", "Flatten", "Gather", "Identity", "Reshape"),
        *("Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"),
    }
)
"""Operators that move values without changing them. All inputs of Concat are values, otherwise the first."""
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
Heads = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes in front of the heads, heads of each part, and width of a head."""


def keep_tables_once(draft: GraphDraft) -> tuple[str, ...]:
    """Add zero to the rows of tables that would be stored twice; returns these."""
    lookups = [node for node in draft.nodes if node.op_type == "Gather"]
    names = dict.fromkeys(node.input[0] for node in lookups)
    tables = [name for name in names if name in draft.constants and _is_stored_twice(draft, name)]
    for node in lookups:
        if node.input[0] in tables:
            kind = helper.tensor_dtype_to_np_dtype(draft.kind(node.input[0]))
            zero = draft.add_constant(f"{kind}/zero", np.zeros((), kind))
            draft.follow(node, "Add", [zero], f"{node.name}/keep")
    return tuple(tables)


def _is_stored_twice(draft: GraphDraft, table: str) -> bool:
    """True if a Q and another reader (a node, a Q, an output) read the rows of a table."""
    tensors, readers = [table], list[Node]()
    for name in tensors:
        for node, index in draft.readers(name):
            if node.op_type in MOVEMENTS and (node.op_type == "Concat" or index == 0):
                tensors += [output for output in node.output if output not in tensors]
            else:
                readers.append(node)
    others = len(readers) - 1 + len(draft.outputs.intersection(tensors))
    is_read = others > 0 and any(node.op_type == "QuantizeLinear" for node in readers)
    return is_read and draft.kind(table) in FLOATS


def split_by_heads(draft: GraphDraft) -> tuple[str, ...]:
    """Split merged FP8 products by heads; returns the names of the Split nodes."""
    changed = list[str]()
    for split in [node for node in draft.nodes if node.op_type == "Split"]:
        if (heads := _heads_behind(draft, split)) is None:
            continue
        (lead, counts, width), name = heads, f"{split.name or split.output[0]}/by_heads"
        shape = draft.add_constant(f"{name}/shape", np.array((*lead, sum(counts), width), np.int64))
        sizes = draft.add_constant(f"{name}/sizes", np.array(counts, np.int64))
        split.input[:] = [draft.insert(split, "Reshape", [split.input[0], shape], name), sizes]
        drop_attributes(split, "axis")
        split.attribute.append(helper.make_attribute("axis", len(lead)))
        changed.append(split.name)
    return tuple(changed)


def _heads_behind(draft: GraphDraft, split: Node) -> Heads | None:
    """Match the heads of a merged FP8 product; None unless all parts are read by heads of one width."""
    product = draft.producer(split.input[0])
    if product is None or product.op_type not in {"MatMul", "Gemm"} or split.input[0] in draft.outputs:
        return None
    if any(draft.dequantize(factor) is None for factor in product.input[:2]):
        return None
    sizes = _integers(draft, split.input[1]) if len(split.input) > 1 else None
    shapes: list[tuple[int, ...]] = []
    for part in split.output:
        readers = draft.readers(part)
        if part in draft.outputs or len(readers) != 1 or readers[0][0].op_type != "Reshape":
            return None
        shape = _integers(draft, readers[0][0].input[1])
        if shape is None or len(shape) < 3 or attribute(readers[0][0], "allowzero", 0):
            return None
        shapes.append(shape)
    lead, width = shapes[0][:-2], shapes[0][-1]
    counts = tuple(shape[-2] for shape in shapes)
    if sizes is None or width <= 0 or any(shape[:-2] != lead or shape[-1] != width for shape in shapes):
        return None
    fits = all(count > 0 and count * width == size for count, size in zip(counts, sizes, strict=True))
    return (lead, counts, width) if fits and _keeps_rows(split, lead) else None


def _integers(draft: GraphDraft, name: str) -> tuple[int, ...] | None:
    is_known = name in draft.constants and draft.kind(name) == TensorProto.INT64
    return tuple(map(int, draft.values(name).flat)) if is_known else None


def _keeps_rows(split: Node, lead: Sequence[int]) -> bool:
    """True if the Split cuts the last axis, and `lead` is valid for the whole as for a part. A -1 follows
    from the rest, which is in proportion. A 0 copies the size of an axis, which must not be the cut one; the
    last axis of a product is not its first.
    """
    axis = attribute(split, "axis", 0)
    return 0 not in lead[1:] if axis == -1 else axis == len(lead)
