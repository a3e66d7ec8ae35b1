"""Embedding tables in INT8: what they do to the loss, the bytes and the speed of CPU engines.

Public rankers that `benchmarks.public_rankers.prepare` wrote, in FP32 but for their tables, so that nothing
else changes the loss::

    python -m benchmarks.micro.int8_tables --cache DIRECTORY

For each ranker: relative change of the log loss on its certification rows with a 95 % interval (users are the
unit), bytes of the tables and of the model file in both forms, and median CPU time of a call over FP32's, in
turns in one process on one thread: the median and the range of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from benchmarks.recording import write_record
from loka_onnx.config import RunConfig, load_run_file
from loka_onnx.engines.onnx_operands import OperandReader
from loka_onnx.engines.onnxruntime.tables import write_tables
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.pipeline.rows import bind_columns, open_splits
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

RANKERS = ("rechub-edcn", "rechub-deepfm", "fuxictr-dcnv2", "fuxictr-finalmlp")
Arrays = dict[str, npt.NDArray[Any]]


def tables_of(model: Path) -> int:
    """Bytes of the matrices that lookups read, with their scales."""
    graph = onnx.load(os.fspath(model)).graph
    read = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    return sum(
        len(onnx.numpy_helper.to_array(tensor).tobytes())
        for tensor in graph.initializer
        if tensor.name in read and tensor.data_type in {onnx.TensorProto.FLOAT, onnx.TensorProto.INT8}
    )


def loss(output: npt.NDArray[Any], label: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Log loss of probabilities, by row."""
    p = np.clip(output.astype(np.float64).reshape(-1), 1e-7, 1 - 1e-7)
    return -label * np.log(p) - (1 - label) * np.log1p(-p)


def change_of(config: RunConfig, exact: Arrays, made: Arrays, columns: Arrays) -> dict[str, float]:
    """Relative change of the first output's loss, and its interval over users, in percent."""
    output = config.outputs[0]
    label = columns[str(output.label)].astype(np.float64).reshape(-1)
    before, after = (loss(values[output.name], label) for values in (exact, made))
    _, user = np.unique(columns[str(config.data.group)], return_inverse=True)
    sums, mean = np.bincount(user, after - before), before.mean()
    counts = np.bincount(user)
    deviation = sums - counts * (after - before).mean()
    half = 1.96 * np.sqrt((deviation**2).sum()) / len(label)
    return {
        "delta_percent": 100 * float((after - before).mean() / mean),
        "half_width_percent": 100 * float(half / mean),
        "largest_change": float(np.abs(made[output.name] - exact[output.name]).max()),
    }


def call_seconds(session: OnnxSession, rows: Arrays, calls: int) -> float:
    """Median CPU seconds of a call, which this thread computes alone."""
    times = []
    for _ in range(calls):
        began = time.thread_time()
        session.run(rows)
        times.append(time.thread_time() - began)
    return statistics.median(times)


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one prepared ranker."""
    config = load_run_file(directory / "run.yaml")
    with TemporaryDirectory() as scratch:
        exact, narrow = Path(scratch) / "exact.onnx", Path(scratch) / "narrow.onnx"
        artifact = import_onnx(directory / "model.onnx", exact, config.output_specs)
        model = onnx.load(os.fspath(exact))
        onnx.save(model, os.fspath(exact))
        stored = write_tables(model, OperandReader(exact))
        onnx.save(model, os.fspath(narrow))
        bindings = bind_columns(config.data.inputs, artifact.inputs, id_bounds(GraphModel.load(exact)))
        rows = next(open_splits(config, bindings).certification.batches(options.rows))
        threads = SessionOptions(threads=1)
        with OnnxSession(exact, threads) as one, OnnxSession(narrow, threads) as other:
            found: dict[str, Any] = {
                **change_of(config, one.run(rows.inputs), other.run(rows.inputs), dict(rows.columns)),
                "rows": rows.rows,
                "tables": len(stored.written),
                "declined": dict(stored.declined),
                "table_bytes": [tables_of(exact), tables_of(narrow)],
                "file_bytes": [exact.stat().st_size, narrow.stat().st_size],
            }
            for size in options.sizes:
                few = {name: values[:size] for name, values in rows.inputs.items()}
                ratios = []
                for number in range(options.rounds + 1):
                    turns = (one, other) if number % 2 else (other, one)
                    times = {id(each): call_seconds(each, few, options.calls) for each in turns}
                    if number:
                        ratios.append(times[id(other)] / times[id(one)])
                found[f"time_over_fp32_batch_{size}"] = [
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                ]
    return found


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="of benchmarks.public_rankers.prepare")
    parser.add_argument("--rankers", nargs="+", default=RANKERS)
    parser.add_argument("--rows", type=int, default=1 << 15, help="most certification rows")
    parser.add_argument("--sizes", type=int, nargs="+", default=(64, 1024))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    figures = {}
    for name in options.rankers:
        figures[name] = measure(options.cache / name, options)
        print(name, json.dumps(figures[name]), flush=True)
    settings = {"threads": 1, "rounds": options.rounds, "calls": options.calls, "base": "fp32"}
    print(write_record("int8_tables", figures, settings))


if __name__ == "__main__":
    main()
