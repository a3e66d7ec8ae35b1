"""The rounds of refining, over a bench whose engines' times and errors are known; when results stand."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_configs import engine_of, plan_of

from loka_onnx.config.schema import RefineConfig
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import BuildStatus, EngineArtifact, EngineSet
from loka_onnx.core.evaluation import (
    BudgetStatus,
    Evaluation,
    EvaluationSet,
    Latency,
    OutputEvaluation,
    PairedDifference,
    TaskMetrics,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PlanSet, PrecisionPlan
from loka_onnx.core.refinement import HardwareRefinement, Origin, RefinedRun, Refinement, Returned
from loka_onnx.evaluation.latency import Interleaved
from loka_onnx.pipeline import refining
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.emission import Results
from loka_onnx.pipeline.judging import Judging
from loka_onnx.pipeline.refining import Rounds, refine, refine_engines
from loka_onnx.planning.ladder import Reverted
from loka_onnx.sessions import host_devices
from loka_onnx.sessions.cuda import CudaDevice

SAVED = {"a": 30.0, "b": 10.0, "c": 20.0, "d": -5.0}
"""Microseconds that a quantized site saves of 100."""
UPPER = {"a": 0.3, "b": 0.9, "c": 0.4, "d": 0.1}
"""Part of the budget that its upper bound takes."""


INT8_SITES = {"fp8": "", "int8": "abcd", "mixed": "bc"}
"""Sites of each kind of plan that have INT8 where they are quantized."""
KINDS = pytest.mark.parametrize("kind", INT8_SITES)


def plan(name: str, *quantized: str, kind: str = "fp8") -> PrecisionPlan:
    # Kernel times say of each site that it saves 1 µs less than it does.
    known = {"gpu": {"10": 70.0 - sum(SAVED[site] - 1.0 for site in quantized)}}
    base = Precision.FP32 if name == "fp32" else Precision.BF16
    return plan_of(name, quantized, SAVED, base, INT8_SITES[kind], predicted_us=known)


def start(kind: str) -> PlanSet:
    """Plans of a run: two in high precision, and two whose quantized sites have the formats of a kind."""
    both = plan(f"{kind}-all", *SAVED, kind=kind), plan(f"{kind}-safe", "a", kind=kind)
    return PlanSet((plan("fp32"), plan("bf16"), *both))


START = start("fp8")


def engine(of: PrecisionPlan, **changes: object) -> EngineArtifact:
    return engine_of(of.id, **changes)


@dataclass
class SimulatedBench:
    """Engines whose time and upper bound are sums over sites; each timing runs on a slower machine.

    It gives back the one site that costs most for what it saves, and proposes what it is told.
    """

    plans: dict[str, PrecisionPlan] = field(default_factory=dict)
    fails: frozenset[str] = frozenset()
    dies: Mapping[str, str] = field(default_factory=dict)
    built: list[tuple[str, str]] = field(default_factory=list)
    timed: list[list[str]] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    slowdown: float = 1.0
    proposed: tuple[PrecisionPlan, ...] = ()
    asked: list[str] = field(default_factory=list)

    def from_search(self, target: str) -> Sequence[PrecisionPlan]:
        return self.proposed

    def revert_sites(self, of: PrecisionPlan, evaluation: Evaluation, target: str) -> Reverted | None:
        self.asked.append(of.id)
        order = sorted(of.quantized_sites, key=lambda s: -(UPPER[s] / SAVED[s] if SAVED[s] > 0 else 99))
        left = [site for site in of.quantized_sites if site != order[0]]
        if not left:
            return None
        return Reverted(plan(of.id, *left, kind=of.kind), (Returned((order[0],), UPPER[order[0]], None),))

    def know(self, plans: Sequence[PrecisionPlan]) -> None:
        self.plans.update({each.id: each for each in plans})

    def build(self, plans: Sequence[PrecisionPlan], like: EngineArtifact) -> Sequence[EngineArtifact]:
        self.know(plans)
        self.built += [(each.id, like.backend) for each in plans]
        failed = {"status": BuildStatus.FAILED, "detail": "signal 11"}
        return [
            engine(each, backend=like.backend, **(failed if each.id in self.fails else {})) for each in plans
        ]

    def time(self, engines: Sequence[EngineArtifact]) -> Interleaved:
        self.timed.append([each.plan for each in engines])
        self.slowdown *= 1.5
        failures = {each.id: self.dies[each.plan] for each in engines if each.plan in self.dies}
        return Interleaved({each.id: (self.latency(each),) for each in engines}, failures)

    def latency(self, of: EngineArtifact) -> Latency:
        chosen = self.plans[of.plan]
        us = 200.0 if chosen.base is Precision.FP32 else 100.0
        us = (us - sum(SAVED[site] for site in chosen.quantized_sites)) * self.slowdown
        return Latency(10, us, us, us, 100, "gpu", True, loads_us=(us,) * 10)

    def judge(self, engines: Sequence[EngineArtifact]) -> Sequence[Evaluation]:
        self.judged += [each.plan for each in engines]
        return [self.evaluation(each) for each in engines]

    def evaluation(self, of: EngineArtifact) -> Evaluation:
        upper = 1e-3 * sum(UPPER[site] for site in self.plans[of.plan].quantized_sites)
        interval = Interval(upper / 2, 0.0, upper, 0.95, 1000)
        status = BudgetStatus.WITHIN if upper <= 1e-3 else BudgetStatus.BEYOND
        difference = PairedDifference("loss", interval, interval, None, None, None, 0.0, 0.0)
        metrics = TaskMetrics(0.5, 0.9, 0.8, 1.0)
        output = OutputEvaluation("ctr", OutputKind.LOGIT, metrics, difference, 1e-3, status, None)
        return Evaluation(of.id, of.backend, of.plan, of.target, "selection", 1000, (output,), (), "measured")


LIMITS = RefineConfig(rounds=5, plans=2, seconds=1e8)


def run(
    engines: Sequence[EngineArtifact] | None = None,
    bench: SimulatedBench | None = None,
    limits: RefineConfig = LIMITS,
    plans: PlanSet = START,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Rounds, SimulatedBench]:
    bench = bench or SimulatedBench()
    bench.know(plans.plans)
    start = [engine(each) for each in plans.plans] if engines is None else engines
    found = refine(start, plans, bench, limits, clock)
    assert serde.loads(Refinement, serde.dumps(found.document)) == found.document
    return found, bench


def only(found: Rounds) -> HardwareRefinement:
    (hardware,) = found.document.hardware
    return hardware


@KINDS
def test_sites_go_until_the_fastest_engine_fits(kind):
    found, _ = run(plans=start(kind))
    hardware = only(found)
    # a b c d is beyond; d saves nothing, then b costs most: a c takes .7 of the budget and 50 of 100 µs.
    assert [plan.id for plan in found.added.plans] == ["refined-1", "refined-2"]
    assert [set(plan.quantized_sites) for plan in found.added.plans] == [{"a", "b", "c"}, {"a", "c"}]
    # Each site keeps the format that the run's plan had it in.
    assert [set(plan.int8_sites) for plan in found.added.plans] == [
        set(INT8_SITES[kind]) - {"d"},
        set(INT8_SITES[kind]) - {"b", "d"},
    ]
    assert (hardware.best, hardware.ended) == ("refined-2", "there is nothing left to try")
    steps = {step.plan: step for step in hardware.steps}
    assert [(s.round, s.origin, s.parent) for s in found.document.hardware[0].steps[-2:]] == [
        (1, Origin.GIVEN_BACK, f"{kind}-all"),
        (2, Origin.GIVEN_BACK, "refined-1"),
    ]
    assert steps["refined-2"].returned == (Returned(("b",), 0.9, None),)
    assert (steps["refined-2"].upper, steps["refined-2"].is_within) == (pytest.approx(0.7), True)
    assert (steps["refined-1"].is_within, steps["refined-1"].is_on_front) == (False, True)
    # d makes all of them slower and less accurate; fp32 is slower than bf16 and no better.
    assert not steps[f"{kind}-all"].is_on_front and not steps["fp32"].is_on_front
    assert hardware.anchor == "gpu-maker-sm90-bf16"
    assert [e.plan for e in found.added.engines] == ["refined-1", "refined-2"]


def test_times_of_slower_rounds_are_held_against_the_anchor():
    found, bench = run()
    # Every round runs on a machine that is half slower than the one before.
    assert bench.timed == [
        ["fp32", "bf16", "fp8-all", "fp8-safe"],
        ["refined-1", "bf16"],
        ["refined-2", "bf16"],
    ]
    steps = {step.plan: step for step in only(found).steps}
    times = {name: step.times.value for name, step in steps.items() if step.times is not None}
    assert times == {
        "fp32": pytest.approx(2.0),
        "bf16": pytest.approx(1.0),
        "fp8-all": pytest.approx(0.45),
        "fp8-safe": pytest.approx(0.70),
        "refined-1": pytest.approx(0.40),
        "refined-2": pytest.approx(0.50),
    }
    assert steps["refined-2"].latency_us["10"] > steps["fp8-safe"].latency_us["10"]


def test_every_plan_with_fp8_is_predicted_before_its_engine_is_measured():
    # The first round runs at the pace of the kernel times, each later one on a machine that is half slower.
    found, _ = run(bench=SimulatedBench(slowdown=1 / 1.5))
    steps = {step.plan: step for step in only(found).steps}
    assert {name: step.predicted_from for name, step in steps.items()} == {
        "fp32": "",
        "bf16": "",
        "fp8-all": "gpu-maker-sm90-bf16",
        "fp8-safe": "gpu-maker-sm90-bf16",
        # Of a b c d and a, the first differs from a b c in one site; from a c it is the other.
        "refined-1": "gpu-maker-sm90-fp8-all",
        "refined-2": "gpu-maker-sm90-fp8-safe",
    }
    # Each µs that kernel times miss is in the prediction once for each site that differs, at the pace of the
    # round, which the anchor tells.
    error = {
        name: step.predicted_us["10"] - step.latency_us["10"]
        for name, step in steps.items()
        if step.predicted_us
    }
    assert error == {
        "fp8-all": pytest.approx(4.0),
        "fp8-safe": pytest.approx(1.0),
        "refined-1": pytest.approx(-1.5),
        "refined-2": pytest.approx(1.5**2),
    }
    document = found.document
    assert [(each.plan, each.batch) for each in document.predictions] == [(name, 10) for name in error]
    errors = sorted(abs(each.predicted_us / each.measured_us - 1.0) for each in document.predictions)
    assert document.median_prediction_error == pytest.approx((errors[1] + errors[2]) / 2)
    # Without `a` alone, the nearest engine was itself timed on a slower machine.
    found, _ = run(plans=PlanSet(START.plans[:3]), bench=SimulatedBench(slowdown=1 / 1.5))
    last = only(found).steps[-1]
    assert (last.plan, last.predicted_from) == ("refined-2", "gpu-maker-sm90-refined-1")
    assert last.predicted_us["10"] - last.latency_us["10"] == pytest.approx(-(1.5**2))


def test_an_engine_that_dies_while_it_is_timed_is_told():
    """It has figures of the batch sizes before that: they are no speed."""
    found, _ = run(bench=SimulatedBench(dies={"refined-1": "at batch 20: signal 11"}))
    dead = next(step for step in only(found).steps if step.plan == "refined-1")
    assert dead.detail == "failed while it was timed: at batch 20: signal 11"
    assert (dead.latency_us, dead.times, dead.is_on_front) == ({}, None, False)
    judged = next(e for e in found.added.evaluations.evaluations if e.plan == "refined-1")
    assert judged.latency_failure == "at batch 20: signal 11"
    assert only(found).best != "refined-1"


def test_what_the_search_proposes_is_tried_once():
    found, bench = run(bench=SimulatedBench(proposed=(plan("x", "a", "c"), plan("y", "a"), plan("z"))))
    # The second is fp8-safe, the third quantizes nothing.
    assert [(step.plan, step.origin) for step in only(found).steps[-2:]] == [
        ("refined-1", Origin.GIVEN_BACK),
        ("refined-2", Origin.SEARCH),
    ]
    assert only(found).best == "refined-2"
    assert bench.built == [("refined-1", "maker"), ("refined-2", "maker")]


def test_rounds_plans_and_time_are_limited():
    many = tuple(plan(f"p{i}", *sites) for i, sites in enumerate(("bc", "bd", "cd", "b", "c")))
    found, _ = run(bench=SimulatedBench(proposed=many), limits=RefineConfig(rounds=1, plans=2, seconds=1e8))
    assert len(found.added.plans) == 2
    assert only(found).ended == "the limit of 1 rounds was reached"
    clock = iter(float(t) for t in range(100))
    limits = RefineConfig(rounds=9, plans=1, seconds=2.5)
    found, _ = run(bench=SimulatedBench(proposed=many), limits=limits, clock=lambda: next(clock))
    assert only(found).ended == "the time limit of 2.5 s was reached"
    # It began at 0; rounds began at 1 and 2.
    assert len(found.added.plans) == 2


def test_an_engine_that_is_not_faster_gives_nothing_back():
    """What misses the budget and is slower than what does not would only become slower."""
    inside = [engine_of(name) for name in ("bf16", "fp8-safe")]
    found, _ = run([*inside, engine_of("fp8-all")])
    assert found.added.plans != ()
    # As fast as `a` alone, and beyond the budget.
    plans = PlanSet((*START.plans, plan("slow", "b", "c")))
    _, bench = run([*inside, engine_of("slow")], plans=plans)
    assert (bench.asked, bench.built, len(bench.timed)) == (["slow"], [], 1)


@KINDS
def test_where_nothing_could_follow_no_engine_is_timed(kind):
    """Judging is needed in any case; timing twice is not."""
    inside = [engine(each) for each in start(kind).plans if not each.id.endswith("-all")]
    tried = SimulatedBench(proposed=(plan("x", "a", kind=kind), plan("y")))
    found, bench = run(inside, tried, plans=start(kind))
    assert (bench.timed, bench.built, bench.judged) == ([], [], [each.plan for each in inside])
    assert [e.plan for e in found.added.evaluations.evaluations] == bench.judged
    assert only(found).ended == "no other plan may follow from these engines"
    # What would be given back of an engine that misses is the plan that was tried.
    plans = PlanSet((*start(kind).plans, plan("a-and-b", "a", "b", kind=kind)))
    _, bench = run([*inside, engine_of("a-and-b")], plans=plans)
    assert (bench.timed, bench.asked) == ([], ["a-and-b"])
    found, bench = run(inside, SimulatedBench(proposed=(plan("x", "a", "c", kind=kind),)), plans=start(kind))
    assert (len(bench.timed), only(found).best) == (2, "refined-1")


def test_a_build_that_fails_costs_that_plan_only():
    found, _ = run(bench=SimulatedBench(fails=frozenset({"refined-1"}), proposed=(plan("x", "a", "c"),)))
    steps = {step.plan: step for step in only(found).steps}
    assert (steps["refined-1"].status, steps["refined-1"].detail) == ("failed", "signal 11")
    assert steps["refined-1"].times is None
    assert only(found).best == "refined-2"
    # What failed is not tried again.
    assert len({frozenset(p.quantized_sites) for p in found.added.plans}) == len(found.added.plans)


@pytest.mark.parametrize(
    ("engines", "ended"),
    [
        ([engine(plan("bf16"))], "no engine here runs FP8 or INT8 at a speed that counts"),
        (
            [engine(plan("bf16")), engine(START.plan("fp8-all"), simulated=True)],
            "no engine here runs FP8 or INT8 at a speed that counts",
        ),
        ([engine(START.plan("fp8-all"))], "no engine in high precision was timed"),
    ],
)
def test_where_there_is_nothing_to_refine(engines, ended):
    found, bench = run(engines)
    assert (only(found).ended, found.added.plans, bench.built) == (ended, (), [])


def test_hardware_that_is_not_here_is_left_out():
    away = [engine(each, status=BuildStatus.BUILT_NOT_RUN) for each in START.plans]
    found, bench = run(away)
    assert found.document.hardware == ()
    assert bench.timed == []


def test_the_backend_of_the_fastest_engine_builds():
    class TwoBackends(SimulatedBench):
        def latency(self, of: EngineArtifact) -> Latency:
            taken = super().latency(of)
            factor = 0.5 if of.backend == "inductor" else 1.0
            return replace(taken, p50_us=taken.p50_us * factor)

    both = [engine(each, backend=backend) for backend in ("maker", "inductor") for each in START.plans]
    found, bench = run(both, TwoBackends())
    assert {backend for _, backend in bench.built} == {"inductor"}
    assert only(found).backend == "inductor"
    assert {e.plan for e in found.added.engines} == {p.id for p in found.added.plans}


MODEL: Any = SimpleNamespace(digest="model")
ENGINE = engine_of("fp8-all", "nvidia-h100")


def judging_in(directory: RunDirectory) -> Judging:
    """What the stage reads of a run."""
    config: Any = SimpleNamespace(
        refine=SimpleNamespace(rounds=1, plans=1, seconds=9.0),
        outputs=(),
        data=SimpleNamespace(group=None, slices=(), request=None),
        batch={},
        plan={},
        serving=SimpleNamespace(inputs="host"),
    )
    split = SimpleNamespace(digest="data")
    context = Context(config, directory, exported=MODEL)
    context.__dict__["splits"] = SimpleNamespace(calibration=split, selection=split)
    return Judging(context, None)


@pytest.mark.parametrize("int8", [(), ("fc",)])
def test_what_was_refined_on_another_device_is_refined_again_on_the_target(tmp_path, monkeypatch, int8):
    """No time counts on an H200 that stands in for an H100, so that no round was ever begun there."""
    here: list[CudaDevice] = []
    rounds = []

    def refined(*inputs: object) -> Rounds:
        device = here[-1].name
        rounds.append(device)
        latency = Latency(8, 1.0, 1.0, 1.0, 9, device, counts_for_choice="H100" in device)
        judged = Evaluation(
            ENGINE.id, "maker", "fp8-all", "nvidia-h100", "selection", 9, (), (latency,), "measured"
        )
        return Rounds(Refinement(), RefinedRun(evaluations=EvaluationSet((judged,))))

    monkeypatch.setattr(refining, "refine", refined)
    monkeypatch.setattr(host_devices, "list_cuda_devices", lambda: tuple(here[-1:]))
    plans = PlanSet((plan_of("fp8-all", ["fc"], int8=int8),))
    results = Results(MODEL, MODEL, plans, {}, EngineSet((ENGINE,)), CorrectionSet())
    h200, h100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
    pcie = "NVIDIA H100 PCIe"
    for device in (h200, h200, h100, h100, h200, pcie, pcie):
        here.append(CudaDevice(0, device, "sm90"))
        with RunDirectory.create(tmp_path / "run", {}, {}, force=False, resume=True) as directory:
            refine_engines(judging_in(directory), results)
    # Nothing is lost where the run goes on on another device later; another H100 is another machine.
    assert rounds == [h200, h100, pcie]
