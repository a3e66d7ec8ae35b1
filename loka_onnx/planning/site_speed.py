"""What FP8 saves at each site of a model on a device, from kernel times.

A linear site is a product of rows·batch × K by K × N. In FP8 its activation has to be quantized
before, once for all sites that read the tensor, and at no cost where the operator that makes the
tensor is one whose kernel quantizes as well (`core.fusions`), or a site that runs in FP8 itself (a
chain). Layout operations between move what is quantized and are looked through.

Times of batch sizes are compared for each row, as the choice among engines does (`planning.speed`):
the mean over the served sizes of microseconds for a request over its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, hypot
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.fusions import fusions_of
from loka_onnx.core.plan import Decision, PrecisionPlan, SiteSpeed, SpeedVerdict
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.site import Site, high_error_parts
from loka_onnx.core.timing import KernelTiming, Shape, TimingRecords
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import GraphModel, producer
from loka_onnx.planning.predict import Estimate, TimeTable

NS = 1000.0
"""Nanoseconds in a microsecond."""
ALIGNMENT = 16
"""FP8 products want K and N in multiples of this (cuBLASLt, "Tensor Core usage": 16-byte alignment)."""


@dataclass(frozen=True)
class DeviceTimings:
    """Kernel times that plans are made by.

    Attributes:
        device: As run files name it.
        backend: Engine maker that the times are of.
        timings: Measured times of the device; empty where there are none.
        serve: Batch sizes that will be served.
        stands_for: Engine maker that runs the plans, where it is another: what that one fuses decides where
            quantizing is free. Empty for the same.
        fused: By name of a site that the engine maker computes in the base precision inside of a larger
            kernel, which; FP8 there would break that apart, and what its parts take is not known.
    """

    device: str
    backend: str
    timings: tuple[KernelTiming, ...]
    serve: tuple[int, ...]
    stands_for: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """Plain data that plans by these times depend on."""
        records = serde.to_plain(TimingRecords.of(self.timings))
        backends = [self.backend, self.stands_for]
        return {
            "device": self.device,
            "backends": backends,
            "serve": self.serve,
            "times": records,
            "fused": dict(self.fused),
        }


@dataclass(frozen=True)
class SiteTime:
    """One site at one batch size.

    Attributes:
        base: Its product in the base precision.
        float8: Its product in FP8.
        quantize: The cast of what it reads; None where it costs nothing.
        beside: The product of its high-error channels, joined to it outside FP8; None for none.
    """

    base: Estimate
    float8: Estimate
    quantize: Estimate | None
    beside: Estimate | None = None

    @property
    def float8_us(self) -> float:
        """Microseconds of the product in FP8, with that of its high-error channels."""
        return self.float8.us + (self.beside.us if self.beside is not None else 0.0)

    @property
    def saved_us(self) -> float:
        """Microseconds that the product saves, the cast not counted."""
        return self.base.us - self.float8_us

    @property
    def quantize_us(self) -> float:
        """Microseconds of the cast."""
        return self.quantize.us if self.quantize is not None else 0.0

    @property
    def is_measured(self) -> bool:
        """Whether nothing of it is predicted."""
        return all(e.is_measured for e in (self.base, self.float8, self.quantize) if e is not None)


@dataclass(frozen=True)
class Source:
    """What a site reads.

    Attributes:
        tensor: Name of the tensor before layout operations.
        fused_into: Name of the node that makes it, where its kernel quantizes as well; else empty.
        made_by: Name of the linear site that makes it, where its kernel quantizes as well when it runs in FP8
            itself; else empty.
    """

    tensor: str
    fused_into: str
    made_by: str = ""


class SiteSpeeds:
    """Savings by FP8 at the linear sites of one model on one device.

    Args:
        graph: The model.
        sites: Its sites.
        known: Kernel times.
        base: Precision that FP8 is held against.
        scales: Granularity of the weight in FP8, of the sites that may run in it.
    """

    def __init__(
        self,
        graph: GraphModel,
        sites: Sequence[Site],
        known: DeviceTimings,
        base: Precision,
        scales: Mapping[str, Granularity],
    ) -> None:
        self.device, self.serve = known.device, tuple(sorted({*known.serve}))
        self._known, self._base, self._scales = known, base, scales
        self._table, self._high_error = TimeTable(known.timings), set[str]()
        fused = fusions_of(known.stands_for or known.backend).quantized_in_place
        able = [site for site in sites if site.name in scales]
        self.sources = {site.name: _source_of(graph, site, fused, scales) for site in able}
        self._unknown = {site.name: reason for site in able if (reason := self._why_unknown(site))}
        self._times = {
            site.name: times
            for site in able
            if site.name not in self._unknown and (times := self._times_of(site)) is not None
        }
        for name, part in high_error_parts(able).items():
            if name in self._times and part in self._times:
                apart = self._times[part]
                self._times[name] = {
                    b: replace(t, beside=apart[b].base) for b, t in self._times[name].items()
                }
                self._high_error.add(part)

    @property
    def known(self) -> Collection[str]:
        """Sites whose times are known, measured or predicted."""
        return self._times.keys()

    def saved_per_row(self, site: str) -> float:
        """Nanoseconds a row that the product saves in FP8, the cast not counted; mean over batch sizes."""
        return self._per_row({b: time.saved_us for b, time in self._times[site].items()})

    def error_per_row(self, site: str) -> float:
        """Standard error of `saved_per_row`."""
        times = self._times[site]
        return self._per_row({b: hypot(t.base.error_us, t.float8.error_us) for b, t in times.items()})

    def quantize_per_row(self, site: str) -> float:
        """Nanoseconds a row that the cast of what a site reads takes."""
        return self._per_row({b: time.quantize_us for b, time in self._times[site].items()})

    def speed(self, site: str) -> SiteSpeed:
        """The verdict of a site, with its reason."""
        source = self.sources[site]
        if site not in self._times:
            reason = self._unknown.get(site) or self._no_timing()
            unknown = SpeedVerdict.UNKNOWN
            return SiteSpeed(site, self.device, unknown, {}, {}, source.tensor, False, reason)
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
        )

    def predicted_us(self, base: Precision, decisions: Sequence[Decision]) -> dict[str, float]:
        """Time of the products of a plan and of their casts, by batch size as text.

        Sites whose times are not known are left out of it. Empty where the plan runs in FP32, of which no
        times are kept.
        """
        if base is Precision.FP32 or not self._times:
            return {}
        float8 = {d.site for d in decisions if d.precision is Precision.FP8}
        found = {}
        for batch in self.serve:
            casts: dict[str, float] = {}
            products = []
            for site, times in self._times.items():
                time = times[batch]
                if site in self._high_error:
                    # In the base precision the site that it was split off has its time, or is one with it.
                    products.append(-time.saved_us if site in float8 else 0.0)
                else:
                    products.append(time.float8_us if site in float8 else time.base.us)
                if site in float8:
                    source = self.sources[site]
                    casts[source.tensor] = 0.0 if source.made_by in float8 else time.quantize_us
            found[str(batch)] = fsum([*products, *casts.values()])
        return found

    def broken_up(self, decisions: Sequence[Decision]) -> dict[str, str]:
        """Sites of a plan in FP8 that are computed inside of a larger kernel where they are not, with it."""
        fused = self._known.fused
        return {d.site: fused[d.site] for d in decisions if d.precision is Precision.FP8 and d.site in fused}

    def _readers(self, tensor: str) -> Iterator[str]:
        return (site for site in self._times if self.sources[site].tensor == tensor)

    def _per_row(self, us: Mapping[int, float]) -> float:
        return NS * fsum(us[batch] / batch for batch in self.serve) / len(self.serve)

    def _why_unknown(self, site: Site) -> str:
        kernel = self._known.fused.get(site.name)
        if kernel is not None:
            return f"it is a part of the kernel '{kernel}', and what the parts of that take was not measured"
        weight = site.weight
        if weight is None or len(weight.shape) != 2:
            return "kernel times are of products of two matrices, and its weight is a stack of them"
        if site.k % ALIGNMENT or site.n % ALIGNMENT:
            return f"K = {site.k}, N = {site.n}: FP8 kernels want multiples of {ALIGNMENT}"
        return ""

    def _no_timing(self) -> str:
        return (
            f"too few kernel timings of {self._known.backend} on {self.device} to predict its time; run "
            "`loka-onnx tune`"
        )

    def _times_of(self, site: Site) -> dict[int, SiteTime] | None:
        found = {}
        for batch in self.serve:
            shape = Shape(site.rows * batch, site.n, site.k)
            product = self._table.compared(self._known.backend, self._base, shape, self._scales[site.name])
            quantize = None
            if not self.sources[site.name].fused_into:
                quantize = self._table.quantize(self._known.backend, shape.m, shape.k)
                if quantize is None:
                    return None
            if product is None:
                return None
            found[batch] = SiteTime(product.base, product.float8, quantize)
        return found

    def _in_words(self, site: str) -> str:
        times, source = self._times[site], self.sources[site]
        products = ", ".join(
            f"{time.base.us:.3g} µs in {self._base} and {time.float8_us:.3g} in fp8 at batch {batch}"
            for batch, time in times.items()
        )
        if source.fused_into:
            cast = f"quantizing is part of '{source.fused_into}'"
        else:
            taken = ", ".join(f"{time.quantize_us:.3g}" for time in times.values())
            others = sum(1 for _ in self._readers(source.tensor)) - 1
            shared = f", shared with {others} other site{'s' if others > 1 else ''}" if others else ""
            chain = f", nothing behind '{source.made_by}' in fp8" if source.made_by else ""
            cast = f"quantizing takes {taken} µs{shared}{chain}"
        if all(time.is_measured for time in times.values()):
            known = "measured"
        else:
            errors = (t.float8.error_us / t.float8.us for t in times.values())
            known = f"predicted, ± {100.0 * max(errors):.0f} %"
        whose = f" with kernels of {self._known.backend}" if self._known.stands_for else ""
        return f"the product takes {products}, {cast} ({known} on {self.device}{whose})"


def expected_us(
    plan: PrecisionPlan, reference: PrecisionPlan, measured_us: Mapping[int, float], device: str
) -> dict[int, float]:
    """Latency to expect of an engine of a plan, from that of an engine of another plan.

    What is not a product takes the same in both: it cancels. Where one of them breaks up a kernel that the
    other has, it does not, and there is nothing to expect (`why_not_expected`).

    Args:
        plan: The plan.
        reference: The plan that was measured, for example ``bf16``.
        measured_us: Latency of its engine by batch size, microseconds.
        device: Where.

    Returns:
        By batch size, of those that both plans have a prediction for.
    """
    if why_not_expected(plan, reference, device):
        return {}
    ours, theirs = (p.predicted_us.get(device, {}) for p in (plan, reference))
    return {
        batch: us + ours[str(batch)] - theirs[str(batch)]
        for batch, us in measured_us.items()
        if str(batch) in ours and str(batch) in theirs
    }


def why_not_expected(plan: PrecisionPlan, reference: PrecisionPlan, device: str) -> str:
    """Why kernel times do not tell the latencies of two plans apart: only one breaks up some kernel.

    Args:
        plan: The plan.
        reference: The plan that was measured.
        device: Where.

    Returns:
        A sentence without its full stop; empty where they may tell.
    """
    ours, theirs = (p.breaks_up.get(device, {}) for p in (plan, reference))
    apart = {**ours, **theirs}
    unlike = sorted(ours.keys() ^ theirs.keys())
    if not unlike:
        return ""
    kernels = sorted({apart[site] for site in unlike})
    named = f"kernel{'s' if len(kernels) > 1 else ''} " + " and ".join(f"'{kernel}'" for kernel in kernels)
    others = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
    whose = "" if unlike[0] in ours else f" of plan '{reference.id}'"
    return (
        f"FP8 at '{unlike[0]}'{others}{whose} breaks up the {named}, and what the parts take was not measured"
    )


def _source_of(graph: GraphModel, site: Site, fused: Collection[str], able: Collection[str]) -> Source:
    root = layout_root(graph.node(site.name).inputs[site.activation.index]).tensor
    maker = producer(root)
    if maker is None:
        return Source(root.name, "")
    # As `transforms.precision.qdq_chains`: where a backend fuses a Q at all, FP8 products end with one.
    makes = maker.name if fused and maker.name in able else ""
    return Source(root.name, maker.name if maker.op in fused else "", makes)
