"""Speed and accuracy of the same engine files: production sizes, trained on MovieLens 1M, on a GPU.

`speed` times engines of random weights. Here the dense part is of the same size and trained (`projected`
makes the tokens that it wants of the features there are). Sites are calibrated and plans made as a run makes
them (`calibration`, `planning`). Every engine then answers the rows of selection and certification, and is
held against the FP32 model, paired by user; the same files are timed in turns (`judging` has the choice)::

    python -m benchmarks.engines.trained --case wukong-large --data DIR --out OUT

DIR holds the data's three Parquet files. Nothing derived from them is kept but figures. Where one command may
not take that long, the first has ``--prepare --directory WORK``, the second ``--directory WORK``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.engines.cases import CASES, Case
from benchmarks.engines.judging import BF16, BLANKET, Judge, accuracy, choose, is_inside, ratios
from benchmarks.engines.plans import TODAY, Engine, cut, high_precision_plans, inputs_of
from benchmarks.engines.prediction import held_against
from benchmarks.engines.preparing import Prepared, opened_data, prepared, trained_model
from benchmarks.engines.projected import CLASSES
from benchmarks.engines.speed import attempt
from benchmarks.engines.timing import (
    Built,
    alone,
    built_or_not,
    device_clock,
    device_facts,
    floors,
    kernel_times,
    limits,
    summary,
    timed_in_turns,
)
from benchmarks.pipeline.training import GROUP
from benchmarks.recording import write_record
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.digests import digest_file, digest_json
from loka_onnx.engines.inductor.backend import FUSE, STATIC
from loka_onnx.engines.registry import get_backend
from loka_onnx.planning.policy import FAST

JUDGED_BATCH = 2048
NAMES = {
    "bf16": BF16,
    "fp8-all": BLANKET,
    "fp8-safe": "safe sites",
    "fp8-outside": "safe sites outside of fused kernels",
    "fp8-half": "large sites outside of fused kernels for half of the budget",
    "fp8-pays": "safe large sites outside of fused kernels",
    FAST: "sites by kernel times",
}

BESIDE = frozenset({"case", "data", "directory", "jobs", "out", "prepare"})
"""Options that change no figure, or stand elsewhere in the record."""
LATER = frozenset({"batches", "rounds", "static", "target", "today"})
"""Options that what was trained and planned does not depend on, but for `batches` where they are given."""


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    able = [name for name, case in CASES.items() if case.model in CLASSES and not case.towers]
    parser.add_argument("--case", choices=able, required=True)
    parser.add_argument("--data", type=Path, required=True, help="directory of the Parquet files")
    parser.add_argument("--target", default="nvidia-h100")
    parser.add_argument(
        "--timings", default="nvidia-h100", help="device whose kernel times plans are made by"
    )
    parser.add_argument("--budget", type=float, default=0.0002)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-4, 3e-4])
    parser.add_argument("--epochs", nargs="+", type=int, default=[2])
    parser.add_argument("--training-batch", type=int, default=2048)
    parser.add_argument("--rows", type=int, help="of each split, for a rehearsal; all where not given")
    parser.add_argument("--calibration-rows", type=int, help="of ranges and errors")
    parser.add_argument("--sensitivity-rows", type=int)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--today", nargs="+", default=["bf16", "fp16"], choices=["bf16", "fp16"])
    parser.add_argument("--split-channels", action="store_true")
    parser.add_argument("--batches", nargs="+", type=int, help="in place of those of the case")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--directory", type=Path, help="keeps what was trained and planned, to go on from")
    parser.add_argument("--prepare", action="store_true", help="with --directory: end when plans are made")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="builds at a time")
    parser.add_argument("--out", type=Path, help="directory of the record, and of the logs of builds")
    options = parser.parse_args()
    if options.out is not None:
        # What is copied there first must not fail when all the work is done.
        options.out.mkdir(parents=True, exist_ok=True)
    # Each build compiles kernels with as many processes as there are cores, if nobody says otherwise.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    asked_for = vars(options)
    settings = {name: value for name, value in asked_for.items() if name not in BESIDE}
    key = key_of(settings)
    with ExitStack() as stack:
        if options.directory is None:
            directory = Path(stack.enter_context(TemporaryDirectory()))
        else:
            # One directory for each set of options: nothing is gone on from under others.
            directory = options.directory.absolute() / f"{options.case}-{key[:8]}"
            directory.mkdir(parents=True, exist_ok=True)
        try:
            case = CASES[options.case]
            if options.batches:
                case = replace(case, batches=tuple(sorted(options.batches)))
            figures = measure(case, options, directory)
        finally:
            for log in directory.rglob("*.log") if options.out is not None else ():
                shutil.copyfile(log, options.out / f"trained-{options.case}-{log.parent.name}.log")
    if options.prepare:
        return
    settings |= {"device": device_facts(), "group": GROUP, "weights": "trained on MovieLens 1M"}
    print(write_record(f"trained-{options.case}", figures, settings, options.out))


def key_of(settings: Mapping[str, Any]) -> str:
    """Of what was trained and planned, by the options that it depends on."""
    asked = {name: value for name, value in settings.items() if name not in LATER}
    if settings["batches"]:
        # The plan by kernel times is of the batch sizes.
        asked["batches"] = sorted(settings["batches"])
    return digest_json(asked)


def measure(case: Case, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train, plan, build, judge and time one case."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)

    data = opened_data(options.data, directory, options.rows)
    shutil.rmtree(directory / "engines", ignore_errors=True)
    figures: dict[str, Any] = {}
    model = trained_model(case, data, options, directory, tell)
    figures["training"] = model.facts
    tell(f"trained and exported: {json.dumps(model.facts['chosen'])}, parity {model.facts['parity']:.1e}")
    batch = JUDGED_BATCH if JUDGED_BATCH in case.batches else max(case.batches)
    with alone(options.target):
        judge = Judge(data, model.spec, model.run, batch)
    figures["reference"] = judge.reference()
    tell(f"FP32: {json.dumps(figures['reference'])}")
    made_ready = prepared(model, data, case, options, directory, tell)
    figures["plans"] = made_ready.facts
    if options.prepare:
        return figures
    engines = engines_of(model.exported, made_ready, options, directory)
    rows = next(data.open("calibration").batches(max(case.batches))).inputs
    built = built_at_once(engines, case, rows, options, directory / "engines")
    for name, made in built.items():
        tell(f"{name}: {made.artifact.status} {made.artifact.detail[-800:]}")
    figures["engines"] = judged = {}
    for engine in engines:
        made = built[engine.name]
        judged[engine.name] = described(engine, made)
        with alone(options.target):
            # One that cannot be judged is never chosen, and the others go on.
            answers = attempt(engine.name, partial(judge.judge, engine, made)) or {}
        judged[engine.name] |= {split: accuracy(found) for split, found in answers.items()}
        tell(f"{engine.name}: {json.dumps(judged[engine.name].get('certification'))}")
    with alone(options.target):
        figures["limits"] = best = limits()
    figures["batches"] = {}
    for batch in case.batches:
        with alone(options.target):
            turns = partial(timed, engines, built, (rows, batch, options.rounds))
            found = attempt(f"batch {batch}", turns)
        if found is None:
            continue
        figures["batches"][str(batch)] = found = found | weighed(found, judged, options.budget)
        if found["chosen"] is not None:
            plan = next(engine for engine in engines if engine.name == found["chosen"])
            found["floors"] = floors(plan.variant, plan.plan, batch, best)
            found["fp8_share"] = plan.plan.fp8_share
        tell(f"batch {batch}: {found['chosen']} {json.dumps(found.get('ratios'))} {found.get('certified')}")
    if not figures["batches"]:
        raise RuntimeError("no batch size could be timed; see above")
    ours = [engine for engine in engines if not engine.name.startswith(TODAY)]
    measured = {
        int(batch): {name: each["median_us"] for name, each in found["times"].items()}
        for batch, found in figures["batches"].items()
    }
    figures["prediction"] = attempt("prediction", partial(held_against, ours, measured, options.timings))
    return figures


def weighed(
    found: Mapping[str, Any], judged: Mapping[str, Mapping[str, Any]], budget: float
) -> dict[str, Any]:
    """What is chosen of the engines that were timed, with its ratios to others that answered as they should.

    Args:
        found: As `timed` returns it.
        judged: Accuracy by engine and split, and the digest of its file.
        budget: Largest accepted relative loss.

    Raises:
        RuntimeError: Another file was timed than was judged.
    """
    for name, digest in found["sha256"].items():
        if digest != judged[name]["sha256"]:
            raise RuntimeError(f"{name}: the engine that was timed is not the one that was judged")
    # An engine whose answers could not be judged, as in FP16 that overflowed, is nobody's yardstick.
    medians = {
        name: each["median_us"]
        for name, each in found["times"].items()
        if np.isfinite(judged[name].get("selection", {}).get("ne", np.nan))
    }
    chosen = choose(medians, judged, budget)
    if chosen is None:
        return {"chosen": None}
    certified = is_inside(judged[chosen], "certification", budget)
    return {"chosen": chosen, "ratios": ratios(medians, chosen), "certified": certified}


def engines_of(
    exported: ModelArtifact,
    ours: Prepared,
    options: argparse.Namespace,
    directory: Path,
) -> list[Engine]:
    """What a user gets today, and ours."""
    fixed = (STATIC, int(options.static))
    plain = cut(exported, high_precision_plans(exported, options.today), directory / "plain")
    found = [
        Engine(f"{TODAY}, {plan.id}", plain, plan, options=((FUSE, 0), fixed))
        for plan in plain.source.plans.plans
    ]
    mine = cut(ours.model, ours.plans, directory / "ours")
    return found + [Engine(NAMES[plan.id], mine, plan, options=(fixed,)) for plan in mine.source.plans.plans]


def built_at_once(
    engines: Sequence[Engine],
    case: Case,
    rows: Mapping[str, npt.NDArray[Any]],
    options: argparse.Namespace,
    directory: Path,
) -> dict[str, Built]:
    """All engines by name."""
    work = partial(built_or_not, case=case, rows=rows, target=options.target, directory=directory)
    with ThreadPoolExecutor(options.jobs) as pool:
        return dict(zip((e.name for e in engines), pool.map(work, engines), strict=True))


def described(engine: Engine, made: Built) -> dict[str, Any]:
    """What an engine is, for the record."""
    artifact = made.artifact
    return {
        "status": str(artifact.status),
        "sha256": digest_file(made.directory / artifact.path) if artifact.path is not None else None,
        "fp8_share": engine.plan.fp8_share,
        "fp8_sites": list(engine.plan.fp8_sites),
        "predicted_kl_percent": {name: 100 * kl for name, kl in engine.plan.predicted_kl.items()},
        "fallbacks": [site.site for site in artifact.fallbacks],
        "build_seconds": artifact.build_seconds,
        "detail": artifact.detail[-400:],
    }


def timed(
    engines: Sequence[Engine],
    built: Mapping[str, Built],
    what: tuple[Mapping[str, npt.NDArray[Any]], int, int],
) -> dict[str, Any]:
    """All engines at one batch size, in turns; by name, with the digest of the file that was timed."""
    rows, batch, rounds = what
    runners, residents, digests = [], {}, {}
    for engine in engines:
        made = built[engine.name]
        if not made.artifact.was_run or made.artifact.path is None:
            continue
        file = made.directory / made.artifact.path
        digests[engine.name] = digest_file(file)
        runner = get_backend(engine.backend).open(made.artifact, file)
        runners.append(runner)
        residents[engine.name] = runner.resident(inputs_of(engine.variant, rows, batch))
    taken = timed_in_turns(residents, rounds, device_clock)
    kernels = {name: kernel_times(resident) for name, resident in residents.items()}
    for runner in runners:
        runner.close()
    times = {name: summary(values) for name, values in taken.items()}
    return {"times": times, "kernels": kernels, "sha256": digests}


if __name__ == "__main__":
    main()
