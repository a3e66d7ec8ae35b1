"""Split off the few input channels of a linear that make most of its error in eight bits.

With a set S of the K input channels, and W₀ the weight with zeros in the rows of S (mixed-precision
decomposition: LLM.int8(), Dettmers et al., arXiv 2208.07339, section 3.2)::

    x · W + b   =   (x · W₀ + b)  +  x[:, S] · W[S, :]

The first product keeps the name of the site, its K and its bias; in low precision it makes no error in S. The
second, ``<site>.loud``, is small and stays in high precision. S holds a multiple of 16 channels, for the
engines' sake. Energies of the errors of channels add, because rounding is nearly uncorrelated::

    e_k   =   E[(x̂_k − x_k)²] · ‖W_k‖²   +   E[x_k²] · ‖Ŵ_k − W_k‖²

In FP8 an error follows its own value: the channels of the largest e_k on half of the rows go. On the uniform
grid of INT8 each follows the largest value of the tensor: the channels of the largest amax go, and x is
multiplied by zeros there (``<site>.quiet``), so that the grid is that of the rest. The other half of the rows
measures what is left. Of several planned formats the one counts that needs the fewest channels. The extra
product pays only in a plan with the site in low precision; every other plan rejoins the two (`rejoin`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loka_onnx.core.formats import E4M3FN, NumberFormat
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.core.site import HIGH_ERROR
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel, Node, producer, shape_of, values_of
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scales import amax_scale, weight_scales
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear
from loka_onnx.transforms.linears.site_rows import Arrays, Doubles, SiteRows, read_rows

ALIGNMENT = 16
GATHER, ADD = ".gather", ".add"
"""Suffixes of the nodes in front of and behind the high-error product."""
QUIET = ".quiet"
"""Suffix of the node that takes the high-error channels out of the activation of the site."""
LARGEST_PART = 0.5
"""Largest share of K that is split off."""
TOLERANCE = 4.0
"""Accepted ratio of the remaining to the requested error; the ladder measures its cost."""


@dataclass(frozen=True)
class ChannelSplit:
    """A linear, its channels to split off, and the share of error left; `narrows` the grid to the others."""

    linear: Linear
    channels: tuple[int, ...]
    left: float
    narrows: bool


class SplitHighErrorChannels(Mod[ChannelSplit]):
    """Linear → product without its high-error channels + product of these.

    `left` is, by name of a linear site, the share of its error energy that may remain, of the smallest one
    among `formats`; TransformError if it is not in (0, 1).
    """

    name = "split-loud-channels"

    def __init__(
        self,
        left: Mapping[str, float],
        rows: Sequence[Arrays],
        scratch: Path,
        formats: Sequence[NumberFormat] = (E4M3FN,),
    ) -> None:
        self._left, self._rows, self._scratch, self._formats = dict(left), tuple(rows), scratch, formats
        for site, part in self._left.items():
            if not 0.0 < part < 1.0:
                raise TransformError(
                    "E0601 the part of an error that may be left is not between 0 and 1",
                    where=f"site '{site}'",
                    evidence=f"it is {part:g}",
                    remedy="leave out sites whose error needs no cut",
                )

    def _find(self, model: GraphModel) -> Iterator[ChannelSplit | Declined]:
        nodes = {node.name: node for node in model.nodes if node.name in self._left}
        yield from (Declined(s, "there is no node of that name") for s in self._left if s not in nodes)
        read = Found.of(find((nodes[s] for s in self._left if s in nodes), lambda node: _read(model, node)))
        yield from read.declined
        linears = {linear.node.name: linear for linear in read.matches}
        rows = read_rows(model, linears, self._rows, self._scratch) if linears else {}
        yield from find(
            (linear.node for linear in linears.values()),
            lambda node: self._highest_error(linears[node.name], rows[node.name], self._left[node.name]),
        )

    def rewrite(self, model: GraphModel, match: ChannelSplit) -> Applied:
        """Put zeros for the high-error rows of the weight, and add the product of these rows, in place."""
        linear, channels = match.linear, np.array(match.channels)
        name, source = linear.node.name, linear.source
        part = f"{name}{HIGH_ERROR}"
        weight = linear.weight_kn()
        remaining = weight.copy()
        remaining[channels] = 0
        axis = len(shape_of(source)) - 1
        indices = model.constant(f"{part}.channels", channels.astype(np.int64))
        gathered = model.add("Gather", [source, indices], f"{part}{GATHER}", source.dtype, {"axis": axis})
        gathered.shape = (*shape_of(source)[:axis], len(channels))
        small_weight = model.constant(f"{part}.weight", np.ascontiguousarray(weight[channels]))
        small = model.add("MatMul", [gathered, small_weight], part, linear.result.dtype)
        small.shape = linear.result.shape
        linear.node.inputs[1] = model.constant(f"{name}{QUIET}.weight", linear.stored(remaining))
        if match.narrows:
            mask = np.ones(linear.k, source.dtype)
            mask[channels] = 0
            zeros = model.constant(f"{name}{QUIET}.mask", mask)
            quiet = model.add("Mul", [source, zeros], f"{name}{QUIET}", source.dtype)
            quiet.shape = source.shape
            linear.node.inputs[0] = quiet
        model.insert_behind(linear.result, "Add", [small], f"{part}{ADD}")
        made = small.inputs[0].name
        return Applied(
            name,
            f"{len(channels)} of {linear.k} channels, with {1.0 - match.left:.1%} of the error, are split "
            f"off as '{made}'",
            {name: (name,), made: (name,)},
        )

    def _highest_error(self, linear: Linear, read: SiteRows, left: float) -> ChannelSplit:
        if len(read.halves[0]) == 0 or len(read.halves[1]) == 0:
            raise NotRewritten("there are too few rows to measure errors on")
        weight = linear.weight_kn()
        errors = {
            format: [channel_errors(weight, read.amax, half, format) for half in read.halves]
            for format in self._formats
        }
        if not all(half.any() for halves in errors.values() for half in halves):
            raise NotRewritten("it makes no error in eight bits on these rows")
        whole = min(float(other.sum()) for _, other in errors.values())
        most = int(linear.k * LARGEST_PART) // ALIGNMENT * ALIGNMENT
        if not most:
            raise NotRewritten(f"of its {linear.k} channels no {ALIGNMENT} are a small part")
        counts = range(ALIGNMENT, most + 1, ALIGNMENT)

        def split_for(format: NumberFormat) -> ChannelSplit:
            (ranking, other), narrows = errors[format], not format.is_float
            order = np.argsort(-(read.amax if narrows else ranking), kind="stable")

            def rest(count: int) -> float:
                kept = order[count:]
                rows = read.halves[1][:, kept]
                left = channel_errors(weight[kept], read.amax[kept], rows, format) if narrows else other[kept]
                return float(left.sum()) / whole

            at = bisect_left(counts, True, key=lambda count: rest(count) <= left)
            count = counts[min(at, len(counts) - 1)]
            return ChannelSplit(linear, tuple(sorted(int(k) for k in order[:count])), rest(count), narrows)

        best = min(map(split_for, self._formats), key=lambda s: (s.left > left, len(s.channels), s.left))
        if best.left > left * TOLERANCE:
            raise NotRewritten(
                f"without its {most} loudest of {linear.k} channels it still makes {best.left:.1%} of its "
                f"error in eight bits; {left:.1%} may be left"
            )
        return best


def rejoin(model: GraphModel, site: str) -> Applied:
    """Undo the split of a site, in place; the weight has its earlier bits. InternalError without a split."""
    linear, part = read_linear(model, model.node(site)), f"{site}{HIGH_ERROR}"
    small, gather, add = (model.node(name) for name in (part, f"{part}{GATHER}", f"{part}{ADD}"))
    weight = linear.weight_kn().copy()
    weight[values_of(gather.inputs[1])] = values_of(small.inputs[1])
    linear.node.inputs[1] = model.constant(f"{site}.weight", linear.stored(weight))
    maker = producer(linear.source)
    quiet = [maker] if maker is not None and maker.name == f"{site}{QUIET}" else []
    for node in quiet:
        linear.node.inputs[0] = node.inputs[0]
    inner, result = add.inputs[0], add.outputs[0]
    add.inputs.clear()
    model.hand_over(result, inner)
    model.remove([add, small, gather, *quiet])
    return Applied(site, f"one product with '{part}' again: it is not in low precision here")


def channel_errors(
    weight: npt.NDArray[np.floating], amax: Doubles, rows: Doubles, format: NumberFormat
) -> Doubles:
    """Return e_k, (K,): the mean energy of the error that each input channel adds to a product in a format.

    The weight is (K, N), `amax` of each channel (K,), rows (M, K), over which e_k is a mean; operands have a
    scale for each tensor, an INT8 weight one for each output channel. CalibrationError if not finite.
    """
    exact = weight.astype(np.float64)
    x = fake_quantize(rows, amax_scale(float(amax.max()), format), format)
    granularity = Granularity.PER_TENSOR if format.is_float else Granularity.PER_CHANNEL
    scales = weight_scales(exact, granularity, 1, format)
    w = fake_quantize(exact, scales, format, None if format.is_float else 1)
    of_activation = np.square(x - rows).mean(axis=0) * np.square(exact).sum(axis=1)
    of_weight = np.square(rows).mean(axis=0) * np.square(w - exact).sum(axis=1)
    return np.asarray(of_activation + of_weight)


def _read(model: GraphModel, node: Node) -> Linear:
    """Read the linear of a site, if it can be split."""
    if not is_candidate(node):
        raise NotRewritten("it is no product with one constant operand")
    linear = read_linear(model, node)
    if linear.on_left:
        raise NotRewritten("its weight stands on the left")
    return linear
