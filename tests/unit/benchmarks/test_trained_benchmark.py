"""What `benchmarks.engines.trained` chooses, compares, and goes on from."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from benchmarks.engines.trained import key_of, weighed

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
