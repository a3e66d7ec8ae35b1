"""What calibration costs: time over a plain ONNX Runtime pass, and memory as the data grows.

The plain pass runs the exported model over the same batches with full optimization and as many threads, one
batch after the other as a user would; calibration runs a batch on each thread. The ratio over a plain pass in
such streams is given as well. All are timed in turns in one process, so that the ratio holds when the machine
drifts.

- **Probe**: ranges, then errors, of one recipe (E4M3FN, a scale for each tensor, amax), of the two that are
  measured by default, and of all there are (three formats, three scale rules, two granularities); over all
  rows, and until the errors are known to the precision that is the default. What that takes does not depend
  on how many rows there are, so one probe with stopping is timed on many rows, too; with ranges from all
  of them, and from a quarter (`calibration.range_rows`).
- **Sensitivity** of every site and group over all rows, and its part for one of them: each is one more pass
  of the switchable model. Moved scales are timed apart: their rows are capped.
- **Memory**: peak of anonymous memory of the whole of calibration in a process of its own, which got its
  model and its rows as files.

The rows are generated (`data.synthetic`): cost does not depend on their values, but where errors stop does::

    python -m benchmarks.pipeline.calibration_cost
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import apart, used
from benchmarks.recording import write_record
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions, Probe, scales_of
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.formats import FLOATS
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import (
    AMAX,
    MSE,
    PER_CHANNEL_WEIGHT,
    PER_TENSOR,
    Granularity,
    Recipe,
)
from loka_onnx.data import Dataset
from loka_onnx.export.torch_module import export_torch
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.sessions.runner import map_in_order
from loka_zoo import MODEL_NAMES, FeatureSpec, create
from loka_zoo.prepared import PreparedData
from loka_zoo.synthetic import LABEL, SyntheticOptions, prepare_synthetic

BATCH = 512
PRECISION = 0.02
SPEC = OutputSpec("logit", OutputKind.LOGIT, LABEL)
ONE = (PER_TENSOR,)
TWO = (PER_TENSOR, PER_CHANNEL_WEIGHT)
ALL = tuple(
    Recipe.of(format_, weight, rule)
    for format_, rule, weight in product(FLOATS, (AMAX, "percentile-99.99", MSE), Granularity)
)
RECIPES = {"one recipe": ONE, "two recipes": TWO, "all recipes": ALL}


@dataclass(frozen=True)
class Case:
    """A model and its rows.

    Attributes:
        artifact: A model of the zoo with random weights.
        prepared: Generated rows.
        threads: Batches at once, or threads of one operator in a plain pass.
    """

    artifact: ModelArtifact
    prepared: PreparedData
    threads: int

    @property
    def data(self) -> Dataset:
        """The rows to calibrate on."""
        return self.prepared.open("calibration")


def make_case(model: str, directory: Path, batches: int, threads: int) -> Case:
    """Export a model and generate rows."""
    data = prepare_synthetic(directory / "data", SyntheticOptions(rows=(64, batches * BATCH, 64, 64)))
    example = next(data.open("calibration").batches(64)).inputs
    module = create(model, FeatureSpec.of(data), "reference")
    return Case(export_torch(module, example, directory / "model.onnx", (SPEC,)), data, threads)


def plain_pass(case: Case) -> None:
    """What calibration is compared with: a session on all threads, one batch after the other."""
    session = OnnxSession(case.artifact.path, SessionOptions(threads=case.threads))
    for batch in case.data.batches(BATCH):
        session.run(batch.inputs)


def plain_streams(case: Case) -> None:
    """The same pass with as many batches at once as calibration runs."""
    session = OnnxSession(case.artifact.path, SessionOptions(threads=1))
    for _ in map_in_order(lambda batch: session.run(batch.inputs), case.data.batches(BATCH), case.threads):
        pass


def probe_pass(
    case: Case, recipes: tuple[Recipe, ...], precision: float | None = None, range_rows: int | None = None
) -> int:
    """Ranges, and the errors that follow from them; returns the rows that the errors were taken from."""
    options = PassOptions(recipes=recipes, batch_size=BATCH, error_precision=precision, range_rows=range_rows)
    with TemporaryDirectory() as scratch:
        probe = Probe(case.artifact, case.artifact.sites, case.data, options, LocalExecutor(case.threads))
        ranges = probe.ranges(Path(scratch))
        return probe.errors(Path(scratch), ranges, scales_of(ranges, recipes)).rows


def whole(case: Case) -> Profile:
    """All of calibration over all rows, one recipe."""
    options = ProbeOptions(recipes=ONE, batch_size=BATCH, error_precision=None, threads=case.threads)
    with TemporaryDirectory() as scratch:
        return calibrate(case.artifact, (SPEC,), case.data, Path(scratch), options)


Timed = Callable[[], dict[str, float]]
"""Runs something and returns seconds by name."""


def timed(name: str, run: Callable[[], object]) -> Timed:
    """The seconds that a call takes, under a name."""

    def measured() -> dict[str, float]:
        began = time.perf_counter()
        run()
        return {name: time.perf_counter() - began}

    return measured


def seconds_of_passes(case: Case) -> dict[str, float]:
    """Calibrate, and return the seconds of the passes that a probe does not have."""
    profile = whole(case)
    sensitivity = profile.seconds["sensitivity"].value
    return {
        "sensitivity": sensitivity,
        "sensitivity, one site": sensitivity / (len(profile.sites) + len(profile.groups)),
        "moved scales": profile.seconds["draws"].value,
    }


def plain_passes(case: Case) -> list[Timed]:
    """What others are compared with."""
    return [
        timed("plain", lambda: plain_pass(case)),
        timed("plain, in streams", lambda: plain_streams(case)),
    ]


def probe_passes(case: Case) -> list[Timed]:
    """Probes of more and more recipes, over all rows and with stopping."""
    found: list[Timed] = []
    for name, recipes in RECIPES.items():
        found.append(timed(f"probe, {name}", partial(probe_pass, case, recipes)))
        found.append(timed(f"probe, {name}, with stopping", partial(probe_pass, case, recipes, PRECISION)))
    return found


def time_in_turns(passes: Sequence[Timed], rounds: int) -> dict[str, list[float]]:
    """Seconds by name, round by round; a first round is not counted."""
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for run in passes:
            for name, value in run().items():
                if number:
                    seconds.setdefault(name, []).append(value)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Median and spread of each pass over another, round by round."""
    found = {}
    for name, values in seconds.items():
        if name.startswith("plain"):
            continue
        each = sorted(a / b for a, b in zip(values, seconds[base], strict=True))
        found[name] = {"median": statistics.median(each), "min": each[0], "max": each[-1]}
    return found


