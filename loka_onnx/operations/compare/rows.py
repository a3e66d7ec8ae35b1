"""Rows and outputs that two deployments are judged on.

Columns, group and slices are those of the run that wrote A, or else B, where its directory is found: the one
given, or the one that the bundle lies in, if its `run.json` lists this very manifest. What the caller names
comes first, and is never left out. A label, group or slice that only the record names may be missing in the
data (live rows have no labels): then a note says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loka_onnx.config import NullGroups
from loka_onnx.core import serde
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.digests import digest_file
from loka_onnx.core.lineage import RunRecord
from loka_onnx.core.manifest import MANIFEST_NAME
from loka_onnx.data import Dataset, RowRange, open_dataset
from loka_onnx.errors import ConfigError, DataError, UserError
from loka_onnx.graph.id_bounds import id_bounds, narrowed
from loka_onnx.graph.model import GraphModel
from loka_onnx.graph.storage import read_proto
from loka_onnx.operations.compare.sides import OpenSide
from loka_onnx.operations.recorded import recorded_settings
from loka_onnx.pipeline.directory import RECORD
from loka_onnx.pipeline.rows import bind_columns
from loka_onnx.report import numbers

ONLY = ""
"""Stands for the only judged output where a label or weight names none."""
UNKNOWN_KIND = "its kind is not known: give it with `--output NAME=logit`"
WITHOUT_LABEL = "a regression is judged by its label, and there is none"
READABLE_OPSET = 13
"""From here on operators have the inputs that bounds of ids are read from."""
Fields = dict[str, Any]
"""Fields of an `OutputSpec` whose label is not settled yet: a regression may lack it."""


@dataclass(frozen=True)
class RowOptions:
    """Rows that are compared, and what is known about them.

    Attributes:
        kinds: Kind of an output by its name, in place of the one that the bundles record; an output that they
            do not record is judged as well. Label, weight, clip and budget stay as they are recorded.
        labels: Column of the label by output; under `ONLY` that of the only one. `weights` likewise.
        group: Column of rows that belong together; None for what the run says.
        slices: Columns whose values are judged apart; empty for what the run says.
        inputs: Columns of each input by its name; others are as the run says, or else by name.
        rows: Use so many rows from the first on; None for all.
        budget: Largest accepted ΔNE of every output, finite and at least 0; None for those that are recorded.
        run: The run directory that says columns, group and slices.
    """

    kinds: Mapping[str, OutputKind] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    slices: tuple[str, ...] = ()
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: int | None = None
    budget: float | None = None
    run: Path | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not 0.0 <= self.budget < math.inf:
            raise ConfigError(
                f"E1605 a budget of {self.budget} cannot be held",
                where="--budget",
                evidence="it is the largest accepted relative loss change, 0 or a finite number above it",
                remedy="write for example --budget 0.0002 for 0.02 %",
            )


@dataclass(frozen=True)
class JudgedRows:
    """Rows with the outputs that are judged on them.

    Attributes:
        unjudged: Why other outputs are not, by name; their change is measured as well.
        unanswered: The part of these that the bundles record or the caller asked for.
        budget_source: Origin of the budgets, in words; `basis`: that of the rows.
        notes: Conditions of the comparison, each a sentence without its full stop.
    """

    data: Dataset
    specs: tuple[OutputSpec, ...]
    unjudged: Mapping[str, str]
    unanswered: Mapping[str, str]
    group: str | None
    slices: tuple[str, ...]
    budget_source: str
    basis: str
    notes: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns beside the inputs."""
        return _columns(self.specs, self.group, self.slices)


