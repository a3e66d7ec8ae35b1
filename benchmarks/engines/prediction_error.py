"""Errors of predicted latencies, over the records of engines: of every plan that was predicted and measured.

A plan with FP8 is predicted from the time of the BF16 engine of the same model and from kernel times: those
that are shipped (`prediction`), and in runs of the whole product those of `tune` on that device (`zoo`)::

    python -m benchmarks.engines.prediction_error
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.recording import RECORDS, write_record

AIM = 0.1
"""Largest median of the relative errors that is aimed at."""


def errors_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """What was predicted, its plan, its batch size, and predicted over measured time less one."""
    figures, name = record["figures"], record["benchmark"]
    for batch, plans in (figures.get("prediction") or {}).get("batches", {}).items():
        for plan, found in plans.items():
            yield name, plan, batch, found["relative_error"]
    if name == "zoo-engines":
        for model, found in figures.items():
            for plan in found.get("predictions", {}).get("plans", ()):
                for batch, percent in plan["error_percent"].items():
                    yield f"{name}, {model}", plan["plan"], batch, percent / 100.0


def summary(errors: list[float]) -> dict[str, float]:
    """Median and upper quartile of their magnitudes, and the largest."""
    sizes = np.abs(errors)
    return {
        "plans and batch sizes": len(errors),
        "median": float(median(sizes)),
        "upper_quartile": float(np.quantile(sizes, 0.75)),
        "largest": float(sizes.max()),
        "median with its sign": float(median(errors)),
    }


def main() -> None:
    """Read the records and write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--out", type=Path, help="directory of the record")
    options = parser.parse_args()
    files = (*options.records.glob("speed-*.json"), *options.records.glob("trained-*.json"))
    documents = [json.loads(f.read_text("utf-8")) for f in (*files, options.records / "zoo-engines.json")]
    found = [each for document in documents for each in errors_of(document)]
    by_name: dict[str, list[float]] = {}
    for name, _, batch, error in found:
        by_name.setdefault(name, []).append(error)
        by_name.setdefault(f"batch {batch}", []).append(error)
    summaries = {"all": summary([error for *_, error in found])}
    summaries |= {name: summary(errors) for name, errors in sorted(by_name.items())}
    for name, of in summaries.items():
        print(
            f"{name:28} {of['plans and batch sizes']} median {of['median']:.3f}, at most {of['largest']:.3f}"
        )
    each = [dict(zip(("what", "plan", "batch", "error"), one, strict=True)) for one in found]
    figures = {"summaries": summaries, "each": each}
    print(write_record("prediction-error", figures, {"aim": AIM}, options.out))


if __name__ == "__main__":
    main()
