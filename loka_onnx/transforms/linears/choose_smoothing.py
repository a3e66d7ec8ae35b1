"""Smoothing where it lowers the measured error of eight-bit products, with the strength that lowers it most.

For each maker (`makers`) and each strength of `STRENGTHS`, factors are computed (`numerics.smoothing`) and
the affected products are measured on rows: those of the linears that read the maker, and that of the maker
itself when it is a linear, in every planned format. The measure is the unweighted sum of their relative
errors (`numerics.product_error`), because a plan decides site by site. An output channel counts by the
weights that it meets next.

Half of the rows choose the strength, the other half accepts it: the sum must fall by `LEAST_GAIN` on both,
and no single product may lose as much. Factors are powers of two, which keep the FP32 model's bits. Makers
are tried in turns, each under the present factors of the others, until none changes (`_TURNS` at most).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.product_error import Rounding, SampledProduct
from loka_onnx.numerics.smoothing import is_gain, keeping_range, smoothing_factors, to_powers_of_two
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.linears.makers import Maker, find_makers, smooth
from loka_onnx.transforms.linears.pattern import Vector, read_linear
from loka_onnx.transforms.linears.site_rows import Arrays, measured_columns, read_rows

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST_GAIN = 0.1
"""Share by which the error must fall. Another noise seed moves a product's error by a few per cent on a
thousand rows."""
FEWEST_ROWS = 64
_TURNS = 4
_TINY = 1e-300


@dataclass(frozen=True)
class Smoothing:
    """Maker of a tensor, the divisors of its channels, and the gain in words."""

    maker: Maker
    divisors: Vector
    gain: str


class ChooseSmoothing(Mod[Smoothing]):
    """Smoothing by measured error; a copy of the model is written to `scratch`."""

    name = "smooth-by-error"

    def __init__(
        self, rows: Sequence[Arrays], scratch: Path, roundings: Sequence[Rounding] = (Rounding(),)
    ) -> None:
        self._rows, self._scratch, self._roundings = tuple(rows), scratch, tuple(roundings)

    def _find(self, model: GraphModel) -> Iterator[Smoothing | Declined]:
        read = Found.of(find_makers(model))
        makers = read.matches
        yield from read.declined
        if not makers:
            return
        count = sum(max(map(len, batch.values()), default=0) for batch in self._rows)
        if count < FEWEST_ROWS:
            reason = f"{count} rows are too few to measure errors on; {FEWEST_ROWS} are needed"
            yield from (Declined(maker.name, reason) for maker in makers)
            return
        search = _Search(_products(model, makers, self._rows, self._scratch), self._roundings)
        search.run(makers)
        for maker in makers:
            tried = search.tried[maker.name]
            if tried.chosen:
                yield Smoothing(maker, tried.divisors, tried.gain())
            else:
                yield Declined(maker.name, tried.reason())

    def rewrite(self, model: GraphModel, match: Smoothing) -> Applied:
        """Divide at one maker, multiply at its readers."""
        return smooth(model, match.maker, match.divisors, f"; {match.gain}")


@dataclass
class _Site:
    """A linear and its input, under the present factors.

    `halves` are rows that choose and rows that accept, with their exact products; `units` weigh the output
    channels, (N,); `before` (K,) and `behind` (N,) divide input and output channels; `version` counts
    changes.
    """

    product: SampledProduct
    halves: tuple[tuple[Vector, Vector], ...]
    units: Vector
    before: Vector
    behind: Vector
    version: int = 0

    @property
    def energy(self) -> float:
        """Mean square of the measured outputs."""
        exact = self.halves[0][1]
        return float(np.square(exact).mean()) if exact.size else 0.0

    def error(self, half: int, before: Vector, behind: Vector, rounding: Rounding) -> float:
        """Return the relative error under given divisors on one half of the rows."""
        rows, exact = self.halves[half]
        return self.product.relative_error(rows, exact, before, behind, rounding)


@dataclass(frozen=True)
class _Candidate:
    """Factors of a maker's channels, with relative errors on the choosing half (`_Search._measured`)."""

    name: str
    factors: Vector
    errors: Mapping[tuple[str, str], float]

    @property
    def sum(self) -> float:
        return sum(self.errors.values())


@dataclass
class _Tried:
    """Outcome for a maker: its divisors, and relative errors of its sites, summed, on the accepting half.

    `formats` names their formats; `without` smoothing, and `now` with the chosen candidate, or with the best
    where none was chosen.
    """

    sites: tuple[str, ...]
    formats: str
    divisors: Vector
    without: float = 0.0
    now: float = 0.0
    best: str = ""
    chosen: list[str] = field(default_factory=list)
    versions: tuple[int, ...] = ()

    def gain(self) -> str:
        """Gain of smoothing, in words."""
        return f"{', then '.join(self.chosen)}: {self._measure()} {self.without:.3g} → {self.now:.3g}"

    def reason(self) -> str:
        """The reason why nothing is smoothed."""
        if not self.best:
            return f"every strength gives equal factors; {self._measure()} {self.without:.3g}"
        return (
            f"no strength lowers {self._measure()} {self.without:.3g} by {LEAST_GAIN:.0%}: "
            f"{self.now:.3g} at {self.best}"
        )

    def _measure(self) -> str:
        names = ", ".join(f"'{site}'" for site in self.sites)
        is_sum = len(self.sites) > 1 or " and " in self.formats
        return f"the relative {self.formats} error energy of {names}" + (", summed," if is_sum else "")


