"""Accuracy of plans on MovieLens 1M: the whole pipeline over trained models of the zoo.

Each model runs as it was exported, with what a run does by default (mods, smoothing, corrections), and with
the loudest channels of unsafe sites split off as well.

Needs the files under ``$LOKA_ONNX_DATA`` (research use; nothing derived from them is kept but figures)::

    python -m benchmarks.pipeline.movielens1m --models dcnv2 wukong
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from benchmarks.pipeline.training import GROUP, TRAINING, arguments_of, trained
from benchmarks.recording import write_record
from loka_onnx.config import build_run_config
from loka_onnx.core.evaluation import OutputEvaluation
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.data.parquet import write_table
from loka_onnx.pipeline.run import RunOptions, RunResult, run
from loka_onnx.transforms.sequence import DEFAULT_MODS
from loka_zoo.demo import BUILDER
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

WITHOUT_MODS = {
    "mods": {"skip": [mod.name for mod in DEFAULT_MODS], "smoothing": False, "split_channels": False},
    "plan": {"corrections": False},
}
"""Sections of a run file that leave the exported model as it is."""


MOST_ROWS = {"interformer": 60_000}
"""Rows of each split of a model that takes many times as long as the others."""
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "as exported": WITHOUT_MODS,
    "with mods": {"mods": {"split_channels": False}},
    "with mods and split channels": {},
}


def run_pipeline(
    model: str,
    data: PreparedData,
    directory: Path,
    budget: float,
    name: str,
    sections: Mapping[str, Mapping[str, Any]],
) -> RunResult:
    """Every stage over one model, engines for the CPU only.

    Args:
        model: Name in the zoo.
        data: MovieLens 1M.
        directory: Of checkpoints and runs.
        budget: Largest accepted loss.
        name: Of the run's directory.
        sections: Of the run file, beside those that say what is run.
    """
    checkpoint = trained(model, data, directory)
    # The run file names whole files; selection is a part of train.parquet.
    files = {
        split: file_of(data, split, directory, MOST_ROWS.get(model))
        for split in ("calibration", "selection", "certification")
    }
    config = build_run_config(
        {
            "name": model,
            "model": {"torch": BUILDER, "checkpoint": checkpoint, "arguments": arguments_of(model, data)},
            "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": budget}],
            "data": {
                **files,
                "group": GROUP,
                "inputs": {b.input: list(b.columns) for b in data.bindings},
            },
            "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
            **sections,
            "plan": {"plans": ["fp32", "fp8-all", "fp8-safe"], **sections.get("plan", {})},
            "output": directory / name,
        },
        directory,
    )
    show = lambda stage, outcome: outcome and print(f"  {stage} {outcome.seconds:.1f} s", flush=True)  # noqa: E731
    return run(config, RunOptions(resume=True, on_stage=show))


def file_of(data: PreparedData, split: str, directory: Path, most: int | None) -> Path:
    """The file of a split, or of its first rows; a part of a file is written to one of its own."""
    part = data.splits[split]
    if part.rows is None and most is None:
        return part.path
    target = directory / (f"{split}.parquet" if most is None else f"{split}-{most}.parquet")
    if not target.exists():
        import pyarrow.parquet as pq

        table = pq.read_table(part.path)
        start, stop = (part.rows.start or 0, part.rows.stop) if part.rows else (0, None)
        rows = table.slice(start, (table.num_rows if stop is None else stop) - start).slice(0, most)
        write_table(rows, target)
    return target


def figures(result: RunResult) -> dict[str, Any]:
    """What the table shows, per plan and split."""
    report = result.report
    assert report is not None
    found: dict[str, Any] = {
        "nodes": {name: _nodes(result.directory / f"model/{name}.onnx") for name in ("exported", "modified")},
        "rewrites": {r.transform: len(r.applied) for r in report.rewrites["mods"].records if r.applied},
        "fp8_able_flops_per_example": report.modified.fp8_able_flops,
        "linear_sites": len(report.modified.linear_sites),
        "error_rows": report.profile.error_rows,
        "sensitivity": {
            "rows": report.profile.sampling.rows,
            "looks": report.profile.sampling.looks,
            "undecided": report.profile.sampling.undecided,
        },
        "verdicts": _verdicts(report.plans.plan("fp8-safe")),
        "calibration_seconds": {name: total.value for name, total in report.profile.seconds.items()},
        "plans": {},
    }
    for evaluation in report.evaluations.evaluations:
        plan = report.plan(evaluation.plan)
        name = "reference" if evaluation.engine == "reference" else evaluation.plan
        entry = found["plans"].setdefault(name, {})
        if plan is not None:
            entry |= {"fp8_sites": len(plan.fp8_sites), "fp8_share_of_flops": plan.fp8_share}
            entry["predicted_kl_percent"] = {k: 100 * v for k, v in plan.predicted_kl.items()}
        if evaluation.outputs:
            entry[evaluation.split] = _output(evaluation.outputs[0]) | {"rows": evaluation.rows}
    return found


def _nodes(path: Path) -> int:
    return len(onnx.load(os.fspath(path), load_external_data=False).graph.node)


def _verdicts(plan: PrecisionPlan) -> dict[str, list[str]]:
    """Names of the sites by verdict."""
    found: dict[str, list[str]] = {}
    for decision in plan.decisions:
        found.setdefault(str(decision.verdict), []).append(decision.site)
    return found


def _output(output: OutputEvaluation) -> dict[str, Any]:
    entry: dict[str, Any] = {"ne": output.metrics.normalized_entropy, "auc": output.metrics.auc}
    if output.difference is not None:
        for name in ("delta_ne", "kl", "labelled"):
            interval = getattr(output.difference, name)
            entry[f"{name}_percent"] = [100 * v for v in (interval.value, interval.lower, interval.upper)]
        entry["logit_rmse"] = output.difference.delta_rmse
    return entry


def _print_plans(title: str, plans: Mapping[str, Mapping[str, Any]]) -> None:
    for plan, entry in plans.items():
        split = entry.get("certification")
        if split:
            delta = split.get("delta_ne_percent", [0, 0, 0])
            print(
                f"{title} {plan}: NE {split['ne']:.5f} AUC {split['auc']:.5f} ΔNE {delta[0]:+.4f} "
                f"[{delta[1]:+.4f}, {delta[2]:+.4f}] % sites {entry.get('fp8_sites', 0)} "
                f"share {100 * entry.get('fp8_share_of_flops', 0):.1f} %",
                flush=True,
            )


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=sorted(TRAINING), choices=sorted(TRAINING))
    parser.add_argument("--directory", type=Path, default=Path("runs/bench-movielens1m"))
    parser.add_argument("--budget", type=float, default=0.0002)
    options = parser.parse_args()
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    data = movielens_1m()
    found = {}
    for model in options.models:
        found[model] = {}
        for variant, sections in VARIANTS.items():
            name = f"run-{model}-{variant.replace(' ', '-')}"
            result = run_pipeline(model, data, directory, options.budget, name, sections)
            found[model][variant] = figures(result)
            _print_plans(f"{model} {variant}", found[model][variant]["plans"])
    settings = {
        "budget": options.budget,
        "group": GROUP,
        "training": {m: vars(TRAINING[m]) for m in options.models},
    }
    print(write_record("movielens1m", found, settings))


if __name__ == "__main__":
    main()
