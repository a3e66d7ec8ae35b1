"""What of two runs is compared with what, and when their comparison may be green."""

from __future__ import annotations

from dataclasses import replace

import pytest
from changed_run import with_latencies, with_outputs, with_plans, with_target
from rich_run import rich
from sample_run import SampleRun
from two_runs import compared, costing, emitting, named, slower, texts

from loka_onnx.core.evaluation import Choice, EvaluationSet, Rejection, Route, Why
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import Verdict
from loka_onnx.operations.compare.difference import Difference
from loka_onnx.report import ReportData
from loka_onnx.report.document import Tone

FP32, SAFE = "cpu-onnxruntime-cpu-fp32", "cpu-onnxruntime-cpu-fp8-safe"
COST = Interval(0.0002, 0.0001, 0.0003, 0.95, 2400)
HIGHER = Interval(0.0005, 0.0004, 0.0006, 0.95, 2400)


@pytest.fixture(scope="module")
def run(sample: SampleRun) -> ReportData:
    """FP32 takes every request to the CPU, inside the budget on both splits."""
    return costing(emitting(rich(sample.report), FP32, "fp32"), COST, budget_status="within")


def changes(found: Difference) -> dict[str, str]:
    """What became of the engine of each target."""
    return {item.what: texts(item)[2] for item in found.rows("engines") if item.verdict is not None}


def tone(found: Difference) -> Tone:
    return named(found, "engines", "cpu").tone


def places(found: Difference) -> set[str]:
    return {item.what.partition(" · ")[0] for item in found.rows("sites")}


# Several architectures of one target -----------------------------------------------------------------


def on_two(data: ReportData, *plans: str) -> ReportData:
    """Engines for two architectures of the RTX; the plans are those emitted for sm89 and for sm120."""
    cpu, rtx = data.choice.targets
    (old,) = (e for e in data.engines if e.target == "rtx")
    engines, choices = [e for e in data.engines if e is not old], [cpu]
    for architecture, plan in zip(("sm89", "sm120"), plans, strict=True):
        others = {*plans, "fp32", "fp8-safe"} - {plan}
        emitted, *mine = (replace(old, architecture=architecture, plan=p) for p in (plan, *sorted(others)))
        losers = tuple(Rejection(e.id, Why.NOT_RUN, "not run") for e in mine)
        choices.append(replace(rtx, engine=emitted.id, plan=plan, losers=losers))
        engines += [emitted, *mine]
    return replace(data, engines=tuple(engines), choice=Choice(tuple(choices)))


def test_each_architecture_of_a_target_is_compared(tmp_path, run):
    before = on_two(run, "fp8-safe", "fp8-safe")
    found = compared(tmp_path / "a", before, on_two(run, "fp8-safe", "fp32"))
    assert changes(found) == {"cpu": "the same", "rtx (sm89)": "the same", "rtx (sm120)": "changed"}
    assert texts(named(found, "engines", "rtx (sm120)"))[:2] == tuple(
        f"rtx-tensorrt_rtx-sm120-{plan} (plan {plan})" for plan in ("fp8-safe", "fp32")
    )
    assert "emitted for rtx (sm120)" in places(found)

    # By architecture and not by their order; a target that was one piece of hardware is one of the two.
    cpu, sm89, sm120 = before.choice.targets
    turned = replace(before, choice=Choice((cpu, sm120, sm89)))
    assert set(changes(compared(tmp_path / "b", before, turned)).values()) == {"the same"}
    grown = compared(tmp_path / "c", replace(before, choice=Choice((cpu, sm120))), before)
    assert changes(grown) == {"cpu": "the same", "rtx (sm120)": "the same", "rtx (sm89)": "appeared"}


# Several engines by the size of requests -----------------------------------------------------------------


def routed(data: ReportData, *routes: tuple[int, str, str]) -> ReportData:
    return with_target(data, routes=tuple(Route(*route) for route in routes))


def test_requests_that_go_to_another_engine_are_a_change(tmp_path, run):
    found = compared(tmp_path, run, routed(run, (8, FP32, "fp32"), (1024, SAFE, "fp8-safe")))
    assert changes(found)["cpu"] == "changed" and tone(found) is Tone.WARN
    routes = named(found, "engines", "cpu: requests by size")
    assert texts(routes)[:2] == (None, f"up to 8 rows: {FP32}; up to 1,024 rows: {SAFE}")
    # Both engines of the new run are judged, and each time is of the engine that takes such requests.
    assert [item.what for item in found.rows("cost") if item.what.startswith("cpu")] == [
        f"cpu · ctr · selection · {FP32}",
        f"cpu · ctr · certification · {FP32}",
        f"cpu · ctr · selection · {FP32} then, {SAFE} now",
        f"cpu · ctr · certification · {FP32} then",
    ]
    latencies = found.rows("latency")
    assert [item.what.split(" · ")[1] for item in latencies] == ["batch 8", "batch 1,024", "batch 1,024"]
    # The times of the other engine are those of a simulation.
    assert [item.note.partition("; ")[0] for item in latencies] == [FP32, f"{FP32} then", f"{FP32} then"]
    assert [item.after is None for item in latencies] == [False, True, True]
    assert "emitted for cpu, fp32 → fp8-safe" in places(found)


