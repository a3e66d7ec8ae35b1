"""What was aimed at, and whether a record reaches it: the only numbers that no record holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.results.formats import interval, number, percent, times
from benchmarks.results.records import Record


@dataclass(frozen=True)
class Outcome:
    """One aim beside what was measured.

    Attributes:
        of: The case.
        aim: What was aimed at.
        measured: What was measured.
        is_met: Whether it is reached.
    """

    of: str
    aim: str
    measured: str
    is_met: bool


NEVER_SLOWER = 1.0
OVER_TODAY = {
    ("speed-wukong-large", "2048"): 2.0,
    ("speed-wukong-small", "1024"): 2.3,
    ("speed-dlrm-dcnv2", "256"): 1.7,
    ("speed-dlrm-dcnv2", "2048"): 1.7,
    ("speed-dlrm-dcnv2", "8192"): 1.3,
}
OVER_BLANKET, OVER_BF16, LEAST_SHARE = 1.1, 1.05, 0.25
SAFE_SHARE, SAFE_SHARE_WITH_MODS = 0.6, 0.9
RANK_CORRELATION = 0.95
COVERAGE = (0.93, 0.97)
OVER_PLAIN, OVER_PLAIN_STOPPING = 4.5, 2.0
FALSE_ALARMS = 5
GROWTH = 0.05
WITHIN = 0.1
READ_ONCE = 1.0
REFRESH = 0.25
ROUNDING = 2.0


def speed(record: Record) -> Iterator[Outcome]:
    """Ratios of the chosen engine over others."""
    for batch, found in record.figures["batches"].items():
        over = found["ratios"]["chosen over today"]
        aim = OVER_TODAY.get((record.name, batch), NEVER_SLOWER)
        yield at_least(f"batch {batch}, over today", over, aim)
        if "towers" in record.name:
            yield at_least(f"batch {batch}, over FP8 everywhere", over_blanket(found), OVER_BLANKET)
            yield at_least(
                f"batch {batch}, over our BF16", found["ratios"]["chosen over our BF16"], OVER_BF16
            )
            share = found["fp8_share"]
            case, aim = f"batch {batch}, FLOPs in FP8", f"≥ {percent(LEAST_SHARE)}"
            yield Outcome(case, aim, percent(share), share >= LEAST_SHARE)


def over_blanket(found: Any) -> float:
    """Ratio over FP8 at every linear site."""
    return float(found["ratios"]["chosen over blanket FP8"])


def trained(record: Record) -> Iterator[Outcome]:
    """Accuracy of the engines that were chosen, by their own outputs."""
    budget = 100 * record.settings["budget"]
    for batch, found in record.figures["batches"].items():
        change = record.figures["engines"][found["chosen"]]["certification"]["delta_ne_percent"]
        aim = f"upper end ≤ {number(budget)} %"
        yield Outcome(f"batch {batch}, ΔNE of the chosen engine", aim, interval(change), change[2] <= budget)
        yield at_least(f"batch {batch}, over today", found["ratios"]["chosen over today"], NEVER_SLOWER)


def predictions(record: Record) -> Iterator[Outcome]:
    """Median error of predicted latencies."""
    error, aim = record.figures["summaries"]["all"]["median"], record.settings["aim"]
    yield Outcome("median error", f"≤ {percent(aim)}", percent(error), error <= aim)


def movielens(record: Record) -> Iterator[Outcome]:
    """Accuracy and share of the plan fp8-safe."""
    budget = 100 * record.settings["budget"]
    for model, variants in record.figures.items():
        for variant, found in variants.items():
            plan = found["plans"]["fp8-safe"]
            change = plan["certification"]["delta_ne_percent"]
            case = f"{model}, {variant}"
            yield Outcome(
                f"{case}, ΔNE", f"upper end ≤ {number(budget)} %", interval(change), change[2] <= budget
            )
            least = {"as exported": SAFE_SHARE, "with mods": None}.get(variant, SAFE_SHARE_WITH_MODS)
            if least is not None:
                share = plan["fp8_share_of_flops"]
                yield Outcome(f"{case}, FLOPs in FP8", f"≥ {percent(least)}", percent(share), share >= least)


def weight_rounding(record: Record) -> Iterator[Outcome]:
    """What rounding of weights gains in INT8."""
    for name, gains in record.figures["gain"].items():
        if name.endswith("-int8"):
            yield at_least(f"{name}, KL of nearest over GPTQ", gains["gptq"], ROUNDING)


def additivity(record: Record) -> Iterator[Outcome]:
    """Order of sites on other rows."""
    for model, found in record.figures.items():
        value = found["order"]["sites"]["kl_with_kl"]
        yield Outcome(
            f"{model}, rank correlation", f"≥ {RANK_CORRELATION}", number(value), value >= RANK_CORRELATION
        )


def coverage(record: Record) -> Iterator[Outcome]:
    """Coverage of intervals over a fixed number of rows."""
    low, high = COVERAGE
    for model, found in record.figures.items():
        for name, part in found["fixed"].items():
            yield Outcome(
                f"{model}, {name}, every site",
                f"{percent(low)} to {percent(high)}",
                f"{percent(part['min'])} to {percent(part['max'])}",
                low <= part["min"] and part["max"] <= high,
            )


def calibration(record: Record) -> Iterator[Outcome]:
    """Time of calibration over a plain pass."""
    for model, found in record.figures.items():
        one = found["ratio_over_plain"]["probe, one recipe"]["median"]
        yield at_most(f"{model}, one recipe over a plain pass", one, OVER_PLAIN)
        for name, ratio in found["many_rows"]["ratio_over_plain"].items():
            yield at_most(f"{model}, {name}", ratio["median"], OVER_PLAIN_STOPPING)


def tables(record: Record) -> Iterator[Outcome]:
    """Embedding tables are read at most once."""
    yield at_most(
        "bytes read over bytes of tables", record.figures["large"]["storage_read_over_tables"], READ_ONCE
    )


def drift(record: Record) -> Iterator[Outcome]:
    """Alarms on the same data, and on changed data."""
    for model, found in record.figures.items():
        alarms = found["false_alarms"]["alarms"]
        samples = found["false_alarms"]["samples"]
        yield Outcome(
            f"{model}, samples of the same data with an alarm",
            f"≤ {FALSE_ALARMS} in 100",
            f"{alarms} in {samples}",
            alarms / samples <= FALSE_ALARMS / 100,
        )
        doubled = [held["doubled"] for held in found["changes"].values() if "doubled" in held]
        named = sum(held["names_the_feature"] for held in doubled)
        yield Outcome(
            f"{model}, doubled features that are named",
            "all",
            f"{named} of {len(doubled)}",
            named == len(doubled),
        )


def overhead(record: Record) -> Iterator[Outcome]:
    """Time around the backend's call."""
    limit = record.settings["limit_us"]
    for way, found in record.figures["largest"].items():
        value, error = found["median_us"], found["median_error_us"]
        yield Outcome(
            f"{way}: largest, {found['case']}",
            f"≤ {number(limit)} µs",
            f"{number(value)} ± {number(error)} µs",
            value <= limit,
        )


