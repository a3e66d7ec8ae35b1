"""How often the choice by time tells equal engines apart, and how often it sees a real difference.

**Simulated.** Times of loads are drawn: the logarithm of each engine's time is its true one, plus what slowed
the machine in that load (2 %), plus a load-to-load deviation of the engine. The package's own functions
decide
how many loads an engine gets (`planning.speed.contenders`) and who is chosen (`planning.choice`).

- *Equal*: all engines take the same. `told_apart`: some engine is surely slower than the fastest. `costs
  precision`: the most exact engine is not among those alike, so that an equal one wins.
- *3 % faster*: one of them is, and the share of contests in which the most exact, slower one is told apart.
  Bar: 80 % at a load-to-load deviation of 1 %.
- *Busy*: in a third of its loads an engine meets other work, which makes most requests up to five times as
  long, and in a twentieth of them every request (deepctr-pnn on an H200 had that in 3 of 12 loads).

**Real.** Two engines of the same ONNX file in ONNX Runtime on the CPU, loaded and timed in turns as a run
does it (`pipeline.judging.PER_LOAD`), as many pairs as the time allows. Bar: 3 % told apart.

    python -m benchmarks.engines.choice_errors --seconds 240
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.recording import write_record
from loka_onnx.core.evaluation import Latency
from loka_onnx.evaluation.latency import from_host, measure_interleaved, over_loads
from loka_onnx.pipeline.judging import PER_LOAD
from loka_onnx.planning.choice import MARGIN, NOISE
from loka_onnx.planning.speed import FIRST_LOADS, LOADS, LOOKS_APART, MOST_LOADS, Speed, contenders, rivals
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

BATCHES = (64, 256)
ENGINES = (2, 4, 8)
DEVIATIONS = (0.0, 0.01, 0.02)
MACHINE = 0.02
BUSY, WHOLLY_BUSY = 1 / 3, 1 / 20
"""Shares of the loads of a busy host."""

Values = npt.NDArray[np.float64]


def told_apart(timed: dict[str, tuple[Latency, ...]], first: str) -> tuple[bool, bool]:
    """Whether any engine is surely slower than the fastest, and whether a certain one is."""
    speeds = rivals({name: Speed({item.batch: item for item in items}) for name, items in timed.items()})
    fastest = min(speeds, key=lambda name: speeds[name].per_row_us)
    slower = [name for name in speeds if name != fastest and speeds[name].is_slower(speeds[fastest], NOISE)]
    return bool(slower), first in slower


def contest(
    truth: Values, deviation: float, random: np.random.Generator, *, is_busy: bool = False
) -> tuple[bool, bool, int]:
    """One simulated contest, decided as a run decides it.

    Args:
        truth: (engines,) times, microseconds for each row.
        deviation: Load-to-load standard deviation of the logarithm.
        random: Draws the loads.
        is_busy: Whether other work is on the machine in some loads.

    Returns:
        As `told_apart` of the first engine, and the loads of all engines together.
    """
    names = [f"e{index}" for index in range(truth.size)]
    # At the batch sizes of one load an engine is as lucky; what the requests add is small beside it.
    machine = MACHINE * random.standard_normal(MOST_LOADS)
    times = truth[:, None] * np.exp(machine + deviation * random.standard_normal((truth.size, MOST_LOADS)))
    noise = np.exp(0.002 * random.standard_normal((truth.size, MOST_LOADS, len(BATCHES))))
    drawn, longer = random.random(times.shape), random.uniform(1.0, 5.0, times.shape)
    medians = times * np.where(drawn < BUSY, longer, 1.0) if is_busy else times
    least = times * np.where(drawn < WHOLLY_BUSY, longer, 1.0) if is_busy else times

    def timed(engine: int, loads: int) -> tuple[Latency, ...]:
        return over_loads(
            [
                [
                    latency(
                        medians[engine, n] * noise[engine, n, b] * size,
                        least[engine, n] * noise[engine, n, b] * size,
                        size,
                    )
                    for b, size in enumerate(BATCHES)
                ]
                for n in range(loads)
            ]
        )

    known = {name: timed(index, FIRST_LOADS) for index, name in enumerate(names)}
    for more, apart in ((LOADS, 0.0), (MOST_LOADS, LOOKS_APART)):
        close = contenders({n: t for n, t in known.items() if _has_all(t, more)}, NOISE, MARGIN, apart)
        known |= {name: timed(index, more) for index, name in enumerate(names) if name in close}
    loads = sum(len(items[0].loads_us) for items in known.values())
    return (*told_apart(known, names[0]), loads)


def _has_all(items: tuple[Latency, ...], more: int) -> bool:
    """True for an engine that took part in the analysis before the one of so many loads."""
    return len(items[0].loads_us) == (LOADS if more == MOST_LOADS else FIRST_LOADS)


def latency(us: float, least: float, batch: int) -> Latency:
    """A load's median and least time at a batch size."""
    return Latency(batch, us, us, us, 40, "gpu", counts_for_choice=True, loads_us=(us,), least_us=(least,))


