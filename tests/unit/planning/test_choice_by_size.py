"""Noise, and engines of their own for batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from choice_cases import (
    BEYOND,
    BF16,
    FP32,
    PLANS,
    Candidate,
    latency,
)
from scipy import stats

from loka_onnx.core import serde
from loka_onnx.core.evaluation import (
    Choice,
    Evaluation,
    EvaluationSet,
    PairedDifference,
    TargetChoice,
    Why,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.planning.choice import ChoiceOptions, choose

# Noise, batch sizes -----------------------------------------------------------------------------------

JITTER = (0.97, 1.03, 0.98, 1.02, 0.99, 1.01, 1.0, 1.0, 0.995, 1.005)


def timed(candidate: Candidate, spread: float = 0.0, **us: float) -> Evaluation:
    """Judged inside the budget, with medians by batch size (``b8=120.0``) whose parts spread."""
    whole = candidate.evaluation("selection")
    # Turned by the candidate, so that the jitter of two engines does not cancel.
    turned = JITTER[len(candidate.plan) % 10 :] + JITTER[: len(candidate.plan) % 10]
    latencies = tuple(
        replace(
            latency(value, batch=int(name[1:])),
            loads_us=tuple(value * (1 + spread * (factor - 1)) for factor in turned),
        )
        for name, value in us.items()
    )
    return replace(whole, latencies=latencies)


def by_size(
    evaluations: dict[Candidate, Evaluation],
    certified: tuple[str, ...] | None = None,
    options: ChoiceOptions | None = None,
) -> TargetChoice:
    """The choice; plans in `certified` are inside the budget there, all of them by default."""
    second = [
        candidate.evaluation("certification")
        if certified is None or candidate.plan in certified
        else replace(candidate, accuracy=(BEYOND,)).evaluation("certification")
        for candidate in evaluations
    ]
    found = choose(
        [candidate.engine() for candidate in evaluations],
        EvaluationSet((*evaluations.values(), *second)),
        PLANS,
        options,
    )
    assert serde.loads(Choice, serde.dumps(found)) == found
    return found.targets[0]


FP8_SAFE, FP8_ALL = Candidate("fp8-safe"), Candidate("fp8-all")


def test_within_noise_the_higher_precision_wins() -> None:
    noisy = {BF16: timed(BF16, 1.0, b8=100), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=98.5)}
    target = by_size(noisy)
    assert target.plan == "bf16"
    (loser,) = target.losers
    assert loser.why is Why.WITHIN_NOISE
    assert loser.times is not None and loser.times.lower < 0.985 < loser.times.upper
    # The same medians, measured without spread, are a difference; less than 1 % never is.
    steady = {BF16: timed(BF16, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=98.5)}
    assert by_size(steady).plan == "fp8-safe"
    close = {BF16: timed(BF16, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=99.5)}
    assert by_size(close).plan == "bf16"
    assert by_size(close, options=ChoiceOptions(noise=0.001)).plan == "fp8-safe"


BOTH_SIZES = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=700)}


def test_each_batch_size_gets_its_engine_where_that_pays() -> None:
    target = by_size(BOTH_SIZES)
    # Over both sizes: (6.25 + 1.95)/2 µs a row against (7.5 + 1.37)/2.
    assert target.plan == "bf16"
    assert [(route.batch, route.plan) for route in target.routes] == [(8, "bf16"), (512, "fp8-safe")]
    assert target.routes[0].times is None
    gain = target.routes[1].times
    assert gain is not None and gain.value == pytest.approx(1000 / 700)
    assert target.engines == (BF16.engine().id, FP8_SAFE.engine().id)
    assert target.plans == ("bf16", "fp8-safe")
    assert target.losers == ()
    # A request between sizes goes to the next larger's, one above all of them to the largest's.
    for rows, plan_id in ((1, "bf16"), (8, "bf16"), (9, "fp8-safe"), (512, "fp8-safe"), (4096, "fp8-safe")):
        assert target.route(rows).endswith(plan_id)


def test_one_engine_serves_where_the_gain_is_inside_margin_or_spread() -> None:
    assert by_size(BOTH_SIZES, options=ChoiceOptions(by_batch=False)).routes == ()
    assert by_size(BOTH_SIZES, options=ChoiceOptions(margin=0.5)).routes == ()
    little = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=975)}
    assert by_size(little).routes == ()
    # 5 % at the median, but the spread reaches below 3 %.
    noisy = {BF16: timed(BF16, 1.0, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=60, b512=952)}
    assert by_size(noisy).routes == ()
    steady = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=60, b512=952)}
    assert len(by_size(steady).routes) == 2


def in_jobs(evaluations: dict[Candidate, Evaluation]) -> dict[Candidate, Evaluation]:
    """The same, each timed in a build job of its own."""
    return {
        candidate: replace(each, latencies=tuple(replace(x, job=each.engine) for x in each.latencies))
        for candidate, each in evaluations.items()
    }


def test_engines_that_were_timed_elsewhere_are_compared_by_their_medians_and_it_is_told() -> None:
    """Each in a job: their parts are as many, and no pairs. Noise is not known, nor worth an engine."""
    noisy = in_jobs({BF16: timed(BF16, 1.0, b8=100), FP8_SAFE: timed(FP8_SAFE, 1.0, b8=98.5)})
    target = by_size(noisy)
    assert target.plan == "fp8-safe"
    (loser,) = target.losers
    assert (loser.why, loser.times) == (Why.SLOWER, None)
    close = in_jobs({BF16: timed(BF16, b8=100), FP8_SAFE: timed(FP8_SAFE, b8=99.5)})
    target = by_size(close)
    assert target.plan == "bf16"
    assert target.losers[0].why is Why.WITHIN_NOISE and "timed elsewhere" in target.losers[0].reason
    # No size gets an engine of its own by a comparison that nobody knows the width of.
    target = by_size(in_jobs(BOTH_SIZES))
    assert (target.plan, target.routes) == ("bf16", ())


def certified_at(main: float, routed: float) -> TargetChoice:
    """Two engines by size, whose upper ends on certification are such parts of the budget (half width .4)."""
    certified = {"bf16": main, "fp8-safe": routed}
    second = []
    for candidate in BOTH_SIZES:
        whole = candidate.evaluation("certification")
        (one,) = whole.outputs
        upper = certified[candidate.plan]
        change = Interval(1e-4 * (upper - 0.4), 1e-4 * (upper - 0.8), 1e-4 * upper, 0.95, 1000)
        difference = PairedDifference("loss", change, change, change, None, change, 1e-3, 1e-2)
        second.append(replace(whole, outputs=(replace(one, difference=difference, budget=1e-4),)))
    evaluations = EvaluationSet((*BOTH_SIZES.values(), *second))
    return choose([candidate.engine() for candidate in BOTH_SIZES], evaluations, PLANS).targets[0]


def test_engines_by_size_share_one_certificate() -> None:
    """Two engines at 97.5 % each: ends lie 1.15 times as far out (Student's t of 99 degrees of freedom)."""
    factor = stats.t.ppf(0.9875, 99) / stats.t.ppf(0.975, 99)
    edge = 1.0 - 0.4 * (factor - 1.0)
    assert edge < 0.99
    assert len(certified_at(edge - 0.005, edge - 0.005).routes) == 2
    for main, routed in ((edge - 0.005, edge + 0.005), (edge + 0.005, edge - 0.005), (0.99, 0.99)):
        alone = certified_at(main, routed)
        # What each may claim alone, both may not: the main engine serves every size.
        assert (alone.plan, alone.routes) == ("bf16", ())
        (loser,) = alone.losers
        assert loser.why is Why.NOT_CERTIFIED


def test_a_routed_engine_that_misses_on_certification_gives_its_sizes_back() -> None:
    target = by_size(BOTH_SIZES, certified=("bf16",))
    assert (target.plan, target.routes) == ("bf16", ())
    (loser,) = target.losers
    assert loser.why is Why.NOT_CERTIFIED
    # The main engine missing leaves nothing that selection chose.
    both = {**BOTH_SIZES, FP32: timed(FP32, b8=100, b512=2000)}
    fallen = by_size(both, certified=("fp8-safe", "fp32"))
    assert (fallen.plan, fallen.routes) == ("fp32", ())
    assert {loser.engine: loser.why for loser in fallen.losers} == {
        BF16.engine().id: Why.NOT_CERTIFIED,
        FP8_SAFE.engine().id: Why.NOT_SELECTED,
    }


def test_an_engine_that_failed_at_a_served_size_is_not_emitted() -> None:
    partly = {BF16: timed(BF16, b8=50, b512=1000), FP8_SAFE: timed(FP8_SAFE, b8=10)}
    target = by_size(partly)
    assert (target.plan, target.routes) == ("bf16", ())
    (loser,) = target.losers
    assert loser.why is Why.NO_SPEED
