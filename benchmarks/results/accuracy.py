"""Records of accuracy and of its statistics."""

from __future__ import annotations

from benchmarks.public_rankers.table import markdown, walls_markdown
from benchmarks.results.formats import (
    Bar,
    chart,
    decimals_of,
    interval,
    number,
    percent,
    signed,
    table,
    times,
)
from benchmarks.results.records import Record

BUDGETS_SHOWN = 4


def public_rankers(record: Record) -> str:
    """A row for each ranker, and what is said of all of them."""
    return markdown(record.figures["runs"])


def run_wall(record: Record) -> str:
    """Seconds of `run` before and after."""
    return walls_markdown(record.figures)


def movielens(record: Record) -> str:
    """Every model with each way to prepare it: plans, their accuracy, their share in FP8."""
    budget = 100 * record.settings["budget"]
    parts = [_safe_shares(record)]
    for model, variants in record.figures.items():
        bars, rows = [], []
        for variant, found in variants.items():
            for plan, held in found["plans"].items():
                judged = held["certification"]
                if "delta_ne_percent" not in judged or plan == "fp32":
                    continue
                middle, low, high = judged["delta_ne_percent"]
                text = signed(middle, decimals_of(high - low))
                bars.append(Bar(f"{plan}, {variant}", middle, text, (low, high), plan == "fp8-safe"))
                rows.append(
                    (
                        f"{plan}, {variant}",
                        interval(judged["delta_ne_percent"]),
                        interval(judged["kl_percent"]),
                        number(judged["auc"], 5),
                        percent(held["fp8_share_of_flops"]),
                        f"{number(held['fp8_sites'])} of {number(found['linear_sites'])}",
                    )
                )
        reference = next(iter(variants.values()))["plans"]["reference"]["certification"]
        parts += [
            f"**{model}**: NE {number(reference['ne'], 5)} and AUC {number(reference['auc'], 5)} in FP32 on "
            f"{number(reference['rows'])} certification rows.",
            chart(
                "ΔNE with its 95 % interval, %; the line is the budget",
                bars,
                mark=budget,
                longest=BUDGETS_SHOWN * budget,
            ),
            table(("plan", "ΔNE", "KL", "AUC", "FLOPs in FP8", "sites"), rows),
        ]
    return "\n\n".join(parts)


def _safe_shares(record: Record) -> str:
    variants = list(next(iter(record.figures.values())))
    rows = [
        (model, *(percent(found[variant]["plans"]["fp8-safe"]["fp8_share_of_flops"]) for variant in variants))
        for model, found in record.figures.items()
    ]
    return "Share of the FP8-able FLOPs that `fp8-safe` has in FP8:\n\n" + table(("model", *variants), rows)


def weight_rounding(record: Record) -> str:
    """KL of a plan with weights rounded to the nearest, over that with each other choice."""
    gains = record.figures["gain"]
    choices = list(dict.fromkeys(choice for known in gains.values() for choice in known))
    rows = [(name, *(times(known.get(choice)) for choice in choices)) for name, known in gains.items()]
    return (
        "KL on certification rows with the nearest weights and bias corrections, over that of each choice: "
        "a gain is above one.\n\n" + table(("plan", *choices), rows)
    )


def int8_tables(record: Record) -> str:
    """Loss, bytes and CPU time of FP32 engines whose tables are in INT8."""
    rows = []
    for model, held in record.figures.items():
        before, after = held["table_bytes"]
        speeds = (ratio_and_range(value) for key, value in held.items() if key.startswith("time_over"))
        change = f"{number(held['delta_percent'])} ± {number(held['half_width_percent'])} %"
        rows.append((model, change, f"{after:,} of {before:,}", *speeds))
    sizes = [key.rpartition("_")[2] for key in held if key.startswith("time_over")]
    columns = ("model", "ΔNE", "bytes of tables", *(f"time at batch {size}" for size in sizes))
    return (
        "Tables alone in INT8, a scale for each row: bytes beside FP32's, and CPU time of a call over "
        "FP32's (median, and range of the rounds).\n\n" + table(columns, rows)
    )


def shared_users(record: Record) -> str:
    """Speed of the request form, by the share of FLOPs that users alone decide."""
    rows = [
        (
            model,
            f"{held['shared_inputs']} of {held['inputs']}",
            percent(held["share_of_flops"]),
            ratio_and_range(held["times_faster"]),
            f"{held['largest_change']:.1e}",
        )
        for model, held in record.figures.items()
    ]
    columns = ("model", "shared inputs", "FLOPs of layers on users", "times faster", "largest change")
    users, candidates = (record.settings[name] for name in ("users", "candidates"))
    return (
        f"Requests of {users} users with {candidates} candidates each on one thread of a CPU, FP32: CPU time "
        "of a call with a row for each candidate, over that of the request form (median, and range of the "
        "rounds).\n\n" + table(columns, rows)
    )


def ratio_and_range(values: list[float]) -> str:
    """A median with the smallest and the largest."""
    middle, low, high = map(number, values)
    return f"{middle} ({low} to {high})"


