"""The peers table: the same trained models and rows through this project and through other tools.

One command makes the environments that are missing (``--environments``), exports the models, runs every tool
in a process of its own, judges what it wrote and writes the record. The table is made of the record::

    python -m benchmarks.peers.compare --checkpoints runs/bench-movielens1m --work runs/bench-peers
    python -m benchmarks.peers.compare --work runs/bench-peers --merge device.json
    python -m benchmarks.peers.compare --table

Times on a GPU come from one run there (`on_device`)::

    python -m benchmarks.peers.on_device pack runs/bench-peers/models packed
    python -m benchmarks.peers.on_device unpack packed/parts models                 # there
    python -m benchmarks.peers.on_device time --models models --target nvidia-h100 --out results

A tool that fails has its row, with its message and the end of its log. ``--models`` measures these, and
takes the figures of others from ``--work``; ``--variants`` does so with the rows of a model. The graphs stay
under ``WORK/models/<model>/<variant>/``, with 2,048 rows of inputs beside them, for `on_device`, whose times
``--merge`` takes in.

Needs the files under ``$LOKA_ONNX_DATA`` (research use; nothing derived from them is kept but figures).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from benchmarks.peers.environments import EnvironmentFailed, python_of
from benchmarks.peers.judging import Clock, Judge, against_reference_evaluator, latencies
from benchmarks.peers.peers_record import CTR, DEVICE, RECORD, WEIGHTS, ZOO, Entry, Settings, write
from benchmarks.peers.processes import ChildLimits, ChildResult, run_job, tail_of
from benchmarks.peers.rounding import narrow_types
from benchmarks.peers.sites import quantized_sites
from benchmarks.peers.table import markdown
from benchmarks.peers.variants import (
    EXPORTED,
    EXPORTED_LABEL,
    NARROW_LABELS,
    NONE,
    OWN,
    VARIANTS,
    Variant,
    chosen,
)
from benchmarks.pipeline.movielens1m import MOST_ROWS, file_of
from benchmarks.pipeline.site_effects import OUTPUT, exported, output_of, split_of
from benchmarks.recording import BESIDE, RECORDS
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.errors import LokaError
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

CALIBRATION_ROWS = 16_384
BATCH = 512
"""Rows of a calibration batch."""
DEVICE_ROWS = 2048
KNOWN = frozenset({"", "ai.onnx", "com.microsoft"})
"""Domains of operators that ONNX Runtime comes with."""
LOG = "log.txt"

Arrays = dict[str, npt.NDArray[Any]]


class Comparison:
    """Every tool over one model.

    Args:
        model: Its name.
        data: MovieLens 1M.
        checkpoints: Of trained models.
        work: For everything that is written.
        environments: Cache of the tools' environments.
        settings: What is asked for.
    """

    def __init__(
        self,
        model: str,
        data: PreparedData,
        checkpoints: Path,
        work: Path,
        environments: Path,
        settings: Settings,
    ) -> None:
        self.model, self.data, self.settings = model, data, settings
        self._checkpoints, self._environments = checkpoints, environments
        self._work = work
        self._home = work / "models" / model
        self._scratch = work / "scratch" / model
        self._home.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)

    def figures(self, variants: tuple[Variant, ...], before: Entry | None) -> Entry:
        """Everything that the record holds of the model.

        Args:
            variants: What is measured.
            before: Figures of the model from an earlier command, whose other rows stay; latencies are taken
                again, of all rows in turns.
        """
        model = self._exported
        told = {"date": datetime.now(UTC).date().isoformat(), "meanwhile": os.environ.get(BESIDE, "")}
        again = {name for v in variants for name in (v.name, v.narrow)}
        entries: dict[str, Entry] = {}
        if before is None:
            entries[EXPORTED] = self._as_exported()
        else:
            entries = {name: entry for name, entry in before["variants"].items() if name not in again}
        for variant in variants:
            entries[variant.name] = self._run(variant)
            if variant.narrow and "failure" not in entries[variant.name]:
                entries[variant.narrow] = self._narrow(variant, entries[variant.name])
            for name in {variant.name, variant.narrow} & entries.keys() if before else ():
                entries[name]["measured_later"] = told
            say(self.model, variant, entries[variant.name])
        graphs = {name: self._graph(name) for name, entry in entries.items() if "failure" not in entry}
        for name, found in latencies(graphs, self._rows, self.settings.clock).items():
            entries[name]["cpu"] = found
        return {
            **({key: before[key] for key in told} if before else told),
            "latencies": told,
            "certification_rows": self._judge.rows,
            "linear_sites": len(model.linear_sites),
            "products": sum(site.n > 0 for site in model.sites),
            "fp8_able_flops_per_example": model.fp8_able_flops,
            "reference": self._judge.reference(),
            "variants": entries,
            "settings": asdict(self.settings),
        }

    # What every tool is given --------------------------------------------------------------------------

    @cached_property
    def _exported(self) -> ModelArtifact:
        if self.model in ZOO:
            model = exported(self.model, self.data, self._checkpoints, self._scratch)
        else:
            # Their library is imported where they are asked for.
            ctr = importlib.import_module("benchmarks.peers.ctr_models")
            model = ctr.exported_ctr(self.model, self.data, self._checkpoints, self._scratch)
        serde.write(model, self._scratch / "artifact.json")
        np.savez(self._scratch / "rows.npz", **self._read("calibration", self.settings.calibration_rows))  # type: ignore[arg-type]
        np.savez_compressed(self._home / "rows.npz", **self._rows)  # type: ignore[arg-type]
        return model

    @cached_property
    def _rows(self) -> Arrays:
        """What latencies are measured on."""
        return self._read("selection", DEVICE_ROWS)

    def _read(self, split: str, rows: int) -> Arrays:
        batches = list(self.data.open(split).batches(4096, stop=rows))
        return {name: np.concatenate([b.inputs[name] for b in batches]) for name in batches[0].inputs}

    @cached_property
    def _judge(self) -> Judge:
        return Judge(
            self._exported.path,
            split_of(self.data, "certification"),
            output_of(self.data, self.settings.budget),
            self.settings.most_rows.get(self.model),
            self._scratch,
        )

    def _files(self) -> dict[str, str]:
        """The splits as this project's run file names them; the others take no more than calibration rows."""
        most = MOST_ROWS.get(self.model)
        wanted = {"calibration": self.settings.calibration_rows, "selection": most, "certification": most}
        return {split: str(file_of(self.data, split, self._work, rows)) for split, rows in wanted.items()}

    # The rows of the table -----------------------------------------------------------------------------

    def _as_exported(self) -> Entry:
        target = self._graph(EXPORTED)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._exported.path, target)
        entry = {"label": EXPORTED_LABEL, "peer": NONE, "call": "as PyTorch's exporter wrote it"}
        return self._judged(EXPORTED, entry, {})

    def _run(self, variant: Variant) -> Entry:
        """One tool: run, and what it wrote looked at."""
        entry: Entry = {"label": variant.label, "peer": variant.peer, "call": variant.call}
        target = self._graph(variant.name)
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir(parents=True)
        try:
            python = None if variant.peer in {OWN, NONE} else python_of(variant.peer, self._environments)
        except EnvironmentFailed as error:
            return entry | {"failure": str(error)}
        done = run_job(
            variant.command(python),
            self._job(variant, target),
            target.with_name(LOG),
            self.settings.limits,
        )
        entry |= _costs(done)
        if done.answer is None:
            return entry | {"failure": done.failure, "log_tail": done.log_tail}
        if not target.is_file():
            failure = "it ended without an error and wrote no graph"
            return entry | {"failure": failure, "log_tail": tail_of(target.with_name(LOG))}
        return self._judged(variant.name, entry, done.answer)

    def _narrow(self, variant: Variant, wide: Entry) -> Entry:
        """The same plan in the form that a GPU gets; nothing was run for it."""
        same = {key: wide[key] for key in ("peer", "call", "versions", "calibration_seconds")}
        same |= {key: wide[key] for key in ("seconds", "cpu_seconds")}
        same |= {key: wide[key] for key in ("peak_anonymous_mib", "imported_anonymous_mib", "wall_seconds")}
        answer = {"plan": wide.get("plan"), "origins": wide.get("origins")}
        return self._judged(variant.narrow, {"label": NARROW_LABELS[variant.narrow], **same}, answer)

    def _job(self, variant: Variant, target: Path) -> dict[str, Any]:
        model = self._exported
        job: dict[str, Any] = {
            "model": str(model.path),
            "artifact": str(self._scratch / "artifact.json"),
            "data": str(self._scratch / "rows.npz"),
            "rows": self.settings.calibration_rows,
            "batch": self.settings.batch,
            "output": str(target),
            "options": variant.options_for(model, self.settings.batch),
            **variant.job,
        }
        if variant.peer == OWN:
            job |= {"budget": self.settings.budget, "files": self._files(), "directory": str(self._scratch)}
            job["narrow"] = str(self._graph(variant.narrow))
        return job

    def _judged(self, name: str, entry: Entry, answer: Mapping[str, Any]) -> Entry:
        """Sites, and accuracy on certification, of a graph that is there."""
        path = self._graph(name)
        entry |= {key: answer[key] for key in ("plan", "origins", "stage_seconds") if answer.get(key)}
        for key in ("seconds", "cpu_seconds", "calibration_seconds"):
            if key in answer:
                entry[key] = answer[key]
        try:
            model = onnx.load(str(path))
            foreign = sorted({f"{n.domain}:{n.op_type}" for n in model.graph.node if n.domain not in KNOWN})
            if foreign:
                reason = f"it needs {', '.join(foreign)}, whose library is not loaded here"
                return entry | {"failure": reason, "not_judged": True}
            entry["sites"] = asdict(quantized_sites(model, self._exported, answer.get("origins")))
            if answer.get("origins"):
                # A mod may leave a part of a site behind in high precision: the plan has counted that.
                entry["sites"]["share"] = answer["plan"]["fp8_share_of_flops"]
            entry["precision"] = _precision(model)
            entry["accuracy"] = self._judge.accuracy(path)
            entry["against_reference_evaluator"] = against_reference_evaluator(
                path, self._rows, OUTPUT, self._scratch
            )
        # Whatever a graph makes ONNX Runtime or the checks raise is its row in the table.
        except Exception as error:
            reason = f"{error.what}: {error.evidence}" if isinstance(error, LokaError) else str(error)
            return entry | {
                "failure": f"the graph that it wrote: {reason}",
                "log_tail": tail_of(path.with_name(LOG)),
            }
        return entry

    def _graph(self, variant: str) -> Path:
        return self._home / variant / WEIGHTS


