"""Kernel times out of build logs."""

import pytest

pytest.importorskip("torch", reason="needs torch")

from benchmarks.engines.kernel_records import BuildLog, product_times
from loka_onnx.core.formats import Precision
from loka_onnx.core.recipe import Granularity
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.core.timing import PRODUCT, Kernel, Provenance, Shape

SOURCE = Provenance("a device", {"torch": "2.11"}, "", "2026-11-22")
HALF = """\
half-product: fc1, fc2, odd
fc1: triton 128x128x64-3-8: 6.59 µs at batch 256, 6.71 µs at batch 2048; error 4.6e-07
fc1: triton 64x32x128-3-4: 3.81 µs at batch 256, 15.32 µs at batch 2048; error 4.6e-07
fc1: library: slower than a tile even without what follows; error 0
fc2: library: 4.81 µs at batch 256, 8.32 µs at batch 2048; error 0
odd: library: 1.00 µs at batch 256, 1.00 µs at batch 2048; error 0
/usr/lib/python3.12/copyreg.py:99: FutureWarning: `isinstance(treespec, LeafSpec)` is deprecated
"""
FLOAT8 = """\
factorization-norm: norm/factorization
float8-product: fc1
half-product: fc2
fc1: triton 64x64x128-2-4: error 0.0022, at most 0.002 is allowed; error 0.0022
fc1: cublas-fast: 3.00 µs at batch 256, 5.00 µs at batch 2048; error 0.00031
fc2: library: 9.99 µs at batch 256, 9.99 µs at batch 2048; error 0
"""


def site(name: str, rows: int, n: int, k: int) -> Site:
    return Site(name, SiteKind.LINEAR, "Gemm", (), "y", k, n, rows)


SITES = (site("fc1", 2, 64, 32), site("fc2", 2, 64, 32), site("odd", 1, 512, 13))


def test_a_log_has_the_fastest_kernel_of_each_site_and_size() -> None:
    found = BuildLog.read(HALF)
    assert (found.float8, found.half) == (frozenset(), {"fc1", "fc2", "odd"})
    assert found.us == {
        "fc1": {256: 3.81, 2048: 6.71},
        "fc2": {256: 4.81, 2048: 8.32},
        "odd": {256: 1.0, 2048: 1.0},
    }
    both = BuildLog.read(FLOAT8)
    assert (both.float8, both.half) == ({"fc1"}, {"fc2"})
    assert both.us["fc1"] == {256: 3.0, 2048: 5.0}


def test_what_was_declined_was_not_fused() -> None:
    """Else the log of an engine in BF16 would be one of FP8."""
    text = "float8-product: declined fc2: its result has another type, and more\n" + HALF
    assert BuildLog.read(text) == BuildLog.read(HALF)


def test_times_are_means_over_the_sites_of_a_shape() -> None:
    found = product_times([BuildLog.read(HALF), BuildLog.read(FLOAT8)], SITES, "gpu", SOURCE)
    assert {(t.kernel.precision, t.shape): t.us for t in found} == {
        # What `odd` multiplies has no kernel in FP8. fc2 in BF16 beside FP8 may
        # quantize for the next one.
        (Precision.BF16, Shape(512, 64, 32)): pytest.approx((3.81 + 4.81) / 2),
        (Precision.BF16, Shape(4096, 64, 32)): pytest.approx((6.71 + 8.32) / 2, abs=1e-3),
        (Precision.FP8, Shape(512, 64, 32)): 3.0,
        (Precision.FP8, Shape(4096, 64, 32)): 5.0,
    }
    assert all(t.provenance == SOURCE for t in found)
    assert {t.kernel for t in found} == {
        Kernel("gpu", "inductor", PRODUCT, Precision.BF16),
        Kernel("gpu", "inductor", PRODUCT, Precision.FP8, Granularity.PER_TENSOR),
    }
