"""Records of engines on a GPU: speed, speed with accuracy, the whole product on the zoo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.results.formats import (
    NOTHING,
    Bar,
    chart,
    decimals_of,
    interval,
    microseconds,
    number,
    percent,
    quartile_ends,
    quartiles,
    signed,
    table,
    times,
)
from benchmarks.results.records import Record
from loka_onnx.numerics.intervals import is_tie

BUDGETS_SHOWN = 4
"""The axis of an accuracy chart ends at so many budgets."""


def speed(record: Record) -> str:
    """One chart and one table for each batch size."""
    parts = [_over(record)]
    for batch, found in _by_size(record.figures["batches"]):
        parts += [
            f"**Batch {batch}**",
            _times(found, f"Time of a request at batch {batch}, µs"),
            _floors(found),
        ]
        rows = []
        for name, taken in _fastest_first(found["times"]):
            engine = record.figures["engines"].get(name, {})
            rows.append(
                (
                    _starred(name, found["chosen"]),
                    quartiles(taken),
                    _over_chosen(found, name),
                    percent(engine.get("fp8_share")),
                    ", ".join(engine.get("fallbacks", ())) or NOTHING,
                )
            )
        head = ("engine", "µs (quartiles)", "over the chosen", "FLOPs in FP8", "planned, not in FP8")
        parts.append(table(head, rows, notes=1))
    return "\n\n".join((*parts, _not_timed(record), _limits(record), _prediction(record)))


def trained(record: Record) -> str:
    """Accuracy and time of the same engine files."""
    figures = record.figures
    reference = figures["reference"]["certification"]
    budget = 100 * record.settings["budget"]
    parts = [
        f"The FP32 model: NE {number(reference['normalized_entropy'], 5)}, AUC "
        f"{number(reference['auc'], 5)} on "
        f"{number(reference['rows'])} certification rows. Budget: {number(budget)} % of the loss.",
        _over(record),
    ]
    judged = {
        name: held for name, held in figures["engines"].items() if "delta_ne_percent" in _certified(held)
    }
    chosen = {found["chosen"] for found in figures["batches"].values()}
    bars = [_change(name, _certified(held), name in chosen) for name, held in judged.items()]
    parts.append(
        chart(
            "ΔNE on certification rows with its 95 % interval, %; the line is the budget",
            bars,
            mark=budget,
            longest=BUDGETS_SHOWN * budget,
        )
    )
    rows = [
        (
            name,
            interval(_certified(held)["delta_ne_percent"]),
            interval(_certified(held)["delta_auc_percent"]),
            _certified(held)["budget"],
            percent(held["fp8_share"]),
            number(len(held["fp8_sites"])),
            ", ".join(held["fallbacks"]) or NOTHING,
        )
        for name, held in judged.items()
    ]
    head = ("engine", "ΔNE", "ΔAUC", "budget", "FLOPs in FP8", "sites", "planned, not in FP8")
    parts.append(table(head, rows, notes=1))
    for batch, found in _by_size(figures["batches"]):
        parts += [
            f"**Batch {batch}**",
            _times(found, f"Time of a request at batch {batch}, µs"),
            _floors(found),
        ]
        rows = [
            (_starred(name, found["chosen"]), quartiles(taken), _over_chosen(found, name))
            for name, taken in _fastest_first(found["times"])
        ]
        parts.append(table(("engine", "µs (quartiles)", "over the chosen"), rows))
    return "\n\n".join((*parts, _limits(record), _prediction(record)))


def zoo(record: Record) -> str:
    """What runs chose, and what that is beside engines without this project."""
    parts = [_beside_today(record)]
    for model, found in record.figures.items():
        choice = found["choice"]
        parts += [f"**{model}**: {choice['plan']} was chosen: {choice['reason']}."]
        rows = []
        for name, held in found["engines"].items():
            judged = held["certification"]
            latency = held.get("latency_us") or {}
            rows.append(
                (
                    _starred(_short(name), _short(choice["engine"])),
                    interval(judged.get("delta_ne_percent")),
                    judged.get("budget_status", judged["status"]),
                    percent(held["fp8_share_percent"] / 100),
                    ", ".join(f"{microseconds(taken)} at {batch}" for batch, taken in latency.items())
                    or NOTHING,
                    found["losers"].get(name, "chosen" if name == choice["engine"] else NOTHING),
                )
            )
        head = ("plan", "ΔNE", "budget", "FLOPs in FP8", "latency", "why not")
        parts.append(table(head, rows, notes=1))
        parts += [f"{note}." for note in found.get("notes", ())]
        if found.get("note"):
            parts.append(f"{found['note']}.")
    return "\n\n".join(parts)


def attention(record: Record) -> str:
    """Fused attention against the same written out, by shape."""
    shapes = sorted(record.figures["shapes"], key=lambda each: each["products"])
    bars = [
        Bar(
            f"{each['heads']} × {each['queries']} × {each['keys']}, width {each['width']}, batch "
            f"{each['batch']}",
            each["written out over fused"],
            times(each["written out over fused"]),
        )
        for each in shapes
    ]
    crossover = [
        (case, *map(_or_nothing, held.values())) for case, held in record.figures["crossover"].items()
    ]
    head = ("shapes", *next(iter(record.figures["crossover"].values())))
    return "\n\n".join(
        (
            chart("Written out over fused, heads × queries × keys; the line is equality", bars, mark=1.0),
            "Products of queries and keys from which the fused form is faster, and up to which it is not:",
            table(head, crossover),
        )
    )


def prediction_error(record: Record) -> str:
    """Errors of predicted latencies, by case."""
    summaries = record.figures["summaries"]
    bars = [
        Bar(f"{name} ({number(held['plans and batch sizes'])})", held["median"], percent(held["median"]))
        for name, held in summaries.items()
    ]
    rows = [
        (
            name,
            number(held["plans and batch sizes"]),
            percent(held["median"]),
            percent(held["median with its sign"]),
            percent(held["upper_quartile"]),
            percent(held["largest"]),
        )
        for name, held in summaries.items()
    ]
    head = ("predictions", "number", "median error", "with its sign", "upper quartile", "largest")
    title = "Median relative error of predicted latency; the line is the aim"
    return "\n\n".join((chart(title, bars, mark=record.settings["aim"]), table(head, rows)))


def summary(record: Record) -> Iterator[tuple[str, ...]]:
    """Rows of the first page: case, batch, ratios, share in FP8, accuracy."""
    for batch, found in _by_size(record.figures["batches"]):
        ratios = found["ratios"]
        judged = record.figures["engines"][found["chosen"]].get("certification")
        yield (
            f"{record.name}, batch {batch}",
            times(ratios["chosen over today"]),
            times(ratios["chosen over our BF16"]),
            times(ratios["chosen over blanket FP8"]),
            percent(share_of(record, found)),
            interval(judged["delta_ne_percent"]) if judged else "speed only",
        )


def share_of(record: Record, found: Mapping[str, Any]) -> float | None:
    """Share of the FP8-able FLOPs that the chosen engine of a batch size has in FP8."""
    share = found.get("fp8_share", record.figures["engines"][found["chosen"]].get("fp8_share"))
    return None if share is None else float(share)


def _beside_today(record: Record) -> str:
    rows = []
    for model, found in record.figures.items():
        beside = found["beside today"]
        if "batches" not in beside:
            rows.append((model, NOTHING, NOTHING, NOTHING, f"not measured: {beside['not measured']}"))
            continue
        for batch, held in _by_size(beside["batches"]):
            for way in ("inputs on the device", "request from host memory"):
                over = held[way]["chosen over"]
                rows.append((model, batch, way, _ratio(over["today"]), _ratio(over.get("blanket FP8"))))
    head = ("model", "batch", "request", "chosen over today", "over FP8 everywhere")
    return table(head, rows, texts=len(head))


def _ratio(held: Mapping[str, float] | None) -> str:
    if held is None:
        return "not measured"
    return f"{times(held['ratio'])} [{number(held['lower'])}, {number(held['upper'])}]"


def _over(record: Record) -> str:
    rows = [
        (
            f"batch {batch}",
            found["chosen"],
            *(
                times(found["ratios"][f"chosen over {other}"])
                for other in ("today", "our BF16", "blanket FP8")
            ),
            percent(share_of(record, found)),
        )
        for batch, found in _by_size(record.figures["batches"])
    ]
    head = ("", "chosen", "over today", "over our BF16", "over FP8 everywhere", "FLOPs in FP8")
    return table(head, rows, texts=2)


def _times(found: Mapping[str, Any], title: str) -> str:
    bars = [
        Bar(
            name,
            held["median_us"],
            number(held["median_us"], 4),
            (held["low_us"], held["high_us"]),
            name == found["chosen"],
        )
        for name, held in _fastest_first(found["times"])
    ]
    return chart(title, bars)


def _floors(found: Mapping[str, Any]) -> str:
    if "floors" not in found:
        return ""
    floors = ", ".join(
        f"{name.removesuffix('_us')} {microseconds(held)}" for name, held in found["floors"].items()
    )
    return f"Least times of the chosen engine by the limits of the device: {floors}."


def _limits(record: Record) -> str:
    held = record.figures["limits"]
    return (
        f"Limits of the device, measured in the same run: {number(held['bf16_tflops'])} TFLOP/s in BF16, "
        f"{number(held['fp8_tflops'])} TFLOP/s in FP8, {number(held['memory_gb_s'], 4)} GB/s."
    )


def _not_timed(record: Record) -> str:
    lines = [
        f"{name}: {held.get('not_timed') or held.get('detail')}."
        for name, held in record.figures["engines"].items()
        if held.get("not_timed") or held.get("detail")
    ]
    return "\n\n".join(lines)


def _prediction(record: Record) -> str:
    found = record.figures.get("prediction")
    if not found:
        return ""
    text = f"Median error of the latencies that were predicted: {percent(found['median_relative_error'])}."
    left = [f"not predicted for {name}: {why}." for name, why in found.get("not_predicted", {}).items()]
    return " ".join((text, *left))


def _change(name: str, judged: Mapping[str, Any], is_chosen: bool) -> Bar:
    middle, low, high = judged["delta_ne_percent"]
    return Bar(name, middle, signed(middle, decimals_of(high - low)), (low, high), is_chosen)


def _certified(engine: Mapping[str, Any]) -> Mapping[str, Any]:
    return engine.get("certification") or {}


def _over_chosen(found: Mapping[str, Any], name: str) -> str:
    """A ratio of medians; a tie where their quartiles overlap."""
    ours, chosen = found["times"][name], found["times"][found["chosen"]]
    if name != found["chosen"] and is_tie(quartile_ends(ours), quartile_ends(chosen)):
        return "tie"
    return times(ours["median_us"] / chosen["median_us"])


def _fastest_first(taken: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(taken.items(), key=lambda item: item[1]["median_us"])


def _by_size(batches: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(batches.items(), key=lambda item: int(item[0]))


def _starred(name: str, chosen: str) -> str:
    return f"**{name}**" if name == chosen else name


def _short(engine: str) -> str:
    """The plan of an engine's id, which ends in it."""
    head, _, plan = engine.partition("-inductor-")
    return plan.partition("-")[2] if plan else head


