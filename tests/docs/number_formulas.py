"""Formulas over the records, for the numbers of README and docs (`numbers.yaml`); of plain JSON alone."""

import ast
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import NormalDist, geometric_mean, median
from typing import Any

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"


def value_of(formula: str) -> float:
    """What a formula comes to, in Python: `R(name, key, …)` is a figure of a record, `S` a setting."""
    return float(eval(formula, dict(FORMULAS)))


@cache
def _record(name: str) -> Any:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def _below(value: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        value = value[key]
    return value


def figure(name: str, *keys: Any) -> Any:
    """A figure of a record."""
    return _below(_record(name)["figures"], keys)


def setting(name: str, *keys: Any) -> Any:
    """How it was measured."""
    return _below(_record(name)["settings"], keys)


def over(name: str, batch: int, other: str) -> float:
    """Time of another engine over that of the chosen one."""
    return float(figure(name, "batches", str(batch), "ratios", f"chosen over {other}"))


def change(name: str, engine: str, split: str = "certification") -> list[float]:
    """ΔNE in percent, with its ends."""
    return list(figure(name, "engines", engine, split, "delta_ne_percent"))


def chosen(name: str, batch: int) -> str:
    """The engine that a benchmark chose."""
    return str(figure(name, "batches", str(batch), "chosen"))


def _zoo(model: str, batch: int, inputs: str) -> Any:
    place = {"host": "request from host memory", "device": "inputs on the device"}[inputs]
    return figure("zoo-engines", model, "beside today", "batches", str(batch), place)


def zoo(model: str, batch: int, inputs: str, other: str = "today") -> float:
    """Time of another engine over that of what `run` chose; `host` counts the copies of a request."""
    return float(_zoo(model, batch, inputs)["chosen over"][other]["ratio"])


def zoo_us(model: str, batch: int, inputs: str) -> float:
    """Microseconds of what `run` chose."""
    return float(_zoo(model, batch, inputs)["median_us"]["chosen"])


def zoo_change(model: str, plan: str) -> list[float]:
    """ΔNE in percent on certification, with its ends."""
    engine = f"nvidia-h100-inductor-sm90-{plan}"
    return list(figure("zoo-engines", model, "engines", engine, "certification", "delta_ne_percent"))


@dataclass(frozen=True)
class _Engine:
    us: float
    low: float
    high: float
    side: str
    has_float8: bool
    inside: bool


def _engines(model: str, batch: int) -> list[_Engine]:
    """Every engine of the peers' record that was timed and is none of simulated FP8."""
    figures, budget = figure("peers", "models", model), 100 * setting("peers", "budget")
    same = {"bf16-kernels": "bf16"}
    rows = [(name, row, row.get("device") or {}) for name, row in figures["variants"].items()]
    rows += [
        (name, {**figures["variants"].get(same[name], {}), "peer": "loka-onnx"}, engines)
        for name, engines in figures.get("beside", {}).items()
    ]
    found = []
    for name, row, engines in rows:
        accuracy = row.get("accuracy")
        inside = accuracy is not None and accuracy["delta_ne_percent"][2] <= budget
        has_float8 = any(times.get("fp8_products_engaged") for times in engines.values())
        side = "blanket" if name.startswith("blanket") else row.get("peer") or "none"
        for times in engines.values():
            if times.get("simulated") or str(batch) not in times.get("microseconds", {}):
                continue
            low, high = times.get("quartiles", {}).get(str(batch), [times["microseconds"][str(batch)]] * 2)
            found.append(_Engine(times["microseconds"][str(batch)], low, high, side, has_float8, inside))
    return found


def _fastest(engines: list[_Engine]) -> _Engine | None:
    return min(engines, key=lambda each: each.us, default=None)


@dataclass(frozen=True)
class _Case:
    ours: _Engine
    ours_without: _Engine
    ours_float8: _Engine | None
    plain: _Engine
    is_common: bool
    others: tuple[_Engine, ...]


@cache
def cases() -> tuple[_Case, ...]:
    """Model by model and size by size: the fastest engines inside the budget."""
    found = []
    for model in figure("peers", "models"):
        for batch in (256, 2048):
            every = _engines(model, batch)
            inside = [each for each in every if each.inside]
            ours = [each for each in inside if each.side == "loka-onnx"]
            peers = {"blanket", "model-optimizer", "onnxruntime", "quark"}
            case = _Case(
                _of(_fastest(ours)),
                _of(_fastest([each for each in ours if not each.has_float8])),
                _fastest([each for each in ours if each.has_float8]),
                _of(_fastest([each for each in inside if each.side in ("none", "")])),
                peers <= {each.side for each in every},
                tuple(each for each in every if each.side in peers - {"blanket"}),
            )
            found.append(case)
    return tuple(found)


def _of(engine: _Engine | None) -> _Engine:
    assert engine is not None
    return engine


def over_plain(*, common: bool) -> float:
    """Geometric mean of the fastest with nothing quantized over ours."""
    return geometric_mean(c.plain.us / c.ours.us for c in cases() if c.is_common or not common)


def float8_wins() -> list[_Case]:
    """Cases in which our fastest engine runs FP8."""
    return [c for c in cases() if c.ours_float8 is not None and c.ours_float8.us <= c.ours_without.us]


def float8_ties() -> int:
    """Of these, how many by less than the spread: the quartiles of both overlap."""
    return sum(_of(c.ours_float8).high >= c.ours_without.low for c in float8_wins())


def float8_adds() -> float:
    """Percent that FP8 adds to our best without it, geometric mean."""
    return 100 * (geometric_mean(c.ours_without.us / c.ours.us for c in cases()) - 1)


def runtime_over_inductor() -> list[float]:
    """ONNX Runtime's time of a graph over Inductor's; where it simulates FP8, it says nothing."""
    found = []
    for model in figure("peers", "models").values():
        for row in model["variants"].values():
            engines = row.get("device") or {}
            if engines.get("onnxruntime", {}).get("simulated"):
                continue
            both = [engines.get(name, {}) for name in ("onnxruntime", "inductor")]
            one, other = (each.get("microseconds", {}) for each in both)
            found += [one[batch] / other[batch] for batch in one if batch in other]
    return found


def coverage(end: str, part_of: str = "kl") -> float:
    """Percent, least or most over models."""
    ends = [model["fixed"][part_of][end] for model in figure("interval_coverage").values()]
    return 100 * (min(ends) if end == "min" else max(ends))


def certified(term: str) -> list[float]:
    """Percent of samples whose interval of certification holds the value of the whole, by model and plan."""
    return [
        100 * share
        for model in figure("interval_coverage_of_plans").values()
        for name, share in model["certificates"].items()
        if name.endswith(f", {term} covered")
    ]


def ever_wrong(interval: str, end: str) -> float:
    """Percent of runs that exclude the truth at some look, least or most over models and orders."""
    ends = [
        order["ever_excludes_the_truth"][interval][end]
        for model in figure("interval_coverage").values()
        for order in model["stopping"].values()
    ]
    return 100 * (min(ends) if end == "min" else max(ends))


def sums(model: str, plan: str, rows: str) -> float:
    """Sum of single KLs over the joint KL."""
    return float(figure("additivity", model, "plans", plan, "predicted_over_measured", "kl", rows))


def additive(model: str, plan: str) -> Mapping[str, Any]:
    """A plan of the record on additivity."""
    found: Mapping[str, Any] = figure("additivity", model, "plans", plan)
    return found


def around(rows: tuple[int, ...], end: Callable[..., float]) -> float:
    """Microseconds around a call of the session, at some sizes."""
    models = figure("runtime_overhead", "models").values()
    found = [model[str(size)]["around the call"] for model in models for size in rows]
    return float(end(each["median_us"] if isinstance(each, dict) else each for each in found))


def mantissa(format: str) -> int:
    """Bits behind the point; the name has them."""
    return int(format[3])


def constant(path: str, name: str, index: int | None = None) -> float:
    """The number that a name of the sources stands for, or one of a tuple, read from the text of the file."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [ast.unparse(t) for t in targets if t is not None]:
            value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return float(value if index is None else value[index])
    raise KeyError(f"'{path}' has no '{name}'")


def quantile(probability: float) -> float:
    """Of the normal distribution."""
    return NormalDist().inv_cdf(probability)


def moved_kl(probability: float, change: float) -> float:
    """KL of a prediction from the one whose logit lies `change` above: log(1 − p + p e^δ) − p δ."""
    return log(1.0 - probability + probability * exp(change)) - probability * change


def largest(format: str) -> float:
    """Largest finite number of an FP8 format, of its exponent bits and bias (OCP OFP8 1.0).

    All ones are NaN in E4M3FN, the largest exponent holds no numbers in E5M2, the bias of FNUZ is one more.
    """
    exponent_bits, bits = int(format[1]), mantissa(format)
    bias = 2 ** (exponent_bits - 1) - 1 + format.endswith("FNUZ")
    top = 2**exponent_bits - 1 - (format == "E5M2")
    fraction = 2 - 2.0**-bits * (2 if format == "E4M3FN" else 1)
    return float(fraction * 2.0 ** (top - bias))


def blanket_float8(batch: int) -> list[float]:
    """Time of FP8 everywhere over that of the chosen engine, of every public ranker on a GPU."""
    runs = (run["beside today"] for run in figure("gpu_rankers").values() if "failed" not in run)
    held = (run["batches"][str(batch)]["inputs on the device"]["chosen over"] for run in runs)
    return [each["blanket FP8"]["ratio"] for each in held if "blanket FP8" in each]


def over_compiled(rankers: Collection[str] = ()) -> list[float]:
    """Time of `torch.compile` over that of the chosen engine, of these or all public rankers on a GPU."""
    runs = [run for name, run in figure("gpu_rankers").items() if name in rankers or not rankers]
    batches = [b for run in runs for b in run["beside today"]["batches"].values()]
    times = [batch["inputs on the device"]["median_us"] for batch in batches]
    return [each["today-torch.compile-bf16"] / each["chosen"] for each in times]


def gpu_minutes() -> list[float]:
    """Minutes of `tune` and `run` of every public ranker on a GPU."""
    return [sum(run["seconds"].values()) / 60 for run in figure("gpu_rankers").values()]


def gpu_plans() -> list[str]:
    """The plan that each run of a public ranker on a GPU chose, where its choice was kept."""
    runs = (run for run in figure("gpu_rankers").values() if "failed" not in run)
    return [run["choice"]["plan"] for run in runs if run["choice"]["plan"] != "not kept"]


def cpu_cases() -> list[tuple[float, str]]:
    """FP32's time over that of the fastest own engine inside the budget, and its plan, of each case."""
    cases = []
    for model in figure("cpu_engines").values():
        graphs = {name: graph for name, graph in model["graphs"].items() if "us" in graph}
        limit = 100 * setting("cpu_engines", "budget")
        own = [n for n, g in graphs.items() if n.startswith("LoKA") and g["delta_ne_percent"][2] <= limit]
        for size, (_, base, _) in graphs["FP32, as exported"]["us"].items():
            us, name = min((graphs[name]["us"][size][1], name) for name in own)
            cases.append((base / us, name))
    return cases


def table_times() -> list[float]:
    """Time of a call with tables in INT8 over that in FP32, medians."""
    return [v[0] for held in figure("int8_tables").values() for k, v in held.items() if k.startswith("time_")]


def gptq_gains(format: str) -> list[float]:
    """KL with weights rounded to the nearest over that by GPTQ, of every plan of a format."""
    gains = figure("weight_rounding", "gain").items()
    return [gain["gptq"] for name, gain in gains if name.endswith(format)]


def walls() -> list[float]:
    """Seconds of a run of each public ranker."""
    return [ranker["after"]["wall_seconds"] for ranker in figure("run_wall", "rankers").values()]


def mixed_shares() -> list[float]:
    """Largest share of FLOPs in eight bits of a plan certified for all outputs, percent, by ranker."""
    return [largest_share(run["plans"]) for run in figure("public_rankers_mixed", "runs")]


def largest_share(plans: dict[str, Any]) -> float:
    """The same of one run."""
    certified = [0.0]
    for plan in plans.values():
        outputs = plan.get("certification", {"outputs": {}})["outputs"].values()
        if outputs and all(output["status"] == "within" for output in outputs):
            certified.append(plan["share"])
    return 100 * max(certified)


def zoo_shares() -> list[float]:
    """The same by model of the zoo."""
    return [largest_share(found["plans"]) for found in figure("zoo_shares").values()]


def zoo_predictions() -> list[float]:
    """Predicted KL over the one on certification rows, of quantized plans of the zoo."""
    plans = (plan for found in figure("zoo_shares").values() for plan in found["plans"].values())
    return [
        plan["predicted_kl"][output] / seen["kl"][0]
        for plan in plans
        for output, seen in plan.get("certification", {"outputs": {}})["outputs"].items()
        if plan["predicted_kl"]
    ]


FORMULAS: dict[str, Any] = {
    "R": figure,
    "S": setting,
    "median": median,
    **{name: made for name, made in list(globals().items()) if callable(made) and not name.startswith("_")},
}
