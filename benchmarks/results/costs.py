"""Records of what stages cost, and of what runs on a fleet host costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.results.formats import (
    Bar,
    chart,
    number,
    percent,
    quartile_ends,
    quartiles,
    spread,
    table,
    times,
)
from benchmarks.results.generic import nested
from benchmarks.results.records import Record


def calibration(record: Record) -> str:
    """Ratios over a plain pass, and memory."""
    parts = []
    for model, found in record.figures.items():
        ratios = found["ratio_over_plain"]
        parts += [
            f"**{model}**: {number(found['sites'])} sites, {number(found['rows'])} rows; the plain "
            f"pass takes "
            f"{number(found['plain_seconds_median'])} s.",
            _ratios("Time over a plain pass", ratios),
            table(
                ("what", "over a plain pass, median (least to most)", "over one in streams"),
                [
                    (name, spread(held), spread(found["ratio_over_plain_in_streams"][name]))
                    for name, held in ratios.items()
                ],
            ),
            f"Over {number(found['many_rows']['rows'])} rows:",
            table(
                ("what", "over a plain pass, median (least to most)"),
                [(name, spread(held)) for name, held in found["many_rows"]["ratio_over_plain"].items()],
            ),
            table(
                ("batches", "peak of anonymous memory, MiB"),
                [(batches, peak) for batches, peak in found["anonymous_peak_mib"].items()],
            ),
        ]
    return "\n\n".join(parts)


def peer_calibration(record: Record) -> str:
    """Calibration beside Model Optimizer's."""
    rows, sites = [], []
    for model, found in record.figures.items():
        rows += [
            (model, name, number(seconds), _over(found["over_model_optimizer_max"].get(name)))
            for name, seconds in found["median_seconds"].items()
        ]
        sites += [
            (model, name, f"{number(taken)}; {number(found['linear_sites'])} linear sites")
            for name, taken in found["sites_of_model_optimizer"].items()
        ]
    return "\n\n".join(
        (
            table(("model", "what", "median s", "over Model Optimizer's max"), rows, texts=2),
            "Products that Model Optimizer quantizes, interactions too, beside the number of linear sites:",
            table(("model", "call", "products"), sites, texts=2),
        )
    )


def _over(held: Mapping[str, float] | None) -> str:
    return spread(held) if held else ""


def rewriting(record: Record) -> str:
    """Seconds by size of the graph."""
    rows = []
    for nodes, found in sorted(record.figures["sizes"].items(), key=lambda item: int(item[0])):
        between = sum(found["between_cpu_s"].values())
        rows.append((f"{int(nodes):,}", found["match_and_rewrite_cpu_s"], between))
    growth = (
        f"Exponent of the growth with the number of nodes: "
        f"{number(record.figures['growth_match_and_rewrite'])} of "
        f"matching and rewriting, {number(record.figures['growth_between'])} of what lies between."
    )
    head = ("nodes", "match and rewrite, processor s", "copies, loads and saves between, processor s")
    return table(head, rows) + "\n" + growth


def engine_size(record: Record) -> str:
    """Bytes of engines by plan."""
    rows = [
        (
            f"{model}, {plan}",
            found["contents"]["total"],
            found["fp8_sites"],
            found["saved_file"],
            found["expected"],
            found["file_over_expected"],
            found["constants_over_expected"],
        )
        for model, plans in record.figures.items()
        for plan, found in plans.items()
    ]
    head = (
        "model, plan",
        "bytes",
        "sites in FP8",
        "saved against BF16",
        "expected of weights",
        "file over expected",
        "constants over expected",
    )
    return table(head, rows)


def overhead(record: Record) -> str:
    """Time around the backend's call, by way of calling and batch size."""
    limit = record.settings["limit_us"]
    parts = []
    for model, sizes in record.figures["models"].items():
        batches = sorted(sizes, key=int)
        ways = [way for way in sizes[batches[0]] if "median_us" in sizes[batches[0]][way]]
        bars = [
            Bar(f"batch {batch}", held["median_us"], number(held["median_us"]), quartile_ends(held))
            for batch in batches
            for held in [sizes[batch]["metrics on"]]
        ]
        title = f"{model}, metrics on: µs beside a direct call, with quartiles; the line is the aim"
        rows = [(way, *(quartiles(sizes[batch][way]) for batch in batches)) for way in ways]
        head = ("µs, median (quartiles)", *(f"batch {batch}" for batch in batches))
        parts += [chart(title, bars, mark=limit), table(head, rows)]
    return "\n\n".join(parts)