def _or_nothing(value: Any) -> str:
    return number(value)


def choice_errors(record: Record) -> str:
    """How often equal engines were told apart, and engines that truly differ, by engines and deviation of
    loads.
    """
    rows = [
        (
            name,
            number(cell["equal_told_apart_percent"]),
            number(cell["equal_costs_precision_percent"]),
            number(cell["three_percent_told_apart_percent"]),
            number(cell["mean_loads_of_an_engine"]),
        )
        for name, cell in record.figures["simulated"].items()
    ]
    head = (
        "engines, deviation from load to load",
        "equal, told apart, %",
        "equal, costs precision, %",
        "truly apart, told apart, %",
        "loads of an engine",
    )
    found = record.figures["real"]
    said = (
        f"One file as two engines in ONNX Runtime on the CPU, {found['pairs']} pairs: "
        f"{found['told_apart']} were told apart (median deviation from load to load "
        f"{number(found['median_load_to_load_deviation_percent'])} %). "
        "On a simulated busy host, the slower of two engines was told apart where it is slower by "
    )
    said += ", ".join(f"{by} in {number(share)} %" for by, share in record.figures["busy"].items()) + "."
    return f"{table(head, rows)}\n\n{said}"


def gpu_rankers(record: Record) -> str:
    """Each ranker's chosen engine over the strongest of today's inside the budget, inputs on the device."""
    rows = []
    for name, found in record.figures.items():
        if "failed" in found:
            rows.append((name, NOTHING, NOTHING, NOTHING, NOTHING, found["failed"]))
            continue
        for batch, taken in found["beside today"]["batches"].items():
            held = taken["inputs on the device"]
            us, today = held["median_us"], held["today is"]
            rows.append(
                (
                    f"{name}, {batch}",
                    found["choice"]["plan"],
                    microseconds(us["chosen"]),
                    str(today).removeprefix("today-"),
                    microseconds(us[today]) if today else NOTHING,
                    _ratio(held["chosen over"].get("today")),
                )
            )
    head = ("ranker, batch", "chosen plan", "µs", "today", "µs", "times faster")
    return table(head, rows) + "\n\n" + record.settings.get("beside", "").capitalize()


