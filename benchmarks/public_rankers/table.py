"""The sweep's results as a table, and its record.

``python -m benchmarks.public_rankers.table --results DIRECTORY``; with ``--record NAME`` it is written. With
``--before DIRECTORY``, results of an earlier tree on the same machine: the seconds of both, and their ratio.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.public_rankers.catalog import RANKERS
from benchmarks.recording import write_record

ACCURACY_PLANS = ("fp8-safe", "int8-safe", "mixed")
SECONDS_TO_REFUSE = 20.0
HEADS = (
    "ranker",
    "library",
    "result",
    "eight bits, % of FP8-able FLOPs",
    "of all products, %",
    "ΔNE, %",
    "KL, %",
    "first attempt",
    "wall, s",
    "CPU, s",
    "emitted",
)


def is_within(plan: Mapping[str, Any], split: str) -> bool:
    """Whether every output of a plan was inside its budget on a split."""
    outputs = plan.get(split, {}).get("outputs", {})
    return bool(outputs) and all(one["status"] == "within" for one in outputs.values())


def accuracy_plan(run: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The plan that is made to be accurate; of several formats and rungs, the certified one with the largest
    share.
    """
    rungs = {name: plan for name, plan in run.get("plans", {}).items() if name.startswith(ACCURACY_PLANS)}
    if not rungs:
        return None
    return max(rungs.items(), key=lambda item: (is_within(item[1], "certification"), item[1]["share"]))


def shares(run: Mapping[str, Any]) -> tuple[float, float]:
    """Certified shares of a run: of the FP8-able FLOPs, and of all products of the exported file.

    A run that does not finish, or whose plan is not inside on certification, has none.
    """
    found = accuracy_plan(run)
    if found is None or not is_within(found[1], "certification"):
        return 0.0, 0.0
    everything = sum(run["products"].values())
    of_able = float(found[1]["share"])
    return of_able, of_able * run["able_flops"] / everything


def is_certified_at_once(run: Mapping[str, Any]) -> bool:
    """Whether no plan with FP8 or INT8 that selection found inside its budget is outside on certification."""
    plans = [plan for plan in run.get("plans", {}).values() if plan["fp8_sites"] or plan.get("int8_sites")]
    tried = [plan for plan in plans if is_within(plan, "selection")]
    return bool(tried) and all(is_within(plan, "certification") for plan in tried)


def result_of(run: Mapping[str, Any]) -> str:
    """Finished, refused (and when), or failed."""
    if run["exit_code"] == 0:
        return "finished"
    message = (run["error"] or {}).get("message") or "no message"
    first = message.splitlines()[0]
    is_refusal = run["exit_code"] == 2 and run["cpu_seconds"] <= SECONDS_TO_REFUSE
    return f"{'refused' if is_refusal else 'failed'} after {run['wall_seconds']:.0f} s: {first}"


def row_of(run: Mapping[str, Any], library: str) -> list[str]:
    """Cells of one ranker."""
    able, everything = shares(run)
    found = accuracy_plan(run)
    outputs = found[1].get("certification", {}).get("outputs", {}) if found else {}
    emitted = ", ".join(plan for plan, _ in run.get("emitted", []))
    return [
        run["ranker"],
        library,
        result_of(run),
        f"{100 * able:.0f}",
        f"{100 * everything:.0f}",
        "; ".join(_interval(one.get("delta_ne")) for one in outputs.values()),
        "; ".join(_interval(one.get("kl")) for one in outputs.values()),
        "yes" if is_certified_at_once(run) else "no",
        f"{run['wall_seconds']:.0f}",
        f"{run['cpu_seconds']:.0f}",
        emitted,
    ]


def _interval(ends: Sequence[float] | None) -> str:
    if ends is None:
        return ""
    value, lower, upper = (100 * end for end in ends)
    return f"{value:+.4f} [{lower:+.4f}, {upper:+.4f}]"


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each ranker's first split, and what is said of all of them."""
    libraries = {ranker.name: str(ranker.library) for ranker in RANKERS}
    firsts = [run for run in runs if run["seed"] == 0]
    lines = ["| " + " | ".join(HEADS) + " |", "|" + " --- |" * len(HEADS)]
    lines += ["| " + " | ".join(row_of(run, libraries[run["ranker"]])) + " |" for run in firsts]
    return "\n".join([*lines, "", *summary(runs)])