def anonymous_peak_mib(case: Case) -> float:
    """Largest growth of anonymous memory during the whole of calibration; for a process of its own."""
    return used(lambda: whole(case)).anonymous_peak_mib


def memory(model: str, batches: int, threads: int) -> float:
    """That of a fresh process, MiB."""
    with TemporaryDirectory() as directory:
        return apart(anonymous_peak_mib, make_case(model, Path(directory), batches, threads))


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ratios and memory of one model."""
    with TemporaryDirectory() as directory:
        case = make_case(model, Path(directory), options.batches, options.threads)
        stopped = {name: probe_pass(case, recipes, PRECISION) for name, recipes in RECIPES.items()}
        passes = [*plain_passes(case), *probe_passes(case), lambda: seconds_of_passes(case)]
        seconds = time_in_turns(passes, options.rounds)
    return {
        "sites": len(case.artifact.sites),
        "rows": options.batches * BATCH,
        "error_rows_with_stopping": stopped,
        "plain_seconds_median": statistics.median(seconds["plain"]),
        "ratio_over_plain": ratios(seconds, "plain"),
        "ratio_over_plain_in_streams": ratios(seconds, "plain, in streams"),
        "many_rows": many_rows(model, options),
        "anonymous_peak_mib": {str(n): memory(model, n, options.threads) for n in options.memory},
    }


def many_rows(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """The probe of one recipe where stopping matters: its errors take as many rows as of a small data set."""
    with TemporaryDirectory() as directory:
        case = make_case(model, Path(directory), options.many_batches, options.threads)
        stopped = probe_pass(case, ONE, PRECISION)
        few = options.many_batches * BATCH // 4
        probes = [
            timed("probe, one recipe, with stopping", lambda: probe_pass(case, ONE, PRECISION)),
            timed(
                "probe, one recipe, with stopping, ranges from a quarter",
                lambda: probe_pass(case, ONE, PRECISION, few),
            ),
        ]
        seconds = time_in_turns([*plain_passes(case), *probes], options.rounds)
    return {
        "rows": options.many_batches * BATCH,
        "error_rows_with_stopping": stopped,
        "ratio_over_plain": ratios(seconds, "plain"),
        "ratio_over_plain_in_streams": ratios(seconds, "plain, in streams"),
    }


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["dcnv2", "wukong"], choices=MODEL_NAMES)
    parser.add_argument("--batches", type=int, default=120, help="of the passes that are timed")
    parser.add_argument("--many-batches", type=int, default=1000, help="of the pass in which errors stop")
    parser.add_argument("--memory", nargs="*", type=int, default=[10, 2000], help="batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    figures = {model: measure(model, options) for model in options.models}
    print(json.dumps(figures, indent=1))
    settings = {
        "batch": BATCH,
        "rounds": options.rounds,
        "threads": options.threads,
        "error_precision": PRECISION,
        "recipes": {"two": [recipe.id for recipe in TWO], "all": len(ALL)},
    }
    print(write_record("calibration_cost", figures, settings))


if __name__ == "__main__":
    main()