def simulated(contests: int, random: np.random.Generator) -> dict[str, Any]:
    """Shares of contests, in percent, by engines and load-to-load deviation."""
    found: dict[str, Any] = {}
    for engines in ENGINES:
        for deviation in DEVIATIONS:
            equal = np.array(
                [contest(np.ones(engines), deviation, random) for _ in range(contests)], dtype=np.float64
            )
            faster = np.r_[np.ones(engines - 1), 0.97]
            real = np.array([contest(faster, deviation, random) for _ in range(contests)], dtype=np.float64)
            found[f"{engines} engines, {100 * deviation:g} %"] = {
                "equal_told_apart_percent": 100.0 * equal[:, 0].mean(),
                "equal_costs_precision_percent": 100.0 * equal[:, 1].mean(),
                "three_percent_told_apart_percent": 100.0 * real[:, 1].mean(),
                "mean_loads_of_an_engine": float(equal[:, 2].mean()) / engines,
            }
            print(engines, deviation, found[f"{engines} engines, {100 * deviation:g} %"], flush=True)
    return found


def busy(contests: int, random: np.random.Generator) -> dict[str, float]:
    """Percent of contests on a busy host that tell the slower of two engines apart, by how much it is."""
    found = {}
    for faster in (1.0, 0.97, 0.7):
        truth = np.array([1.0, faster])
        apart = [contest(truth, 0.01, random, is_busy=True)[1] for _ in range(contests)]
        found[f"{100 * (1 - faster):.0f} %"] = 100.0 * float(np.mean(apart))
    return found


def write_model(path: Path) -> None:
    """A small ranker: three products of 64 columns."""
    random = np.random.default_rng(0)
    weights = [random.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(3)]
    nodes, name = [], "x"
    for index in range(len(weights)):
        nodes += [
            helper.make_node("MatMul", [name, f"w{index}"], [f"m{index}"]),
            helper.make_node("Relu", [f"m{index}"], [f"h{index}"]),
        ]
        name = f"h{index}"
    graph = helper.make_graph(
        nodes,
        "ranker",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)],
    )
    opset = helper.make_opsetid("", 19)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)


def real_pair(path: Path) -> tuple[bool, dict[str, list[float]]]:
    """Time one file as two engines; whether they are told apart, and the times of their loads."""
    inputs = {
        size: {"x": np.random.default_rng(size).standard_normal((size, 64)).astype(np.float32)}
        for size in BATCHES
    }
    loads: dict[str, list[tuple[Latency, ...]]] = {"a": [], "b": []}
    for index in range(MOST_LOADS):
        least = {FIRST_LOADS: 0.0, LOADS: LOOKS_APART}.get(index)
        known = {name: over_loads(each) for name, each in loads.items()}
        if least is not None and not contenders(known, NOISE, MARGIN, least):
            break
        with ExitStack() as stack:
            names = ("b", "a") if index % 2 else ("a", "b")
            runners = {
                name: from_host(stack.enter_context(OnnxSession(path, SessionOptions(threads=1))).run)
                for name in names
            }
            timed = measure_interleaved(runners, inputs.__getitem__, BATCHES, PER_LOAD, "cpu", True)
        for name, latencies in timed.latencies.items():
            loads[name].append(latencies)
    apart, _ = told_apart({name: over_loads(each) for name, each in loads.items()}, "a")
    return apart, {name: [load[0].p50_us for load in each] for name, each in loads.items()}


def real_pairs(seconds: float) -> tuple[list[bool], list[float]]:
    """Pairs of the same engine until the time is over: which are told apart, and their deviations."""
    apart, deviations = [], []
    end = time.monotonic() + seconds
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        write_model(path)
        while time.monotonic() < end:
            is_apart, times = real_pair(path)
            apart.append(is_apart)
            loads = min(map(len, times.values()))
            differences = np.log(times["a"][:loads]) - np.log(times["b"][:loads])
            deviations.append(float(differences.std(ddof=1)) / np.sqrt(2.0))
    return apart, deviations


def real(seconds: float, jobs: int) -> dict[str, Any]:
    """Pairs in as many processes."""
    with ProcessPoolExecutor(jobs) as pool:
        found = list(pool.map(real_pairs, [seconds] * jobs))
    apart = [each for pairs, _ in found for each in pairs]
    return {
        "pairs": len(apart),
        "told_apart": sum(apart),
        "told_apart_percent": 100.0 * float(np.mean(apart)),
        "median_load_to_load_deviation_percent": 100.0 * median(each for _, some in found for each in some),
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contests", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=240.0, help="for real pairs")
    parser.add_argument("--jobs", type=int, default=1, help="processes that time real pairs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    figures = {
        "simulated": simulated(options.contests, random),
        "busy": busy(options.contests, random),
        "real": real(options.seconds, options.jobs),
    }
    print(figures["real"])
    settings = {
        "loads": LOADS,
        "most_loads": MOST_LOADS,
        "first_loads": FIRST_LOADS,
        "noise": NOISE,
        "contests": options.contests,
    }
    settings["jobs"] = options.jobs
    print(write_record("choice_errors", figures, settings))


if __name__ == "__main__":
    main()
