"""A trial of a model in a child process: ONNX Runtime 1.31 ends the process at some models.

A GRU or an LSTM does that over an axis without entries: in a model that leaves out empty histories, at every
batch in which all of them are empty.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.site import OtherProduct
from loka_onnx.engines.isolation import Ending, run_child
from loka_onnx.engines.request import BuildLimits
from loka_onnx.errors import EngineError, ModelError
from loka_onnx.export.preflight import Batches, Fault, Finding, preflight
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.products import other_products
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.pipeline.rows import bind_columns, generated_rows
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

ENDING_OPS = frozenset({"GRU", "LSTM"})
"""Operators by which ONNX Runtime is known to end the process."""
_LIMITS = BuildLimits(seconds=120.0)
_BATCH = "loka-onnx: a batch of "
"""Text that the child prints before each batch."""


def find_fatal_batch(path: Path, products: Iterable[OtherProduct], batches: Batches) -> Finding | None:
    """The first batch by which ONNX Runtime ends its process; None where it survives all of them.

    Tried are all sizes, and every row in batches of the smallest size, of a model with `ENDING_OPS`. An error
    that ONNX Runtime raises ends the trial, and so do 120 s: the parent then runs its own preflight.
    """
    suspects = [f"'{other.name}' ({other.op_type})" for other in products if other.op_type in ENDING_OPS]
    if not suspects:
        return None
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.npz", Path(folder) / "log"
        np.savez(rows, *batches.rows.values())
        task = {"names": list(batches.rows), "sizes": batches.sizes, "threads": batches.threads}
        outcome = run_child(__name__, [str(path), str(rows), json.dumps(task)], log, _LIMITS)
        begun = log.read_text(encoding="utf-8", errors="replace").rpartition(_BATCH)[2].splitlines()
    if outcome.ending is not Ending.SIGNALLED or not begun:
        return None
    evidence = f"a batch of {begun[0]}: a process that ran it {outcome.describe(_LIMITS)}"
    return Finding(Fault.FAILS, f"node {', '.join(suspects)}", evidence)


def try_generated(path: Path, model: GraphModel, smallest: int, largest: int) -> tuple[Finding, ...]:
    """Run a canonical model on generated rows, ids of unknown tables all 0; return its faults."""
    inputs, outputs = (tuple(map(tensor_spec, ends)) for ends in (model.inputs, model.outputs))
    rows = generated_rows(inputs, bind_columns({}, inputs, id_bounds(model)), largest)
    batches = Batches(rows, smallest, largest, are_generated=True)
    fatal = find_fatal_batch(path, other_products(model), batches)
    names = [spec.name for spec in outputs if spec.shape[:1] == (None,)] or [spec.name for spec in outputs]
    return preflight(model, batches, names) if fatal is None else (fatal,)


def _try(session: OnnxSession, rows: Mapping[str, npt.NDArray[Any]], sizes: Sequence[int]) -> None:
    batches, smallest = Batches(rows), sizes[0]
    for size in sizes:
        print(f"{_BATCH}{size} rows", flush=True)
        session.run(batches.first(size))
    count = min(map(len, rows.values()))
    for start in range(smallest, count - smallest + 1, smallest):
        print(f"{_BATCH}{smallest} rows, from row {start} on", flush=True)
        session.run({name: values[start : start + smallest] for name, values in rows.items()})


def main(model: str, rows: str, task: str) -> None:
    """Run every batch, in the child."""
    given = json.loads(task)
    try:
        session = OnnxSession(Path(model), SessionOptions(threads=given["threads"], optimize=False))
        with np.load(rows, allow_pickle=False) as held:
            _try(session, dict(zip(given["names"], held.values(), strict=True)), given["sizes"])
    except (ModelError, EngineError) as error:
        print(error, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
