"""Which engine is emitted, for which batch sizes, and the reason that every other one gets."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from choice_cases import (
    BEYOND,
    BF16,
    FASTEST,
    FP32,
    ONLY,
    PLANS,
    UNDECIDED,
    WITHIN,
    Candidate,
    chosen,
    latency,
    on_both,
    only,
    reasons,
)
from scipy import stats

from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus
from loka_onnx.core.evaluation import (
    Choice,
    Evaluation,
    EvaluationSet,
    Latency,
    PairedDifference,
    TargetChoice,
    Why,
)
from loka_onnx.core.intervals import Interval
from loka_onnx.errors import PlanningError
from loka_onnx.planning.choice import MEASURED, ChoiceOptions, choose, group_by_hardware
from loka_onnx.planning.speed import MOST_LOADS

NOT_INSIDE = "; not inside on selection: "
EXACT = "no engine with a measured speed is inside the budget: the exact model, fp32"
INSIDE, OUTSIDE = "accuracy inside the budget; ", "accuracy beyond the budget; "
SIMULATED = "FP8 is simulated here, its speed never counts"
ABSENT = Candidate("fp8-all", None, (), BuildStatus.BUILT_NOT_RUN, "rtx", "sm89", detail="no sm89 here")

TABLE = {
    "fp8_faster_and_inside": ((FP32, BF16, Candidate("fp8-safe", 100)), ("fp8-safe", FASTEST.format(3)),
        {"fp32": INSIDE + "slower by 300.0 %", "bf16": INSIDE + "slower by 100.0 %"}),
    "fp8_slower": ((FP32, BF16, Candidate("fp8-safe", 250)), ("bf16", FASTEST.format(3) + "; FP8 is slower"),
        {"fp8-safe": INSIDE + "slower by 25.0 %"}),
    "fp8_beyond": ((FP32, BF16, Candidate("fp8-all", 50, (BEYOND,))),
        ("bf16", FASTEST.format(2) + NOT_INSIDE + "fp8-all"), {"fp8-all": OUTSIDE + "faster by 75.0 %"}),
    "fp8_undecided": ((FP32, Candidate("fp8-all", 50, (WITHIN, UNDECIDED))),
        ("fp32", ONLY + NOT_INSIDE + "fp8-all"),
        {"fp8-all": "accuracy undecided: the budget lies inside the interval; faster by 87.5 %"}),
    "beyond_outweighs_undecided": ((FP32, Candidate("fp8-all", 50, (UNDECIDED, BEYOND))),
        ("fp32", ONLY + NOT_INSIDE + "fp8-all"), {"fp8-all": OUTSIDE + "faster by 87.5 %"}),
    "none_inside": ((Candidate("bf16", 200, (BEYOND,)), Candidate("fp32", 400, (UNDECIDED,))),
        ("fp32", EXACT), {"bf16": OUTSIDE + "faster by 50.0 %"}),
    "a_simulation_never_wins_on_speed": (
        (FP32, Candidate("fp8-all", 1, simulated=True), Candidate("fp8-safe", 1, (BEYOND,), simulated=True)),
        ("fp32", ONLY + "; inside but simulated: fp8-all" + NOT_INSIDE + "fp8-safe"),
        {"fp8-all": INSIDE + SIMULATED, "fp8-safe": OUTSIDE + SIMULATED}),
    "a_latency_that_does_not_count": ((FP32, Candidate("fp8-all", 1, counts=False)),
        ("fp32", ONLY + "; inside, of unknown speed: fp8-all"),
        {"fp8-all": INSIDE + "timed on device, which is not the target: its speed does not count"}),
    "no_latency": ((FP32, Candidate("fp8-all", None)), ("fp32", ONLY + "; inside, of unknown speed: fp8-all"),
        {"fp8-all": INSIDE + "its speed on the target was not measured"}),
    "never_evaluated": ((FP32, Candidate("fp8-all", None, (), detail="the first inference timed out")),
        ("fp32", ONLY + "; not measured: fp8-all"),
        {"fp8-all": "not measured: the first inference timed out"}),
    "failed": ((FP32, Candidate("fp8-all", None, (), BuildStatus.FAILED, detail="signal 11 (SIGSEGV)")),
        ("fp32", ONLY + "; failed: fp8-all"), {"fp8-all": "failed: signal 11 (SIGSEGV)"}),
    "declined": ((FP32, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products")),
        ("fp32", ONLY + "; declined: bf16"), {"bf16": "declined: no BF16 products"}),
    "one_that_cannot_run_beside_one_that_can": ((FP32, ABSENT),
        ("fp32", ONLY + "; not measured: fp8-all (rtx)"), {"fp8-all": "not measured: no sm89 here"}),
    "nothing_measured": ((Candidate("bf16", None, ()), Candidate("fp32", None, ())), ("fp32", EXACT),
        {"bf16": "not measured: built and run here"}),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_engines_that_ran_here(case):
    candidates, expected, others = TABLE[case]
    target = only(*candidates)
    assert (target.plan, target.reason, target.basis) == (*expected, MEASURED)
    assert reasons(target).items() >= others.items()


def test_the_faster_fp32_engine_is_the_fallback_and_a_target_without_any_is_an_error():
    slow, fast = Candidate("fp32", 400, (UNDECIDED,)), Candidate("fp32", 300, (UNDECIDED,), backend="ort")
    assert only(slow, fast, Candidate("bf16", 1, (BEYOND,))).engine == fast.engine().id
    failed = Candidate("fp32", None, (), BuildStatus.FAILED, detail="no memory")
    with pytest.raises(PlanningError) as caught:
        chosen(failed, Candidate("bf16", None, (), BuildStatus.DECLINED, detail="no BF16 products"))
    assert caught.value.code == "E0702" and "gpu-trt-sm90-fp32 failed: no memory" in caught.value.evidence


def test_what_selection_chose_must_hold_on_certification():
    fp8, spoiled = Candidate("fp8-all", 100), Candidate("fp8-all", 100, (BEYOND,))
    target = on_both([FP32, BF16, fp8], [FP32, BF16, spoiled])
    # Not the runner-up: certification is looked at once and does not choose.
    assert target.plan == "fp32"
    assert target.reason == (
        "'fp8-all' was selected and is not inside the budget on certification: fp32 instead"
    )
    assert reasons(target) == {
        "bf16": INSIDE + "faster by 50.0 %; certification does not choose among the others",
        "fp8-all": "selected; on certification accuracy beyond the budget",
    }
    for selection, certification, plan in (
        ([FP32, spoiled], [FP32, fp8], "fp32"),
        ([FP32, fp8], [FP32, fp8], "fp8-all"),
        ([FP32, fp8], [FP32], "fp32"),  # never certified
    ):
        assert on_both(selection, certification).plan == plan


def test_a_simulation_that_misses_on_certification_is_not_told_as_inside():
    holds, spoiled = (
        Candidate("fp8-all", 1, verdicts, simulated=True) for verdicts in ((WITHIN,), (UNDECIDED,))
    )
    missed = on_both([FP32, holds], [FP32, spoiled])
    assert missed.reason == ONLY + "; inside on selection, but not on certification: fp8-all"
    assert on_both([FP32, holds], [FP32, holds]).reason == ONLY + "; inside but simulated: fp8-all"


def test_speed_is_the_mean_time_per_row_over_the_batch_sizes():
    """10 µs at 10 rows weigh as much as 100 µs at 100."""

    def evaluation(candidate: Candidate, *latencies: Latency) -> Evaluation:
        return replace(candidate.evaluation("selection"), latencies=latencies)

    at_small = evaluation(BF16, latency(10, batch=10), latency(130, batch=100))
    at_large = evaluation(FP32, latency(15, batch=10), latency(100, batch=100))
    certified = (BF16.evaluation("certification"), FP32.evaluation("certification"))
    evaluations = EvaluationSet((at_small, at_large, *certified))
    choice = choose([FP32.engine(), BF16.engine()], evaluations, PLANS, ChoiceOptions(by_batch=False))
    assert choice.targets[0].plan == "bf16"
    assert choice.targets[0].losers[0].reason.endswith("slower by 8.7 %")


@pytest.mark.parametrize(("engines", "groups"), [
    ("trt:sm90", ["trt:sm90"]),
    # Backends name one device differently.
    ("ort:cuda trt:sm90", ["ort:cuda trt:sm90"]),
    ("rtx:sm89 rtx:sm120", ["rtx:sm89", "rtx:sm120"]),
    # A general engine competes everywhere, one for an architecture there.
    ("rtx:sm89 rtx:sm120 ort:cuda", ["rtx:sm89 ort:cuda", "rtx:sm120 ort:cuda"]),
    ("rtx:sm89 rtx:sm120 trt:sm120", ["rtx:sm89", "rtx:sm120 trt:sm120"]),
    ("rtx:sm89 trt:sm89 rtx:sm120 trt:sm120", ["rtx:sm89 trt:sm89", "rtx:sm120 trt:sm120"]),
])  # fmt: skip
def test_one_choice_for_each_piece_of_hardware(engines, groups):
    names = (name.split(":") for name in engines.split())
    found = group_by_hardware([Candidate("fp32", backend=b, architecture=a).engine() for b, a in names])
    assert [" ".join(f"{e.backend}:{e.architecture}" for e in group) for group in found] == groups
    choice = chosen(FP32, Candidate("fp32", 1, target="cpu"), BF16)
    assert [(t.target, t.plan) for t in choice.targets] == [("gpu", "bf16"), ("cpu", "fp32")]


JITTER = (0.97, 1.03, 0.98, 1.02, 0.99, 1.01, 1.0, 1.0, 0.995, 1.005)
FP8_SAFE = Candidate("fp8-safe")


def timed(candidate: Candidate, spread: float = 0.0, **us: float) -> Evaluation:
    """Judged inside the budget, with medians by batch size (``b8=120.0``) whose parts spread."""
    # Turned by the candidate, so that the jitter of two engines does not cancel.
    turned = JITTER[len(candidate.plan) % 10 :] + JITTER[: len(candidate.plan) % 10]
    latencies = tuple(
        replace(
            latency(value, batch=int(name[1:])),
            loads_us=tuple(value * (1 + spread * (factor - 1)) for factor in turned),
        )
        for name, value in us.items()
    )
    return replace(candidate.evaluation("selection"), latencies=latencies)


def both(spread=0.0, *, bf16, fp8):
    return {BF16: timed(BF16, spread, **bf16), FP8_SAFE: timed(FP8_SAFE, spread, **fp8)}


def by_size(evaluations, missed=(), **options):
    """The choice; plans in `missed` are beyond the budget on certification."""
    second = [
        replace(c, accuracy=(BEYOND,) if c.plan in missed else c.accuracy).evaluation("certification")
        for c in evaluations
    ]
    known = EvaluationSet((*evaluations.values(), *second))
    chosen = ChoiceOptions(**options)  # type: ignore[arg-type]
    found = choose([candidate.engine() for candidate in evaluations], known, PLANS, chosen)
    assert serde.loads(Choice, serde.dumps(found)) == found
    return found.targets[0]


def test_within_noise_the_higher_precision_wins():
    target = by_size(both(1.0, bf16={"b8": 100}, fp8={"b8": 98.5}))
    assert target.plan == "bf16"
    (loser,) = target.losers
    assert loser.why is Why.WITHIN_NOISE
    assert loser.times is not None and loser.times.lower < 0.985 < loser.times.upper
    # The same medians, measured without spread, are a difference; less than 1 % never is.
    assert by_size(both(bf16={"b8": 100}, fp8={"b8": 98.5})).plan == "fp8-safe"
    close = both(bf16={"b8": 100}, fp8={"b8": 99.5})
    assert by_size(close).plan == "bf16"
    assert by_size(close, noise=0.001).plan == "fp8-safe"


def with_loads(known: Evaluation, factors: Sequence[float], us: float | None = None) -> Evaluation:
    """Each load takes such a multiple of the median, or of `us`."""
    latencies = (
        replace(item, loads_us=tuple((us or item.p50_us) * factor for factor in factors))
        for item in known.latencies
    )
    return replace(known, latencies=tuple(latencies))


@pytest.mark.parametrize("other", [FP8_SAFE, replace(BF16, backend="ort")])
def test_a_wide_interval_is_no_percentage_and_no_verdict_on_speed(other):
    """Three loads of a busy host: the mean is slower by 160 %, the interval holds both 1 and 10."""
    bf16, third = ({"b8": us} for us in (100.0, 101.0))
    wild = (1.0, 1.1, 18.0)
    noisy = {
        BF16: with_loads(timed(BF16, **bf16), (1.0, 1.0, 1.0)),
        other: with_loads(timed(other, **third), wild),
    }
    target = by_size(noisy)
    (loser,) = target.losers
    assert (target.engine, loser.why) == (BF16.engine().id, Why.WITHIN_NOISE)
    assert loser.times is not None and loser.times.lower < 1.0 and loser.times.upper > 10.0
    assert not re.search(r"(slower|faster) by", loser.reason)
    # After the most loads the median over loads decides, and is told.
    for each, factors in zip(noisy, ((1.0,) * MOST_LOADS, (1.3,) * 8 + (0.01, 100.0) * 2), strict=True):
        noisy[each] = with_loads(noisy[each], factors, 100.0)
    (loser,) = by_size(noisy).losers
    assert loser.why is Why.SLOWER and "slower by 30.0 %" in loser.reason
    assert loser.times.lower < 1.0 < loser.times.upper


BOTH_SIZES = both(bf16={"b8": 50, "b512": 1000}, fp8={"b8": 60, "b512": 700})


def test_each_batch_size_gets_its_engine_where_that_pays():
    target = by_size(BOTH_SIZES)
    # Over both sizes: (6.25 + 1.95)/2 µs a row against (7.5 + 1.37)/2.
    assert target.plan == "bf16"
    assert [(route.batch, route.plan) for route in target.routes] == [(8, "bf16"), (512, "fp8-safe")]
    assert target.routes[0].times is None
    gain = target.routes[1].times
    assert gain.value == pytest.approx(1000 / 700)
    assert target.engines == (BF16.engine().id, FP8_SAFE.engine().id)
    assert (target.plans, target.losers) == (("bf16", "fp8-safe"), ())
    # A request between sizes goes to the next larger's, one above all of them to the largest's.
    for rows, plan_id in ((1, "bf16"), (8, "bf16"), (9, "fp8-safe"), (512, "fp8-safe"), (4096, "fp8-safe")):
        assert target.route(rows).endswith(plan_id)


@pytest.mark.parametrize(("spread", "us", "options", "routes"), [
    (0.0, 700, {"by_batch": False}, 0),
    (0.0, 700, {"margin": 0.5}, 0),
    (0.0, 975, {}, 0),
    # 5 % at the median, but the spread reaches below 3 %.
    (1.0, 952, {}, 0),
    (0.0, 952, {}, 2),
])  # fmt: skip
def test_one_engine_serves_where_the_gain_is_inside_margin_or_spread(spread, us, options, routes):
    pair = both(spread, bf16={"b8": 50, "b512": 1000}, fp8={"b8": 60, "b512": us})
    assert len(by_size(pair, **options).routes) == routes


@pytest.mark.parametrize(("margin", "loads", "routes"), [(0.03, 12, 2), (0.03, 6, 0), (0.1, 12, 0)])
def test_after_the_most_loads_the_median_over_loads_gives_a_size_its_engine(margin, loads, routes):
    pair = both(bf16={"b8": 50, "b512": 1000}, fp8={"b8": 60, "b512": 930})
    # Wild loads widen the interval of every pair.
    wild = ((1.0,) * 10 + (1.0, 1.7))[-loads:], ((1.3,) + (1.0,) * 11)[:loads]
    noisy = {each: with_loads(pair[each], factors) for each, factors in zip(pair, wild, strict=True)}
    assert len(by_size(noisy, margin=margin).routes) == routes


@pytest.mark.parametrize("where", ["job", "device"])
def test_engines_that_were_timed_elsewhere_are_compared_by_their_medians_and_it_is_told(where):
    """Their parts are as many, and no pairs. Noise is not known, nor worth an engine."""

    def in_jobs(evaluations: dict[Candidate, Evaluation]) -> dict[Candidate, Evaluation]:
        return {
            candidate: replace(
                each, latencies=tuple(replace(x, **{where: each.engine}) for x in each.latencies)
            )
            for candidate, each in evaluations.items()
        }

    target = by_size(in_jobs(both(1.0, bf16={"b8": 100}, fp8={"b8": 98.5})))
    assert target.plan == "fp8-safe"
    (loser,) = target.losers
    assert (loser.why, loser.times) == (Why.SLOWER, None)
    target = by_size(in_jobs(both(bf16={"b8": 100}, fp8={"b8": 99.5})))
    assert target.plan == "bf16"
    assert target.losers[0].why is Why.WITHIN_NOISE and "timed elsewhere" in target.losers[0].reason
    # No size gets an engine of its own by a comparison that nobody knows the width of.
    target = by_size(in_jobs(BOTH_SIZES))
    assert (target.plan, target.routes) == ("bf16", ())


def certified_at(main: float, routed: float) -> TargetChoice:
    """Two engines by size, whose upper ends on certification are such parts of the budget (half width .4)."""
    second = []
    for candidate, upper in zip(BOTH_SIZES, (main, routed), strict=True):
        whole = candidate.evaluation("certification")
        change = Interval(1e-4 * (upper - 0.4), 1e-4 * (upper - 0.8), 1e-4 * upper, 0.95, 1000)
        difference = PairedDifference("loss", change, change, change, None, change, 1e-3, 1e-2)
        second.append(
            replace(whole, outputs=(replace(whole.outputs[0], difference=difference, budget=1e-4),))
        )
    evaluations = EvaluationSet((*BOTH_SIZES.values(), *second))
    return choose([candidate.engine() for candidate in BOTH_SIZES], evaluations, PLANS).targets[0]


def test_engines_by_size_share_one_certificate():
    """Two engines at 97.5 % each: ends lie 1.15 times as far out (Student's t of 99 degrees of freedom)."""
    factor = stats.t.ppf(0.9875, 99) / stats.t.ppf(0.975, 99)
    edge = 1.0 - 0.4 * (factor - 1.0)
    assert edge < 0.99
    assert len(certified_at(edge - 0.005, edge - 0.005).routes) == 2
    for main, routed in ((edge - 0.005, edge + 0.005), (edge + 0.005, edge - 0.005), (0.99, 0.99)):
        alone = certified_at(main, routed)
        # What each may claim alone, both may not: the main engine serves every size.
        assert (alone.plan, alone.routes) == ("bf16", ())
        assert [loser.why for loser in alone.losers] == [Why.NOT_CERTIFIED]


def test_a_routed_engine_that_misses_on_certification_or_failed_at_a_size_gets_none():
    target = by_size(BOTH_SIZES, missed=("fp8-safe",))
    assert (target.plan, target.routes) == ("bf16", ())
    assert [loser.why for loser in target.losers] == [Why.NOT_CERTIFIED]
    # The main engine missing leaves nothing that selection chose.
    fallen = by_size({**BOTH_SIZES, FP32: timed(FP32, b8=100, b512=2000)}, missed=("bf16",))
    assert (fallen.plan, fallen.routes) == ("fp32", ())
    assert [loser.why for loser in fallen.losers] == [Why.NOT_CERTIFIED, Why.NOT_SELECTED]
    target = by_size(both(bf16={"b8": 50, "b512": 1000}, fp8={"b8": 10}))
    assert (target.plan, target.routes) == ("bf16", ())
    assert [loser.why for loser in target.losers] == [Why.NO_SPEED]
