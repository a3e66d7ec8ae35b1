"""What calibration costs where embedding tables are larger than half of the memory.

A DLRM with 26 tables is exported with tiny ones; its tables are then replaced by random numbers of the size
asked for, outside of the model file, as a trained model would have them. Ids are drawn evenly, which is the
worst for every cache. Two models that differ in the size of their tables only are calibrated (ranges, errors
and sensitivities) over equally many rows:

- **Once, from storage**, each in a process of its own, with its tables dropped from the page cache before:
  peak of anonymous memory, and bytes read from storage over the bytes of the tables. 1 or less is "the
  tables are not loaded more than once".
- **In turns**, in one process, once its pages are there: seconds per batch of the large over the small.

The tables are written to a temporary directory, which is removed::

    python -m benchmarks.pipeline.embedding_tables --gigabytes 12
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.external_data_helper import set_external_data

from benchmarks.processes import apart, used
from benchmarks.recording import write_record
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.storage import model_files
from loka_zoo import FeatureSpec, create
from loka_zoo.prepared import PreparedData
from loka_zoo.synthetic import LABEL, SyntheticOptions, prepare_synthetic

BATCH = 512
TABLES = 26
NUMERIC = 13
SMALL_BYTES = 12_000_000
SPEC = OutputSpec("logit", OutputKind.LOGIT, LABEL)
BLOCK_ROWS = 1 << 17


@dataclass(frozen=True)
class Case:
    """A model and its rows.

    Attributes:
        artifact: The model.
        data: Rows with ids up to the size of its tables.
        table_bytes: Bytes of all tables together.
    """

    artifact: ModelArtifact
    data: PreparedData
    table_bytes: int


def make_case(directory: Path, table_bytes: int, rows: int) -> Case:
    """A model with tables of that size, and rows for it."""
    directory.mkdir()
    module = create("dlrm", _features(64), "reference")
    example: dict[str, npt.NDArray[Any]] = {
        "dense": np.zeros((2, NUMERIC), dtype=np.float32),
        "ids": np.zeros((2, TABLES), dtype=np.int64),
    }
    export_torch(module, example, directory / "tiny.onnx", (SPEC,))
    proto = onnx.load(os.fspath(directory / "tiny.onnx"))
    source = directory / "source.onnx"
    ids = enlarge_tables(proto, table_bytes, directory / "tables.bin")
    source.write_bytes(proto.SerializeToString())
    artifact = import_onnx(source, directory / "model.onnx", (SPEC,), link_tables=True)
    options = SyntheticOptions(rows=(64, rows, 64, 64), cardinalities=(ids,) * TABLES, numeric=NUMERIC)
    return Case(artifact, prepare_synthetic(directory / "data", options), table_bytes)


def _features(ids: int) -> FeatureSpec:
    return FeatureSpec(tuple((f"c{i}", ids) for i in range(TABLES)), tuple(f"x{i}" for i in range(NUMERIC)))


def enlarge_tables(proto: onnx.ModelProto, table_bytes: int, path: Path) -> int:
    """Give every table of a model as many random rows as make up the size; returns the rows of each.

    Args:
        proto: The model; edited.
        table_bytes: Bytes of all tables together, about.
        path: File beside the model that the numbers go to.
    """
    looked_up = {node.input[0] for node in proto.graph.node if node.op_type == "Gather"}
    tables = [t for t in proto.graph.initializer if t.name in looked_up and len(t.dims) == 2]
    if len(tables) != TABLES:
        raise RuntimeError(f"expected {TABLES} tables in the exported model, found {len(tables)}")
    width = int(tables[0].dims[1])
    # Whole pages, so that each table starts on one and can be mapped.
    rows = max(table_bytes // (TABLES * width * 4) // 1024, 1) * 1024
    # The same block again and again: drawing 12 GB takes minutes, and nothing here depends on the values.
    block = np.random.default_rng(0).standard_normal((min(BLOCK_ROWS, rows), width), dtype=np.float32)
    block *= np.float32(0.05)
    with path.open("wb") as stream:
        for table in tables:
            offset = stream.tell()
            for start in range(0, rows, BLOCK_ROWS):
                stream.write(block[: rows - start].data)
            set_external_data(table, path.name, offset, stream.tell() - offset)
            table.dims[0] = rows
            table.ClearField("raw_data")
            table.data_location = onnx.TensorProto.EXTERNAL
        stream.flush()
        os.fsync(stream.fileno())
    return rows


def drop_from_page_cache(path: Path) -> None:
    """Let the next reader of a file take it from storage."""
    with path.open("rb") as stream:
        # Pages that are not yet written stay.
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def profile_case(case: Case, scratch: Path, threads: int) -> float:
    """Calibrate over all rows; returns seconds."""
    options = ProbeOptions(batch_size=BATCH, threads=threads, error_precision=None, draws=1, synthetic=True)
    began = time.perf_counter()
    calibrate(case.artifact, (SPEC,), case.data.open("calibration"), scratch, options)
    return time.perf_counter() - began


def once(case: Case, threads: int) -> dict[str, float]:
    """In a process of its own: memory and storage that one calibration takes."""
    with TemporaryDirectory(dir=case.artifact.path.parent) as scratch:
        usage = used(lambda: profile_case(case, Path(scratch), threads))
    return {
        "seconds": usage.result,
        "anonymous_peak_mib": usage.anonymous_peak_mib,
        "mapped_peak_mib": usage.mapped_peak_mib,
        "storage_read_over_tables": usage.storage_read_bytes / case.table_bytes,
    }


def in_turns(cases: dict[str, Case], rounds: int, threads: int) -> dict[str, list[float]]:
    """In a process of its own: seconds of each calibration; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            with TemporaryDirectory(dir=case.artifact.path.parent) as scratch:
                took = profile_case(case, Path(scratch), threads)
            if number:
                seconds[name].append(took)
    return seconds


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of both models."""
    rows = options.batches * BATCH
    large_bytes = int(options.gigabytes * 1e9)
    cases = {
        "small": make_case(directory / "small", SMALL_BYTES, rows),
        "large": make_case(directory / "large", large_bytes, rows),
    }
    found: dict[str, Any] = {"sites": len(cases["large"].artifact.sites), "rows": rows}
    for name, case in cases.items():
        for path in model_files(case.artifact.path):
            drop_from_page_cache(path)
        found[name] = apart(once, case, options.threads) | {"table_bytes": case.table_bytes}
        print(name, json.dumps(found[name]), flush=True)
    seconds = apart(in_turns, cases, options.rounds, options.threads)
    ratios = sorted(a / b for a, b in zip(seconds["large"], seconds["small"], strict=True))
    for name in cases:
        per_batch = statistics.median(seconds[name]) / options.batches
        found[name]["milliseconds_per_batch"] = 1000 * per_batch
    found["large_over_small_seconds"] = {
        "median": statistics.median(ratios),
        "min": ratios[0],
        "max": ratios[-1],
    }
    return found


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where the tables go; the system's place by default")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.directory) as directory:
        free = shutil.disk_usage(directory).free
        if free < 1.1e9 * options.gigabytes + 1e9:
            sys.exit(f"{directory} has {free / 1e9:.1f} GB free, the tables need {options.gigabytes:g} GB")
        figures = measure(Path(directory), options)
    print(json.dumps(figures, indent=1))
    settings = {"batch": BATCH, "tables": TABLES, "rounds": options.rounds, "threads": options.threads}
    print(write_record("embedding_tables", figures, settings))


if __name__ == "__main__":
    main()