def soak(record: Record) -> Iterator[Outcome]:
    """Errors and memory of the server."""
    answers = record.figures["answers"]
    for name in ("errors", "wrong"):
        yield Outcome(f"answers: {name}", "0", number(answers[name]), answers[name] == 0)
    growth = record.figures["growth_after_10_s"]["anonymous"]
    yield Outcome("growth of memory", f"≤ {percent(GROWTH)}", percent(growth), growth <= GROWTH)


def rewriting(record: Record) -> Iterator[Outcome]:
    """Time of rewriting a large graph."""
    limit = record.settings["limit_s_at_5000"]
    for nodes, found in record.figures["sizes"].items():
        if nodes == "5000":
            seconds = found["match_and_rewrite_cpu_s"] + sum(found["between_cpu_s"].values())
            yield Outcome(f"{nodes} nodes", f"≤ {number(limit)} s", f"{number(seconds)} s", seconds <= limit)


def size(record: Record) -> Iterator[Outcome]:
    """Bytes that FP8 saves, over those that its weights should."""
    for model, plans in record.figures.items():
        for plan, found in plans.items():
            share = found["file_over_expected"]
            if share is not None:
                yield Outcome(
                    f"{model}, {plan}, bytes saved over expected",
                    f"within {percent(WITHIN)} of 1",
                    number(share),
                    abs(share - 1) <= WITHIN,
                )


def refresh(record: Record) -> Iterator[Outcome]:
    """Time of a refresh over that of a full run."""
    yield at_most("refresh over full run", record.figures["ratio"], REFRESH)
    yield at_most("with the start of the process", record.figures["process_ratio"], REFRESH)


def stated(record: Record) -> Iterator[Outcome]:
    """Aims that a record states itself, with whether they were reached."""
    for aim, is_met in record.figures["held"].items():
        yield Outcome("", aim.replace("_", " "), "reached" if is_met else "not reached", is_met)


def at_least(of: str, ratio: float, aim: float) -> Outcome:
    """A ratio that should be large."""
    return Outcome(of, f"≥ {times(aim)}", times(ratio), ratio >= aim)


def at_most(of: str, ratio: float, aim: float) -> Outcome:
    """A ratio that should be small."""
    return Outcome(of, f"≤ {times(aim)}", times(ratio), ratio <= aim)


Aims = Callable[[Record], Iterator[Outcome]]