def gpu_formats(record: Record) -> str:
    """Time of a request by plan and batch, inputs on the device, as the run timed it."""
    rows = []
    for name, plans in record.figures.items():
        for plan, held in plans.items():
            times = (microseconds(us) for us in held["p50_us"].values())
            rows.append((f"{name}, {plan}", "within" if held["within"] else "undecided", *times))
    batches = [f"µs at {batch}" for batch in held["p50_us"]]
    return table(("ranker, plan", "budget", *batches), rows)


def rtx_formats(record: Record) -> str:
    """Sites planned and read back, by model, architecture and plan; plans in high precision are left out."""

    def counted(sites: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {precision.upper()}" for precision, count in sites.items()) or NOTHING

    rows = [
        (
            f"{model}, {engine['architecture']}, {engine['plan']}",
            percent(engine["share"]),
            *(counted(engine[part]) for part in ("planned", "read_back")),
            "; ".join(f"{site}: {why}" for site, why in engine["fallbacks"].items()) or engine["declined"],
        )
        for model, engines in record.figures.items()
        for engine in engines
        if engine["planned"] or engine["declined"]
    ]
    return table(
        ("model, GPU, plan", "of the FP8-able FLOPs", "sites planned", "read back", "fallbacks, or why none"),
        rows,
    )


LAUNCHED = "launch and wait"


def host_requests(record: Record) -> str:
    """Time of a request from host memory over that of its kernels, and the gain of several sessions."""
    rows = []
    for name, found in record.figures.items():
        for batch in (key for key in found if key.isdigit()):
            held = found[batch]
            device = held["device"]["median_us"]
            rates = {count: held[key] for count in (1, 2, 4) if (key := f"requests/s, {count}") in held}
            best = max(list(rates)[1:], key=rates.__getitem__, default=0)
            p99 = [held[key] for count in (1, best) if (key := f"p99 µs, {count}") in held]
            rows.append(
                (
                    f"{name}, {batch}",
                    str(found["columns"]),
                    microseconds(device),
                    *(f"+{held[way]['median_us'] - device:.0f}" for way in ("arrays", "buffers", LAUNCHED)),
                    f"{rates[1]:,.0f}" if best else NOTHING,
                    f"{rates[best] / rates[1]:.2f}" if best else NOTHING,
                    " / ".join(map(microseconds, p99)) or NOTHING,
                )
            )
    head = (
        "ranker, batch",
        "inputs",
        "kernels, µs",
        "from arrays, µs",
        "from `Engine.buffers`, µs",
        "launch and wait alone, µs",
        "requests/s, one session",
        "times with several sessions",
        "slowest request in a hundred, one / several, µs",
    )
    return table(head, rows)
