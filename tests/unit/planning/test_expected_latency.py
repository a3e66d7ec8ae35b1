"""From which measured engine a latency is predicted, and what follows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan, Verdict
from loka_onnx.core.recipe import PER_TENSOR
from loka_onnx.errors import InternalError
from loka_onnx.planning.expected_latency import Known, Point, front, predict, why_not_expected

SAVED = {"a": 30.0, "b": 10.0, "c": 20.0}


def plan(*fp8: str, base: Precision = Precision.BF16) -> PrecisionPlan:
    """Products take 60 µs at 10 rows and twice that at 20, less what FP8 saves."""
    decisions = tuple(
        Decision(site, Precision.FP8, PER_TENSOR, Verdict.SAFE, "", 1.0, (1.0,))
        if site in fp8
        else Decision(site, base, None, Verdict.NOT_JUDGED, "")
        for site in SAVED
    )
    us = 60.0 - sum(SAVED[site] for site in fp8)
    return PrecisionPlan("p", "d", base, decisions, {}, 0.0, predicted_us={"gpu": {"10": us, "20": 2 * us}})


BF16 = Known("bf16", plan(), {10: 100.0, 20: 180.0})
# FP8 at a and b saves 10 µs less in the engine than kernel times say.
BOTH = Known("both", plan("a", "b"), {10: 70.0, 20: 130.0})


def test_the_difference_is_added_to_what_was_measured_of_the_plan_that_differs_in_fewest_sites():
    found = predict(plan("a"), (BF16,), "gpu")
    assert (found.start, dict(found.us)) == ("bf16", {10: pytest.approx(70.0), 20: pytest.approx(120.0)})
    found = predict(plan("a", "b", "c"), (BF16, BOTH), "gpu")
    assert (found.start, found.us[10]) == ("both", pytest.approx(50.0))
    nearer = predict(plan("c"), (BF16, BOTH), "gpu")
    assert nearer.start == "bf16"


def test_nothing_is_predicted_without_a_like_engine_or_kernel_times() -> None:
    other = Known("fp16", plan(base=Precision.FP16), {10: 90.0})
    assert predict(plan("a"), (other,), "gpu") is None
    assert predict(plan("a"), (BF16,), "another") is None
    unknown = Known("near", replace(plan("a"), predicted_us={}), {10: 1.0})
    found = predict(plan("a"), (unknown, BF16), "gpu")
    assert found.start == "bf16"


def test_nothing_is_predicted_across_a_kernel_that_one_plan_breaks_up() -> None:
    alone = replace(plan("a"), breaks_up={"gpu": {"a": "token-residual-norm"}})
    found = predict(alone, (BF16,), "gpu")
    why = "FP8 at 'a' breaks up the kernel 'token-residual-norm', and what the parts take was not measured"
    assert (found.start, found.us, found.why_not) == ("", {}, why)
    # On another device it is no kernel.
    assert why_not_expected(alone, BF16.plan, "another") == ""
    # The other way round as well.
    found = predict(plan("b"), (Known("parted", alone, {10: 90.0}),), "gpu")
    assert found.us == {}
    assert found.why_not.startswith("FP8 at 'a' of plan 'p' breaks up the kernel 'token-residual-norm'")
    # An engine that differs in more sites, and not by a kernel, is what it starts from.
    further = predict(plan("a", "b"), (Known("near", alone, {10: 1.0}), BF16), "gpu")
    assert (further.start, further.why_not) == ("bf16", "")


# The front against its definition, tried on every pair

# Few values, so that ties in one and in both come up.
VALUES = st.sampled_from([0.5, 1.0, 1.5, 2.0, inf])


def dominates(a: Point, b: Point) -> bool:
    no_worse = a.time <= b.time and a.loss <= b.loss
    return no_worse and (a.time < b.time or a.loss < b.loss)


@given(st.lists(st.tuples(VALUES, VALUES), max_size=12))
def test_it_is_what_no_other_point_dominates(places: list[tuple[float, float]]) -> None:
    points = [Point(f"p{i}", time, loss) for i, (time, loss) in enumerate(places)]
    found = front(points)
    by_definition = {p.name for p in points if not any(dominates(other, p) for other in points)}
    assert {p.name for p in found} == by_definition
    assert [p.time for p in found] == sorted(p.time for p in found)
    assert all(a.loss >= b.loss for a, b in pairwise(found))
    with pytest.raises(InternalError):
        front([*points, Point("a", nan, 1.0)])
