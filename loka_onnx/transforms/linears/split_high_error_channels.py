"""Split off the few input channels of a linear that make most of its FP8 error.

With a set S of the K input channels, and W₀ the weight with zeros in the rows of S (mixed-precision
decomposition: LLM.int8(), Dettmers et al., arXiv 2208.07339, section 3.2)::

    x · W + b   =   (x · W₀ + b)  +  x[:, S] · W[S, :]

The first product keeps the name of the site, its K and its bias; in FP8 it makes no error in S. The second,
``<site>.loud``, is small and stays in high precision. S holds a multiple of 16 channels, for the engines'
sake. Energies of the errors of channels add, because rounding is nearly uncorrelated::

    e_k   =   E[(x̂_k − x_k)²] · ‖W_k‖²   +   E[x_k²] · ‖Ŵ_k − W_k‖²

Half of the rows rank the channels, the other half measures the rest. The extra product pays only in a plan
with the site in FP8; every other plan rejoins the two (`rejoin`).
"""

from __future__ import annotations

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
from loka_onnx.graph.model import GraphModel, Node, shape_of, values_of
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.numerics.scales import amax_scale, weight_scales
from loka_onnx.transforms.base import Found, Mod, NotRewritten, find
from loka_onnx.transforms.linears.pattern import Linear, is_candidate, read_linear
from loka_onnx.transforms.linears.site_rows import Arrays, Doubles, SiteRows, read_rows

ALIGNMENT = 16
GATHER, ADD = ".gather", ".add"
"""Suffixes of the nodes in front of and behind the high-error product."""
LARGEST_PART = 0.5
"""Largest share of K that is split off."""
TOLERANCE = 4.0
"""Accepted ratio of the remaining to the requested error; the ladder measures its cost."""


@dataclass(frozen=True)
class ChannelSplit:
    """A linear, its channels that are split off, ascending, and the share of the error that remains."""

    linear: Linear
    channels: tuple[int, ...]
    left: float


class SplitHighErrorChannels(Mod[ChannelSplit]):
    """Linear → product without its high-error channels + product of these.

    `left` is, by name of a linear site, the share of its error energy that may remain, in (0, 1).
    """

    name = "split-loud-channels"

    def __init__(
        self, left: Mapping[str, float], rows: Sequence[Arrays], scratch: Path, format: NumberFormat = E4M3FN
    ) -> None:
        self._left, self._rows, self._scratch, self._format = dict(left), tuple(rows), scratch, format
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
        """Put zeros for the high-error rows, and add their product."""
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
        linear.node.inputs[1] = model.constant(f"{name}.quiet.weight", linear.stored(remaining))
        model.insert_behind(linear.result, "Add", [small], f"{part}{ADD}")
        made = small.inputs[0].name
        return Applied(
            name,
            f"{len(channels)} of {linear.k} channels, with {1.0 - match.left:.1%} of the FP8 error, are "
            f"split off as '{made}'",
            {name: (name,), made: (name,)},
        )

    def _highest_error(self, linear: Linear, read: SiteRows, left: float) -> ChannelSplit:
        if len(read.halves[0]) == 0 or len(read.halves[1]) == 0:
            raise NotRewritten("there are too few rows to measure errors on")
        ranking, other = (channel_errors(linear.weight_kn(), read.amax, h, self._format) for h in read.halves)
        if not ranking.any() or not other.any():
            raise NotRewritten("it makes no FP8 error on these rows")
        order = np.argsort(-ranking, kind="stable")
        remaining = 1.0 - np.cumsum(other[order]) / other.sum()
        most = int(linear.k * LARGEST_PART) // ALIGNMENT * ALIGNMENT
        if not most:
            raise NotRewritten(f"of its {linear.k} channels no {ALIGNMENT} are a small part")
        counts = range(ALIGNMENT, most + 1, ALIGNMENT)
        count = next((n for n in counts if remaining[n - 1] <= left), most)
        rest = float(remaining[count - 1])
        if rest > left * TOLERANCE:
            raise NotRewritten(
                f"without its {most} loudest of {linear.k} channels it still makes {rest:.1%} of its FP8 "
                f"error; {left:.1%} may be left"
            )
        return ChannelSplit(linear, tuple(sorted(int(k) for k in order[:count])), rest)


def rejoin(model: GraphModel, site: str) -> Applied:
    """Merge the channels split off a site back, with the bits of the original weight."""
    linear, part = read_linear(model, model.node(site)), f"{site}{HIGH_ERROR}"
    small, gather, add = (model.node(name) for name in (part, f"{part}{GATHER}", f"{part}{ADD}"))
    weight = linear.weight_kn().copy()
    weight[values_of(gather.inputs[1])] = values_of(small.inputs[1])
    linear.node.inputs[1] = model.constant(f"{site}.weight", linear.stored(weight))
    inner, result = add.inputs[0], add.outputs[0]
    add.inputs.clear()
    model.hand_over(result, inner)
    model.remove([add, small, gather])
    return Applied(site, f"one product with '{part}' again: it is not in FP8 here")


def channel_errors(
    weight: npt.NDArray[np.floating], amax: Doubles, rows: Doubles, format: NumberFormat
) -> Doubles:
    """Return the energy of the error that each input channel adds to a product in FP8, e_k, (K,).

    The weight is (K, N), `amax` of each channel (K,), rows (M, K); operands have a scale for each tensor.
    """
    exact = weight.astype(np.float64)
    x = fake_quantize(rows, amax_scale(float(amax.max()), format), format)
    w = fake_quantize(exact, weight_scales(exact, Granularity.PER_TENSOR, 1, format), format, None)
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