def open_rows(a: OpenSide, b: OpenSide, data: Path, options: RowOptions) -> JudgedRows:
    """Settle which outputs are judged, and open the rows, a Parquet or npz file.

    Raises ConfigError where an option names what is not there, or A and B were judged differently and no
    option says what holds; DataError, ModelError and UserError where a file or the run cannot be read.
    """
    recorded, run = _recorded((a, b), options.run)
    bindings = bind_columns({**recorded.inputs, **options.inputs}, a.inputs, _bounds(a, b))
    requested, budget_source = _requested(a, b, options)
    # The file and its inputs first: a column that is missing beside them is then known to be just that.
    open_dataset(data, bindings)
    notes = list[str]()
    specs = list[OutputSpec]()
    unjudged = {spec.name: UNKNOWN_KIND for spec in a.outputs if len(spec.shape) <= 2}
    unanswered = dict[str, str]()
    for output in requested:
        name, label, is_regression = output["name"], output["label"], output["kind"] is OutputKind.REGRESSION
        if label is not None and not {name, ONLY} & set(options.labels):
            costs = "is not judged" if is_regression else "is judged without its label"
            label = _where_there(data, label, f"output '{name}' {costs}", notes)
        if label is None and is_regression:
            unjudged[name] = unanswered[name] = WITHOUT_LABEL
            continue
        unjudged.pop(name, None)
        # Without a label there is no AUC.
        guard = None if label is None else output.get("max_auc_drop")
        specs.append(OutputSpec(**output | {"label": label, "max_auc_drop": guard}))
    group, slices = options.group, options.slices
    if group is None and recorded.group is not None:
        group = _where_there(data, recorded.group, "rows are taken as independent", notes)
    if not slices:
        known = (_where_there(data, n, f"there are no slices by '{n}'", notes) for n in recorded.slices)
        slices = tuple(name for name in known if name is not None)
    nullable = set(slices) - {group}
    if recorded.null_groups is NullGroups.UNGROUP and group is not None:
        nullable.add(group)
    columns = _columns(specs, group, slices)
    dataset = open_dataset(data, bindings, columns, None, nullable)
    if options.rows is not None and options.rows < dataset.rows:
        dataset = open_dataset(data, bindings, columns, RowRange(0, options.rows), nullable)
    named = bool(options.inputs or options.group or options.slices)
    source = "as asked for" if named else "inputs by name"
    if run is not None:
        source = f"of the run {run.parent}{', and as asked for' if named else ''}"
    together = f"rows of one '{group}' belong together" if group else "independent rows"
    count = f"{numbers.count(dataset.rows)} rows of {dataset.name} (sha256 {dataset.rows_digest})"
    basis = f"{count}, {together}; columns {source}"
    return JudgedRows(
        dataset, tuple(specs), unjudged, unanswered, group, slices, budget_source, basis, tuple(notes)
    )


def _requested(a: OpenSide, b: OpenSide, options: RowOptions) -> tuple[list[Fields], str]:
    """The outputs to judge with the columns asked for or recorded, and where their budgets come from."""
    present = [spec.name for spec in a.outputs]
    for name in options.kinds:
        if name not in present:
            raise ConfigError(
                f"E1607 there is no output '{name}'",
                where="--output",
                evidence=f"the outputs are {', '.join(present)}",
                remedy="correct the name",
            )
    recorded = [{spec.name: asdict(spec) for spec in side.judged} for side in (a, b)]
    declared = [name for name in options.kinds if not any(name in specs for specs in recorded)]
    names = tuple(dict.fromkeys((*recorded[0], *recorded[1], *declared)))
    asked = {
        "kind": options.kinds,
        "label": {_name(names, output, "--label"): column for output, column in options.labels.items()},
        "weight": {_name(names, output, "--weight"): column for output, column in options.weights.items()},
    }
    recorded.append({name: {"name": name} for name in declared})
    settled = [
        {
            name: spec | {key: values.get(name, spec.get(key)) for key, values in asked.items()}
            for name, spec in specs.items()
        }
        for specs in recorded
    ]
    judged = [_alike([specs[name] for specs in settled if name in specs]) for name in names]
    if options.budget is None:
        some = f"as recorded; the default of {', '.join(declared)}" if declared else "as recorded"
        return judged, "the default" if declared and len(declared) == len(names) else some
    if not judged:
        raise ConfigError(
            "E1606 a budget needs an output that is judged",
            where="--budget",
            evidence="neither A nor B records the kind of an output",
            remedy="give it with `--output NAME=logit` (or probability, or regression)",
        )
    return [output | {"budget": options.budget} for output in judged], "as asked for"