class _Search:
    """Search over makers in turns."""

    def __init__(self, sites: Mapping[str, _Site], roundings: Sequence[Rounding]) -> None:
        self._sites, self._roundings = sites, roundings
        precisions = dict.fromkeys(rounding.format.precision.upper() for rounding in roundings)
        self._formats = " and ".join(precisions)
        self.tried: dict[str, _Tried] = {}

    def run(self, makers: Sequence[Maker]) -> None:
        """Try every maker until none changes."""
        for maker in makers:
            names = dict.fromkeys(reader.node.name for reader in maker.readers)
            if maker.is_linear:
                names[maker.name] = None
            self.tried[maker.name] = _Tried(tuple(names), self._formats, np.ones(maker.channels))
        for _ in range(_TURNS):
            changes = [self._turn(maker) for maker in makers]
            if not any(changes):
                return

    def _turn(self, maker: Maker) -> bool:
        """Try the strengths at one maker; return whether its factors changed."""
        tried = self.tried[maker.name]
        versions = tuple(self._sites[site].version for site in tried.sites)
        if versions == tried.versions:
            return False
        tried.versions = versions
        ones = np.ones(maker.channels)
        without, before = self._measured(maker, ones, 0), self._measured(maker, ones, 1)
        if not tried.chosen:
            tried.without = tried.now = sum(before.values())
        best = min(self._candidates(maker), key=lambda candidate: candidate.sum, default=None)
        if best is None:
            return False
        after = self._measured(maker, best.factors, 1)
        if not (is_gain(without, best.errors, LEAST_GAIN) and is_gain(before, after, LEAST_GAIN)):
            if not tried.chosen:
                tried.now, tried.best = sum(after.values()), best.name
            return False
        tried.now = sum(after.values())
        tried.chosen.append(best.name)
        tried.divisors = tried.divisors * best.factors
        for name, (divided, behind) in self._divided(maker, best.factors).items():
            site = self._sites[name]
            site.before, site.behind, site.version = divided, behind, site.version + 1
        tried.versions = tuple(self._sites[site].version for site in tried.sites)
        return True

    def _candidates(self, maker: Maker) -> list[_Candidate]:
        """Return distinct factors that have an effect, with errors on the choosing half."""
        activation, weight = self._channel_amax(maker)
        tried: list[_Candidate] = []
        for strength in STRENGTHS:
            raw = smoothing_factors(activation, weight, strength)
            factors = keeping_range(to_powers_of_two(raw), activation)
            known = [np.ones(maker.channels), *(candidate.factors for candidate in tried)]
            if not any(np.array_equal(factors, other) for other in known):
                tried.append(_Candidate(f"strength {strength:g}", factors, self._measured(maker, factors, 0)))
        return tried

    def _channel_amax(self, maker: Maker) -> tuple[Vector, Vector]:
        """Return the largest magnitude of each channel and of its weight rows, (channels,) each."""
        activation, weight = np.zeros(maker.channels), np.zeros(maker.channels)
        for reader in maker.readers:
            site, mine = self._sites[reader.node.name], reader.channels >= 0
            rows = site.before * np.abs(site.product.weight / site.behind).max(axis=1)
            np.maximum.at(activation, reader.channels[mine], (site.product.amax / site.before)[mine])
            np.maximum.at(weight, reader.channels[mine], rows[mine])
        return activation, weight

    def _measured(self, maker: Maker, factors: Vector, half: int) -> dict[tuple[str, str], float]:
        """Return relative errors under further factors on one half of the rows, by site and format."""
        return {
            (name, rounding.format.name): self._sites[name].error(half, before, behind, rounding)
            for name, (before, behind) in self._divided(maker, factors).items()
            for rounding in self._roundings
        }

    def _divided(self, maker: Maker, factors: Vector) -> dict[str, tuple[Vector, Vector]]:
        """Return divisors of a maker's sites under further factors: before and behind them."""
        sides = {
            name: (self._sites[name].before, self._sites[name].behind)
            for name in self.tried[maker.name].sites
        }
        for reader in maker.readers:
            before, behind = sides[reader.node.name]
            sides[reader.node.name] = (before * reader.of_rows(factors), behind)
        if maker.is_linear:
            before, behind = sides[maker.name]
            sides[maker.name] = (before, behind * factors)
        return sides


def _products(
    model: GraphModel, makers: Sequence[Maker], rows: Sequence[Arrays], scratch: Path
) -> dict[str, _Site]:
    nodes = {reader.node.name: reader.node for maker in makers for reader in maker.readers}
    nodes |= {maker.name: maker.node for maker in makers if maker.node is not None and maker.is_linear}
    linears = {name: read_linear(model, node) for name, node in nodes.items()}
    read = read_rows(model, linears, rows, scratch)
    by_name = {maker.name: maker for maker in makers}
    sites: dict[str, _Site] = {}
    # Readers before makers, because makers take their units from readers.
    order = [node.name for node in model.sorted_nodes() if node.name in linears]
    for name in reversed(order):
        linear = linears[name]
        units = _units(by_name[name], sites) if name in by_name else np.ones(linear.n)
        weight = linear.weight_kn().astype(np.float64)
        product = SampledProduct(read[name].amax, weight, measured_columns(linear), units)
        halves = tuple((half, product.exact(half)) for half in read[name].halves)
        sites[name] = _Site(product, halves, units, np.ones(linear.k), np.ones(linear.n))
    return sites


def _units(maker: Maker, sites: Mapping[str, _Site]) -> Vector:
    """Return the weight of each output channel of a linear, (N,): the length of the weights it meets next.

    These are in the units of their own outputs, each reader relative to its whole output.
    """
    squares = np.zeros(maker.channels)
    for reader in maker.readers:
        site, mine = sites[reader.node.name], reader.channels >= 0
        met = np.square(site.product.weight * site.units).sum(axis=1) / max(site.energy, _TINY)
        np.add.at(squares, reader.channels[mine], met[mine])
    return np.sqrt(squares) if squares.any() else np.ones(maker.channels)