def summary(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences over all runs."""
    firsts = [run for run in runs if run["seed"] == 0]
    if not firsts:
        return ["No run."]
    pairs = [shares(run) for run in firsts]
    finished = [run for run in runs if run["exit_code"] == 0]
    at_once = sum(is_certified_at_once(run) for run in finished)
    results = [result_of(run).split(" ", 1)[0] for run in firsts]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("finished", "refused", "failed"))
    return [
        f"{len(firsts)} of {len(RANKERS)} listed rankers were run: {counts}.",
        f"Certified share, median over all: {100 * median(pair[0] for pair in pairs):.0f} % of the FP8-able "
        f"FLOPs, {100 * median(pair[1] for pair in pairs):.0f} % of all products; a ranker that did not "
        "finish counts as 0.",
        f"Certified at the first attempt: {at_once} of {len(finished)} runs that finished.",
    ]


def wall_times(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of `run` by ranker, of those that finished under both trees, and the geometric mean ratio."""
    earlier = {(run["ranker"], run["seed"]): run for run in before if run["exit_code"] == 0}
    pairs = [
        (earlier[key], run)
        for run in after
        if (key := (run["ranker"], run["seed"])) in earlier and run["exit_code"] == 0
    ]
    rankers = {
        new["ranker"]: {
            "before": {name: old[name] for name in ("wall_seconds", "cpu_seconds", "stages")},
            "after": {name: new[name] for name in ("wall_seconds", "cpu_seconds", "stages")},
            "ratio": new["wall_seconds"] / old["wall_seconds"],
        }
        for old, new in pairs
    }
    return {"rankers": rankers, "geometric mean": geometric_mean(one["ratio"] for one in rankers.values())}


def walls_markdown(figures: Mapping[str, Any]) -> str:
    """A row for each ranker."""
    lines = ["| ranker | before, s | after, s | ratio |", "| --- | --- | --- | --- |"]
    for name, one in figures["rankers"].items():
        seconds = [f"{one[when]['wall_seconds']:.0f}" for when in ("before", "after")]
        lines.append(f"| {name} | {' | '.join(seconds)} | {one['ratio']:.2f} |")
    return "\n".join([*lines, "", f"Geometric mean of the ratios: {figures['geometric mean']:.2f}."])


def recorded(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run without what names the machine: of an error, its kind and its first line with bare file names."""
    error = run["error"]
    if error is None:
        return dict(run)
    first = (error["message"] or "").splitlines()[:1]
    words = [word.rsplit("/", 1)[-1] if "/" in word else word for line in first for word in line.split()]
    return {**run, "error": {"kind": error["kind"], "message": " ".join(words)}}


def read(results: Path) -> list[dict[str, Any]]:
    """Every run, in the order of the list."""
    order = [ranker.name for ranker in RANKERS]
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*.json")]
    return sorted(runs, key=lambda run: (run["seed"], order.index(run["ranker"])))


def main() -> None:
    """Print the table, and write the record where it is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="results of an earlier tree")
    parser.add_argument("--record", help="name of the record to write")
    parser.add_argument("--commit", default="", help="commit of the tree that was run, for the record")
    options = parser.parse_args()
    runs = read(options.results)
    if options.before:
        walls = wall_times(read(options.before), runs)
        print(walls_markdown(walls))
        if options.record:
            print(write_record(options.record, walls, {"commits": options.commit}))
        return
    print(markdown(runs))
    if options.record:
        from benchmarks.public_rankers.prepare import BUDGET, FRACTIONS  # needs PyTorch

        settings = {"budget": BUDGET, "fractions": FRACTIONS, "commit": options.commit}
        print(write_record(options.record, {"runs": [recorded(run) for run in runs]}, settings))


if __name__ == "__main__":
    main()