def _costs(done: ChildResult) -> Entry:
    return {
        "versions": done.versions,
        "wall_seconds": done.wall_seconds,
        "peak_anonymous_mib": done.peak_anonymous_mib,
        "imported_anonymous_mib": done.imported_anonymous_mib,
    }


def _precision(model: onnx.ModelProto) -> str:
    """Type of what is not FP8."""
    names = {int(onnx.TensorProto.BFLOAT16): "bf16", int(onnx.TensorProto.FLOAT16): "fp16"}
    return "+".join(sorted(names[kind] for kind in narrow_types(model))) or "fp32"


def say(model: str, variant: Variant, entry: Entry) -> None:
    """One line of progress."""
    if "failure" in entry:
        print(f"{model} {variant.name}: FAILED {entry['failure'][:200]}", flush=True)
        return
    delta, sites = entry["accuracy"]["delta_ne_percent"], entry["sites"]
    print(
        f"{model} {variant.name}: {len(sites['sites'])}/{sites['linear_sites']} sites, "
        f"{100 * sites['share']:.0f} % of FLOPs, ΔNE {delta[0]:+.4f} [{delta[1]:+.4f}, {delta[2]:+.4f}] %, "
        f"{entry['seconds']:.1f} s, {entry['peak_anonymous_mib']:.0f} MiB",
        flush=True,
    )


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[*ZOO, *CTR], choices=[*ZOO, *CTR])
    parser.add_argument("--variants", nargs="+", default=[], help="of " + ", ".join(v.name for v in VARIANTS))
    parser.add_argument("--checkpoints", type=Path, default=Path("runs/bench-movielens1m"))
    parser.add_argument("--ctr-checkpoints", type=Path, help="of the CTR models; with the others by default")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-peers"))
    parser.add_argument("--environments", type=Path, default=Path(".cache/peers"))
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--budget", type=float, default=0.0002)
    parser.add_argument("--calibration-rows", type=int, default=CALIBRATION_ROWS)
    parser.add_argument("--rows", type=int, help="of certification, for a rehearsal")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of one call of a tool")
    parser.add_argument("--memory-mib", type=float, default=12_000.0, help="limit of a tool's process")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        help="take in the times that `on_device` wrote, those of later runs after the first; measures "
        "nothing else",
    )
    parser.add_argument("--table", action="store_true", help="print the record as Markdown; measures nothing")
    return parser


