"""Latency on a clock that the test owns."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from loka_onnx.core.evaluation import InputPlace
from loka_onnx.errors import EngineError
from loka_onnx.evaluation.latency import (
    LatencyOptions,
    from_host,
    measure_interleaved,
    measure_latency,
    over_loads,
    prepared,
)
from loka_onnx.sessions.runner import Resident, Runner


class Machine:
    """A clock, and engines that take the time they are told."""

    def __init__(self):
        self.now_ns = 0
        self.calls = []

    def clock(self):
        return self.now_ns

    def engine(self, name, microseconds):
        def run(inputs):
            batch = len(inputs["x"])
            self.calls.append((name, batch, float(inputs["x"][0])))
            spent = microseconds(len(self.calls), batch) if callable(microseconds) else microseconds
            self.now_ns += int(spent * 1000)

        return from_host(run)

    def options(self, **changes):
        base = LatencyOptions(warmup=2, min_repeats=3, max_repeats=10, max_seconds=1e9, input_sets=2)
        return replace(base, clock_ns=self.clock, **changes)


class Inputs:
    """Counts the input sets it made; the first value tells them apart."""

    def __init__(self):
        self.made = 0

    def __call__(self, batch):
        self.made += 1
        return {"x": np.full(batch, float(self.made))}


def test_percentiles_of_known_times_without_the_warmup():
    machine = Machine()
    # Calls 1 and 2 are the warm-up; 3…12 take 3…12 µs.
    run = machine.engine("a", lambda call, batch: 1e6 if call <= 2 else call)
    (got,) = measure_latency(run, Inputs(), (8,), machine.options(), "cpu", False)
    expected = np.percentile(np.arange(3, 13), [50, 90, 99])
    assert (got.p50_us, got.p90_us, got.p99_us) == pytest.approx(expected)
    assert (got.repeats, got.batch, got.device, got.counts_for_choice) == (10, 8, "cpu", False)
    assert [x for _, _, x in machine.calls[:4]] == [1.0, 2.0, 1.0, 2.0]


def test_batch_sizes_come_in_order_and_each_is_told():
    machine, told = Machine(), []
    options = machine.options(on_batch=lambda: told.append(machine.calls[-1][1]))
    run = machine.engine("a", lambda call, batch: batch)
    got = measure_latency(run, Inputs(), (64, 1), options, "gpu", True)
    assert [(x.batch, x.p50_us) for x in got] == [(64, 64.0), (1, 1.0)]
    runs = {"a": run, "b": machine.engine("b", 2)}
    measure_interleaved(runs, Inputs(), (4, 2, 8), options, "cpu", True)
    assert told == [64, 1, 4, 2, 8]


def test_the_time_limit_stops_but_not_before_the_least_repeats():
    machine = Machine()
    run = machine.engine("a", 1e6)
    (slow,) = measure_latency(run, Inputs(), (1,), machine.options(max_seconds=0.5), "cpu", True)
    assert slow.repeats == 3
    assert len(machine.calls) == 1 + 3  # the warm-up is limited too
    (some,) = measure_latency(run, Inputs(), (1,), machine.options(max_seconds=4.5), "cpu", True)
    assert some.repeats == 5
    runs = {"a": run, "b": run}
    both = measure_interleaved(runs, Inputs(), (1,), machine.options(max_seconds=4.5), "cpu", True)
    assert [both.latencies[engine][0].repeats for engine in runs] == [5, 5]


def test_engines_take_turns_so_that_a_drifting_machine_slows_all_alike():
    machine = Machine()
    # Each request takes 1 % longer than the one before: timed one after the other, the second would lose.
    drift = {"a": 100.0, "b": 100.0, "c": 50.0}
    runs = {
        name: machine.engine(name, lambda call, batch, base=base: base * 1.01**call)
        for name, base in drift.items()
    }
    inputs = Inputs()
    got = measure_interleaved(runs, inputs, (4,), machine.options(), "cpu", True)
    p50 = {name: latencies[0].p50_us for name, latencies in got.latencies.items()}
    assert p50["a"] / p50["b"] == pytest.approx(1.0, abs=0.02)
    assert p50["c"] / p50["a"] == pytest.approx(0.5, abs=0.02)
    assert got.failures == {}
    assert inputs.made == 2
    order = [name for name, _, _ in machine.calls]
    assert order[:9] == ["a", "b", "c", "b", "c", "a", "a", "b", "c"]


def test_an_engine_that_fails_drops_out_and_the_others_go_on():
    machine = Machine()
    good = machine.engine("good", 5)

    def bad(inputs):
        if len(inputs["x"]) > 1:
            raise EngineError("the worker died", evidence="signal 11")
        machine.now_ns += 1000

    engines = {"bad": from_host(bad), "good": good}
    got = measure_interleaved(engines, Inputs(), (1, 2, 4), machine.options(), "cpu", True)
    assert [x.batch for x in got.latencies["good"]] == [1, 2, 4]
    assert [x.batch for x in got.latencies["bad"]] == [1]
    assert got.failures == {"bad": "at batch 2: the worker died\n  evidence: signal 11"}
    with pytest.raises(EngineError):
        measure_latency(from_host(bad), Inputs(), (2,), machine.options(), "cpu", True)


def test_a_bug_is_not_taken_for_a_failing_engine_and_the_collector_sleeps_while_timing_only():
    def broken(inputs):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_interleaved({"a": from_host(broken)}, Inputs(), (1,), LatencyOptions(), "cpu", True)
    assert gc.isenabled()
    states = []
    options = LatencyOptions(warmup=0, min_repeats=1, max_repeats=2)
    watching = from_host(lambda inputs: states.append(gc.isenabled()))
    measure_latency(watching, Inputs(), (1,), options, "cpu", True)
    assert (states, gc.isenabled()) == ([False, False], True)


def test_loads_are_put_together_by_their_medians_at_the_sizes_that_all_finished():
    machine = Machine()
    runs = {"a": machine.engine("a", lambda call, batch: 100.0 + call)}
    options = machine.options(max_repeats=25)
    loads = [
        measure_interleaved(runs, Inputs(), batches, options, "cpu", True).latencies["a"]
        for batches in ((4, 8), (4, 8), (8, 4, 2))
    ]
    assert [len(each.loads_us) for load in loads for each in load] == [1] * 7
    four, eight = over_loads(loads)
    assert (four.batch, eight.batch) == (4, 8)
    known = [next(each for each in load if each.batch == 4) for load in loads]
    assert four.loads_us == tuple(each.p50_us for each in known)
    assert four.p50_us == sorted(four.loads_us)[1]
    assert four.least_us == tuple(each.least_us[0] for each in known)
    assert all(least < median for least, median in zip(four.least_us, four.loads_us, strict=True))
    assert four.repeats == sum(each.repeats for each in known)
    assert over_loads([]) == ()


def test_the_load_of_the_host_is_recorded_and_the_largest_is_kept(monkeypatch):
    monkeypatch.setattr("psutil.getloadavg", lambda: (6.0, 1.0, 1.0))
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    machine = Machine()
    options = LatencyOptions(min_repeats=2, max_repeats=2, clock_ns=machine.clock)
    (busy,) = measure_latency(from_host(lambda _: {}), lambda _: {}, (4,), options, "cpu", True)
    assert busy.host_load == 1.5
    others = (replace(busy, host_load=0.5), replace(busy, host_load=None))
    assert over_loads([(others[0],), (busy,), (others[1],)])[0].host_load == 1.5
    assert over_loads([(others[1],)])[0].host_load is None


class Copying(Runner):
    """Takes 100 µs to hand a batch over and 30 µs to compute it; up to 8 rows it can stay on the device."""

    def __init__(self, machine):
        self.machine, self.answered = machine, []

    def _taken(self, inputs):
        self.machine.now_ns += 100_000

        def compute():
            self.machine.now_ns += 30_000
            self.answered.append(float(inputs["x"][0]))

        return compute

    def run(self, inputs):
        self._taken(inputs)()
        return {}

    def resident(self, inputs):
        if len(inputs["x"]) > 8:
            return super().resident(inputs)
        return Resident(self._taken(inputs), lambda: None)


def test_copies_are_timed_where_inputs_come_from_the_host_and_only_there():
    machine = Machine()
    timed = {}
    for place in InputPlace:
        runner = Copying(machine)
        timed[place] = measure_latency(
            prepared(runner, place), Inputs(), (4, 16), machine.options(), "gpu", True
        )
        # Every request is one of its own, wherever it lies.
        assert set(runner.answered) == {1.0, 2.0, 3.0, 4.0}
    host, device = timed[InputPlace.HOST], timed[InputPlace.DEVICE]
    assert [(x.p50_us, x.inputs) for x in host] == [(130.0, InputPlace.HOST)] * 2
    # What the engine cannot take there it is handed, and the figure says so.
    assert [(x.p50_us, x.inputs) for x in device] == [(30.0, InputPlace.DEVICE), (130.0, InputPlace.HOST)]


def test_an_engine_that_fails_as_it_takes_a_request_drops_out():
    machine = Machine()

    class Refusing(Copying):
        def resident(self, inputs):
            raise EngineError("no memory on the device")

    engines = {
        "bad": prepared(Refusing(machine), InputPlace.DEVICE),
        "good": prepared(Copying(machine), InputPlace.DEVICE),
    }
    got = measure_interleaved(engines, Inputs(), (4,), machine.options(), "gpu", True)
    assert got.failures == {"bad": "at batch 4: no memory on the device"}
    assert [x.batch for x in got.latencies["good"]] == [4]