def _alike(sides: Sequence[Fields]) -> Fields:
    """The first, A's where it records the output; both must judge it alike, budgets and guards apart."""
    ours, theirs = sides[0], sides[-1]
    name, apart = ours["name"], {key for key in ours if ours[key] != theirs[key]}
    options = {"kind": f"`--output {name}={ours['kind']}`"}
    options |= {key: f"`--{key} {name}=COLUMN`" for key in ("label", "weight")}
    if not apart & {*options, "clip"}:
        return ours
    say = " and ".join(option for key, option in options.items() if key in apart)
    remedies = [f"say what holds: {say}"] if say else []
    remedies += ["build both bundles with one `clip`"] if "clip" in apart else []
    how = "{kind}, label {label}, weight {weight}, clip {clip:g}"
    raise ConfigError(
        f"E1608 A and B judge output '{name}' differently",
        evidence=f"A: {how.format(**ours)}; B: {how.format(**theirs)}",
        remedy="; ".join(remedies),
    )


def _name(names: Sequence[str], output: str, option: str) -> str:
    if output in names:
        return output
    if output == ONLY and len(names) == 1:
        return names[0]
    raise ConfigError(
        "a column without its output needs exactly one judged output"
        if output == ONLY
        else f"no output '{output}' is judged",
        where=option,
        evidence=f"judged are {', '.join(names) or 'none'}",
        remedy=f"write `{option} OUTPUT=COLUMN`; `--output NAME=KIND` says what is judged",
    )


def _columns(specs: Iterable[OutputSpec], group: str | None, slices: Iterable[str]) -> tuple[str, ...]:
    named = [column for spec in specs for column in (spec.label, spec.weight)]
    return tuple(dict.fromkeys(column for column in (*named, group, *slices) if column is not None))


def _where_there(data: Path, column: str, otherwise: str, notes: list[str]) -> str | None:
    """The column if the data have it; else None, and a note is added to `notes`."""
    try:
        open_dataset(data, (), (column,))
    except DataError as error:
        notes.append(f"{otherwise}: {error.what}")
        return None
    return column


def _bounds(a: OpenSide, b: OpenSide) -> dict[str, tuple[range | None, ...]]:
    """Ids that are in the tables of both models; they may have grown from one to the other."""
    one = _table_bounds(a.model)
    other = one if a.digest == b.digest else _table_bounds(b.model)
    return {
        name: tuple(
            narrowed(*pair)
            for pair in zip(one.get(name) or other[name], other.get(name) or one[name], strict=True)
        )
        for name in {**one, **other}
    }


def _table_bounds(model: Path) -> dict[str, tuple[range | None, ...]]:
    """Bounds of ids that the tables of a model set; none of a model that they cannot be read from."""
    proto = read_proto(model)
    opset = next((entry.version for entry in proto.opset_import if not entry.domain), 0)
    if opset < READABLE_OPSET or proto.functions:
        return {}
    return id_bounds(GraphModel.load(model))


@dataclass(frozen=True)
class _Recorded:
    """Columns that a run recorded."""

    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    group: str | None = None
    slices: tuple[str, ...] = ()
    null_groups: NullGroups = NullGroups.REFUSE


@dataclass(frozen=True)
class _Config:
    data: _Recorded


def _recorded(sides: Sequence[OpenSide], run: Path | None) -> tuple[_Recorded, Path | None]:
    """Columns of the run that wrote a side, and its record."""
    if run is not None and not (run / RECORD).is_file():
        raise ConfigError(
            "E1609 there is no run directory",
            where=f"--run {run}",
            evidence=f"it has no {RECORD}",
            remedy="name the directory that a run wrote its report and bundle to",
        )
    record = run / RECORD if run else next(filter(None, map(_record_of, sides)), None)
    if record is None:
        return _Recorded(), None
    remedy = "name the columns with `--inputs`, `--group` and `--slices`"
    return recorded_settings(_Config, record, remedy).data, record


def _record_of(side: OpenSide) -> Path | None:
    """The record beside a bundle, if it lists this very manifest."""
    place = side.path.absolute().parent / RECORD
    if side.manifest is None or not place.is_file():
        return None
    try:
        record = serde.read(RunRecord, place)
    except UserError:
        # Of another version: its columns can be named, or its directory given, which says what is wrong.
        return None
    listed = (MANIFEST_NAME, digest_file(side.manifest))
    files = ((Path(path).name, known) for stage in record.stages for path, known in stage.files.items())
    return place if listed in files else None