def _figures_of(path: Path) -> Entry | None:
    """What an earlier command left of a model; None where it left nothing."""
    if not path.is_file():
        return None
    figures: Entry = json.loads(path.read_text(encoding="utf-8"))
    return figures


def main() -> None:
    """Measure and record, merge, or print."""
    options = arguments().parse_args()
    if options.table:
        path = (options.out or RECORDS) / f"{RECORD}.json"
        print(markdown(json.loads(path.read_text(encoding="utf-8"))))
        return
    most = dict(MOST_ROWS) if options.rows is None else dict.fromkeys((*ZOO, *CTR), options.rows)
    settings = Settings(
        options.budget,
        options.calibration_rows,
        BATCH,
        most,
        ChildLimits(options.seconds, options.memory_mib),
        Clock(),
    )
    work, environments = options.work.absolute(), options.environments.absolute()
    (work / "figures").mkdir(parents=True, exist_ok=True)
    if options.merge:
        given = [path.read_bytes() for path in options.merge]
        for path in work.glob(DEVICE):
            path.unlink()
        for number, document in enumerate(given):
            (work / DEVICE.replace("*", str(number))).write_bytes(document)
        print(write(work, environments, settings, options.out))
        return
    variants, data = chosen(options.variants), movielens_1m()
    failed = []
    for model in options.models:
        place = options.checkpoints
        if model in CTR and options.ctr_checkpoints is not None:
            place = options.ctr_checkpoints
        path = work / "figures" / f"{model}.json"
        before = _figures_of(path) if options.variants else None
        if not options.variants:
            path.unlink(missing_ok=True)
        try:
            comparison = Comparison(model, data, place.absolute(), work, environments, settings)
            serde.write_text(json.dumps(comparison.figures(variants, before)) + "\n", path)
        # A model that cannot be exported or judged must not cost the others theirs.
        except Exception:
            traceback.print_exc()
            failed.append(model)
            continue
        print(write(work, environments, settings, options.out), flush=True)
    if failed:
        sys.exit(f"no figures of {', '.join(failed)}: see above")


if __name__ == "__main__":
    main()
