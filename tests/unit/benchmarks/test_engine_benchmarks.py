"""Benchmarks of engines: kernel times out of logs, what they say of plans, and what is chosen."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from benchmarks.engines.cases import CASES, export_case
from benchmarks.engines.kernel_records import BuildLog, product_times
from benchmarks.engines.plans import NAMES, Wanted, engines_of
from benchmarks.engines.prediction import held_against
from benchmarks.engines.trained import key_of, weighed
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


DEVICE = "nvidia-h100"


@pytest.mark.slow
def test_blanket_fp8_across_fused_kernels_is_not_predicted(tmp_path):
    case = CASES["rehearsal"]
    made = engines_of(case, export_case(case, tmp_path), tmp_path, Wanted(today=("bf16",)))
    ours = [engine for engine in made if engine.name in NAMES.values()]
    names = {engine.name for engine in ours if engine.plan.fp8_sites}
    assert names >= {NAMES["fp8-all"], NAMES["fp8-outside"]}
    measured = {16: {engine.name: 50.0 for engine in ours}}
    found = held_against(ours, measured, DEVICE)
    assert set(found["not_predicted"]) == {NAMES["fp8-all"]}
    assert "'token-residual-norm'" in found["not_predicted"][NAMES["fp8-all"]]
    assert set(found["batches"]["16"]) == names - {NAMES["fp8-all"]}
    # Nothing but what cannot be predicted: no median, and the reason stands.
    few = [engine for engine in ours if engine.name in (NAMES["fp8-all"], NAMES["bf16"])]
    assert held_against(few, measured, DEVICE) == {
        "batches": {},
        "median_relative_error": None,
        "not_predicted": found["not_predicted"],
    }
    assert held_against(ours, measured, DEVICE, ()) == {}
    assert held_against(few[:1], measured, DEVICE) == {}


JUDGED: dict[str, dict[str, Any]] = {
    "today, bf16": {"sha256": "a", "selection": {"ne": 0.5}},
    "today, fp16": {"sha256": "b", "selection": {"status": "not measured: a logit is infinite"}},
    "BF16": {
        "sha256": "c",
        "selection": {"ne": 0.5, "delta_ne_percent": [0.0, 0.0, 0.001]},
        "certification": {"delta_ne_percent": [0.0, 0.0, 0.5]},
    },
    "blanket FP8": {"sha256": "d", "selection": {"ne": float("nan")}},
}
TIMES = {"today, bf16": 9.0, "today, fp16": 1.0, "BF16": 3.0, "blanket FP8": 2.0}


def timed(**digests: str) -> dict[str, Any]:
    return {"times": {name: {"median_us": us} for name, us in TIMES.items()}, "sha256": digests}


def test_an_engine_that_gives_no_numbers_is_nobodys_yardstick() -> None:
    found = weighed(timed(BF16="c"), JUDGED, 0.0002)
    assert found["chosen"] == "BF16"
    assert found["ratios"] == {"chosen over today": 3.0, "chosen over our BF16": 1.0}
    assert found["certified"] is False


def test_another_file_than_was_judged_counts_for_nothing() -> None:
    with pytest.raises(RuntimeError, match="BF16: the engine that was timed is not the one that was judged"):
        weighed(timed(BF16="x"), JUDGED, 0.0002)


def test_plans_are_gone_on_from_for_the_same_batch_sizes_alone() -> None:
    settings = {"batches": None, "rounds": 25, "budget": 0.0002}
    assert key_of(settings) == key_of(settings | {"rounds": 3})
    assert key_of(settings) != key_of(settings | {"batches": [512]})
    assert key_of(settings | {"batches": [64, 512]}) == key_of(settings | {"batches": [512, 64]})
