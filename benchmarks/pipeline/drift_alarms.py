"""Does `loka-onnx drift` alarm when it should, and only then? MovieLens 1M, trained models.

- **False alarms.** A profile of the calibration split, and fresh random samples of the certification split,
  which is of the same distribution. Once with the thresholds that a user has, and once by certainty alone,
  which shows the family-wise level itself, also at levels that are easier to tell from never. All samples
  share the one profile, and so its luck: further profiles, each of other random rows, are held against
  samples of the rows that are left.
- **Changes.** One numeric feature doubled, or silent (0), one at a time; every feature 0.5 % larger, which is
  certain on all rows and not worth an alarm.
- **What predicts ΔNE.** With each feature doubled: KL measured on live rows over the profile's, beside the
  growth of relative noise energy weighted by KL, over all products of the model.
- **Monitor.** CPU time of one call of `feed` and of one measured batch, over a plain pass of the same rows.

Only figures are kept. Needs the files under ``$LOKA_ONNX_DATA``::

    python -m benchmarks.pipeline.drift_alarms --models dcnv2 wukong
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.pipeline.site_effects import BATCH, OUTPUT, exported, output_of
from benchmarks.recording import write_record
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.site import SiteKind
from loka_onnx.data import Dataset, open_dataset
from loka_onnx.operations.drift.live import Baseline
from loka_onnx.operations.drift.measure import measure_drift
from loka_onnx.operations.drift.monitor import Monitor, MonitorOptions
from loka_onnx.operations.drift.report import DriftOptions, DriftReport
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

ROWS = 16_384
PROFILE_ROWS = 60_000
KL_ROWS = 512
BUDGET = 0.0002
REQUEST_ROWS = 256
LEVELS = (0.01, 0.05, 0.1, 0.2, 0.5)

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Bench:
    """One model, and where its data go."""

    artifact: ModelArtifact
    data: PreparedData
    scratch: Path
    threads: int

    def opened(self, columns: Columns) -> Dataset:
        """Rows as a data set."""
        path = self.scratch / "rows.parquet"
        pq.write_table(pa.table(columns), path)
        return open_dataset(path, self.data.bindings, (self.data.label,))

    def baseline(self, rows: Dataset) -> Baseline:
        """A profile of rows; every product is counted."""
        options = ProbeOptions(batch_size=BATCH, sensitivity_rows=ROWS, draws=1, threads=self.threads)
        spec = output_of(self.data, BUDGET)
        profile = calibrate(self.artifact, (spec,), rows, self.scratch, options)
        products = frozenset(s.name for s in self.artifact.sites if s.kind is not SiteKind.NORM)
        columns = {binding.input: binding.columns for binding in self.data.bindings}
        return Baseline(self.artifact, profile, (spec,), products, "every product", columns)

    def compare(self, baseline: Baseline, columns: Columns, kl_rows: int = KL_ROWS) -> DriftReport:
        """Live rows against a profile."""
        options = DriftOptions(threads=self.threads, kl_rows=kl_rows)
        return measure_drift(baseline, self.opened(columns), self.scratch, options)


def drawn(table: Columns, rows: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positions of random rows, none twice."""
    return random.choice(len(next(iter(table.values()))), rows, replace=False)


def taken(table: Columns, positions: npt.NDArray[Any]) -> Columns:
    """Some rows."""
    return {name: values[positions] for name, values in table.items()}


def false_alarms(bench: Bench, baseline: Baseline, table: Columns, samples: int, seed: int) -> Counter[str]:
    """How many of so many fresh samples alarm, and at which level anything is certain."""
    random, found = np.random.default_rng(seed), Counter[str]()
    for _ in range(samples):
        report = bench.compare(baseline, taken(table, drawn(table, ROWS, random)))
        assert report.is_judged
        certainty = min(tensor.smallest_adjusted for tensor in report.tensors)
        found["samples"] += 1
        found["tests"] += report.tests
        found["alarms"] += bool(report.alarms)
        found.update({f"by_certainty_alone_at_{level:g}": int(certainty <= level) for level in LEVELS})
    return found


def per_sample(found: Counter[str]) -> dict[str, int]:
    """With the mean number of tests."""
    return {**found, "tests": round(found["tests"] / found["samples"])}


def other_profiles(bench: Bench, table: Columns, profiles: int, samples: int) -> Counter[str]:
    """The same with profiles of random rows, each against samples of the others."""
    random, found = np.random.default_rng(1000), Counter[str]()
    for number in range(profiles):
        order = random.permutation(len(table[bench.data.label]))
        baseline = bench.baseline(bench.opened(taken(table, order[:PROFILE_ROWS])))
        rest = taken(table, order[PROFILE_ROWS:])
        found.update(false_alarms(bench, baseline, rest, samples, 2000 + number))
    return found