def drift(record: Record) -> str:
    """False alarms, what changed features raise, and what watching costs."""
    parts = []
    for model, found in record.figures.items():
        changes = [
            (
                name,
                _alarms(held, "doubled"),
                _alarms(held, "silent"),
                held.get("kl_ratio"),
                held.get("kl_ratio_by_noise"),
            )
            for name, held in found["changes"].items()
            if "doubled" in held
        ]
        false = {
            "the same profile": found["false_alarms"],
            **{key: held for key, held in found.items() if key.startswith("false_alarms_of")},
        }
        rows = [
            (name.replace("_", " "), held["alarms"], held["samples"], held["tests"])
            for name, held in false.items()
        ]
        parts += [
            f"**{model}**: false alarms",
            table(("profile", "samples with an alarm", "samples", "tests in each"), rows),
            table(
                (
                    "feature",
                    "alarms when doubled",
                    "alarms when silent",
                    "KL over the profile's",
                    "predicted by noise",
                ),
                changes,
            ),
            nested(found["monitor_cost"], ("cost of watching",)),
        ]
    return "\n\n".join(parts)


def _alarms(held: Mapping[str, Any], change: str) -> str:
    found = held[change]
    return f"{number(found['alarms'])}{', named' if found['names_the_feature'] else ', not named'}"


def refresh(record: Record) -> str:
    """Seconds by stage of the run and of its refresh."""
    full, new = record.figures["full"], record.figures["refresh"]
    bars = [
        Bar(name, held["seconds"], f"{number(held['seconds'])} s")
        for name, held in (("full run", full), ("refresh", new))
    ]
    names = [*full["stages"], *(name for name in new["stages"] if name not in full["stages"])]
    rows = [(name, full["stages"].get(name), new["stages"].get(name)) for name in names]
    totals = [
        (name.replace("_", " "), full[name], new[name])
        for name in ("seconds", "process_seconds", "cpu_seconds")
    ]
    return "\n\n".join(
        (
            f"A refresh takes {times(record.figures['ratio'])} of the full run, with the start of "
            f"the process "
            f"{times(record.figures['process_ratio'])}, in processor time "
            f"{times(record.figures['cpu_ratio'])}.",
            chart("Seconds from call to bundle", bars),
            table(("stage", "full run, s", "refresh, s"), [*rows, *totals]),
        )
    )


def first_hour(record: Record) -> str:
    """Each public ranker from its export to an answer over HTTP, in seconds; no line is edited by hand."""
    steps = ("export", "init", "run", "serve")
    rows = [
        (
            name,
            *(number(found["seconds"][step]) for step in steps),
            _emitted(found["result"]),
        )
        for name, found in record.figures.items()
    ]
    head = ("ranker", *(f"{step}, s" for step in steps), "emitted")
    cores = number(record.machine["cores"])
    said = f"No line of a run file was edited by hand. On {cores} cores, {record.settings['beside']}."
    return f"{said}\n\n{table(head, rows, notes=1)}"


def _emitted(result: str) -> str:
    """The plan in a run's first line, ``cpu: int8-safe, …``."""
    return result.partition(": ")[2].partition(",")[0]


def soak(record: Record) -> str:
    """Answers, errors and memory of the server."""
    answers, memory = record.figures["answers"], record.figures["anonymous_mib"]
    counts = ", ".join(f"{number(count)} {name}" for name, count in answers["count"].items())
    latency = ", ".join(f"{name} {number(held)} ms" for name, held in answers["latency_ms"].items())
    text = (
        f"{number(record.settings['clients'])} clients for {number(record.settings['seconds'])} s. "
        f"Answers: {counts}; "
        f"errors: {number(answers['errors'])}; answers with wrong bits: {number(answers['wrong'])}; "
        f"{latency}. "
        f"Memory grew by {percent(record.figures['growth_after_10_s']['anonymous'])}."
    )
    bars = [Bar(when, held, f"{number(held)} MiB") for when, held in memory.items()]
    return "\n\n".join((text, chart("Anonymous memory of the server, MiB", bars)))


def _ratios(title: str, ratios: Mapping[str, Mapping[str, float]]) -> str:
    bars = [
        Bar(name, held["median"], times(held["median"]), (held["min"], held["max"]))
        for name, held in ratios.items()
    ]
    return chart(f"{title}; the line is equality", bars, mark=1.0)
