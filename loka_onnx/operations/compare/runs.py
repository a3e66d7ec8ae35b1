"""Difference of two runs, from their reports: nothing is run, nothing is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka_onnx.core import serde
from loka_onnx.core.digests import digest_bytes
from loka_onnx.core.lineage import RunRecord
from loka_onnx.errors import UserError
from loka_onnx.operations.compare import run_rows
from loka_onnx.operations.compare.difference import Difference, Side
from loka_onnx.pipeline.directory import RECORD
from loka_onnx.pipeline.run import GIVEN
from loka_onnx.report import JSON_NAME, ReportData, numbers

_OF_A_REPORT = re.compile(r"loka-onnx/report/(\d+)")
_NO_SETTINGS = ("output", "name", GIVEN)
"""Entries of a run's record that name the run, and say nothing of what it did."""


@dataclass(frozen=True)
class ReadRun:
    """One side: its report with the SHA-256 of that, and its record, None for a report.json by itself."""

    path: str
    digest: str
    data: ReportData
    record: RunRecord | None


def read_run(path: Path) -> ReadRun:
    """Read the report of a run directory, or a report.json; a UserError if this version cannot read one."""
    file = path / JSON_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            "E1610 there is no report of a run",
            where=str(path),
            evidence=f"it has no '{JSON_NAME}'" if path.is_dir() else "there is no such file",
            remedy="name a run directory or a report.json; `loka-onnx report RUN.yaml` writes one",
        )
    with UserError("E1611 cannot read the report", where=str(file)).in_place_of(OSError, UnicodeDecodeError):
        text = file.read_text(encoding="utf-8")
    _refuse_others(file, text)
    record = file.parent / RECORD
    return ReadRun(
        str(path),
        digest_bytes(text.encode()),
        serde.loads(ReportData, text, where=str(file)),
        serde.read(RunRecord, record) if path.is_dir() and record.is_file() else None,
    )


def _refuse_others(file: Path, text: str) -> None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    schema = document.get("schema") if isinstance(document, dict) else None
    expected = serde.schema_id(ReportData)
    if schema == expected:
        return
    match = _OF_A_REPORT.fullmatch(schema) if isinstance(schema, str) else None
    if match is None:
        raise UserError(
            "E1612 this is no report of a run",
            where=str(file),
            evidence="it is no JSON document" if document is None else f"its schema is {schema!r}",
            remedy=f"name a run directory or its {JSON_NAME}; `loka-onnx compare` is for bundles and models",
        )
    is_older = int(match.group(1)) < int(expected.rpartition("/")[2])
    # Versions are part of the key of every stage (`RunDirectory.stage`): in its own directory the run would
    # be measured anew, and its old figures would be gone.
    older = (
        "compare with the version that wrote it; or copy its run directory and write the report again there: "
        "`loka-onnx report RUN.yaml --output COPY`, which runs every stage once more, and measures anew, "
        "where the version of loka-onnx or of a library has changed"
    )
    raise UserError(
        f"E1613 the report was written by {'an older' if is_older else 'a newer'} version of loka-onnx",
        where=str(file),
        evidence=f"schema is {schema!r}, this version reads {expected!r}",
        remedy=older if is_older else "compare with that version, or write both reports with this one",
    )


def compare_runs(old: Path, new: Path) -> Difference:
    """The difference of two runs, each as of `read_run`.

    Sections are ``engines`` (one row for each target, then its properties), ``cost``, ``latency``, ``gain``,
    ``sites``, ``plans``, ``rewrites``, ``data``, ``versions`` and ``settings``.
    """
    before, after = read_run(old), read_run(new)
    sections = list(run_rows.sections(before.data, after.data))
    if before.record is not None and after.record is not None:
        configs = (_flat(record.config, _NO_SETTINGS) for record in (before.record, after.record))
        sections.append(run_rows.entries("settings", "Settings that differ", *configs))
    synthetic = [name for name, run in (("old", before), ("new", after)) if run.data.is_synthetic]
    generated = "both runs" if len(synthetic) == 2 else f"the {''.join(synthetic)} run"
    return Difference(
        f"{before.data.title} against {after.data.title}: two runs",
        _side("old", before),
        _side("new", after),
        tuple(section for section in sections if section.rows),
        is_different=run_rows.is_other_engine(before.data, after.data),
        banner=f"SYNTHETIC DATA: numbers of {generated} were measured on generated rows, not on yours"
        if synthetic
        else "",
        notes=tuple(_notes(before, after)),
    )


def _flat(config: Mapping[str, Any], leave_out: Iterable[str] = ()) -> dict[str, str]:
    """A configuration as JSON by the path of each setting: ``calibration.batch_size``."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if name in leave_out:
            continue
        if isinstance(value, Mapping) and value:
            texts |= {f"{name}.{inner}": text for inner, text in _flat(value).items()}
        else:
            texts[name] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return texts


def _side(name: str, run: ReadRun) -> Side:
    facts = (
        f"'{run.data.title}', report sha256 {numbers.digest(run.digest)}",
        f"model after mods sha256 {numbers.digest(run.data.modified.digest)}, {len(run.data.modified.sites)} "
        f"sites; {len(run.data.engines)} engines were candidates",
    )
    return Side(name, run.path, run.data.exported.digest, facts)


def _notes(old: ReadRun, new: ReadRun) -> Iterator[str]:
    a, b = old.data, new.data
    if old.digest == new.digest:
        yield "Both are the same report"
    if a.exported.digest != b.exported.digest:
        yield "The runs are of different exported models: costs are relative to different FP32 losses"
    if a.is_synthetic != b.is_synthetic:
        which = "old" if a.is_synthetic else "new"
        yield f"The data of the {which} run is synthetic, that of the other is not"
    if a.data.label_rule != b.data.label_rule:
        yield f"The labels differ: '{a.data.label_rule}' in the old run, '{b.data.label_rule}' in the new one"
    if run_rows.other_splits(a, b):
        yield "Not every split is the same: costs may be of different rows"
    without = [name for name, run in (("old", old), ("new", new)) if run.record is None]
    if without:
        yield (
            f"Settings are not compared: of the {' and the '.join(without)} run only its report was given, "
            f"and settings stand in the '{RECORD}' of a run directory"
        )