SMALL = [(8, FP32, "fp32"), (64, SAFE, "fp8-safe")]


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (SMALL, "the same"),
        # Sizes are other ones, and each request goes where it went.
        ([(4, FP32, "fp32"), (8, FP32, "fp32"), (512, SAFE, "fp8-safe")], "the same"),
        ([(16, FP32, "fp32"), (64, SAFE, "fp8-safe")], "changed"),
        ([], "changed"),
    ],
)
def test_a_route_table_is_what_it_does_to_requests(tmp_path, run, now, change):
    before = routed(run, *SMALL)
    assert changes(compared(tmp_path, before, routed(run, *now)))["cpu"] == change
    # The cost of an engine that takes some requests only counts.
    after = with_outputs(before, lambda o: replace(o, budget_status="beyond"), engine=SAFE)
    assert tone(compared(tmp_path, before, after)) is Tone.BAD


# When it may be green ------------------------------------------------------------------------------


def in_parts(data: ReportData, spread: float) -> ReportData:
    """Latencies whose ten loads spread by a fraction of the median."""
    shifts = [1 + spread * (place - 4.5) / 4.5 for place in range(10)]
    return with_latencies(
        data, lambda item: replace(item, loads_us=tuple(item.p50_us * shift for shift in shifts))
    )


@pytest.mark.parametrize(
    ("factor", "spread", "verdict"),
    [
        (3.0, 0.02, "slower"),
        (1.05, 0.001, "slower"),
        (1.05, 0.1, "not slower"),
        (1.005, 0.0001, "not slower"),
        (0.5, 0.02, "not slower"),
        # Without recorded loads a percent is noise.
        (1.02, None, "slower"),
        (1.009, None, "not slower"),
    ],
)
def test_an_engine_that_takes_longer_than_noise_is_not_green(tmp_path, run, factor, spread, verdict):
    before = run if spread is None else in_parts(run, spread)
    found = compared(tmp_path, before, slower(before, factor))
    assert {texts(item)[2].partition("; ")[2] for item in found.rows("latency")} == {verdict}
    assert tone(found) is (Tone.WARN if verdict == "slower" else Tone.GOOD)


def without(data: ReportData, split: str) -> ReportData:
    kept = tuple(e for e in data.evaluations.evaluations if e.split != split)
    return replace(data, evaluations=EvaluationSet(kept))


def on_other_rows(data: ReportData) -> ReportData:
    splits = tuple(replace(s, digest="e" * 64) for s in data.data.splits)
    return replace(data, data=replace(data.data, splits=splits))


def of_another_model(data: ReportData) -> ReportData:
    return replace(data, exported=replace(data.exported, digest="f" * 64))


def test_green_is_only_what_is_seen_to_hold(tmp_path, run):
    for name, after, expected in (
        ("same", run, Tone.GOOD),
        ("lower cost", costing(run, Interval(0.0, -5e-5, 5e-5, 0.95, 2400)), Tone.GOOD),
        ("undecided", costing(run, COST, budget_status="undecided"), Tone.WARN),
        ("not certified", without(run, "certification"), Tone.WARN),
        ("rows", on_other_rows(run), Tone.WARN),
        ("model", of_another_model(run), Tone.WARN),
        ("device", slower(run, 1.0, "another cpu"), Tone.WARN),
        ("higher cost", costing(run, HIGHER), Tone.BAD),
    ):
        assert tone(compared(tmp_path / name, run, after)) is expected, name


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (on_other_rows, "measured on another file, another selection of rows or other columns of them"),
        (of_another_model, "relative to another FP32 model"),
    ],
)
def test_a_cost_is_worse_for_certain_on_the_same_rows_and_model_only(tmp_path, run, change, remark):
    found = compared(tmp_path, run, change(costing(run, HIGHER)))
    costs = [item for item in found.rows("cost") if item.what.startswith("cpu")]
    assert len(costs) == 2
    assert all(texts(item)[2].endswith("; intervals do not overlap") for item in costs)
    assert {item.note for item in costs} == {remark} and tone(found) is Tone.WARN


# Sites ----------------------------------------------------------------------------------------------------


def test_sites_are_alike_only_where_nothing_of_them_differs(tmp_path, run):
    assert not compared(tmp_path / "same", run, run).rows("sites")
    # A plan without FP8 in either run: another verdict, and a site that it says nothing of any more.
    plan = run.plan("fp32")
    first, *rest = plan.decisions
    for decisions, now in (
        ((replace(first, verdict=Verdict.UNSAFE), *rest), "fp32, unsafe"),
        (rest, "not decided"),
    ):
        changed = replace(plan, decisions=tuple(decisions))
        after = with_plans(run, plans=tuple(changed if p is plan else p for p in run.plans.plans))
        (item,) = compared(tmp_path / now, run, after).rows("sites")
        assert (item.what, texts(item)[1]) == (f"plan fp32 · {first.site}", now)
    # Another width under the same name.
    site, *others = run.modified.sites
    wider = replace(run.modified, sites=(replace(site, n=2 * site.n), *others))
    (item,) = compared(tmp_path / "wider", run, replace(run, modified=wider)).rows("sites")
    assert item.what == site.name
    assert item.before.numbers[-1] * 2 == item.after.numbers[-1] == 2 * site.n