def changes(bench: Bench, baseline: Baseline, table: Columns) -> dict[str, Any]:
    """What is found when a feature doubles or falls silent, and when nothing much happens."""
    sample = taken(table, drawn(table, ROWS, np.random.default_rng(7)))
    found: dict[str, Any] = {}
    for name in bench.data.numeric:
        doubled = bench.compare(baseline, sample | {name: sample[name] * np.float32(2)}, ROWS)
        silent = bench.compare(baseline, sample | {name: np.zeros_like(sample[name])})
        found[name] = {
            "doubled": _found(doubled, name),
            "silent": _found(silent, name),
            "kl_ratio": doubled.outputs[0].live_kl / doubled.outputs[0].kl,
            "kl_ratio_by_noise": _by_noise(doubled),
        }
    slightly = table | {name: table[name] * np.float32(1.005) for name in bench.data.numeric}
    report = bench.compare(baseline, slightly)
    found["every feature × 1.005, all rows"] = {
        "rows": report.live_rows,
        "tensors_changed_for_certain": len(report.changed),
        "alarms": len(report.alarms),
    }
    return found


def _found(report: DriftReport, name: str) -> dict[str, Any]:
    return {
        "alarms": len(report.alarms),
        "names_the_feature": any(f"'{name}'" in alarm.sentence for alarm in report.alarms),
        "measures": sorted({str(alarm.measure) for alarm in report.alarms}),
    }


def _by_noise(report: DriftReport) -> float:
    """Growth of KL that the growth of each site's relative noise energy would mean."""
    sites = [site for site in report.sites if site.profile_noise]
    grown = sum(site.kl[OUTPUT] * site.live_noise / site.profile_noise for site in sites)
    return grown / sum(site.kl[OUTPUT] for site in sites)


def monitor_cost(bench: Bench, baseline: Baseline, table: Columns) -> dict[str, float]:
    """CPU time, medians."""
    rows = bench.opened(taken(table, np.arange(ROWS)))
    inputs = next(rows.batches(ROWS)).inputs
    calls = [
        {name: array[start : start + REQUEST_ROWS] for name, array in inputs.items()}
        for start in range(0, ROWS, REQUEST_ROWS)
    ]
    found: dict[str, float] = {}
    for rate in (0.01, 1.0):
        with Monitor(baseline, MonitorOptions(sample_rate=rate, pending=ROWS // BATCH, seed=0)) as monitor:
            times = [_cpu(lambda call=call: monitor.feed(call)) for call in calls]
            found[f"feed_us_of_{REQUEST_ROWS}_rows_at_{rate:g}"] = 1e6 * float(np.median(times))
            monitor.flush()
            tally = monitor.tally()
            if tally.batches:
                found["measured_batch_ms"] = 1e3 * tally.seconds / tally.batches
                found["text_ms"] = 1e3 * float(np.median([_cpu(monitor.text) for _ in range(9)]))
    session = OnnxSession(bench.artifact.path, SessionOptions(threads=1))
    batch = {name: array[:BATCH] for name, array in inputs.items()}
    found["plain_batch_ms"] = 1e3 * float(np.median([_cpu(lambda: session.run(batch)) for _ in range(30)]))
    found["measured_over_plain"] = found["measured_batch_ms"] / found["plain_batch_ms"]
    return found


def _cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(model: str, checkpoints: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    data = movielens_1m()
    names = [column for binding in data.bindings for column in binding.columns]
    table = {
        name: column.to_numpy()
        for name, column in zip(
            [*names, data.label],
            pq.read_table(data.splits["certification"].path, columns=[*names, data.label]).columns,
            strict=True,
        )
    }
    with TemporaryDirectory() as directory:
        scratch = Path(directory)
        artifact = exported(model, data, checkpoints, scratch)
        bench = Bench(artifact, data, scratch, options.threads)
        baseline = bench.baseline(data.open("calibration"))
        found: dict[str, Any] = {
            "profile_rows": baseline.profile.rows,
            "changes": changes(bench, baseline, table),
            "monitor_cost": monitor_cost(bench, baseline, table),
        }
        print(model, found, flush=True)
        found["false_alarms"] = per_sample(false_alarms(bench, baseline, table, options.samples, 1))
        print(model, found["false_alarms"], flush=True)
        each = options.samples // options.profiles // 2
        found[f"false_alarms_of_{options.profiles}_other_profiles"] = per_sample(
            other_profiles(bench, table, options.profiles, each)
        )
        print(model, found, flush=True)
        return found


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dcnv2", "wukong"])
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-movielens1m"))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--profiles", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    found = {model: measure(model, directory, options) for model in options.models}
    settings = {"rows": ROWS, "batch": BATCH, "budget": BUDGET, "family_wise": DriftOptions().family_wise}
    print(write_record("drift_alarms", found, settings | {"relevance": vars(DriftOptions().relevance)}))


if __name__ == "__main__":
    main()
