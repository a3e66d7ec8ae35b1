"""Q/DQ pairs of a planned graph in MIGraphX's form, and their FP8 in its format.

MIGraphX's ONNX parser knows no FP8 type but FLOAT8E4M3FNUZ ("Prototensor data type 17 not supported"), while
plans use E4M3FN. The conversion depends on the device; see `to_fnuz` and `to_carrier`.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx

from loka_onnx.engines.draft import Array, GraphDraft, Node, drop_attributes
from loka_onnx.engines.migraphx.products import is_quantized
from loka_onnx.errors import ModelError
from loka_onnx.sessions.model_files import FLOAT8_TYPES

E4M3FN, FNUZ = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e4m3fnuz)


def quantized_nodes(draft: GraphDraft) -> Iterator[Node]:
    """Yield every Q and DQ that `is_quantized`; a `ModelError` for computed scales, FP8 zero points not 0."""
    for node in list(draft.nodes):
        if not is_quantized(draft, node):
            continue
        parameters = [name for name in node.input[1:3] if name]
        if not all(name in draft.constants for name in parameters):
            raise ModelError(
                "E0851 MIGraphX drops Q/DQ pairs whose scale is not a constant",
                where=f"node '{node.name}'",
                evidence=f"inputs {', '.join(parameters)}",
                remedy="plan the model again: plans write scales as constants",
            )
        if len(parameters) > 1 and np.any(draft.values(parameters[1]).astype(np.float32)):
            raise ModelError(
                "E0852 an FP8 zero point must be zero",
                where=f"node '{node.name}'",
                evidence=f"'{parameters[1]}' is not",
                remedy="plan the model again: plans quantize symmetrically",
            )
        yield node


def explicit_zero_points(draft: GraphDraft) -> None:
    """Add the zero point that ONNX assumes to every Q and DQ without one.

    ::

        Q(x, s) = Q(x, s, 0)        DQ(q, s) = DQ(q, s, 0)

    Without it, MIGraphX does not recognise the pair, deletes it, and computes in high precision.
    """
    for node in quantized_nodes(draft):
        if len(node.input) < 3 or not node.input[2]:
            scale, kind = draft.values(node.input[1]), draft.quantized_kind(node)
            zero = draft.add_constant(
                f"{node.name}/zero_point", np.zeros(scale.shape, onnx.helper.tensor_dtype_to_np_dtype(kind))
            )
            del node.input[2:]
            node.input.append(zero)
        drop_attributes(node, "output_dtype")


def rank_0_scales(draft: GraphDraft) -> None:
    """Give per-tensor scales and zero points rank 0, in ``raw_data``. MIGraphX throws when it broadcasts a
    scale of shape (1,), and reads FP8 values in ``int32_data`` as numbers.
    """
    for node in quantized_nodes(draft):
        for index in (1, 2):
            values = draft.values(node.input[index])
            if values.size == 1:
                name = node.input[index]
                node.input[index] = draft.add_constant(
                    f"{name}/rank_0" if values.ndim else name, values.reshape(())
                )
        if draft.values(node.input[1]).ndim == 0:
            drop_attributes(node, "axis", "block_size")


def separate_sources(draft: GraphDraft) -> None:
    """Give each quantizer whose tensor x has other readers an input of its own, 2·x, with the scale 2·s.

    Otherwise MIGraphX gives the other readers DQ(Q(x)): a residual sum would add rounded values. ::

        Q(x, s) = Q(2·x, 2·s)

    is exact: doubling changes only the exponent. Where 2·x overflows FP32, x/s is beyond the range of FP8 and
    INT8 for every scale below 2¹¹⁸, and both saturate; tensors of FP16 graphs have a factor of 8 to spare
    (`planning.fp16`).
    The multiplication joins the quantizing kernel; one by 1 would be removed. Where Q reads a cast of x,
    readers of an equal cast count too, because equal casts are merged.
    """
    copies: dict[str, str] = {}
    for node in quantized_nodes(draft):
        source, scale = node.input[0], draft.values(node.input[1])
        cast = draft.producer(source)
        names = [source, *(cast.input if cast is not None and cast.op_type == "Cast" else ())]
        is_shared = any(len(draft.readers(name)) > 1 or name in draft.outputs for name in names)
        if node.op_type != "QuantizeLinear" or not is_shared:
            continue
        if source not in copies:
            two = draft.add_constant(f"two/{scale.dtype.name}", np.array(2, scale.dtype))
            copies[source] = draft.insert(node, "Mul", [source, two], f"{node.name}/copy")
        node.input[0] = copies[source]
        node.input[1] = draft.add_constant(f"{node.input[1]}/doubled", (scale * 2).astype(scale.dtype))


def to_fnuz(draft: GraphDraft) -> None:
    """Store E4M3FN values as E4M3FNUZ of half the size, under scales of twice the size: for gfx94x.

    ::

        v·s = (v/2)·(2·s)                for every stored value v
        Q:  FNUZ(x / (2·s)) = E4M3FN(x / s) / 2

    The exponent bias of E4M3FNUZ is 8 and that of E4M3FN is 7, so that v/2 has the bits of v: E4M3FNUZ holds
    half of every finite value of E4M3FN exactly, ±448 and the subnormals included, and its rounding points
    are half those of E4M3FN ("8-bit Numerical Formats for Deep Neural Networks", arXiv 2206.02915). −0
    becomes 0: its bits are NaN there.

    A scale that maps the largest value to 448 then maps it to 224, within FNUZ's 240. What saturates at 448·s
    in E4M3FN is rounded to 448·s up to 464·s, and saturates at 480·s beyond: values that did not saturate are
    unchanged; those that did have a smaller error.
    """
    for node in _float8_nodes(draft):
        scale = draft.values(node.input[1])
        with np.errstate(over="ignore"):
            doubled = (scale * 2).astype(scale.dtype)
        if not np.isfinite(doubled.astype(np.float64)).all():
            raise ModelError(
                "E0853 a scale is too large for E4M3FNUZ",
                where=f"node '{node.name}'",
                evidence=f"its double overflows {scale.dtype.name}",
            )
        node.input[1] = draft.add_constant(f"{node.input[1]}/fnuz", doubled)
        node.input[2] = draft.add_constant("zero_point/fnuz", np.zeros(scale.shape, FNUZ))
        if _is_stored_float8(draft, node.input[0]):
            halved = draft.values(node.input[0]).astype(np.float32) / 2
            if np.isnan(halved).any():
                raise ModelError(
                    "E0854 a stored FP8 weight is NaN",
                    where=f"node '{node.name}'",
                    remedy="check the checkpoint",
                )
            node.input[0] = draft.add_constant(f"{node.input[0]}/fnuz", halved.astype(FNUZ))


def to_carrier(draft: GraphDraft) -> None:
    """Write E4M3FN bits with the type E4M3FNUZ: for gfx950 and gfx12, which multiply E4M3FN.

    ::

        bits(v) as E4M3FNUZ, scale s         parsed, then read as E4M3FN again, gives v·s

    The parser keeps the bits and computes nothing with them. Before compilation, `reread_float8` restores the
    type of every FP8 constant of the program, zero points included, from which all other types follow. Until
    then, the file's values are half of the intended ones (`to_fnuz`): it is never run itself.
    """
    for node in _float8_nodes(draft):
        for index in (0, 2):
            name = node.input[index]
            if _is_stored_float8(draft, name):
                # `ascontiguousarray` would add an axis to a zero point.
                bits: Array = np.array(draft.values(name), order="C").view(np.uint8)
                node.input[index] = draft.add_constant(f"{name}/carrier", bits.view(FNUZ))


def _float8_nodes(draft: GraphDraft) -> Iterator[Node]:
    """Yield every Q and DQ of FP8; a `ModelError` for another FP8 than E4M3FN."""
    for node in quantized_nodes(draft):
        if draft.quantized_kind(node) not in FLOAT8_TYPES:
            continue
        for name in (node.input[0], node.input[2]):
            if _is_stored_float8(draft, name) and draft.values(name).dtype != E4M3FN:
                raise ModelError(
                    "E0855 MIGraphX multiplies FP8 of E4M3FN plans only",
                    where=f"node '{node.name}'",
                    evidence=f"'{name}' is {draft.values(name).dtype.name}",
                    remedy="plan with the format E4M3FN",
                )
        yield node


def _is_stored_float8(draft: GraphDraft, name: str) -> bool:
    """True for an FP8 constant; a Q may also read a wider one."""
    return name in draft.constants and draft.kind(name) in FLOAT8_TYPES
