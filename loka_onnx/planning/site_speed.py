"""Savings of FP8 at each site of a model on a device, from kernel times.

A linear site is a product of rows·batch × K by K × N. In FP8 its activation is quantized first, once for all
sites that read the tensor, and for free where the operator that makes the tensor quantizes in its kernel
(`core.backends`) or is a site in FP8 itself (a chain). Layout operations between are looked through.

Times are per row, as in the choice among engines (`planning.speed`): the mean over served batch sizes of
microseconds per request over its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, hypot
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, SiteSpeed, SpeedVerdict
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site, high_error_parts
from loka_onnx.core.timing import KernelTiming, Shape, TimingRecords
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, producer
from loka_onnx.planning.predict import TimeTable
from loka_onnx.sessions.backends import fusions_of

NS = 1000.0
"""Nanoseconds in a microsecond."""
ALIGNMENT = 16
"""FP8 products want K and N in multiples of this (cuBLASLt, "Tensor Core usage": 16-byte alignment)."""


@dataclass(frozen=True)
class DeviceTimings:
    """Kernel times of a device for plans.

    `stands_for` is another backend that runs the plans, whose fusions decide if quantizing is free; else
    empty. `fused` sites have the name of a larger kernel that computes them in the base precision: FP8 would
    break it apart, and the times of its parts are unknown.
    """

    device: str
    backend: str
    timings: tuple[KernelTiming, ...]
    serve: tuple[int, ...]
    stands_for: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)

    def times(self, precision: Precision) -> bool:
        """True if it has times of kernels in a precision."""
        return any(timing.kernel.precision is precision for timing in self.timings)

    @property
    def key(self) -> dict[str, Any]:
        """Plain data that plans by these times depend on."""
        return {
            "device": self.device,
            "backends": [self.backend, self.stands_for],
            "serve": self.serve,
            "times": serde.to_plain(TimingRecords.of(self.timings)),
            "fused": dict(self.fused),
        }


@dataclass(frozen=True)
class SiteTime:
    """Microseconds of one site at one batch size: its product in the base precision and in FP8, and the cast.

    In FP8 the product of its high-error channels is included. `error_us` is the standard error of what the
    product saves, `relative_error` that of its time in FP8. `is_measured` if nothing is predicted.
    """

    base_us: float
    quantized_us: float
    quantize_us: float
    error_us: float
    relative_error: float
    is_measured: bool

    @property
    def saved_us(self) -> float:
        """Microseconds that the product saves, the cast not counted."""
        return self.base_us - self.quantized_us


@dataclass(frozen=True)
class SiteInput:
    """Input tensor of a site, before layout operations.

    `fused_into` is the node that makes it, where its kernel quantizes as well; `made_by` the linear site that
    makes it, where its kernel quantizes when it runs in FP8. Else empty.
    """

    tensor: str
    fused_into: str
    made_by: str = ""


class SiteSpeeds:
    """Savings by FP8, over `base`, at a model's linear sites that have `recipes`, on one device."""

    def __init__(
        self,
        graph: GraphModel,
        sites: Sequence[Site],
        known: DeviceTimings,
        base: Precision,
        recipes: Mapping[str, Recipe],
    ) -> None:
        self.device, self.serve, self.fused = known.device, tuple(sorted({*known.serve})), known.fused
        self._known, self._base, self._recipes = known, base, recipes
        self._table, self._high_error = TimeTable(known.timings), set[str]()
        fused = fusions_of(known.stands_for or known.backend).quantized_in_place
        able = [site for site in sites if site.name in recipes]
        self.sources = {site.name: _source_of(graph, site, fused, recipes) for site in able}
        self._unknown = {site.name: reason for site in able if (reason := self._why_unknown(site))}
        self._times = {
            site.name: times
            for site in able
            if site.name not in self._unknown and (times := self._times_of(site)) is not None
        }
        for name, part in high_error_parts(able).items():
            if name in self._times and part in self._times:
                # Part of the site's own product where it is not in FP8.
                beside = self._times[part]
                self._times[name] = {
                    b: replace(t, quantized_us=t.quantized_us + beside[b].base_us)
                    for b, t in self._times[name].items()
                }
                self._high_error.add(part)

    @property
    def known(self) -> Collection[str]:
        """Sites whose times are known, measured or predicted."""
        return self._times.keys()

    def saved_per_row(self, site: str) -> float:
        """Return nanoseconds per row that the product saves in FP8, a mean over batch sizes."""
        return self._per_row({b: time.saved_us for b, time in self._times[site].items()})

    def error_per_row(self, site: str) -> float:
        """Return the standard error of `saved_per_row`."""
        return self._per_row({b: time.error_us for b, time in self._times[site].items()})

    def quantize_per_row(self, site: str) -> float:
        """Return nanoseconds per row of the cast of a site's input."""
        return self._per_row({b: time.quantize_us for b, time in self._times[site].items()})

    def speed(self, site: str) -> SiteSpeed:
        """Return whether a site saves time in its recipe's precision, with the reason.

        It is FAST if its product is faster, and the faster products on its input tensor together save more
        than one cast costs. Times are microseconds of a request, by batch size; none if they are UNKNOWN.
        """
        source, precision = self.sources[site], self._recipes[site].precision
        if site not in self._times:
            reason = self._unknown.get(site) or (
                f"too few kernel timings of {self._known.backend} on {self.device} to predict its time; run "
                "`loka-onnx tune`"
            )
            unknown = SiteSpeed(site, self.device, SpeedVerdict.UNKNOWN, {}, {}, source.tensor, False, reason)
            return replace(unknown, precision=precision)
        times = self._times[site]
        gains = [self.saved_per_row(other) for other in self._readers(source.tensor)]
        together = fsum(gain for gain in gains if gain > 0.0) - self.quantize_per_row(site)
        is_fast = self.saved_per_row(site) > 0.0 and together > 0.0
        return SiteSpeed(
            site=site,
            device=self.device,
            verdict=SpeedVerdict.FAST if is_fast else SpeedVerdict.SLOW,
            saved_us={str(batch): time.saved_us for batch, time in times.items()},
            quantize_us={str(batch): time.quantize_us for batch, time in times.items()},
            tensor=source.tensor,
            is_measured=all(time.is_measured for time in times.values()),
            reason=self._in_words(site),
            made_by=source.made_by,
            precision=precision,
        )

    def predicted_us(self, base: Precision, decisions: Sequence[Decision]) -> dict[str, float]:
        """Return microseconds per request of a plan's products and casts, by batch size; empty for FP32."""
        if base is Precision.FP32 or not self._times:
            return {}
        quantized = {d.site for d in decisions if d.precision.is_quantized}
        predicted = {}
        for batch in self.serve:
            casts: dict[str, float] = {}
            products = []
            for site, times in self._times.items():
                time = times[batch]
                if site in self._high_error:
                    # In the base precision its time is part of the site that it was split from.
                    products.append(-time.saved_us if site in quantized else 0.0)
                else:
                    products.append(time.quantized_us if site in quantized else time.base_us)
                if site in quantized:
                    source = self.sources[site]
                    casts[source.tensor] = 0.0 if source.made_by in quantized else time.quantize_us
            predicted[str(batch)] = fsum([*products, *casts.values()])
        return predicted

    def broken_up(self, decisions: Sequence[Decision]) -> dict[str, str]:
        """Return a plan's FP8 sites that are otherwise computed inside a larger kernel, with its name."""
        quantized = [d.site for d in decisions if d.precision.is_quantized]
        return {site: self.fused[site] for site in quantized if site in self.fused}

    def _readers(self, tensor: str) -> Iterator[str]:
        return (site for site in self._times if self.sources[site].tensor == tensor)

    def _per_row(self, us: Mapping[int, float]) -> float:
        return NS * fsum(us[batch] / batch for batch in self.serve) / len(self.serve)

    def _why_unknown(self, site: Site) -> str:
        kernel = self.fused.get(site.name)
        if kernel is not None:
            return f"it is a part of the kernel '{kernel}', and what the parts of that take was not measured"
        weight = site.weight
        if weight is None or len(weight.shape) != 2:
            return "kernel times are of products of two matrices, and its weight is a stack of them"
        if site.k % ALIGNMENT or site.n % ALIGNMENT:
            return f"K = {site.k}, N = {site.n}: FP8 kernels want multiples of {ALIGNMENT}"
        return ""

    def _times_of(self, site: Site) -> dict[int, SiteTime] | None:
        times, table, backend = {}, self._table, self._known.backend
        recipe = self._recipes[site.name]
        is_free = bool(self.sources[site.name].fused_into)
        for batch in self.serve:
            shape = Shape(site.rows * batch, site.n, site.k)
            product = table.compared(backend, self._base, shape, recipe)
            cast = None if is_free else table.quantize(backend, recipe.precision, shape.m, shape.k)
            if product is None or (cast is None and not is_free):
                return None
            base, quantized = product
            times[batch] = SiteTime(
                base.us,
                quantized.us,
                0.0 if cast is None else cast.us,
                hypot(base.error_us, quantized.error_us),
                quantized.error_us / quantized.us,
                all(each.is_measured for each in (base, quantized, cast) if each is not None),
            )
        return times

    def _in_words(self, site: str) -> str:
        times, source, precision = self._times[site], self.sources[site], self._recipes[site].precision
        products = ", ".join(
            f"{time.base_us:.3g} µs in {self._base} and {time.quantized_us:.3g} in {precision} at batch {b}"
            for b, time in times.items()
        )
        if source.fused_into:
            cast = f"quantizing is part of '{source.fused_into}'"
        else:
            taken = ", ".join(f"{time.quantize_us:.3g}" for time in times.values())
            others = sum(1 for _ in self._readers(source.tensor)) - 1
            shared = f", shared with {others} other site{'s' if others > 1 else ''}" if others else ""
            chain = f", nothing behind '{source.made_by}' in {precision}" if source.made_by else ""
            cast = f"quantizing takes {taken} µs{shared}{chain}"
        if all(time.is_measured for time in times.values()):
            known = "measured"
        else:
            known = f"predicted, ± {100.0 * max(time.relative_error for time in times.values()):.0f} %"
        whose = f" with kernels of {self._known.backend}" if self._known.stands_for else ""
        return f"the product takes {products}, {cast} ({known} on {self.device}{whose})"


def _source_of(graph: GraphModel, site: Site, fused: Collection[str], able: Collection[str]) -> SiteInput:
    root = layout_root(graph.node(site.name).inputs[site.activation.index]).tensor
    maker = producer(root)
    if maker is None:
        return SiteInput(root.name, "")
    # As `transforms.precision.place_qdq`: where a backend fuses a Q at all, FP8 products end with one.
    makes = maker.name if fused and maker.name in able else ""
    return SiteInput(root.name, maker.name if maker.op in fused else "", makes)
