"""A run file proposed from a model and rows.

Guesses are marked: an output's kind decides the loss. Inputs without columns are listed with candidates.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.core.artifact import TensorSpec
from loka_onnx.core.backends import backend_names
from loka_onnx.core.devices import ACCELERATORS, CPU, device_called
from loka_onnx.errors import ConfigError, DataError, LokaError, MissingPackage, nearest
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.id_bounds import id_bounds
from loka_onnx.graph.model import GraphModel, producer
from loka_onnx.graph.shape_values import tensor_spec
from loka_onnx.pipeline.survival import try_generated
from loka_onnx.sessions.backends import get_spec
from loka_onnx.sessions.cuda import list_cuda_devices

Array = npt.NDArray[Any]
SAMPLE_ROWS = 8192
"""Rows that types, widths and values of columns are read from."""
CALIBRATION_ROWS = 50_000
"""Rows from which more calibration rows change no verdict on the rankers of the benchmarks."""
CHECK = "check this"
_UNNAMED = re.compile(r"|best|export(ed)?|final|latest|models?|onnx|output")
"""Names of files and folders that say nothing of a model."""
_LABELS = re.compile(r"label|click|target|convers|purchase|buy|bought|like|watch|ctr|cvr|y$")
_GROUPS = "requestid sessionid searchid impressionid queryid userid uid user memberid"
_TIMES = ("timestamp", "time", "date", "datetime", "eventtime", "ts", "hour", "day")
_PASSING = frozenset(
    {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Concat", "Slice", "Gather"}
)
"""Operators that a probability passes on its way to an output."""


@dataclass(frozen=True)
class SampledColumn:
    """A column of the data, by its first rows.

    `kind` is the NumPy kind of its values; ``?`` if no input takes them. `width` is the length of its lists,
    0 for a scalar column; `low` and `high` are its least and largest number. It `is_binary` if it holds both
    0 and 1 and nothing else, and `is_sorted` if its values never decrease.
    """

    name: str
    kind: str
    width: int = 0
    low: float = 0.0
    high: float = 0.0
    is_binary: bool = False
    is_sorted: bool = False

    @property
    def is_number(self) -> bool:
        """True if an input may take it."""
        return self.kind in "iufb"


@dataclass(frozen=True)
class Match:
    """Columns of an input: none where nothing was found, then with candidates; `rule` says why."""

    input: str
    columns: tuple[str, ...]
    rule: str = ""
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """A run file; `notes` maps its keys (`outputs[0].kind`) to what a reader has to check there."""

    document: dict[str, Any]
    matches: tuple[Match, ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def unmatched(self) -> tuple[Match, ...]:
        """Inputs without columns: the file is not complete."""
        return tuple(match for match in self.matches if not match.columns)

    @property
    def guesses(self) -> tuple[str, ...]:
        """Lines of the run file with a comment: what was guessed."""
        return tuple(line.strip() for line in self.text.splitlines()[1:] if "#" in line)

    @property
    def text(self) -> str:
        """The run file as YAML with comments."""
        return "\n".join(_lines(self)) + "\n"


def propose(
    model: Path,
    data: Path,
    *,
    home: Path,
    devices: Sequence[str] = (),
    labels: Sequence[str] = (),
    budget: float = 0.0002,
) -> Proposal:
    """Propose a run file for an .onnx model and one .parquet or .npz file of rows.

    Args:
        home: Directory that paths in the file are relative to.
        devices: Names of `core.devices`; empty for those of this machine.
        labels: Columns of the labels, in the order of the outputs; empty to find them by name and values.
        budget: Largest accepted relative increase of the loss.

    Raises:
        ModelError: The model cannot be read.
        DataError: The data cannot be read, or a label is no column.
        ConfigError: A device is not known.
    """
    graph = canonicalize(model).model
    rows, columns = _read(data)
    for label in labels:
        if label not in columns:
            raise DataError(
                f"E1639 the data have no column '{label}'",
                where=str(data),
                evidence=f"columns are {', '.join(columns)}",
                remedy="correct the name of the label",
            )
    notes: dict[str, str] = {}
    inputs = [tensor_spec(tensor) for tensor in graph.inputs]
    outputs = list(_outputs(graph, columns, inputs, labels, budget, notes))
    taken = {output["label"] for output in outputs if output["label"]}
    splitting, outside = _splitting(columns, rows, notes)
    matches = match_columns(
        inputs, columns, taken, outside - {spec.name for spec in inputs}, id_bounds(graph)
    )
    listed = {match.input: list(match.columns) for match in matches if match.columns != (match.input,)}
    document = {
        "name": run_name(model),
        "model": {"onnx": os.path.relpath(model, home)},
        "outputs": outputs,
        "data": {"path": os.path.relpath(data, home), **splitting, **({"inputs": listed} if listed else {})},
        "batch": {"min": _smallest_batch(model, graph, notes), "serve": [256, 1024, 2048], "max": 4096},
        "targets": list(_targets(devices, notes)),
    }
    return Proposal(document, matches, notes)


def run_name(model: Path) -> str:
    """Name of a run: the file's, or that of its nearest folder whose name says something."""
    parts = (model.stem, *(folder.name for folder in model.absolute().parents))
    names = (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
    return next((name for name in names if not _UNNAMED.fullmatch(name)), "ranker")


# Columns ------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[int, dict[str, SampledColumn]]:
    """Rows of a file, and its columns by name, in its order, as the first `SAMPLE_ROWS` rows show them."""
    with DataError(
        "E1640 the rows cannot be read", where=str(path), remedy="give a .parquet or an .npz file"
    ).in_place_of(OSError, ValueError, StopIteration, words=lambda e: str(e)[:300] or "it holds none"):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                sample = {name: arrays[name] for name in arrays.files}
                rows = len(next(iter(sample.values())))
        else:
            import pyarrow.parquet as pq

            file = pq.ParquetFile(path)
            batch, rows = next(file.iter_batches(SAMPLE_ROWS)), int(file.metadata.num_rows)
            sample = {name: _array(batch.column(name)) for name in batch.schema.names}
    return rows, {name: _column(name, values[:SAMPLE_ROWS]) for name, values in sample.items()}


def _column(name: str, values: Array) -> SampledColumn:
    width = 0 if values.ndim == 1 else int(values.shape[1]) if values.ndim == 2 else -1
    numeric = values.dtype.kind in "iufb" and values.size > 0 and width >= 0
    kind = values.dtype.kind if numeric or values.dtype.kind in "MU" else "?"
    numbers = values.astype(np.float64) if numeric else np.zeros(0)
    numbers = numbers[np.isfinite(numbers)] if numbers.ndim == 1 else numbers
    is_scalar = width == 0 and numbers.size > 0
    return SampledColumn(
        name,
        kind,
        max(0, width),
        float(numbers.min()) if numbers.size else 0.0,
        float(numbers.max()) if numbers.size else 0.0,
        is_binary=is_scalar and set(np.unique(numbers)) == {0.0, 1.0},
        is_sorted=width == 0 and kind in "iufM" and bool((values[1:] >= values[:-1]).all()),
    )


def _array(column: Any) -> Array:
    """Values of a Parquet column: (rows,), or (rows, width) of lists of one length; objects otherwise."""
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "O" and len(values) and isinstance(values[0], np.ndarray):
        lengths = {len(each) for each in values if each is not None}
        if len(lengths) == 1 and column.null_count == 0:
            values = np.stack(values)
    elif values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(np.str_)
    return np.asarray(values)


# Inputs -------------------------------------------------------------------------------------------


def match_columns(
    inputs: Sequence[TensorSpec],
    columns: Mapping[str, SampledColumn],
    labels: set[str],
    outside: set[str],
    bounds: Mapping[str, tuple[range | None, ...]],
) -> tuple[Match, ...]:
    """Find the columns of each input: by name, by the end of a name, by width, then by order.

    No input takes `labels`; an input takes `outside` (groups, times) only by name. `bounds` are the ids that
    the lookups of an input take.
    """
    matches: dict[str, Match] = {}

    def free(spec: TensorSpec) -> list[SampledColumn]:
        used = {name for match in matches.values() for name in match.columns}
        return [c for c in columns.values() if c.name not in used | labels and _fits(c, spec, bounds)]

    def settle(rule: str, find: Callable[[TensorSpec, list[SampledColumn]], Sequence[str]]) -> None:
        for spec in inputs:
            if spec.name not in matches and (names := tuple(find(spec, free(spec)))):
                matches[spec.name] = Match(spec.name, names, rule)

    settle("same name", lambda spec, able: [c.name for c in able if c.name == spec.name])
    settle(
        "same letters", lambda spec, able: _only(c for c in able if _letters(c.name) == _letters(spec.name))
    )
    settle("end of the name", _longest_end)
    settle("the one list of its width", lambda _, able: _only(c for c in able if c.width))
    settle(
        "as many columns as it is wide, in file order",
        lambda spec, able: _stacked(spec, able, outside, bounds.get(spec.name, ())),
    )
    left = [spec for spec in inputs if spec.name not in matches]
    if len(left) == 1 and _width(left[0]) == 1:
        settle("the one column left", lambda _, able: _only(c for c in able if c.name not in outside))
    return tuple(
        matches.get(spec.name) or Match(spec.name, (), "", tuple(_nearest(spec.name, free(spec))))
        for spec in inputs
    )


def _fits(column: SampledColumn, spec: TensorSpec, bounds: Mapping[str, tuple[range | None, ...]]) -> bool:
    integers = np.dtype(spec.dtype).kind in "iu"
    if not column.is_number or (integers and column.kind == "f"):
        return False
    if column.width:
        return len(spec.shape) == 2 and _width(spec) in {None, column.width}
    return _width(spec) != 1 or all(_holds(column, one) for one in bounds.get(spec.name, ())[:1])


def _holds(column: SampledColumn, ids: range | None) -> bool:
    return ids is None or (column.low >= ids.start and column.high < ids.stop)


def _width(spec: TensorSpec) -> int | None:
    return spec.shape[1] if len(spec.shape) == 2 else 1


def _stacked(
    spec: TensorSpec, able: Sequence[SampledColumn], outside: set[str], bounds: Sequence[range | None]
) -> list[str]:
    """All scalar columns that are left, where they are as many as the input is wide and hold its ids.

    A group or time is among them only where they are too few without it: many rankers look the user up.
    """
    if _width(spec) in {None, 1}:
        return []
    is_float = np.dtype(spec.dtype).kind == "f"
    for left_out in (outside, set()):
        left = [c for c in able if not c.width and c.name not in left_out]
        for each in ([c for c in left if (c.kind == "f") == is_float], left):
            if len(each) == _width(spec) and all(map(_holds, each, bounds)):
                return [c.name for c in each]
    return []


def _longest_end(spec: TensorSpec, able: Sequence[SampledColumn]) -> list[str]:
    """The column with the longest name that ends the input's; exporters put the argument's name before it."""
    ends = [c for c in able if len(_letters(c.name)) > 1 and _letters(spec.name).endswith(_letters(c.name))]
    longest = max((len(_letters(c.name)) for c in ends), default=0)
    return _only(c for c in ends if len(_letters(c.name)) == longest)


def _only(columns: Iterator[SampledColumn]) -> list[str]:
    """The name of the only column; none of several."""
    names = [column.name for column in columns]
    return names if len(names) == 1 else []


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _nearest(name: str, able: Sequence[SampledColumn]) -> list[str]:
    by_letters = {_letters(column.name): column.name for column in able}
    return [by_letters[near] for near in get_close_matches(_letters(name), by_letters, 4, 0.0)]


# Outputs, splits, targets -------------------------------------------------------------------------


def _outputs(
    graph: GraphModel,
    columns: Mapping[str, SampledColumn],
    inputs: Sequence[TensorSpec],
    labels: Sequence[str],
    budget: float,
    notes: dict[str, str],
) -> Iterator[dict[str, Any]]:
    fed = {spec.name for spec in inputs}
    able = [c for c in columns.values() if c.name not in fed and not c.width and c.is_number]
    named = [c for c in able if _LABELS.match(_letters(c.name))]
    binary = [c for c in able if c.is_binary and c not in named]
    left = [columns[name] for name in labels] or sorted(named, key=lambda c: not c.is_binary) + binary
    floats = [tensor for tensor in graph.outputs if tensor_spec(tensor).dtype.startswith("float")]
    # An embedding beside a score is not judged.
    single = [each for each in floats if {*tensor_spec(each).shape[1:]} <= {1, None}]
    for index, tensor in enumerate(single or floats):
        label = next((c for c in left if not labels and _letters(c.name) in _letters(tensor.name)), None)
        label = label or (left[0] if left else None)
        left = [c for c in left if c is not label]
        kind, why = _kind(tensor, label)
        notes[f"outputs[{index}].kind"] = f"{CHECK}: {why}"
        if label is None:
            notes[f"outputs[{index}].label"] = "no column of 0 and 1 was found: judged on KL alone"
        elif not labels:
            others = ", ".join(c.name for c in left)
            notes[f"outputs[{index}].label"] = CHECK + (f"; others could be {others}" if others else "")
        yield {"name": tensor.name, "kind": kind, "label": label and label.name, "budget": budget}


def _kind(output: Any, label: SampledColumn | None) -> tuple[str, str]:
    if label is not None and not (label.is_binary or {label.low, label.high} <= {0.0, 1.0}):
        return "regression", f"the label has values from {label.low:g} to {label.high:g}"
    tensor = output
    for _ in range(16):
        node = producer(tensor)
        if node is None:
            break
        if node.op in {"Sigmoid", "Softmax"}:
            return "probability", f"it comes from a {node.op}"
        if node.op not in _PASSING or not node.inputs:
            return "logit", f"it comes from a {node.op}, not from a Sigmoid"
        tensor = node.inputs[0]
    return "logit", "no Sigmoid was found before it"


def _splitting(
    columns: Mapping[str, SampledColumn], rows: int, notes: dict[str, str]
) -> tuple[dict[str, Any], set[str]]:
    """The split and the group, and the columns that an input takes only by name."""
    times = [c.name for c in columns.values() if c.kind == "M" or _letters(c.name) in _TIMES]
    scalars = {_letters(c.name): c.name for c in columns.values() if not c.width}
    groups = [scalars[word] for word in _GROUPS.split() if word in scalars]
    group = {"group": groups[0]} if groups else {}
    absent = "no column of a request or a user was found: rows count as independent"
    notes["data.group"] = f"{CHECK}: rows of one value belong together" if groups else absent
    share = float(f"{min(0.2, CALIBRATION_ROWS / max(1, rows)):.2g}")
    split: dict[str, Any] = {"by": "order"}
    if any(columns[name].is_sorted for name in times):
        notes["data.split"] = "by time: the rows are in its order"
    elif groups:
        split = {"by": "hash", "column": groups[0]}
    else:
        notes["data.split"] = "in the order of the file"
    split["fractions"] = {"calibration": share, "selection": 0.3, "certification": 0.5}
    return {"split": split, **group}, {*times, *groups}


def _targets(devices: Sequence[str], notes: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Targets of the named devices, or of this machine."""
    here = [device_called(gpu.name, gpu.architecture) for gpu in list_cuda_devices()]
    wanted = list(devices) or [*dict.fromkeys(name for name in here if name in ACCELERATORS), CPU]
    known = (CPU, *ACCELERATORS)
    for index, device in enumerate(wanted):
        if device not in known:
            raise ConfigError(
                f"E1641 the device '{device}' is not known",
                where="--device",
                evidence=f"known are {', '.join(known)}",
                remedy=nearest(device, ACCELERATORS) or "name one of these",
            )
        backends = [name for name in backend_names() if _builds_for(name, device)]
        if device != CPU and device not in here:
            notes[f"targets[{index}].backends"] = (
                "this machine has no such device: remove what yours does not use"
            )
        yield {"device": device, "backends": backends}


def _smallest_batch(model: Path, graph: GraphModel, notes: dict[str, str]) -> int:
    """Rows of the smallest batch that the model takes: 2 where a trial fails at one row alone."""
    with suppress(LokaError):  # What else is wrong with the model, a run says.
        at_one, at_two = (try_generated(model, graph, rows, 4) for rows in (1, 2))
        if at_one and not at_two:
            notes["batch"] = f"not 1: one row fails at {at_one[0].operator}"
            return 2
    return 1


def _builds_for(backend: str, device: str) -> bool:
    with suppress(MissingPackage):
        return backend == "onnxruntime" if device == CPU else bool(get_spec(backend).devices.get(device))
    return False


# Text ---------------------------------------------------------------------------------------------


def _lines(proposal: Proposal) -> Iterator[str]:
    document, notes = proposal.document, proposal.notes
    yield "# Proposed by `loka-onnx init`. Every key: `loka-onnx schema run-file`. Check what says so."
    yield f"name: {_flow(document['name'])}"
    yield f"model: {_flow(document['model'])}"
    yield "outputs:"
    for index, output in enumerate(document["outputs"]):
        for number, (key, value) in enumerate(output.items()):
            head = "  - " if number == 0 else "    "
            yield f"{head}{key}: {_flow(value)}{_note(notes, f'outputs[{index}].{key}')}"
    yield "data:"
    data = document["data"]
    for key in ("path", "split", "group"):
        if key in data:
            yield f"  {key}: {_flow(data[key])}{_note(notes, f'data.{key}')}"
        elif key == "group":
            yield f"  # group:{_note(notes, 'data.group').replace('  #', '')}"
    listed = [match for match in proposal.matches if match.columns != (match.input,)]
    if listed:
        yield "  inputs:"
    for match in listed:
        columns = list(match.columns) if len(match.columns) > 1 else (match.columns or ("",))[0]
        if match.columns:
            yield f"    {_flow(match.input)}: {_flow(columns)}  # {CHECK}: {match.rule}"
        else:
            near = ", ".join(match.candidates) or "no column fits its type and width"
            yield f"    {_flow(match.input)}:  # no column was found; candidates: {near}"
    yield f"batch: {_flow(document['batch'])}{_note(notes, 'batch')}"
    yield "targets:"
    for index, target in enumerate(document["targets"]):
        yield f"  - {_flow(target)}{_note(notes, f'targets[{index}].backends')}"


def _note(notes: Mapping[str, str], key: str) -> str:
    return f"  # {notes[key]}" if key in notes else ""


_WORD = re.compile(r'(?<!\\)"(?!(?:yes|no|on|off|true|false|null|y|n)")([A-Za-z_/][\w./-]*)"', re.IGNORECASE)
"""A string of JSON that YAML 1.1 and 1.2 read without quotes."""


def _flow(value: object) -> str:
    """A value on one line of YAML: JSON, with plain words as they are."""
    return _WORD.sub(r"\1", json.dumps(value, ensure_ascii=False))
