"""INT8 on the CPU: engines of finished runs beside ONNX Runtime's own quantizers and NNCF's.

Every graph is judged on the run's certification rows, against the exported FP32 model, and timed in turns
with all others of its model::

    loka-onnx run RUN.yaml --set plan.formats=[int8]
    python -m benchmarks.peers.cpu_engines DIRECTORY … --nncf TARGET

`DIRECTORY` is that of a run. Quantizers get its exported model and `CALIBRATION_ROWS` of its calibration
rows. ``--nncf`` is where ``pip install --target TARGET --no-deps nncf==3.4.*`` and what it needs were put;
without it, NNCF has no rows. Figures of runs that are not given stay in the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from benchmarks.peers.children.rows import Rows
from benchmarks.peers.judging import Clock, Judge, latencies
from benchmarks.recording import RECORDS, write_record
from loka_onnx.config import RunConfig, build_run_config
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.rows import bind_columns, open_splits

RECORD = "cpu_engines"
CALIBRATION_ROWS, SELECTION_ROWS, BATCH = 2048, 16_384, 256
NNCF_SECONDS = 150
BATCHES, THREADS, ROUNDS = (64, 256, 1024), (1, 2), 25
EXPORTED = "FP32, as exported"
STATIC = {
    "static, MinMax": CalibrationMethod.MinMax,
    "static, Percentile": CalibrationMethod.Percentile,
    "static, Entropy": CalibrationMethod.Entropy,
}
OWN = "LoKA-ONNX, "
BUDGET, MAX_KL = 0.0002, 0.001
"""Upper ends of ΔNE and of KL that every graph is held against, whatever the run's own; the second as a run
does it by default (`outputs[].max_kl`): a gain by luck is no accuracy."""
NNCF = {"NNCF, PTQ": None, "NNCF, accuracy control": BUDGET}
"""Largest accepted relative rise of NE; None for plain post-training quantization."""


class Run:
    """A finished run: its exported model, its rows and its engines."""

    def __init__(self, directory: Path) -> None:
        document = json.loads((directory / "run.json").read_text(encoding="utf-8"))["value"]
        self.directory = directory
        given = {key: value for key, value in document["config"].items() if key != "run_file"}
        for output in given["outputs"]:
            if output["kind"] != "probability":
                del output["clip"]
        self.config: RunConfig = build_run_config(given, directory)
        self.exported = directory / "model" / "exported.onnx"
        artifact = serde.read(ModelArtifact, directory / "model" / "exported.json")
        bounds = id_bounds(GraphModel.load(self.exported))
        self._splits = open_splits(
            self.config, bind_columns(self.config.data.inputs, artifact.inputs, bounds)
        )

    def judges(self, scratch: Path) -> list[Judge]:
        """One for each output."""
        rows = self._splits.certification
        return [Judge(self.exported, rows, spec, None, scratch) for spec in self.config.output_specs]

    def rows(self, split: str, count: int) -> dict[str, np.ndarray]:
        """The first inputs of a split."""
        return dict(next(getattr(self._splits, split).batches(count)).inputs)

    def labels(self, count: int) -> np.ndarray:
        """Labels of the first output for the first selection rows."""
        label = self.config.output_specs[0].label
        return np.asarray(next(self._splits.selection.batches(count)).columns[str(label)])

    def engines(self) -> Iterator[tuple[str, Path]]:
        """Engines by plan; a later attempt takes the place of an earlier one."""
        for engine in serde.read(EngineSet, self.directory / "engines.json").engines:
            if engine.path is not None:
                yield OWN + engine.plan.partition("-attempt")[0], self.directory / engine.path


def quantized(run: Run, scratch: Path, nncf: Path | None) -> Iterator[tuple[str, Path | str]]:
    """Every peer's graph, or the first line of its error."""
    data = scratch / "calibration.npz"
    _write(run.rows("calibration", CALIBRATION_ROWS), data)
    prepared = scratch / "prepared.onnx"
    quant_pre_process(run.exported, prepared, skip_symbolic_shape=True)
    for number, (name, method) in enumerate(STATIC.items()):
        target = scratch / f"static-{number}.onnx"
        try:
            quantize_static(
                prepared,
                target,
                Rows(str(data), BATCH),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=method,
            )
            yield name, target
        except Exception as error:
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    target = scratch / "dynamic.onnx"
    quantize_dynamic(prepared, target, per_channel=True, weight_type=QuantType.QInt8)
    yield "dynamic", target
    if nncf is None:
        return
    spec = run.config.output_specs[0]
    selection = scratch / "selection.npz"
    _write({"label": run.labels(SELECTION_ROWS), **run.rows("selection", SELECTION_ROWS)}, selection)
    for number, (name, drop) in enumerate(NNCF.items()):
        target = scratch / f"nncf-{number}.onnx"
        job = [
            str(run.exported),
            str(target),
            str(data),
            str(selection),
            spec.name,
            spec.kind,
            str(drop or ""),
        ]
        command = [
            sys.executable,
            str(Path(__file__).parent / "children" / "quantize_nncf.py"),
            str(nncf),
            *job,
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NNCF_SECONDS)
            said = done.stderr.strip().splitlines()
            yield name, target if done.returncode == 0 else (said or ["no message"])[-1][:200]
        except subprocess.TimeoutExpired:
            yield name, f"no end within {NNCF_SECONDS} s"


def _write(arrays: dict[str, Any], path: Path) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def figures(run: Run, nncf: Path | None) -> dict[str, Any]:
    """Accuracy and times of every graph of one model."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        graphs: dict[str, Path | str] = {EXPORTED: run.exported, **dict(run.engines())}
        graphs |= dict(quantized(run, scratch, nncf))
        paths = {name: graph for name, graph in graphs.items() if isinstance(graph, Path)}
        found: dict[str, Any] = {
            name: {"failure": text} for name, text in graphs.items() if isinstance(text, str)
        }
        judges = run.judges(scratch)
        for name, path in paths.items():
            try:
                each = [judge.accuracy(path) for judge in judges]
                worst = {
                    key: max((accuracy[key] for accuracy in each), key=lambda bounds: bounds[2])
                    for key in ("delta_ne_percent", "kl_percent")
                }
                found[name] = {**worst, "us": {}}
            except Exception as error:
                found[name] = {"failure": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            print(f"  {name}: {found[name]}", flush=True)
        timed = {name: path for name, path in paths.items() if "us" in found[name]}
        for threads in THREADS:
            for batch in BATCHES:
                rows = run.rows("certification", batch)
                for name, times in latencies(timed, rows, Clock(batch, ROUNDS, threads)).items():
                    quartiles = [times["iqr"][0], times["microseconds"], times["iqr"][1]]
                    found[name]["us"][f"{threads} x {batch}"] = [round(us, 1) for us in quartiles]
        return {"rows": judges[0].rows, "graphs": found}


def main() -> None:
    """Measure the given runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--nncf", type=Path, help="directory that NNCF was installed to")
    options = parser.parse_args()
    path = RECORDS / f"{RECORD}.json"
    models = json.loads(path.read_text(encoding="utf-8"))["figures"] if path.is_file() else {}
    for directory in options.runs:
        run = Run(directory.resolve())
        print(run.config.name, flush=True)
        models[run.config.name] = figures(run, options.nncf)
        limits = {"budget": BUDGET, "max_kl": MAX_KL}
        settings = {"calibration_rows": CALIBRATION_ROWS, "rounds": ROUNDS, **limits}
        write_record(RECORD, models, settings)


if __name__ == "__main__":
    main()