def additivity(record: Record) -> str:
    """Predicted over measured, and the order of sites."""
    rows = []
    for model, found in record.figures.items():
        for plan, held in found["plans"].items():
            over = held["predicted_over_measured"]
            rows.append(
                (
                    f"{model}, {plan}",
                    over["energy"]["calibration"],
                    over["kl"]["calibration"],
                    interval(held["delta_ne_percent"]),
                    f"{number(held['kl_percent'])} %",
                    held["correlation_of_parts"]["largest"],
                )
            )
    head = (
        "plan",
        "energy, predicted over measured",
        "KL, likewise",
        "ΔNE",
        "KL",
        "largest correlation of parts",
    )
    orders = []
    for model, found in record.figures.items():
        order = found["order"]["sites"]
        ceiling = order["ceiling_of_delta_ne"]["another draw"]
        orders.append(
            (
                model,
                number(order["sites"]),
                order["kl_with_kl"],
                order["kl_with_delta_ne"],
                order["loss_change_with_delta_ne"],
                f"{number(ceiling['median'])} ({number(ceiling['from'])} to {number(ceiling['to'])})",
            )
        )
    order_head = (
        "model",
        "sites",
        "KL with KL of other rows",
        "KL with ΔNE",
        "loss change with ΔNE",
        "ceiling that noise puts on it",
    )
    return "\n\n".join(
        (
            "Joint effect of a plan, on certification rows, against the sum of its parts on "
            "calibration rows:",
            table(head, rows),
            "Rank correlation over sites, calibration rows against certification rows:",
            table(order_head, orders),
        )
    )


def coverage(record: Record) -> str:
    """Coverage at a fixed number of rows and at stopping times."""
    fixed = [
        (f"{model}, {part}", *(percent(held[name]) for name in ("mean", "min", "max")))
        for model, found in record.figures.items()
        for part, held in found["fixed"].items()
    ]
    stopping = []
    for model, found in record.figures.items():
        for arrival, held in found["stopping"].items():
            for threshold, seen in held["thresholds_over_value"].items():
                sequence, plain = (
                    seen["coverage_of_the_confidence_sequence"],
                    seen["coverage_of_the_fixed_interval"],
                )
                stopping.append(
                    (
                        f"{model}, {arrival}",
                        threshold,
                        f"{percent(sequence['min'])} to {percent(sequence['max'])}",
                        f"{percent(plain['min'])} to {percent(plain['max'])}",
                        percent(seen["wrong"]["max"]),
                        seen["median_rows"],
                    )
                )
    certified = [
        (f"{model}, {name}", percent(share))
        for model, found in record.figures.items()
        for name, share in found.get("certificates", {}).items()
    ]
    head = (
        "model, order of arrival",
        "threshold over the value",
        "sequence covers",
        "fixed interval covers",
        "most wrong decisions",
        "rows, median",
    )
    return "\n\n".join(
        (
            f"Over {number(record.settings['resamples'])} resamplings, sites taken together:",
            table(("model, term", "coverage, mean", "lowest site", "highest site"), fixed),
            *(("At the stopping time:", table(head, stopping)) if stopping else ()),
            *(
                ("Intervals of certification:", table(("", "share of samples"), certified))
                if certified
                else ()
            ),
        )
    )


def zoo_shares(record: Record) -> str:
    """A row for each plan: share in eight bits, loss and KL on certification, the KL that was predicted."""
    rows = []
    for model, found in record.figures.items():
        for plan, held in found["plans"].items():
            for output, seen in held.get("certification", {"outputs": {}})["outputs"].items():
                if plan == "fp32":
                    continue
                delta_ne, kl = (interval([100 * end for end in seen[part]]) for part in ("delta_ne", "kl"))
                share = held["share"]
                shares = percent(share), percent(share * found["able_flops"] / found["all_flops"])
                sites = f"{held['fp8_sites']}, {held['int8_sites']}"
                ratio = number(held["predicted_kl"][output] / seen["kl"][0])
                rows.append((model, plan, *shares, sites, delta_ne, kl, ratio, seen["status"]))
    shares = "of the FP8-able FLOPs", "of all products"
    head = ("model", "plan", *shares, "sites in FP8, INT8", "ΔNE, %", "KL, %", "predicted over it", "budget")
    return table(head, rows)


def tails(record: Record) -> str:
    """One row for each tail, sizes and number of groups: misses, and the bounds of KL compared."""
    rows = [
        (
            name,
            number(cell["truth_above_upper_end_percent"]["delta_ne"]),
            *(number(cell["bounds_of_kl"][bound]["misses_percent"]) for bound in _BOUNDS),
            number(cell["truth_above_upper_end_percent"]["kl"]),
            number(cell["upper_end_of_kl_over_truth"]),
            "yes" if cell["can_be_said"] else "no",
        )
        for name, cell in record.figures["cells"].items()
    ]
    head = (
        "tail, sizes of groups, groups",
        "ΔNE, %",
        *(f"KL by {bound}, %" for bound in _BOUNDS),
        "KL as taken, %",
        "its upper end over the truth",
        "can be within",
    )
    power = record.figures["power"]
    said = (
        "Samples whose upper end lies below the truth. Within is said in "
        f"{number(power['within_percent'])} % where the change is half the budget and the interval a quarter "
        "of it wide."
    )
    return f"{said}\n\n{table(head, rows)}"


_BOUNDS = ("student", "hall", "one more", "bernstein")
